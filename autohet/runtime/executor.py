"""Runs a stage's schedule: forwards, backwards and the exchange of hidden states with the neighbouring stages."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from autohet.runtime.groups import Group
from autohet.runtime.pacing import Pacer
from autohet.runtime.place import Place
from autohet.runtime.schedule import CHANNEL_DEPTH, Action, Kind, one_forward_one_backward

Batch = tuple[Tensor, Tensor]  # token ids and targets, each [b, S] int64


class Stage(Protocol):
    """What the executor needs of a stage model (see `autohet.runtime.models.stage.StageModel`)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor: ...


class Executor:
    """One worker's part of a pipeline's forward and backward passes. Called by every worker of the pipeline once a step; blocks."""

    def __init__(
        self, place: Place, stage: Stage, forward_group: Group, backward_group: Group, hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device, pacer: Pacer | None = None, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.place, self.stage, self.pacer = place, stage, pacer
        self._forward_group, self._backward_group = forward_group, backward_group
        self._shape, self._dtype, self._device = hidden_shape, dtype, device
        self._check = (
            check  # raises Interrupted once the generation is over: between actions, for stages that wait for nobody
        )
        pipeline = place.pipeline
        self._actions = one_forward_one_backward(place.stage_index, len(pipeline.stages), pipeline.num_microbatches)
        self.wait_s = 0.0

    def run(
        self,
        batch: Callable[[int], Batch],
        on_phase: Callable[[str], None],
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Tensor]:
        """One step's passes: gradients of the *sum* of losses accumulate in the stage's parameters.

        `batch(m)` gives microbatch m. Returns the sum of losses (float64 scalar, 0 where the stage is not the last) and the number of
        targets that counted (int64 scalar). Raises PeerLost or Interrupted; then the step has not happened.
        """
        self._batch, self._phase, self._before_last_backward = batch, on_phase, before_last_backward
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._arrived: dict[tuple[Kind, int], tuple[Tensor, Work | None]] = {}
        self._sending: dict[Kind, deque[tuple[Group, Work | None, Tensor]]] = defaultdict(deque)
        self._gradients: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_targets = torch.zeros((), dtype=torch.int64, device=self._device)
        self.wait_s = 0.0
        steps: dict[Kind, Callable[[int], None]] = {
            Kind.RECV_ACTIVATION: self._recv_activation, Kind.FORWARD: self._forward, Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_GRADIENT: self._recv_gradient, Kind.BACKWARD: self._backward, Kind.SEND_GRADIENT: self._send_gradient,
        }  # fmt: skip
        try:
            for action in self._actions:
                self._check()
                steps[action.kind](action.microbatch)
            for kind in list(self._sending):
                self._end_sends(kind, 0)
        finally:
            self._forget()
        return self._loss, self._num_targets

    def _forget(self) -> None:
        """Let go of what this step brought: of a generation that has ended, an operation or a caller's method would keep all groups."""
        for kept in (self._kept, self._arrived, self._sending, self._gradients, self._inputs):
            kept.clear()
        del self._batch, self._phase, self._before_last_backward

    def _recv_activation(self, m: int) -> None:
        assert self.place.upstream is not None
        self._inputs[m] = self._take(
            Kind.RECV_ACTIVATION, m, self._forward_group, self.place.upstream, 2 * m
        ).requires_grad_()

    def _recv_gradient(self, m: int) -> None:
        assert self.place.downstream is not None
        self._gradients[m] = self._take(Kind.RECV_GRADIENT, m, self._backward_group, self.place.downstream, 2 * m + 1)

    def _take(self, kind: Kind, m: int, group: Group, source: str, tag: int) -> Tensor:
        """Wait for what microbatch m brings, after posting the receive of the next one: it may come while this one computes."""
        tensor, work = self._arrived.pop((kind, m)) if (kind, m) in self._arrived else self._post(group, source, tag)
        if m + 1 < self.place.pipeline.num_microbatches:
            self._arrived[(kind, m + 1)] = self._post(group, source, tag + 2)
        self._wait(group, work)
        return tensor

    def _post(self, group: Group, source: str, tag: int) -> tuple[Tensor, Work | None]:
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return tensor, group.recv(tensor, source, tag)

    def _forward(self, m: int) -> None:
        self._phase("forward")
        started = time.perf_counter()
        tokens, targets = self._batch(m)
        given = tokens if self.place.is_first else self._inputs.pop(m)
        out = self.stage(given)
        if self.place.is_last:
            loss = self.stage.loss_sum(out, targets)
            self._loss += loss.detach()
            self._num_targets += (targets >= 0).sum()  # no .item(): on CUDA the host must not wait here
            out = loss
        self._kept[m] = (given, out)
        if self.pacer is not None:
            self.pacer.after_forward(started)

    def _backward(self, m: int) -> None:
        self._phase("backward")
        started = time.perf_counter()
        if m == self.place.pipeline.num_microbatches - 1:
            self._before_last_backward()
        given, out = self._kept.pop(m)
        if self.place.is_last:
            torch.autograd.backward(out)
        else:
            torch.autograd.backward(out, self._gradients.pop(m))
        if not self.place.is_first:
            assert given.grad is not None
            self._gradients[m] = given.grad
        if self.pacer is not None:
            self.pacer.after_backward(started)

    def _send_activation(self, m: int) -> None:
        tensor = self._kept[m][1].detach().contiguous()
        self._send(Kind.SEND_ACTIVATION, self._forward_group, tensor, self.place.send_forward_to, 2 * m)

    def _send_gradient(self, m: int) -> None:
        self._send(
            Kind.SEND_GRADIENT,
            self._backward_group,
            self._gradients.pop(m).contiguous(),
            self.place.send_backward_to,
            2 * m + 1,
        )

    def _send(self, kind: Kind, group: Group, tensor: Tensor, to: tuple[str, ...], tag: int) -> None:
        """Start a send; it may take until CHANNEL_DEPTH more have started, so that no more tensors than that are kept for it."""
        self._sending[kind].extend((group, group.send(tensor, worker, tag), tensor) for worker in to)
        self._end_sends(kind, CHANNEL_DEPTH * len(to))

    def _end_sends(self, kind: Kind, most: int) -> None:
        while len(self._sending[kind]) > most:
            group, work, _ = self._sending[kind].popleft()
            self._wait(group, work)

    def _wait(self, group: Group, work: Work | None) -> None:
        started = time.perf_counter()
        group.wait(work)
        self.wait_s += time.perf_counter() - started


__all__ = ["Action", "Batch", "Executor", "Stage"]
