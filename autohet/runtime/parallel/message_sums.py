"""Sums of what crossed a stage's two borders, as it was sent and as it arrived.

Each worker adds up the messages that it sent and takes away those that arrived. Over all workers of
a border the difference is zero unless a message changed on its way, from one device's memory to the
other's. The vote sums the differences of all workers; only if that is not zero do they exchange
them, to find the border.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.plans.plan import Pipeline

MODULUS = 1 << 32
"""Sums are taken modulo this, so that float64 adds those of 2**21 workers exactly."""


class MessageSums:
    """Differences of one worker's messages since `clear`, before its stage and after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        self._sent: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._arrived: tuple[list[Tensor], list[Tensor]] = ([], [])

    def __bool__(self) -> bool:
        """True if a message was counted."""
        return any(self._sent) or any(self._arrived)

    def add_all(self, other: MessageSums) -> None:
        """Count the messages of another object, too."""
        for mine, its in ((self._sent, other._sent), (self._arrived, other._arrived)):
            for side in (0, 1):
                mine[side].extend(its[side])

    def add_sent(self, offset: int, message: Tensor) -> None:
        """Count a message over the border before the stage (offset -1) or after it (1)."""
        self._sent[offset > 0].append(_sum_of(message))

    def add_arrived(self, offset: int, message: Tensor) -> None:
        self._arrived[offset > 0].append(_sum_of(message))

    def differences(self) -> Tensor:
        """Return the differences before and after the stage, int64 [2] from 0 to MODULUS - 1.

        The host does not wait for the device.
        """
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        found = []
        for sent, arrived in zip(self._sent, self._arrived, strict=True):
            found.append(_folded([zero, *sent]) - _folded([zero, *arrived]))
        return torch.stack(found).remainder(MODULUS)


def _sum_of(message: Tensor) -> Tensor:
    """Return the sum of a flat message's words, an int64 scalar that wraps."""
    message = message.detach()
    if message.nbytes % 8:
        return message.view(torch.uint8).sum(dtype=torch.int64)
    if message.data_ptr() % 8:
        # a slice that begins within a word
        message = message.clone()
    return message.view(torch.int64).sum()


def _folded(sums: list[Tensor]) -> Tensor:
    """Return the sum of both halves of each number, so that no bit of a word is lost."""
    stacked = torch.stack(sums)
    return ((stacked ^ (stacked >> 32)) & (MODULUS - 1)).sum()


def changed_borders(
    pipelines: Sequence[Pipeline], differences: dict[str, list[int]]
) -> list[tuple[int, tuple[str, ...]]]:
    """Return each border whose messages changed: the layer after it, and the workers at it.

    differences: of each worker, before and after its stage.
    """
    found = []
    for pipeline in pipelines:
        for before, after in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            total = sum(differences[worker][1] for worker in before.workers)
            total += sum(differences[worker][0] for worker in after.workers)
            if total % MODULUS:
                found.append((after.first_layer, (*before.workers, *after.workers)))
    return found
