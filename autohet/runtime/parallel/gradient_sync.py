"""Sum each parameter's gradient over all its holders, however the pipelines are cut.

The gradient of the whole batch is a sum over tokens. Each pipeline sums over its own microbatches.
Every holder of a shard (parameter, unit), or its owner alone if it has one, must end with the whole
sum:

    G[u] = sum over holders w of u:  c_w * g_w[u]

c_w is w's share of its tensor-parallel group's work if each rank of the group holds u whole, else
1. Shares are k / 2^n: 1 / t_w of t_w ranks, or the shares of the plan; they add up to 1 exactly. If
each rank's gradient is a part of the sum, c_w = 1.

A worker of two pipelines that are cut differently, or of different TP degree, therefore has
different partners for different layers, and each pipeline counts once. Tied embeddings need no
special case: first and last stages are holders of one shard. Pipelines need no weights: the trainer
divides the sum once by the number of tokens of the global batch.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work

from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.parallel.buckets import (
    BUCKET_BYTES,
    Bucket,
    LocalBuffers,
    ParameterPiece,
    Run,
    plan_buckets,
)
from autohet.runtime.parallel.scaled_passes import ScaledPasses

NORM_CHUNK = 1 << 16
"""Elements whose squares are added at a time on the CPU: 0.5 MB in fp64, which fits its cache."""


@dataclass(frozen=True)
class _LocalPiece:
    """A piece in this worker's buffer, with its runs in the local gradient."""

    piece: ParameterPiece
    view: Tensor
    runs: tuple[Run, ...]
    weight: float

    def add(self, gradient: Tensor, factor: float) -> None:
        for run in self.runs:
            own = run.view_in_piece(self.view)
            own.add_(run.view_in(gradient), alpha=factor)


class GradientSync:
    """Gradients of this worker in one step, fp32: summed over microbatches, then over holders.

    Every worker of the plan builds it, in the same order of groups. Per step: `begin`; backward
    passes, with `last_backward` called before the last one; `finish`. With `overlap`, a bucket's
    sum starts as soon as the last pass has completed the bucket. From `finish` until the next
    `begin`, `flats` has the sums, with the same bits at every holder, or at the owner alone. Only
    the buffers store gradients. If a worker holds exactly one piece of a parameter, its gradient is
    a view of the buffer; else each microbatch's gradient is added to the pieces. scaled: the passes
    of a stage in fp16, whose gradients lose their scale here.
    """

    def __init__(
        self,
        local: LocalBuffers,
        groups: GenerationGroups,
        parameters: Mapping[str, nn.Parameter],
        *,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        scaled: ScaledPasses | None = None,
    ) -> None:
        self._scaled = scaled
        self.may_sum: Callable[[], bool] = lambda: True
        """Returns whether sums may start during the last backward pass."""
        self.local = local
        self._parameters = dict(parameters)
        self._overlap = overlap
        unmatched = set(local.units) ^ set(self._parameters)
        assert not unmatched, sorted(unmatched)
        tensors = list(self._parameters.values())
        self._device = tensors[0].device if tensors else groups.device

        self.flats: dict[int, Tensor] = {}
        # An owner of whole matrices also keeps sums of units that it does not compute with.
        for index in sorted({*local.held, *local.kept}):
            size = local.buffers[index].num_elements
            self.flats[index] = torch.zeros(size, dtype=torch.float32, device=self._device)

        # All groups, in the order that all workers have, whether a bucket of them is here or not.
        built = {members: groups.group(members) for members in local.groups}
        buckets = plan_buckets(local.buffers, bucket_bytes)
        self.buckets = tuple(bucket for bucket in buckets if self._takes_part(bucket))
        self._stage = local.stage_group(groups)
        self._group_of: dict[int, Group | None] = {}
        for index in {bucket.buffer for bucket in self.buckets}:
            members = local.group_of(index)
            self._group_of[index] = None if members is None else built[members]

        self._pieces: dict[str, list[_LocalPiece]] = defaultdict(list)
        self._whole: dict[str, Tensor] = {}
        """Views of the buffers that are a parameter's whole gradient."""
        self._place_pieces()

        self._waits_for: list[set[str]] = []
        """Parameters whose gradients each bucket waits for."""
        self._to_weigh: list[list[tuple[Tensor, float]]] = []
        """Parts of each bucket whose weight is not 1, with their weights."""
        self._buckets_of: dict[str, list[int]] = defaultdict(list)
        self._read_buckets()

        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
        self._reset()

    def _takes_part(self, bucket: Bucket) -> bool:
        """Return whether this worker sums `bucket` with others, or holds it alone."""
        members = self.local.group_of(bucket.buffer)
        if members is None:
            members = self.local.buffer_of(bucket).holders
        return self.local.me in members

    def _place_pieces(self) -> None:
        """Map the pieces of each parameter to the buffers."""
        local = self.local
        for index in local.held:
            for piece in local.buffers[index].pieces:
                view = piece.view_in(self.flats[index])
                weight = _weight(local, piece)
                placed = _LocalPiece(piece, view, local.runs(piece), weight)
                self._pieces[piece.parameter].append(placed)
        for name, pieces in self._pieces.items():
            first = pieces[0]
            is_whole = first.piece.units == local.units[name]
            if len(pieces) == 1 and is_whole:
                self._whole[name] = first.view

    def _read_buckets(self) -> None:
        """List what each bucket waits for, and what of it is weighted."""
        for number, bucket in enumerate(self.buckets):
            names: set[str] = set()
            parts: list[tuple[Tensor, float]] = []
            # A worker that holds nothing of the bucket only joins its sum.
            if bucket.buffer in self.local.held:
                flat = self.flats[bucket.buffer]
                buffer = self.local.buffer_of(bucket)
                for piece in bucket.pieces_in(buffer):
                    names.add(piece.parameter)
                    weight = _weight(self.local, piece)
                    if weight != 1.0:
                        parts.append((_part(flat, bucket, piece), weight))
            self._waits_for.append(names)
            self._to_weigh.append(parts)
            for name in names:
                self._buckets_of[name].append(number)

    def _reset(self) -> None:
        self._is_last = False
        self._next = 0
        self._works: list[Work | None] = []
        self._missing = [len(names) for names in self._waits_for]

    def begin(self) -> None:
        """Clear the last step's gradients."""
        for flat in self.flats.values():
            flat.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if parameter.dtype == torch.float32:
                # Autograd then adds straight into the buffer.
                parameter.grad = self._whole.get(name)
        self._reset()

    def add(self, other: GradientSync) -> None:
        """Add the gradients that the same stage has accumulated elsewhere, and not summed."""
        for name, pieces in other._pieces.items():
            found = torch.zeros_like(self._parameters[name], dtype=torch.float32)
            for piece in pieces:
                for run in piece.runs:
                    run.view_in(found).copy_(run.view_in_piece(piece.view))
            for piece in self._pieces[name]:
                piece.add(found, 1.0)

    def not_finite(self) -> tuple[str, ...]:
        """Return the names of parameters whose summed gradient holds a value that is not finite."""
        found = []
        for name, pieces in self._pieces.items():
            for piece in pieces:
                if not torch.isfinite(piece.view).all():
                    found.append(name)
                    break
        return tuple(found)

    def last_backward(self) -> None:
        """Announce that the next backward pass is the step's last."""
        self._is_last = True

    def _take_accumulated(self, name: str, parameter: Tensor) -> None:
        """Add a microbatch's gradient to the pieces, and start the sums that waited for it last."""
        found = parameter.grad
        is_in_buffer = found is self._whole.get(name)
        if found is not None and not is_in_buffer:
            factor = 1.0
            if self._scaled is not None and found.dtype == torch.float16:
                factor = self._scaled.unscale_factor(found)
            for piece in self._pieces[name]:
                piece.add(found, factor)
            parameter.grad = None
        if not self._is_last or not self._overlap:
            return
        for number in self._buckets_of[name]:
            self._missing[number] -= 1
        # All holders start sums in one order, so a later bucket that is ready waits for this one.
        while self._next < len(self.buckets) and self._missing[self._next] <= 0:
            if not self.may_sum():
                return
            self.start_sum(self._next)

    def start_sum(self, number: int) -> None:
        """Start a bucket's sum; always in the order of `buckets`, which all holders share."""
        self._next = number + 1
        for part, weight in self._to_weigh[number]:
            part.mul_(weight)
        bucket = self.buckets[number]
        group = self._group_of[bucket.buffer]
        if group is None:
            self._works.append(None)
            return
        is_held = bucket.buffer in self.local.held
        if is_held:
            given = self.flats[bucket.buffer][bucket.start : bucket.stop]
        else:
            # The group serves several sets of holders: give zeros to a bucket of others.
            given = torch.zeros(bucket.stop - bucket.start, device=self._device)
        receiver = self.local.buffer_of(bucket).receiver
        if receiver is None:
            work = group.start_all_reduce(given)
        else:
            work = group.start_reduce(given, receiver)
        if not is_held:
            # The zeros must live until the stream has sent them, and no longer.
            group.wait_on_stream(work)
            work = None
        self._works.append(work)

    def finish(self) -> Tensor:
        """Start the sums that have not started, and wait for all; every holder calls this; blocks.

        Raises PeerLost, Interrupted.

        Returns this worker's part of the squared norm of the summed gradient, float64. It is the
        sum of squares of the shards that this worker owns, or is the first holder of, so that each
        shard counts once over all workers. It is finite exactly if those gradients are.
        """
        while self._next < len(self.buckets):
            self.start_sum(self._next)
        for bucket, work in zip(self.buckets, self._works, strict=True):
            group = self._group_of[bucket.buffer]
            if group is not None:
                group.wait_on_stream(work)
        self._works = [None] * len(self.buckets)
        self._bring_to_owners()
        counted = []
        for index, flat in self.flats.items():
            buffer = self.local.buffers[index]
            if buffer.counts == self.local.me and not buffer.is_token_count:
                counted.append(flat)
        return squared_norm(counted, self._device)

    def _bring_to_owners(self) -> None:
        """Send sums that another rank of this stage owns, and receive those that this one owns.

        All ranks go through the buffers in one order, so none waits for one that waits for it.
        """
        group = self._stage
        if group is None:
            return
        sent = []
        for index, (receiver, owner) in self.local.moved.items():
            flat = self.flats[index]
            if self.local.me == receiver:
                sent.append(group.send(flat, owner, index))
            else:
                group.wait_on_stream(group.recv(flat, receiver, index))
        for work in sent:
            group.wait_on_stream(work)


def _part(flat: Tensor, bucket: Bucket, piece: ParameterPiece) -> Tensor:
    """Return the part of a piece that lies in a bucket, flat."""
    start = max(bucket.start, piece.offset)
    stop = min(bucket.stop, piece.stop)
    return flat[start:stop]


def squared_norm(flats: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of all squares, float64, on the device; the host does not wait for it.

    On the CPU it is exact if the squares and their sum are exact in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        if flats:
            norms = torch.stack(torch._foreach_norm(flats, 2, dtype=torch.float64))
            total += norms.square().sum()
        return total
    for flat in flats:
        for part in flat.split(NORM_CHUNK):
            wide = part.double()
            total += wide.dot(wide)
    return total


def _hook(sync: weakref.ref[GradientSync], name: str) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference to the sync.

    The garbage collector does not see through a parameter's hooks, so a strong reference would leak
    a generation's buffers and groups.
    """

    def on_accumulated(parameter: Tensor) -> None:
        alive = sync()
        if alive is not None:
            alive._take_accumulated(name, parameter)

    return on_accumulated


def _weight(local: LocalBuffers, piece: ParameterPiece) -> float:
    """Return the weight of a worker's gradient of a piece in the sum over all holders.

    A tensor that a sequence-parallel rank holds whole has the gradient of the rank's own tokens
    alone.
    """
    spec = local.specs[piece.parameter]
    is_part = spec.split_dim is not None or spec.partial_gradient or local.cuts_sequence
    return 1.0 if is_part else local.share.fraction
