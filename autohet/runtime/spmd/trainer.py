"""Training of one worker in one generation of an SPMD plan.

The worker computes its part of every microbatch, sums gradients by their layouts and runs AdamW on
local parts. Steps are committed as in `autohet.runtime.step.step_commit`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from autohet.runtime.facts.layout import state_name
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.registry import family_of
from autohet.runtime.parallel.executor import Batch
from autohet.runtime.spmd.capture import Captured
from autohet.runtime.spmd.clock import ClockedGroup, ComputeClock
from autohet.runtime.spmd.executor import ProgramExecutor
from autohet.runtime.spmd.language_model import capture_language_model
from autohet.runtime.state.optimizer import (
    UpdateRule,
    clip_factor,
    parameters_without_decay,
    update,
)
from autohet.runtime.step.generation import NO_HOOKS, TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.step_commit import Trainer
from autohet.runtime.step.votes import Vote
from planner.plans.plan import Plan
from planner.spmd.layouts import TensorLayout
from planner.spmd.plan import PlacedProgram

BUCKET_BYTES = 64 * 2**20
"""Bytes of replicated gradients that one all-reduce sums: its extra memory beside the gradients."""


def _capture_job(setup: TrainingSetup, plan: Plan) -> tuple[Captured, PlacedProgram]:
    """Capture the job's model for one microbatch, on the device.

    Return it with the plan's program over its graph.
    """
    assert plan.spmd is not None, "the plan has no program"
    training = setup.training
    (pipeline,) = plan.pipelines
    dtype = COMPUTE_DTYPES[training.precision]
    captured = capture_language_model(
        setup.config, pipeline.microbatch_sequences, training.sequence_length, dtype
    )
    placed = plan.spmd.place(captured.graph)
    constants: dict[str, Tensor] = {
        name: value.to(setup.device) for name, value in captured.constants.items()
    }
    return replace(captured, constants=constants), placed


class SpmdTrainer(Trainer):
    """Owner of a rank's parts of the state, in the layouts of the plan's program.

    program: a captured model and a program over its graph, to replace the setup's and the plan's.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        generation: WorkerGeneration,
        hooks: TrainerHooks = NO_HOOKS,
        *,
        program: tuple[Captured, PlacedProgram] | None = None,
    ) -> None:
        (self._pipeline,) = generation.plan.pipelines
        captured, placed = program or _capture_job(setup, generation.plan)
        over = generation.groups
        world = over.group(generation.plan.workers, "spmd")
        self._compute = ComputeClock(lambda: over.interrupted)
        clocked: Any = ClockedGroup(world, self._compute)
        self.executor = ProgramExecutor(captured, placed, clocked, self._compute, generation.pace)
        self._world = world
        super().__init__(setup, generation, hooks, world, counts_loss=True)
        self._storage: dict[str, TensorLayout] = {}
        for name, layout in placed.program.storage.items():
            if name in captured.parameters:
                self._storage[name] = layout
        self._gradients: dict[str, Tensor] = {}
        self._undecayed: frozenset[str] = frozenset()
        if setup.training.no_decay != "none":
            specs = family_of(setup.config).parameter_specs(setup.config)
            self._undecayed = parameters_without_decay(setup.training, specs)

    @property
    def compute_s(self) -> float:
        """Compute seconds on the host's clock, without collectives."""
        return self._compute.seconds

    def _leaf(self, name: str) -> Tensor:
        """Return this rank's part of a weight; empty if its share is zero."""
        part = self.state.get(state_name("param", name))
        if part is None:
            captured = self.executor.captured.parameters[name]
            part = self.executor.local_part(captured, name, self._storage[name])
            part = part.float()
            assert not part.numel(), f"no state of {name}"
        return part.detach().requires_grad_()

    def _gradients_of(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any, Any]]:
        begin = self._clock.mark()
        self._compute.begin()
        leaves = {name: self._leaf(name) for name in self._storage}
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        num_targets = torch.zeros((), dtype=torch.int64, device=self._device)
        size = self._pipeline.microbatch_sequences
        for number in range(self._pipeline.num_microbatches):
            # The whole microbatch: the executor takes this rank's part of it.
            sequences = range(number * size, (number + 1) * size)
            inputs = batch(self.step, sequences)
            self.groups.check()
            self._enter("forward")
            part = self.executor.run(leaves, inputs)
            self._enter("backward")
            part.backward()
            loss += part.detach()
            # Every rank has the whole batch, but a target counts once.
            if self._world.rank == 0:
                num_targets += (inputs[-1] >= 0).sum()
        self._compute.pause()
        passes_done = self._clock.mark()
        self._enter("gradient_sync")
        self._gradients = {}
        for name, leaf in leaves.items():
            gradient = leaf.grad
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            self._gradients[name] = gradient
        self._sum_replicated()
        squares = self._squares()
        marks = (begin, passes_done, self._clock.mark())
        return squares, loss, num_targets, marks

    def _sum_replicated(self) -> None:
        """Sum the partial gradients over ranks: those of replicated parameters.

        Gradients of factored parameters are whole already.
        """
        # All ranks sum in one order, whatever the order in which they read their storage.
        partial = []
        for name in sorted(self._storage):
            if self._storage[name].kind == "replicated":
                partial.append(self._gradients[name])
        for bucket in _take_tensors(partial, BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            self._world.all_reduce(flat)
            totals = _unflatten_dense_tensors(flat, bucket)
            for gradient, total in zip(bucket, totals, strict=True):
                gradient.copy_(total)

    def _squares(self) -> Tensor:
        """Return this rank's part of the squared norm; each element counts on one rank only."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in self._gradients.items():
            is_own = self._storage[name].kind == "sharded"
            if is_own or self._world.rank == 0:
                total += gradient.double().square().sum()
        return total

    def apply_update(self, vote: Vote) -> None:
        factor = clip_factor(self.training, vote.gradient_norm) / max(1, vote.tokens)
        for name in sorted(self._gradients):
            if state_name("param", name) in self.state:
                decays = name not in self._undecayed
                rule = UpdateRule(self.training, self.step, factor, decays)
                update(self.state, {name: self._gradients[name]}, rule)
        self._gradients = {}
