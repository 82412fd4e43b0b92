"""Operations of process groups: which of them end for a device's stream, and which for the host."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from autohet.runtime.groups.interruptible import InterruptibleGroup


class Group(InterruptibleGroup):
    """Workers that communicate with each other in one generation.

    Every member calls collectives in the same order. `send` and `recv` start an operation, which a
    wait ends. Messages between two members match in the order of sending, or by `tag` if the back
    end has tags.
    """

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group in place and end the operation for the stream.

        All members get the same bits.
        """
        self.wait_on_stream(self.start_all_reduce(tensor))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the elementwise maximum over the group in place; end it for the stream."""
        self.wait_on_stream(self.start_all_reduce(tensor, ReduceOp.MAX))

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Work | None:
        """Start an in-place all-reduce; a wait ends it."""
        if self.process_group is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: Work | None = self._call(lambda: self.process_group.allreduce([tensor], options))
        return work

    def start_reduce(self, tensor: Tensor, to: str) -> Work | None:
        """Start to sum over the group into `tensor` of the member `to`; a wait ends the operation.

        The other members' tensors are undefined afterwards.
        """
        if self.process_group is None:
            return None
        op: Any = ReduceOp.SUM
        options = dist.ReduceOptions()
        options.reduceOp = op
        options.rootRank = self.members.index(to)
        work: Work | None = self._call(lambda: self.process_group.reduce([tensor], options))
        return work

    def start_broadcast(self, tensor: Tensor, source: str) -> Work | None:
        """Start to copy `tensor` of the member `source` to all members; a wait ends the operation.

        The tensor is contiguous, and has the same size on every member.
        """
        if self.process_group is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(source)
        work: Work | None = self._call(lambda: self.process_group.broadcast([tensor], options))
        return work

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Gather every member's `part` in rank order into `out`; end the operation for the stream.

        `out` is as large as all parts together; both are contiguous.
        """
        assert out.numel() == self.size * part.numel(), (
            f"{self.size} parts of {part.numel()} into {out.numel()}"
        )
        if self.process_group is None:
            out.view(-1).copy_(part.view(-1))
            return
        flat_out = out.view(-1)
        flat_part = part.view(-1)
        options = AllgatherOptions()
        work = self._call(lambda: self.process_group._allgather_base(flat_out, flat_part, options))
        self.wait_on_stream(work)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        """Sum `parts` [size, ...] over the group, and put this member's part into `out`.

        Ends the operation for the stream. `parts` is contiguous, and undefined afterwards. A back
        end without the operation sums all parts.
        """
        if self.process_group is not None:
            self.all_reduce(parts)
        out.copy_(parts[self.rank])

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send rows of `given` to every member and receive rows of every member into `out`.

        Ends the operation for the stream. received, sent: rows by rank of the other member; rows
        are in the order of these ranks. Both tensors are contiguous.
        """
        self.wait_on_stream(self._start_all_to_all(out, given, received, sent))

    def exchange_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """Send `counts[rank]` to each member; return the sent and the received counts by rank.

        counts: int64 [size]. Ends the operation for the host.
        """
        theirs = torch.empty_like(counts)
        ones = [1] * self.size
        self.wait_on_host(self._start_all_to_all(theirs, counts, ones, ones))
        return counts.tolist(), theirs.tolist()

    def _start_all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work | None:
        if self.process_group is None:
            out.copy_(given)
            return None
        out_rows = list(received)
        given_rows = list(sent)
        options = AllToAllOptions()
        work: Work | None = self._call(
            lambda: self.process_group.alltoall_base(out, given, out_rows, given_rows, options)
        )
        return work

    def send(self, tensor: Tensor, to: str, tag: int) -> Work | None:
        """Start to send a contiguous tensor, which must not change before a wait."""
        rank = self.members.index(to)
        work: Work | None = self._call(lambda: self.process_group.send([tensor], rank, tag))
        return work

    def recv(self, tensor: Tensor, source: str, tag: int) -> Work | None:
        """Start to receive into a contiguous tensor."""
        rank = self.members.index(source)
        work: Work | None = self._call(lambda: self.process_group.recv([tensor], rank, tag))
        return work

    def barrier_on_host(self) -> None:
        """Wait on the host until every member has called this."""
        arrived = torch.ones(1, device=self.device)
        self.wait_on_host(self.start_all_reduce(arrived))
        assert arrived.item() == self.size, f"{self.name}: {arrived.item()} of {self.size} came"
