"""Training state for tests of recovery: small tensors of every cut, random layouts, and a group
whose workers are threads.
"""

from __future__ import annotations

import itertools
import queue
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from recovery.state.layout import Layout, ShardId, TensorSpec

NUM_UNITS = 4
KINDS = ("param", "exp_avg", "exp_avg_sq")


def tensors_of(num_layers: int, dtype: str = "float32") -> dict[str, TensorSpec]:
    """Per layer and kind: one tensor cut evenly by rows, one unevenly by columns, one that is never
    cut.
    """
    specs = []
    for layer, kind in itertools.product(range(num_layers), KINDS):
        stem = f"{kind}/layers.{layer}"
        specs.append(TensorSpec(f"{stem}.rows", (8, 3), dtype, 0, (0, 2, 4, 6, 8)))
        specs.append(TensorSpec(f"{stem}.columns", (5, 11), dtype, 1, (0, 1, 4, 8, 11)))
        specs.append(TensorSpec(f"{stem}.norm", (7,), dtype))
    return {spec.name: spec for spec in specs}


def whole(spec: TensorSpec, step: int) -> Tensor:
    """The tensor's content at a step: known to a test without any holder."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name}@{step}".encode()))
    return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def unit(spec: TensorSpec, shard: ShardId, step: int) -> Tensor:
    return whole(spec, step)[spec.unit_slices(shard.unit)]


def state_of(layout: Layout, worker: str, step: int) -> dict[str, Tensor]:
    """What `worker` holds at `step`, built with torch.cat, not with the code under test."""
    state = {}
    for name, units in layout.units_of(worker).items():
        spec = layout.tensors[name]
        parts = [unit(spec, ShardId(name, number), step) for number in units]
        state[name] = (
            parts[0].clone() if spec.split_dim is None else torch.cat(parts, spec.split_dim)
        )
    return state


def stage_shards(
    tensors: Mapping[str, TensorSpec], layers: range, rank: int, degree: int
) -> frozenset[ShardId]:
    shards = set()
    for spec in tensors.values():
        if int(spec.name.split(".")[1]) in layers:
            each = spec.num_units // degree
            units = range(rank * each, (rank + 1) * each) if spec.num_units > 1 else range(1)
            shards |= {ShardId(spec.name, number) for number in units}
    return frozenset(shards)


@dataclass(frozen=True)
class Placed:
    layout: Layout
    node_by_worker: dict[str, str]


def placed(
    tensors: Mapping[str, TensorSpec],
    num_layers: int,
    pipelines: Sequence[Sequence[tuple[int, Sequence[str]]]],
) -> Placed:
    """Pipelines as lists of (number of layers, workers "node/gpu" of the stage)."""
    shards: dict[str, frozenset[ShardId]] = {}
    for pipeline in pipelines:
        first = 0
        for count, workers in pipeline:
            for rank, worker in enumerate(workers):
                shards[worker] = stage_shards(
                    tensors, range(first, first + count), rank, len(workers)
                )
            first += count
        assert first == num_layers
    return Placed(Layout(tensors, shards), {worker: worker.split("/")[0] for worker in shards})


@st.composite
def placements(draw: Any, num_layers: int, num_nodes: int = 3, max_pipelines: int = 2) -> Placed:
    """Asymmetric plans: unequal depth, unequal cuts, TP 1, 2 or 4; workers spread over nodes at
    random.
    """
    number = 0
    pipelines = []
    for _ in range(draw(st.integers(1, max_pipelines))):
        inner = draw(st.sets(st.integers(1, num_layers - 1), max_size=2))
        stages = []
        for first, last in itertools.pairwise([0, *sorted(inner), num_layers]):
            degree = draw(st.sampled_from((1, 2, 4)))
            node = draw(st.integers(0, num_nodes - 1))
            stages.append((last - first, [f"n{node}/{number + rank}" for rank in range(degree)]))
            number += degree
        pipelines.append(stages)
    return placed(tensors_of(num_layers), num_layers, pipelines)


class PostOffice:
    """Carries messages between threads.

    A send ends only once its receiver has taken it, as over a real link.
    """

    def __init__(self, deadline_s: float = 20.0) -> None:
        self._boxes: dict[tuple[str, str, int], queue.Queue[tuple[Tensor, threading.Event]]] = {}
        self._lock = threading.Lock()
        self.deadline_s = deadline_s
        self.flip: set[tuple[str, str]] = set()

    def box(self, key: tuple[str, str, int]) -> queue.Queue[tuple[Tensor, threading.Event]]:
        with self._lock:
            return self._boxes.setdefault(key, queue.Queue())

    def member(self, worker: str) -> Member:
        return Member(self, worker)


class Member:
    """One worker's end of a post office."""

    def __init__(self, office: PostOffice, worker: str) -> None:
        self._office = office
        self._worker = worker

    def send(self, tensor: Tensor, to: str, tag: int) -> Any:
        taken = threading.Event()
        content = tensor.clone()
        if (self._worker, to) in self._office.flip:
            content[0] ^= 1
        self._office.box((self._worker, to, tag)).put((content, taken))
        return taken

    def recv(self, tensor: Tensor, source: str, tag: int) -> Any:
        return (tensor, self._office.box((source, self._worker, tag)))

    def wait_on_host(self, work: Any) -> None:
        if isinstance(work, threading.Event):
            if not work.wait(self._office.deadline_s):
                raise TimeoutError(f"nobody took what {self._worker} sent")
            return
        tensor, box = work
        content, taken = box.get(timeout=self._office.deadline_s)
        tensor.copy_(content)
        taken.set()
