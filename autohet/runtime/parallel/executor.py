"""Executor of a stage's schedule: forward and backward passes, and messages to neighbours.

`borders` exchanges the hidden states with the neighbouring stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.pacing import Pacer
from autohet.runtime.parallel.borders import Borders
from autohet.runtime.parallel.schedule import Action, Kind, one_forward_one_backward

Batch = tuple[Tensor, Tensor]  # token ids and targets, each [b, S] int64
PieceMap = Callable[[int], Tensor]
"""Function from a microbatch to its map of piece begins, bool [b, S] on the host."""
NO_BATCH = (
    torch.empty(0),
    torch.empty(0),
)  # what stages between the first and the last have of one


class Stage(Protocol):
    """Interface of a stage model for the executor.

    See `autohet.runtime.models.stage.StageModel`.
    """

    def __call__(self, x: Tensor, begins: Tensor | None = None) -> Tensor: ...
    def loss(self, x: Tensor, targets: Tensor, begins: Tensor | None = None) -> Tensor: ...


class Executor:
    """Executor of one worker's part of a pipeline's passes, for a generation.

    Every worker of the pipeline calls `run` once a step; it blocks.

    check: raises Interrupted once the generation is over; called between actions, for stages that
    wait for no peer.
    """

    def __init__(
        self,
        borders: Borders,
        stage: Stage,
        pacer: Pacer | None = None,
        check: Callable[[], None] = lambda: None,
        clock: StreamClock | None = None,
    ) -> None:
        self.borders, self.place, self.stage, self.pacer = borders, borders.place, stage, pacer
        self.clock = clock or HostClock()
        self._check = check
        self._actions = one_forward_one_backward(self.place.pipeline, self.place.stage_index)
        self._computed: list[tuple[Any, Any]] = []

    @property
    def compute_s(self) -> float:
        """Seconds of the last step's forward and backward passes on the device.

        Read this only after the host has waited for the end of the step.
        """
        return sum(self.clock.seconds(begin, end) for begin, end in self._computed)

    def run(
        self,
        batch: Callable[[int], Batch],
        on_phase: Callable[[str], None],
        before_last_backward: Callable[[], None] = lambda: None,
        begins: PieceMap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one step's passes.

        Gradients of the *sum* of losses accumulate in the stage's parameters. `batch(m)` returns
        microbatch m. `begins(m)` returns its map of pieces, on every stage; None: each row is one
        piece. Returns the sum of losses (float64 scalar, 0 unless the stage is the last) and the
        number of counted targets (int64 scalar). Raises PeerLost or Interrupted; the step has not
        happened then.
        """
        step = _Step(self, batch, on_phase, before_last_backward, begins)
        take = {
            Kind.RECV_ACTIVATION: step.receive_activation,
            Kind.FORWARD: step.forward,
            Kind.SEND_ACTIVATION: step.send_activation,
            Kind.RECV_GRADIENT: step.receive_gradient,
            Kind.BACKWARD: step.backward,
            Kind.SEND_GRADIENT: step.send_gradient,
        }
        for action in self._actions:
            self._check()
            take[action.kind](action.microbatch)
        step.finish()
        self._computed = step.computed
        return step.loss, step.num_targets

    @torch.no_grad()
    def evaluate(
        self, batch: Callable[[int], Batch], count: int, begins: PieceMap | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run only the forward passes of the first `count` microbatches; touch no gradients.

        Every worker of the pipeline calls this; it blocks. Returns and raises as `run`.
        """
        place, device = self.place, self.borders.hidden.device
        arrivals, departures = (
            self.borders.activation_receives(count),
            self.borders.activation_sends(),
        )
        loss = torch.zeros((), dtype=torch.float64, device=device)
        num_targets = torch.zeros((), dtype=torch.int64, device=device)
        for m in range(count):
            self._check()
            tokens, targets = batch(m) if place.is_first or place.is_last else NO_BATCH
            x = tokens if place.is_first else arrivals.take(m)
            isolated = () if begins is None else (begins(m),)
            started = time.perf_counter()
            if place.is_last:
                loss += self.stage.loss(x, targets, *isolated)
                num_targets += (targets >= 0).sum()
            else:
                out = self.stage(x, *isolated)
            if self.pacer is not None:
                self.pacer.after_forward(started)
            if not place.is_last:
                departures.start(m, out.contiguous())
        departures.finish()
        return loss, num_targets


@dataclass
class _Microbatch:
    """Tensors that a stage holds of one microbatch.

    One action fills each field, and the last action that needs it empties it.
    """

    input: Tensor | None = None
    """Input of the forward pass; the backward pass stores its gradient there."""
    output: Tensor | None = None
    """Hidden states to send."""
    backward_root: Tensor | GradientEdge | None = None
    """Root of the backward pass: the loss, or, before the last stage, the output's graph edge.

    The edge alone is kept, so that a sent output need not stay in memory until its gradient
    arrives.
    """
    output_gradient: Tensor | None = None
    input_gradient: Tensor | None = None


class _Step:
    """Passes of one step on one stage: microbatches in flight, messages over the borders, and sums.

    It ends with the step, so that nothing of it outlives a generation that is interrupted midway.
    """

    def __init__(
        self,
        executor: Executor,
        batch: Callable[[int], Batch],
        on_phase: Callable[[str], None],
        before_last_backward: Callable[[], None],
        begins: PieceMap | None,
    ) -> None:
        self._begins = begins
        self._place, self._stage, self._pacer, self._clock = (
            executor.place,
            executor.stage,
            executor.pacer,
            executor.clock,
        )
        self._batch, self._on_phase, self._before_last_backward = (
            batch,
            on_phase,
            before_last_backward,
        )
        borders = executor.borders
        self._activations_in, self._activations_out = (
            borders.activation_receives(),
            borders.activation_sends(),
        )
        self._gradients_in, self._gradients_out = (
            borders.gradient_receives(),
            borders.gradient_sends(),
        )
        self._microbatches = [_Microbatch() for _ in range(self._place.pipeline.num_microbatches)]
        self.loss = torch.zeros((), dtype=torch.float64, device=borders.hidden.device)
        self.num_targets = torch.zeros((), dtype=torch.int64, device=borders.hidden.device)
        self.computed: list[tuple[Any, Any]] = []
        """Marks of the stream before and after each pass."""

    def receive_activation(self, m: int) -> None:
        self._microbatches[m].input = self._activations_in.take(m).requires_grad_()

    def forward(self, m: int) -> None:
        microbatch = self._microbatches[m]
        with self._computing("forward"):
            tokens, targets = (
                self._batch(m) if self._place.is_first or self._place.is_last else NO_BATCH
            )
            if self._place.is_first:
                microbatch.input = tokens
            assert microbatch.input is not None
            isolated = () if self._begins is None else (self._begins(m),)
            if self._place.is_last:
                loss = self._stage.loss(microbatch.input, targets, *isolated)
                microbatch.backward_root = loss
                self.loss += loss.detach()
                # no .item(): on CUDA the host must not wait here
                self.num_targets += (targets >= 0).sum()
            else:
                out = self._stage(microbatch.input, *isolated)
                microbatch.backward_root, microbatch.output = get_gradient_edge(out), out.detach()

    def send_activation(self, m: int) -> None:
        microbatch = self._microbatches[m]
        assert microbatch.output is not None
        self._activations_out.start(m, microbatch.output.contiguous())
        microbatch.output = None

    def receive_gradient(self, m: int) -> None:
        self._microbatches[m].output_gradient = self._gradients_in.take(m)

    def backward(self, m: int) -> None:
        microbatch = self._microbatches[m]
        with self._computing("backward"):
            if m == len(self._microbatches) - 1:
                self._before_last_backward()
            given, root, gradient = (
                microbatch.input,
                microbatch.backward_root,
                microbatch.output_gradient,
            )
            microbatch.input = microbatch.backward_root = microbatch.output_gradient = None
            assert given is not None
            assert root is not None
            torch.autograd.backward(root, gradient)
            if not self._place.is_first:
                assert given.grad is not None
                microbatch.input_gradient = given.grad

    def send_gradient(self, m: int) -> None:
        microbatch = self._microbatches[m]
        assert microbatch.input_gradient is not None
        self._gradients_out.start(m, microbatch.input_gradient.contiguous())
        microbatch.input_gradient = None

    def finish(self) -> None:
        """Wait until the neighbours have received all sends."""
        self._activations_out.finish()
        self._gradients_out.finish()

    @contextmanager
    def _computing(self, phase: str) -> Iterator[None]:
        """Record a pass's time on the device, and sleep out the time of an emulated GPU."""
        self._on_phase(phase)
        started, begin = time.perf_counter(), self._clock.mark()
        yield
        if self._pacer is not None:
            after = self._pacer.after_forward if phase == "forward" else self._pacer.after_backward
            after(started)
        self.computed.append((begin, self._clock.mark()))


__all__ = ["Action", "Batch", "Executor", "Stage"]
