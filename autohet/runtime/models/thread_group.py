"""Tensor-parallel group of threads in one process, with the sums of a real group."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.models.layers.tensor_parallel import ReduceGroup, TensorParallel
from planner.plans.plan import Stage

DEADLINE_S = 60.0


@dataclass(frozen=True)
class ThreadGroup(ReduceGroup):
    """View of a single rank on a group whose ranks are threads.

    Sums are taken in rank order, so every rank gets the same bits.
    """

    rank: int
    slots: list[Tensor | None]
    sent: list[list[int]]
    meeting: threading.Barrier

    def all_reduce(self, tensor: Tensor) -> None:
        self._exchange(tensor, torch.add)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._exchange(tensor, torch.maximum)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        parts = torch.zeros_like(out)
        parts[self.rank] = part
        self.all_reduce(parts)
        out.copy_(parts)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        self.all_reduce(parts)
        out.copy_(parts[self.rank])

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        assert (len(out), len(given)) == (sum(received), sum(sent))
        self.slots[self.rank] = given.detach().clone()
        self.sent[self.rank] = list(sent)
        self.meeting.wait(DEADLINE_S)
        parts = []
        for rank, theirs in enumerate(self.slots):
            assert theirs is not None
            rows = theirs.split(self.sent[rank])[self.rank]
            assert len(rows) == received[rank], "ranks disagree about the rows between them"
            parts.append(rows)
        came = torch.cat(parts)
        # No rank may overwrite its slot before all have read it.
        self.meeting.wait(DEADLINE_S)
        out.detach().copy_(came)

    def _exchange(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.slots[self.rank] = tensor.detach().clone()
        self.meeting.wait(DEADLINE_S)
        parts = [part for part in self.slots if part is not None]
        assert {part.shape for part in parts} == {tensor.shape}, (
            "ranks sum tensors of different shapes"
        )
        total = parts[0].clone()
        for part in parts[1:]:
            total = combine(total, part)
        # No rank may overwrite its slot before all have read it.
        self.meeting.wait(DEADLINE_S)
        tensor.detach().copy_(total)


def run_ranks(
    degree: int,
    work: Callable[[TensorParallel], Any],
    shares: tuple[int, ...] = (),
    *,
    cuts_sequence: bool = False,
    all_to_all: bool = False,
) -> list[Any]:
    """Call `work` on every rank of a group of `degree`, each in a thread; return results by rank.

    shares: shares of the ranks, if they are not equal. cuts_sequence, all_to_all: as a stage's
    `sequence_parallel` and `expert_dispatch`.

    Raises the first exception other than a broken barrier, since those ranks only lost their
    partner.
    """
    slots: list[Tensor | None] = [None] * degree
    sent: list[list[int]] = [[] for _ in range(degree)]
    stage = Stage(
        0,
        1,
        ("w",) * degree,
        tp_shares=shares,
        sequence_parallel=cuts_sequence,
        expert_dispatch="all_to_all" if all_to_all else None,
    )
    barrier = threading.Barrier(degree)

    def one(rank: int) -> Any:
        try:
            group = ThreadGroup(rank, slots, sent, barrier)
            return work(TensorParallel(group, rank, stage))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as threads:
        futures = [threads.submit(one, rank) for rank in range(degree)]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
