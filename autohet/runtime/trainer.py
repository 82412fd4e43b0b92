"""One worker's training in one generation of a plan of pipelines: passes, gradient sums and the update, committed as `step_commit` says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.batches import Batch
from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.job import TrainingSection
from autohet.runtime.layout import layout_of_plan
from autohet.runtime.models import COMPUTE_DTYPES, EMBEDDING, HEAD, TensorParallel, build_stage, family_of
from autohet.runtime.models.kernels import compile_blocks, use_library
from autohet.runtime.models.stage import StageModel
from autohet.runtime.pacing import Pace, Pacer
from autohet.runtime.parallel.buckets import LocalBuffers
from autohet.runtime.parallel.compute_weights import ComputeWeights
from autohet.runtime.parallel.executor import Executor
from autohet.runtime.parallel.gradient_sync import GradientSync
from autohet.runtime.parallel.place import Place, place_of
from autohet.runtime.replica_check import ReplicaCheck
from autohet.runtime.state.flat_optimizer import FlatOptimizer
from autohet.runtime.state.optimizer import clip_factor
from autohet.runtime.step_commit import PhaseHook, Trainer, Vote
from planner.communicators import num_border_groups
from planner.plan import Plan
from recovery.peers.replication_rounds import PreservationStatus

logger = logging.getLogger("autohet.worker")


class StageTrainer(Trainer):
    """Owns a stage, its optimizer state and its groups, for one generation."""

    def __init__(
        self, config: PreTrainedConfig, plan: Plan, me: str, groups: GenerationGroups, training: TrainingSection, device: torch.device,
        state: dict[str, Tensor], step: int, pace: Pace | None = None, phase_hook: PhaseHook | None = None,
        before_update: Callable[[], None] | None = None, overlap: bool | None = None,
        preservation_status: Callable[[], PreservationStatus] | None = None,
    ) -> None:  # fmt: skip
        place = place_of(plan, me)
        assert place is not None, f"{me} is not in the plan"
        self.place: Place = place
        self.plan = plan
        dtype = COMPUTE_DTYPES[training.precision]
        tensor = self._tensor_group(groups)
        self._tp = None if tensor is None else TensorParallel(tensor, place.tp_rank, place.tp_degree)
        borders = ("even", "odd") if num_border_groups(plan) > 2 else ("even", "even")
        forward, backward = (
            [groups.group(plan.workers, f"{direction}/{border}") for border in borders]
            for direction in ("forward", "backward")
        )
        world = backward[0]  # for the vote: it starts after the last message of a step; one communicator fewer
        super().__init__(
            training, state, step, groups, world, device, place.is_last and place.tp_rank == 0, phase_hook, before_update,
            preservation_status,
        )  # fmt: skip
        if training.kernels == "liger" and (why_not := use_library(str(config.model_type), device)) is not None:
            logger.info(why_not)
        build = getattr(
            family_of(config), "build_stage", build_stage
        )  # a family may bring stages of its own (the tests' exact model)
        self.stage: StageModel = build(
            config,
            place.stage.first_layer,
            place.stage.num_layers,
            self._tp,
            device,
            dtype,
            place.stage.recompute or training.stage_recompute,
        )
        local = LocalBuffers(plan, config, me, groups.back_end.max_sync_groups(plan))
        self._optimizer = FlatOptimizer(local, state)  # before gradients and compute copies take memory
        self._weights = ComputeWeights(local, groups, state, dtype, device)
        self._gathering: tuple[Any, Any] | None = None  # marks of the stream before and after
        self.stage.load_parameters(self._weights.tensors)
        if training.compile_blocks:
            compile_blocks(self.stage)
        # Groups that run in the order of streams need one order on all workers, which overlap with 1F1B does not give.
        overlap = not groups.back_end.in_stream_order if overlap is None else overlap
        self._sync = GradientSync(local, groups, self.stage.local_parameters(), place.tp_degree, overlap=overlap)
        shape = (place.pipeline.microbatch_sequences, training.sequence_length, int(config.hidden_size))
        pacer = None if pace is None else Pacer(pace, lambda: groups.interrupted)
        self._executor = Executor(
            place, self.stage, forward, backward, tensor, shape, dtype, device, pacer, groups.check, self._clock
        )
        if training.replica_check_steps:
            ends = {EMBEDDING: "embedding", HEAD: "head"}
            specs = family_of(config).parameter_specs(config)
            layers = {name: ends.get(spec.layer, spec.layer) for name, spec in specs.items()}
            layout = layout_of_plan(plan, config)
            self.replicas = ReplicaCheck(me, layout, state, world, training.replica_check_steps, layers)

    def _tensor_group(self, groups: GenerationGroups) -> Group | None:
        """The ranks of this worker's stage, where it has several. Every worker builds the one that it is in, in plan order."""
        stage = self.place.stage
        return groups.group(stage.workers, "tensor") if stage.tp_degree > 1 else None

    def _gradients_of(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any, Any]]:
        self._gather_weights()
        begin = self._clock.mark()
        self._sync.begin()
        step = self.step
        loss, num_targets = self._executor.run(
            lambda m: batch(step, self.place.sequences(m)), self._enter, self._sync.last_backward
        )
        passes_done = self._clock.mark()
        self._enter("gradient_sync")
        squares = self._sync.finish()
        return squares, loss, num_targets, (begin, passes_done, self._clock.mark())

    def _gather_weights(self) -> None:
        """Where state is sharded: take what others own. Before the passes, not after the update, so that the update talks to nobody and a
        worker that is lost here costs no committed step.
        """
        if self._weights.are_gathered:
            self._enter("gather")
            before = self._clock.mark()
            self._weights.gather()
            self._gathering = (before, self._clock.mark())

    def _parts(self, started: float, voted: float, marks: tuple[Any, Any, Any]) -> dict[str, float]:
        parts = super()._parts(started, voted, marks)
        if self._gathering is not None:
            parts["gather"] = self._clock.seconds(*self._gathering)
            parts["vote"] = max(0.0, parts["vote"] - parts["gather"])
        return parts

    @property
    def compute_s(self) -> float:
        return self._executor.compute_s

    def _update(self, vote: Vote) -> None:
        factor = clip_factor(self.training, vote.gradient_norm) / max(1, vote.tokens)
        self._optimizer.update(self._sync.flats, self.training, self.step, factor)
        self._weights.refresh()

    def _state_mended(self, names: Collection[str]) -> None:
        if any(name.startswith("param/") for name in names):
            self._weights.refresh()


__all__ = ["StageTrainer"]
