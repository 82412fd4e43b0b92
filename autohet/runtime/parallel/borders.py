"""Exchange of hidden states and their gradients between neighbouring stages.

Both are [b, S, H], whole and equal on all ranks of a stage. They cross in the format of both
stages, or in fp32 if the formats differ or are fp16. Between nodes each rank of the
receiving stage takes one of t equal slices of the flattened tensor, and the stage's own group
gathers the whole. Zeros pad the tensor if t does not divide it, as in an uneven stage of five
ranks. If each of the t ranks took the whole, one NIC would receive the same bytes t times
(`planner.cost.links.traffic`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import Work

from autohet.runtime.groups import Group
from autohet.runtime.parallel.message_sums import MessageSums
from autohet.runtime.parallel.place import Place
from autohet.runtime.parallel.schedule import CHANNEL_DEPTH
from planner.cost.links.traffic import Transfer


def border_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that crosses the border of stages that compute in these.

    Gradients inside a stage in fp16 are scaled, those outside are not, and fp16 might not hold
    them.
    """
    if one == other and one != torch.float16:
        return one
    return torch.float32


@dataclass(frozen=True)
class HiddenStates:
    """Shape (b, S, H), dtype and device of one microbatch's hidden states and their gradients.

    A microbatch may have fewer than b rows.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    def of_rows(self, num_rows: int) -> HiddenStates:
        """Return those of a microbatch of so many rows."""
        return replace(self, shape=(num_rows, *self.shape[1:]))

    def empty_slices(self, transfer: Transfer, count: int) -> Tensor:
        """Allocate `count` slices, one after the other."""
        num_elements = count * self.slice_size(transfer)
        return torch.empty(num_elements, dtype=self.dtype, device=self.device)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def slice_size(self, transfer: Transfer) -> int:
        """Return the elements of one slice; slices are equal, and the last may end in zeros."""
        return -(-self.num_elements // transfer.slices)


@dataclass(frozen=True)
class Borders:
    """Connections of one worker to the stages before and after its own, for a generation.

    forward, backward: the groups over which hidden states and gradients cross even and odd borders
    (border s is behind stage s). tensor_group: the ranks of this worker's stage, in their order;
    None for a stage of one rank. hidden: as the stage computes them. crossing: dtypes in which they
    cross the border before the stage and the one after it; None: as in `hidden`. sums: takes what
    crosses.
    """

    place: Place
    forward: Sequence[Group]
    backward: Sequence[Group]
    tensor_group: Group | None
    hidden: HiddenStates
    crossing: tuple[torch.dtype, torch.dtype] | None = None
    sums: MessageSums = field(default_factory=lambda: MessageSums(torch.device("cpu")))

    def activation_receives(self, count: int | None = None) -> Receives:
        """Return receivers of one step's activations from the stage before.

        Create new ones for each step, also with the three methods below. count: microbatches; None:
        all of a step.
        """
        return self._receives(self.forward, -1, first_tag=0, count=count)

    def gradient_receives(self) -> Receives:
        return self._receives(self.backward, +1, first_tag=1)

    def activation_sends(self) -> Sends:
        return self._sends(self.forward, +1, first_tag=0)

    def gradient_sends(self) -> Sends:
        return self._sends(self.backward, -1, first_tag=1)

    def _receives(
        self, groups: Sequence[Group], offset: int, first_tag: int, count: int | None = None
    ) -> Receives:
        hidden = self._hidden(offset)
        return Receives(
            self._group(groups, offset),
            self.place.transfer_from(offset),
            [hidden.of_rows(len(each)) for each in self.place.deal.microbatches[:count]],
            self.tensor_group,
            first_tag,
            partial(self.sums.add_arrived, offset),
        )

    def _sends(self, groups: Sequence[Group], offset: int, first_tag: int) -> Sends:
        group = self._group(groups, offset)
        return Sends(
            group,
            self.place.transfers_to(offset),
            self._hidden(offset),
            first_tag,
            partial(self.sums.add_sent, offset),
        )

    def _group(self, groups: Sequence[Group], offset: int) -> Group:
        """Return the group of the border before this stage (-1) or after it (+1)."""
        border = self.place.stage_index + min(offset, 0)
        return groups[border % 2]

    def _hidden(self, offset: int) -> HiddenStates:
        """Return the hidden states as they cross the border before the stage or after it."""
        if self.crossing is None:
            return self.hidden
        before, after = self.crossing
        return replace(self.hidden, dtype=before if offset < 0 else after)


@dataclass
class Receives:
    """Receives of one step in one direction, in the order of microbatches.

    hidden: what arrives, by microbatch. count: takes each message. The next receive is posted
    ahead, so its message may arrive while this microbatch computes.
    """

    group: Group
    transfer: Transfer | None
    hidden: Sequence[HiddenStates]
    tensor_group: Group | None
    first_tag: int
    count: Callable[[Tensor], None]
    _posted: tuple[Tensor, Work | None] | None = None
    _next: int = 0

    def take(self, m: int) -> Tensor:
        """Wait for the tensor of microbatch m; return it whole, [b, S, H].

        If this rank receives a slice, all ranks of the stage call this for the same m. Raises
        PeerLost, Interrupted.
        """
        assert m == self._next, f"microbatch {m} is taken before microbatch {self._next}"
        assert self.transfer is not None, "nothing comes from this side"
        tensor, work = self._posted or self._post(self.transfer)
        self._next += 1
        self._posted = None
        if self._next < len(self.hidden):
            self._posted = self._post(self.transfer)
        self.group.wait_on_stream(work)
        self.count(tensor)
        hidden = self.hidden[m]
        if self.transfer.slices > 1:
            tensor = self._gather(tensor, self.transfer, hidden)
        # The last slice may end in zeros that belong to no element.
        return tensor[: hidden.num_elements].view(hidden.shape)

    def _post(self, transfer: Transfer) -> tuple[Tensor, Work | None]:
        tensor = self.hidden[self._next].empty_slices(transfer, 1)
        # Even tags are of hidden states, odd ones of gradients.
        tag = self.first_tag + 2 * self._next
        work = self.group.recv(tensor, transfer.source, tag)
        return tensor, work

    def _gather(self, part: Tensor, transfer: Transfer, hidden: HiddenStates) -> Tensor:
        """Gather the slices that the ranks of this stage have received."""
        assert self.tensor_group is not None
        whole = hidden.empty_slices(transfer, transfer.slices)
        self.tensor_group.all_gather(whole, part)
        return whole


@dataclass
class Sends:
    """Sends of one step in one direction.

    A send may last until CHANNEL_DEPTH more have started, so no more tensors than that are kept (a
    slice is a view, and keeps its whole tensor). count: takes each message.
    """

    group: Group
    transfers: tuple[Transfer, ...]
    hidden: HiddenStates
    first_tag: int
    count: Callable[[Tensor], None]
    _pending: deque[tuple[Work | None, Tensor]] = field(default_factory=deque)

    def start(self, m: int, tensor: Tensor) -> None:
        """Start to send each target its slice of microbatch m.

        `tensor` is whole, [b, S, H], and contiguous; it crosses in the border's dtype.
        """
        tensor = tensor.to(self.hidden.dtype)
        tag = self.first_tag + 2 * m
        hidden = self.hidden.of_rows(len(tensor))
        for transfer in self.transfers:
            size = hidden.slice_size(transfer)
            flat = tensor.view(-1)
            missing = transfer.slices * size - len(flat)
            if missing > 0:
                flat = F.pad(flat, (0, missing))
            start = transfer.index * size
            part = flat[start : start + size]
            self.count(part)
            work = self.group.send(part, transfer.target, tag)
            # The part is kept until the send has ended: its memory must not be used again before.
            self._pending.append((work, part))
        self._end_all_but(CHANNEL_DEPTH * len(self.transfers))

    def finish(self) -> None:
        """Wait until all sends have been received. Raises PeerLost, Interrupted."""
        self._end_all_but(0)

    def _end_all_but(self, most: int) -> None:
        while len(self._pending) > most:
            work, _ = self._pending.popleft()
            self.group.wait_on_stream(work)
