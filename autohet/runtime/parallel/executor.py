"""Runs a stage's schedule: forwards, backwards and the exchange of hidden states with the neighbouring stages.

Hidden states and their gradients, [b, S, H], are whole and equal on all ranks of a stage. Between nodes each rank of the receiving stage
takes one of t equal slices of the flattened tensor, and the stage's own group gathers the whole: t ranks that each took the whole would
bring the same bytes t times through one NIC (`planner.cost.links`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import Work

from autohet.runtime.groups import Group
from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.pacing import Pacer
from autohet.runtime.parallel.place import Place
from autohet.runtime.parallel.schedule import CHANNEL_DEPTH, Action, Kind, one_forward_one_backward
from planner.cost.links import Transfer

Batch = tuple[Tensor, Tensor]  # token ids and targets, each [b, S] int64
NO_BATCH = (torch.empty(0), torch.empty(0))  # what stages between the first and the last have of one


class Stage(Protocol):
    """What the executor needs of a stage model (see `autohet.runtime.models.stage.StageModel`)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor: ...


class Executor:
    """One worker's part of a pipeline's forward and backward passes. Called by every worker of the pipeline once a step; blocks.

    forward, backward: the groups over which hidden states and gradients cross even and odd borders (border s is behind stage s).
    tensor_group: the ranks of this worker's stage, in their order; None where it has one. hidden_shape: (b, S, H) of a microbatch.
    """

    def __init__(
        self, place: Place, stage: Stage, forward: Sequence[Group], backward: Sequence[Group], tensor_group: Group | None,
        hidden_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device,
        pacer: Pacer | None = None, check: Callable[[], None] = lambda: None, clock: StreamClock | None = None,
    ) -> None:  # fmt: skip
        self.place, self.stage, self.pacer = place, stage, pacer
        ahead, behind = (
            place.stage_index % 2,
            (place.stage_index - 1) % 2,
        )  # the borders to the next stage, and to the one before
        self._activations_from, self._activations_to = forward[behind], forward[ahead]
        self._gradients_from, self._gradients_to = backward[ahead], backward[behind]
        self._tensor_group = tensor_group
        self._shape, self._dtype, self._device = hidden_shape, dtype, device
        self._check = (
            check  # raises Interrupted once the generation is over: between actions, for stages that wait for nobody
        )
        self._actions = one_forward_one_backward(place.pipeline, place.stage_index)
        self._clock = clock or HostClock()
        self._computed: list[tuple[Any, Any]] = []

    @property
    def compute_s(self) -> float:
        """What the last step's forward and backward passes took on the device; the host has waited for the end of the step."""
        return sum(self._clock.seconds(begin, end) for begin, end in self._computed)

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
        self._kept: dict[int, tuple[Tensor, Tensor | GradientEdge]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._arrived: dict[tuple[Kind, int], tuple[Tensor, Work | None]] = {}
        self._sending: dict[Kind, deque[tuple[Group, Work | None, Tensor]]] = defaultdict(deque)
        self._gradients: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_targets = torch.zeros((), dtype=torch.int64, device=self._device)
        self._computed = []
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
        for kept in (self._kept, self._outputs, self._arrived, self._sending, self._gradients, self._inputs):
            kept.clear()
        del self._batch, self._phase, self._before_last_backward

    def _recv_activation(self, m: int) -> None:
        transfer = self.place.takes_forward
        assert transfer is not None
        self._inputs[m] = self._take(Kind.RECV_ACTIVATION, m, self._activations_from, transfer, 2 * m).requires_grad_()

    def _recv_gradient(self, m: int) -> None:
        transfer = self.place.takes_backward
        assert transfer is not None
        self._gradients[m] = self._take(Kind.RECV_GRADIENT, m, self._gradients_from, transfer, 2 * m + 1)

    def _take(self, kind: Kind, m: int, group: Group, transfer: Transfer, tag: int) -> Tensor:
        """Wait for what microbatch m brings, after posting the receive of the next one: it may come while this one computes.

        Returns the whole, [b, S, H]. Where this rank takes a slice of it, all ranks of the stage are in this call, for the same m.
        """
        arrived = self._arrived.pop((kind, m), None)
        tensor, work = self._post(group, transfer, tag) if arrived is None else arrived
        if m + 1 < self.place.pipeline.num_microbatches:
            self._arrived[(kind, m + 1)] = self._post(group, transfer, tag + 2)
        group.wait_on_stream(work)
        return tensor.view(self._shape) if transfer.slices == 1 else self._gathered(tensor)

    def _post(self, group: Group, transfer: Transfer, tag: int) -> tuple[Tensor, Work | None]:
        tensor = torch.empty(self._slice_size(transfer), dtype=self._dtype, device=self._device)
        return tensor, group.recv(tensor, transfer.source, tag)

    def _slice_size(self, transfer: Transfer) -> int:
        """Elements of one slice. They are equal: a TP degree divides H."""
        assert self._shape[2] % transfer.slices == 0, f"{transfer.slices} slices of hidden size {self._shape[2]}"
        return math.prod(self._shape) // transfer.slices

    def _gathered(self, part: Tensor) -> Tensor:
        """The whole, [b, S, H], of the slices that the ranks of this stage have taken."""
        assert self._tensor_group is not None
        whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._tensor_group.all_gather(whole, part)
        return whole

    def _forward(self, m: int) -> None:
        self._phase("forward")
        started, begin = time.perf_counter(), self._clock.mark()
        tokens, targets = self._batch(m) if self.place.is_first or self.place.is_last else NO_BATCH
        given = tokens if self.place.is_first else self._inputs.pop(m)
        out = self.stage(given)
        if self.place.is_last:
            loss = self.stage.loss_sum(out, targets)
            self._loss += loss.detach()
            self._num_targets += (targets >= 0).sum()  # no .item(): on CUDA the host must not wait here
            self._kept[m] = (given, loss)
        else:  # the way back alone: what has been sent need not stay in memory until its gradient comes
            self._kept[m] = (given, get_gradient_edge(out))
            self._outputs[m] = out.detach()
        if self.pacer is not None:
            self.pacer.after_forward(started)
        self._computed.append((begin, self._clock.mark()))

    def _backward(self, m: int) -> None:
        self._phase("backward")
        started, begin = time.perf_counter(), self._clock.mark()
        if m == self.place.pipeline.num_microbatches - 1:
            self._before_last_backward()
        given, out = self._kept.pop(m)
        torch.autograd.backward(out, None if self.place.is_last else self._gradients.pop(m))
        if not self.place.is_first:
            assert given.grad is not None
            self._gradients[m] = given.grad
        if self.pacer is not None:
            self.pacer.after_backward(started)
        self._computed.append((begin, self._clock.mark()))

    def _send_activation(self, m: int) -> None:
        tensor = self._outputs.pop(m).contiguous()
        self._send(Kind.SEND_ACTIVATION, self._activations_to, tensor, self.place.gives_forward, 2 * m)

    def _send_gradient(self, m: int) -> None:
        tensor = self._gradients.pop(m).contiguous()
        self._send(Kind.SEND_GRADIENT, self._gradients_to, tensor, self.place.gives_backward, 2 * m + 1)

    def _send(self, kind: Kind, group: Group, tensor: Tensor, to: tuple[Transfer, ...], tag: int) -> None:
        """Start to send the slice that each target takes; `tensor` is whole, [b, S, H].

        A send may take until CHANNEL_DEPTH more have started: no more tensors than that are kept for it (a slice is a view, and keeps
        its whole tensor).
        """
        for transfer in to:
            size = self._slice_size(transfer)
            part = tensor.view(-1)[transfer.index * size : (transfer.index + 1) * size]
            self._sending[kind].append((group, group.send(part, transfer.target, tag), part))
        self._end_sends(kind, CHANNEL_DEPTH * len(to))

    def _end_sends(self, kind: Kind, most: int) -> None:
        while len(self._sending[kind]) > most:
            group, work, _ = self._sending[kind].popleft()
            group.wait_on_stream(work)


__all__ = ["Action", "Batch", "Executor", "Stage"]
