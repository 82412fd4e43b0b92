"""Span of equal steps, which a simulation keeps instead of every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrainedSpan:
    """`num_steps` steps of `step_s` seconds from `first_step` on, begun at `begin_s`.

    Steps that were lost later are not counted.
    """

    generation: int
    first_step: int
    begin_s: float
    step_s: float
    num_gpus: int
    num_steps: int = 0

    @property
    def seconds(self) -> float:
        return self.num_steps * self.step_s
