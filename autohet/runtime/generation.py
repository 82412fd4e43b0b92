"""What a trainer is made from, by how long each part of it lives: the job's setup, one worker's
generation, and the worker around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.groups import GenerationGroups
from autohet.runtime.job import TrainingSection
from autohet.runtime.length_work import LengthWork
from autohet.runtime.pacing import Pace
from planner.plan import Plan
from recovery.peers.replication_rounds import PreservationStatus

PhaseHook = Callable[[str, int], None]
"""Called with a phase of a step, when it begins, and the step's number."""


@dataclass(frozen=True)
class TrainingSetup:
    """What stays for the whole job: which model is trained how, and on which device of this
    process.
    """

    config: PreTrainedConfig
    training: TrainingSection
    device: torch.device
    overlap: bool | None = None
    """Whether gradient sums start during the last backward pass; None: where the groups' back end
    and the plan allow it (`parallel.overlap`).
    """
    begins: Callable[[int, range], Tensor] | None = None
    """Where pieces begin in the rows of these positions of a step's global batch, bool [b, S] on
    the host; None: a row is one piece.
    """
    length_work: LengthWork | None = None
    """How a microbatch's work follows the lengths of its pieces; None: all have the same."""


@dataclass(frozen=True)
class WorkerGeneration:
    """One worker's part of a generation: the plan, which of its workers this one is, the groups
    that reach the others, and the state that it goes on from.

    state: this worker's slices of masters and moments by state name, which the trainer updates in
    place; of after `step` updates. pace: of the GPU type that is emulated, if one is. frozen: by
    parameter, slices that it computes with and nobody trains, in the compute format.
    """

    plan: Plan
    worker: str
    groups: GenerationGroups
    state: dict[str, Tensor]
    step: int = 0
    pace: Pace | None = None
    frozen: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerHooks:
    """What the worker around a trainer wants to know and to say during a step. All are called from
    the training thread, in a roll-forward from that one's.

    before_update: blocks until the state may change. preservation_status: what this worker says in
    the vote of its copies.
    """

    on_phase: PhaseHook | None = None
    before_update: Callable[[], None] | None = None
    preservation_status: Callable[[], PreservationStatus] | None = None


NO_HOOKS = TrainerHooks()

__all__ = ["NO_HOOKS", "PhaseHook", "TrainerHooks", "TrainingSetup", "WorkerGeneration"]
