"""Parts of a trainer, grouped by lifetime.

They are the job's setup, one worker's generation, and the hooks of the worker around the trainer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.groups import GenerationGroups
from autohet.runtime.job import TrainingSection
from autohet.runtime.step.length_work import LengthWork
from autohet.runtime.step.loss_scale import FIRST_SCALE, LossScale
from autohet.runtime.step.pacing import Pace
from planner.plans.plan import Plan
from recovery.peers.replication_rounds import PreservationStatus

PhaseHook = Callable[[str, int], None]
"""Callback at the start of a phase of a step; receives the phase and the step's number."""


@dataclass(frozen=True)
class TrainingSetup:
    """Constants of a trainer for the whole job: model, training settings and device."""

    config: PreTrainedConfig
    training: TrainingSection
    device: torch.device
    overlap: bool | None = None
    """True: gradient sums start during the last backward pass.

    None: they do if the groups' back end and the plan allow it (`parallel.overlap`).
    """
    begins: Callable[[int, range], Tensor] | None = None
    """Function that returns the starts of pieces in rows of a step's global batch.

    It receives the step and positions and returns bool [b, S] on the host. None: a row is one
    piece.
    """
    length_work: LengthWork | None = None
    """Work of a microbatch as a function of its pieces' lengths; None: all have the same work."""


@dataclass(frozen=True)
class WorkerGeneration:
    """State and groups of one worker in a generation, with the plan and the worker's name in it.

    state: this worker's slices of masters and moments after `step` updates, by state name; the
    trainer updates them in place. pace: speed of the emulated GPU type, if one is emulated. frozen:
    slices of untrained parameters that this worker computes with, by parameter, in the job's
    precision. reload_frozen: reads those of some parameters from their origin again, in place.
    loss_scale: scale in fp16 stages after the step before.
    """

    plan: Plan
    worker: str
    groups: GenerationGroups
    state: dict[str, Tensor]
    step: int = 0
    pace: Pace | None = None
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    reload_frozen: Callable[[Collection[str]], None] = lambda parameters: None
    loss_scale: LossScale = FIRST_SCALE


@dataclass(frozen=True)
class TrainerHooks:
    """Callbacks from a trainer to the worker around it, during a step.

    The training thread calls them; in a roll-forward, the thread of the roll-forward does.
    before_update: blocks until the state may change. preservation_status: returns this worker's
    contribution to the vote about its copies.
    """

    on_phase: PhaseHook | None = None
    before_update: Callable[[], None] | None = None
    preservation_status: Callable[[], PreservationStatus] | None = None


NO_HOOKS = TrainerHooks()
