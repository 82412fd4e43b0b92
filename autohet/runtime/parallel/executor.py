"""Executor of a stage's schedule: forward and backward passes, and messages to neighbours.

`borders` exchanges the hidden states with the neighbouring stages.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.models.layers.loss_terms import AnswerLosses
from autohet.runtime.parallel.borders import Borders
from autohet.runtime.parallel.place import Deal
from autohet.runtime.parallel.preference import PreferenceLoss
from autohet.runtime.parallel.scaled_passes import ScaledPasses
from autohet.runtime.parallel.schedule import one_forward_one_backward
from autohet.runtime.step.pacing import Pacer

Batch = tuple[Tensor, Tensor]
"""Token ids and targets, each [b, S] int64."""
PieceMap = Callable[[int], Tensor]
"""Function from a microbatch to its map of piece begins, bool [b, S] on the host."""
NO_BATCH = (torch.empty(0), torch.empty(0))
"""Stand-in for a batch on the stages between the first and the last, which read none."""


class ExecutableStage(Protocol):
    """Interface of a stage model for the executor.

    See `autohet.runtime.models.stages.stage.StageModel`.
    """

    def __call__(self, x: Tensor, begins: Tensor | None = None) -> Tensor: ...
    def loss(self, x: Tensor, targets: Tensor, begins: Tensor | None = None) -> Tensor: ...
    def answer_losses(
        self, x: Tensor, targets: Tensor, begins: Tensor, tokens: Tensor | None = None
    ) -> AnswerLosses: ...
    def as_reference(self, first_weights: Mapping[str, Tensor]) -> AbstractContextManager[None]: ...


class Executor:
    """Executor of one worker's part of a pipeline's passes, for a generation.

    Every worker of the pipeline calls `run` once a step; it blocks.

    check: raises Interrupted once the generation is over; called between actions, for stages that
    wait for no peer. preference: the loss of preferences, whose reference takes forward passes of
    its own; None: cross entropy.
    """

    def __init__(
        self,
        borders: Borders,
        stage: ExecutableStage,
        pacer: Pacer | None = None,
        check: Callable[[], None] = lambda: None,
        clock: StreamClock | None = None,
        preference: PreferenceLoss | None = None,
    ) -> None:
        self.preference = preference
        self.borders = borders
        self.place = borders.place
        self.stage = stage
        self.pacer = pacer
        self.clock = clock or HostClock()
        in_fp16 = borders.hidden.dtype == torch.float16
        self.scaled = ScaledPasses(borders.hidden.device) if in_fp16 else None
        """Scale of this stage's backward passes; None unless it computes in fp16."""
        self._check = check
        self._order = one_forward_one_backward(self.place.pipeline, self.place.stage_index)
        self.computed: list[tuple[Any, Any]] = []

    def dealt(self, deal: Deal) -> Executor:
        """Return this executor for a step of other rows."""
        other = copy.copy(self)
        other.place = replace(self.place, deal=deal)
        other.borders = replace(self.borders, place=other.place)
        other._order = one_forward_one_backward(
            self.place.pipeline, self.place.stage_index, deal.count
        )
        return other

    @property
    def compute_s(self) -> float:
        """Seconds of the last step's forward and backward passes on the device.

        Read this only after the host has waited for the end of the step.
        """
        return sum(self.clock.seconds(begin, end) for begin, end in self.computed)

    def run(
        self,
        batch: Callable[[int], Batch],
        on_phase: Callable[[str], None],
        before_last_backward: Callable[[], None] = lambda: None,
        begins: PieceMap | None = None,
        before_forward: Callable[[int], None] = lambda m: None,
    ) -> tuple[Tensor, Tensor]:
        """Run one step's passes.

        Gradients of the *sum* of losses accumulate in the stage's parameters. `batch(m)` returns
        microbatch m. `begins(m)` returns its map of pieces, on every stage; None: each row is one
        piece. `before_forward(m)` is called before its forward pass. Returns the sum of losses
        (float64 scalar, 0 unless the stage is the last) and the number of counted targets (int64
        scalar). Raises PeerLost or Interrupted; the step has not happened then.
        """
        self.computed = []
        if self.preference is not None:
            assert begins is not None
            batch = cache(batch)
            begins = cache(begins)
            on_phase("forward")
            begin = self.clock.mark()
            self._run_reference(batch, self.place.deal.count, begins)
            self.computed.append((begin, self.clock.mark()))
        step = _Step(self, batch, on_phase, before_last_backward, begins)
        for m in self._order:
            self._check()
            if m >= 0:
                before_forward(m)
                step.forward(m)
            else:
                step.backward(~m)
        step.finish()
        self.computed += step.computed
        return step.loss, step.num_targets

    @torch.no_grad()
    def evaluate(
        self, batch: Callable[[int], Batch], count: int, begins: PieceMap | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run only the forward passes of the first `count` microbatches; touch no gradients.

        Every worker of the pipeline calls this; it blocks. Returns and raises as `run`.
        """
        device = self.borders.hidden.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        num_targets = torch.zeros((), dtype=torch.int64, device=device)

        def add(m: int, x: Tensor, batch: Batch, isolated: tuple[Tensor, ...]) -> None:
            nonlocal loss, num_targets
            loss += self.loss_of(m, x, batch, isolated)
            num_targets += (batch[1] >= 0).sum()

        if self.preference is not None:
            assert begins is not None
            batch = cache(batch)
            begins = cache(begins)
            self._run_reference(batch, count, begins)
        self._forward_passes(batch, count, begins, add, self.pacer)
        return loss, num_targets

    def loss_of(self, m: int, x: Tensor, batch: Batch, isolated: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of losses of microbatch m, on a last stage."""
        if self.preference is None:
            return self.stage.loss(x, batch[1], *isolated)
        return self.preference.loss(m, self.stage, x, batch, *isolated)

    @torch.no_grad()
    def _run_reference(self, batch: Callable[[int], Batch], count: int, begins: PieceMap) -> None:
        """Run forward passes of the reference, if the loss has one.

        An emulated GPU sleeps out its time in the forward passes that follow, whose emulated
        seconds are those of both.
        """
        preference = self.preference
        assert preference is not None
        preference.begin()
        if not preference.has_reference:
            return

        def keep(m: int, x: Tensor, batch: Batch, isolated: tuple[Tensor, ...]) -> None:
            preference.keep_reference(m, self.stage, x, batch[1], *isolated)

        with self.stage.as_reference(preference.first_weights):
            self._forward_passes(batch, count, begins, keep, None)

    def _forward_passes(
        self,
        batch: Callable[[int], Batch],
        count: int,
        begins: PieceMap | None,
        at_end: Callable[[int, Tensor, Batch, tuple[Tensor, ...]], None],
        pacer: Pacer | None,
    ) -> None:
        """Pass `count` microbatches through the pipeline; the last stage calls `at_end` on each.

        `at_end` receives the microbatch's number, its input, its batch, and its map of pieces if
        there is one.
        """
        place = self.place
        arrivals = self.borders.activation_receives(count)
        departures = self.borders.activation_sends()
        dtype = self.borders.hidden.dtype
        for m in range(count):
            self._check()
            tokens, targets = batch(m) if place.is_first or place.is_last else NO_BATCH
            x = tokens if place.is_first else arrivals.take(m).to(dtype)
            isolated = () if begins is None else (begins(m),)
            started = time.perf_counter()
            if place.is_last:
                at_end(m, x, (tokens, targets), isolated)
            else:
                out = self.stage(x, *isolated)
            if pacer is not None:
                pacer.after_forward(started, place.share_of(m))
            if not place.is_last:
                departures.start(m, out.contiguous())
        departures.finish()


class _Arrival(torch.autograd.Function):
    """Beginning of a stage's graph, which does not keep the hidden states that have arrived."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor, found: list[Tensor]) -> Tensor:
        """Return the hidden states; backward adds their gradient to `found`.

        anchor: wants a gradient, so that the result does.
        """
        ctx.found = found
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.found.append(gradient)
        return None, None, None


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
        self._executor = executor
        self._place = executor.place
        self._scaled = executor.scaled
        self._begins = begins
        self._batch = batch
        self._on_phase = on_phase
        self._before_last_backward = before_last_backward
        borders = executor.borders
        self._activations_in = borders.activation_receives()
        self._activations_out = borders.activation_sends()
        self._gradients_in = borders.gradient_receives()
        self._gradients_out = borders.gradient_sends()
        self._in_flight: dict[int, tuple[list[Tensor], Tensor | GradientEdge]] = {}
        """Place for each microbatch's gradient of its input, and the root of its backward pass: the
        loss or, before the last stage, the edge of the output's graph.

        The edge alone is kept, so that a sent output need not stay in memory until its gradient
        arrives.
        """
        self._dtype = borders.hidden.dtype
        device = borders.hidden.device
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.num_targets = torch.zeros((), dtype=torch.int64, device=device)
        self.computed: list[tuple[Any, Any]] = []
        """Marks of the stream before and after each pass."""

    def forward(self, m: int) -> None:
        """Receive a microbatch's input, run its forward pass and start to send the output."""
        given = None
        if not self._place.is_first:
            given = self._activations_in.take(m).to(self._dtype)
        output = self._run_forward(m, given)
        if output is not None:
            self._activations_out.start(m, output.contiguous())

    def _run_forward(self, m: int, given: Tensor | None) -> Tensor | None:
        """Return the hidden states to send; None on the last stage."""
        with self._computing("forward", m):
            tokens, targets = NO_BATCH
            if self._place.is_first or self._place.is_last:
                tokens, targets = self._batch(m)
            gradients = list[Tensor]()
            x = tokens
            if given is not None:
                anchor = torch.empty(0, requires_grad=True)
                x = _Arrival.apply(anchor, given, gradients)  # type: ignore[no-untyped-call]
            isolated = () if self._begins is None else (self._begins(m),)
            if self._place.is_last:
                loss = self._executor.loss_of(m, x, (tokens, targets), isolated)
                self._in_flight[m] = (gradients, loss)
                self.loss += loss.detach()
                # no .item(): on CUDA the host must not wait here
                self.num_targets += (targets >= 0).sum()
                return None
            out = self._executor.stage(x, *isolated)
            self._in_flight[m] = (gradients, get_gradient_edge(out))
            return out.detach()

    def backward(self, m: int) -> None:
        """Receive an output's gradient, run the backward pass and start to send the input's."""
        gradient = self._run_backward(m, self._receive_gradient(m))
        if gradient is not None:
            self._gradients_out.start(m, gradient.contiguous())

    def _receive_gradient(self, m: int) -> Tensor | None:
        """Return the gradient of a microbatch's output; None on the last stage."""
        if self._place.is_last:
            return None
        arrived = self._gradients_in.take(m)
        return arrived if self._scaled is not None else arrived.to(self._dtype)

    def _run_backward(self, m: int, gradient: Tensor | None) -> Tensor | None:
        """Return the input's gradient to send; None on the first stage."""
        with self._computing("backward", m):
            if m == self._place.deal.count - 1:
                self._before_last_backward()
            # Autograd frees what it has used, as long as nothing else refers to it.
            gradients, root = self._in_flight.pop(m)
            if self._scaled is not None:
                gradient = self._scaled_gradient(root, gradient)
            torch.autograd.backward(root, gradient)
            found = None if self._place.is_first else gradients.pop()
            if self._scaled is not None:
                if found is not None:
                    found = self._scaled.unscale(found)
                self._scaled.end_microbatch()
            return found

    def _scaled_gradient(self, root: Tensor | GradientEdge, gradient: Tensor | None) -> Tensor:
        """Return the gradient with which a stage in fp16 begins its backward pass."""
        assert self._scaled is not None
        if gradient is not None:
            return self._scaled.scale(gradient)
        assert isinstance(root, Tensor)
        return self._scaled.root_gradient(root)

    def finish(self) -> None:
        """Wait until the neighbours have received all sends."""
        self._activations_out.finish()
        self._gradients_out.finish()

    @contextmanager
    def _computing(self, phase: str, m: int) -> Iterator[None]:
        """Record a pass's time on the device, and sleep out the time of an emulated GPU."""
        self._on_phase(phase)
        clock = self._executor.clock
        pacer = self._executor.pacer
        started = time.perf_counter()
        begin = clock.mark()
        yield
        if pacer is not None:
            share = self._place.share_of(m)
            if phase == "forward":
                pacer.after_forward(started, share)
            else:
                pacer.after_backward(started, share)
        self.computed.append((begin, clock.mark()))
