"""Training steps of one rank of an SPMD plan: gradients by their layouts, the global norm for clipping, AdamW on local parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autohet.runtime.job import TrainingSection
from autohet.runtime.layout import STATE_KINDS, state_name
from autohet.runtime.spmd.capture import Captured
from autohet.runtime.spmd.collectives import Collectives
from autohet.runtime.spmd.executor import Executor
from autohet.runtime.state.optimizer import clip_factor, update
from planner.spmd.plan import SpmdPlan


@dataclass(frozen=True)
class SpmdStep:
    """A step that every rank has applied. gradient_norm: before clipping."""

    step: int
    loss: float
    gradient_norm: float
    applied: bool


def initial_state(executor: Executor) -> dict[str, Tensor]:
    """This rank's parts of the captured model's weights, and zero moments, by state name."""
    state = {}
    for name, layout in executor.plan.program.storage.items():
        if name in executor.captured.parameters:
            whole = executor.captured.parameters[name].detach().float()
            part = executor.local_part(whole, name, layout).clone()
            state[state_name("param", name)] = part
            for kind in STATE_KINDS[1:]:
                state[state_name(kind, name)] = torch.zeros_like(part)
    return state


class SpmdTrainer:
    """Owns a rank's state: local parts by state name, updated in place. `train_step` is called by every rank and blocks on the others.

    phase_hook: told of "forward", "backward", "gradient_sync", "vote" and "apply" of each step.
    """

    def __init__(
        self, captured: Captured, plan: SpmdPlan, group: Collectives, training: TrainingSection, state: dict[str, Tensor] | None = None,
        step: int = 0, phase_hook: Callable[[str, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.executor = Executor(captured, plan, group)
        self.group, self.training, self.step = group, training, step
        self.state = initial_state(self.executor) if state is None else state
        self._storage = {name: layout for name, layout in plan.program.storage.items() if state_name("param", name) in self.state}
        self._hook = phase_hook or (lambda phase, step: None)

    def gradients(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Of this rank's parts by parameter, summed where they are replicated; and this rank's part of the loss."""
        leaves = {name: self.state[state_name("param", name)].detach().requires_grad_() for name in self._storage}
        self._hook("forward", self.step)
        loss = self.executor.run(leaves, inputs)
        self._hook("backward", self.step)
        loss.backward()
        found = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        self._hook("gradient_sync", self.step)
        self._sum_replicated(found)
        return found, loss.detach()

    def _sum_replicated(self, gradients: Mapping[str, Tensor]) -> None:
        """One all-reduce of all gradients that are partial: those of replicated parameters (factored ones are whole already)."""
        partial = [gradients[name] for name in sorted(self._storage) if self._storage[name].kind == "replicated"]
        if not partial:
            return
        flat = torch.cat([gradient.flatten() for gradient in partial])
        self.group.all_reduce(flat)
        for gradient, total in zip(partial, flat.split([gradient.numel() for gradient in partial]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def train_step(self, inputs: Sequence[Tensor]) -> SpmdStep:
        """The next step on a whole global batch. PeerLost, Interrupted: this rank has not changed its state."""
        gradients, loss = self.gradients(inputs)
        self._hook("vote", self.step)
        squared, total = self._vote(gradients, loss)
        norm = squared**0.5
        self._hook("apply", self.step)
        finite = bool(torch.isfinite(torch.tensor([squared, total])).all())
        if finite:
            update(self.state, gradients, self.training, self.step, clip_factor(self.training, norm))
        self.step += 1
        return SpmdStep(self.step - 1, total, norm, finite)

    def _vote(self, gradients: Mapping[str, Tensor], loss: Tensor) -> tuple[float, float]:
        """The squared global norm, each element counted once whoever holds it, and the loss."""
        mine = torch.zeros(2, dtype=torch.float64)
        for name, gradient in gradients.items():
            if self._storage[name].kind == "sharded" or self.group.rank == 0:
                mine[0] += gradient.double().square().sum().cpu()
        mine[1] = loss.double().cpu()
        mine = mine.to(loss.device)
        self.group.wait_on_host(self.group.start_all_reduce(mine))
        squared, total = mine.tolist()
        return squared, total
