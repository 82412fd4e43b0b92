"""Parts of a stage's trainer that need no training state, so that they can be built ahead of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from autohet.runtime.facts.layout import frozen_layout, layout_of_plan
from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.adapters import without_any_dropout
from autohet.runtime.models.layers.fp8 import check_fp8, use_fp8
from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD
from autohet.runtime.models.registry import family_of, held_specs
from autohet.runtime.models.stages.kernels import compile_blocks, use_library, wants_compiled
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.parallel.buckets import LocalBuffers
from autohet.runtime.parallel.place import Place, place_of
from autohet.runtime.parallel.stage_dtypes import StageDtypes
from autohet.runtime.step.generation import TrainingSetup
from autohet.runtime.step.replica_check import Comparison
from planner.plans.communicators import num_border_groups
from planner.plans.plan import Plan
from recovery.state.layout import Layout

logger = logging.getLogger("autohet.worker")


@dataclass(frozen=True)
class StageGroups:
    """Process groups of one stage, without gradient-sync groups.

    `world`: all workers of the plan, for the vote. The vote starts after the last message of a
    step, so it shares a group of borders, which saves one communicator, unless steps are gated.
    Without borders it is their only group.
    """

    tensor: Group | None
    forward: list[Group]
    backward: list[Group]
    world: Group

    @classmethod
    def build(cls, plan: Plan, groups: GenerationGroups, place: Place) -> StageGroups:
        """Build the groups that this worker is in, in the plan's order; every worker calls it."""
        stage = place.stage
        tensor = groups.group(stage.workers, "tensor") if stage.tp_degree > 1 else None
        num_groups = num_border_groups(plan)
        if not num_groups:
            # Nothing crosses a border. The group of gradient sums would not do for votes: workers
            # start both in different orders.
            world = groups.group(plan.workers, "world")
            return cls(tensor, [world, world], [world, world], world)
        # Unless some stage has borders on both sides, all borders share the even ones' groups.
        borders = ("even", "odd" if num_groups > 2 else "even")
        members = place.pipeline.workers if groups.gated else plan.workers
        forward = [groups.group(members, f"forward/{border}") for border in borders]
        backward = [groups.group(members, f"backward/{border}") for border in borders]
        world = groups.group(plan.workers) if groups.gated else backward[0]
        return cls(tensor, forward, backward, world)


@dataclass(frozen=True)
class StageParts:
    """Parts of one worker's trainer under a plan: groups, modules without storage, buffers."""

    place: Place
    dtypes: StageDtypes
    groups: StageGroups | None
    """Groups of the stage; None: they are built once the workers stand."""
    stage: StageModel
    local: LocalBuffers
    compare: Callable[[], Comparison]
    """Returns all that the check of replicas compares; computed once, at the first call."""

    @classmethod
    def build(
        cls,
        setup: TrainingSetup,
        plan: Plan,
        groups: GenerationGroups,
        *,
        with_groups: bool = True,
        present: StageParts | None = None,
    ) -> StageParts:
        """Build the parts; every worker of the plan calls it. Blocks until the groups stand.

        with_groups: False for a stage on one GPU, whose modules need no group. present: parts of
        the trainer that these will replace. An equal stage is taken over, which that trainer uses
        until its generation is over.

        Raises:
            PeerLost, Interrupted: a group cannot be built.
        """
        place = place_of(plan, groups.me)
        assert place is not None, f"{groups.me} is not in the plan"
        dtypes = StageDtypes.of_place(plan, place, setup.training.precision)
        stage_groups = StageGroups.build(plan, groups, place) if with_groups else None
        tensor = None if stage_groups is None else stage_groups.tensor
        assert tensor is not None or place.tp_degree == 1
        if present is not None and present._has_stage_of(place, dtypes):
            stage = present.stage
        else:
            stage = _build_stage(setup, place, tensor, dtypes.compute)
        local = LocalBuffers(plan, setup.config, groups.me, groups.back_end.max_sync_groups(plan))
        compare = cache(partial(_replicas, plan, setup, groups.me))
        return cls(place, dtypes, stage_groups, stage, local, compare)

    def _has_stage_of(self, place: Place, dtypes: StageDtypes) -> bool:
        """Return True if the modules of this stage are those of `place`.

        Modules that use a group or count tokens serve one generation alone.
        """
        mine = self.place.stage
        if place.tp_degree > 1 or self.dtypes.compute != dtypes.compute:
            return False
        if replace(place.stage, workers=mine.workers) != mine:
            return False
        return isinstance(self.stage, StageModel) and not self.stage.spec.family.has_experts

    def warm_up(self, setup: TrainingSetup) -> None:
        """Run one microbatch of zeros through the stage, with weights of zeros that are then freed.

        The first pass of a process loads kernels, starts threads and compiles. No-op for stages
        that communicate or count tokens.
        """
        place = self.place
        stage = self.stage
        if not isinstance(stage, StageModel) or place.tp_degree > 1:
            return
        if stage.spec.family.has_experts:
            return
        spec = stage.spec
        weights = {}
        for name, size in stage.weights.local_shapes().items():
            dtype = spec.parameters[name].compute_dtype(spec.dtype)
            # On the device at once: host memory is planned for snapshots.
            weights[name] = torch.zeros(size, dtype=dtype, device=spec.device)
        stage.weights.load(weights)
        del weights
        rows = place.pipeline.microbatch_sequences
        shape = (rows, setup.training.sequence_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=setup.device)
        x = tokens
        if not place.is_first:
            wide = (*shape, int(setup.config.hidden_size))
            x = torch.zeros(wide, dtype=self.dtypes.compute, device=setup.device).requires_grad_()
        if stage.dropout.drops:
            stage.dropout.draw(setup.training.seed, range(rows))
        result = stage.loss(x, tokens) if place.is_last else stage(x).sum()
        result.backward()
        stage.weights.unload()

    def build_sync_groups(self, groups: GenerationGroups) -> None:
        """Build the groups of gradient sums, which the trainer then finds."""
        for members in self.local.groups:
            groups.group(members)


def _replicas(plan: Plan, setup: TrainingSetup, me: str) -> Comparison:
    """Return what is compared of the training state and of frozen weights, which count alike."""
    state = layout_of_plan(plan, setup.config)
    frozen = frozen_layout(plan, setup.config, COMPUTE_DTYPES[setup.training.precision])
    shards_by_worker = {}
    for worker, shards in state.shards_by_worker.items():
        shards_by_worker[worker] = shards | frozen.shards_by_worker[worker]
    layout = Layout({**state.tensors, **frozen.tensors}, shards_by_worker)
    ends = {EMBEDDING: "embedding", HEAD: "head"}
    specs = held_specs(setup.config)
    layers = {name: ends.get(spec.layer, spec.layer) for name, spec in specs.items()}
    return Comparison(me, layout, layers)


def _build_stage(
    setup: TrainingSetup, place: Place, tensor: Group | None, dtype: torch.dtype
) -> StageModel:
    """Build this worker's slice of the model, without weights."""
    config = setup.config
    training = setup.training
    stage = place.stage
    if training.kernels == "liger":
        why_not = use_library(str(config.model_type), setup.device)
        if why_not is not None:
            logger.info(why_not)
    # A family may bring stages of its own, as the tests' exact model does.
    build = getattr(family_of(config), "build_stage", build_stage)
    tp = None if tensor is None else TensorParallel(tensor, place.tp_rank, stage)
    recompute = stage.recompute or training.stage_recompute
    if training.preference_beta is not None:
        # As in TRL, and the reference drops nothing either.
        config = without_any_dropout(config)
    layers = range(stage.first_layer, stage.end_layer)
    built: StageModel = build(config, layers, tp, setup.device, dtype, recompute)
    if (stage.compute or training.precision) == "fp8":
        check_fp8(setup.device)
        for block in built.blocks:
            use_fp8(block)
    built.loss_terms = LossTerms(
        training.label_smoothing,
        training.z_loss,
        training.balance_weight,
        counts_tokens=training.router_balance == "bias",
    )
    if wants_compiled(training.compile_blocks, built):
        compile_blocks(built)
    return built
