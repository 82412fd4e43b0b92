"""Layout of gradients: flat buffers, and the buckets (slices of buffers) in which they are summed.

A shard (parameter, unit) has *holders*, the workers that compute with it. There is one buffer for
each set of holders, and one for the token counts of their routers. In a sharded layer one of the
holders owns a shard (`autohet.runtime.facts.layout`); a set of holders then has one buffer for each
owner, so that the sums for an owner are adjacent. A piece is a buffer's part of one parameter.
Every piece begins at a multiple of ALIGNMENT elements, and so does every bucket. The vectorised
AdamW then treats each element alike, whatever its neighbours (it would round the last few elements,
fewer than a vector, differently).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.facts.layout import held_units, unit_holders, unit_owners
from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD, ParameterSpec, local_shape
from autohet.runtime.models.registry import family_of
from autohet.runtime.parallel.place import place_of
from planner.plans.communicators import sync_groups
from planner.plans.plan import Plan

BUCKET_BYTES = 32 << 20
ALIGNMENT = 16
"""Alignment of pieces and buckets in fp32 elements: a cache line; no vector register is larger."""


@dataclass(frozen=True)
class ParameterPiece:
    """Adjacent units of one parameter along its split dimension.

    The piece lies at `offset` elements of its buffer. Its elements are row-major. `order`: the
    number of the model's parameters that a backward pass completes before this one.
    """

    parameter: str
    units: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    order: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Offset just past this piece, aligned."""
        return self.offset + pad_to_alignment(self.num_elements)

    @property
    def stop(self) -> int:
        """Offset just past the last element; padding follows up to `end`."""
        return self.offset + self.num_elements

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the view of this piece in a flat tensor that begins where its buffer does."""
        return flat[self.offset : self.stop].view(self.shape)


@dataclass(frozen=True)
class GradientBuffer:
    """Pieces with the same holders, in the order in which backward passes complete them.

    `owner`: the only worker that keeps their masters and moments; None: each holder keeps them.
    `receiver`: the holder to which the sums for the owner go: the owner itself, or another rank of
    its stage where the owner of a whole matrix does not compute with this part; None without an
    owner. `counts`: the worker that counts them in the global norm, which is the owner or the first
    holder. `is_token_count`: the sums are numbers of tokens by expert, no gradients, and are in no
    norm.
    """

    holders: tuple[str, ...]
    owner: str | None
    receiver: str | None
    pieces: tuple[ParameterPiece, ...]
    is_token_count: bool = False

    @property
    def num_elements(self) -> int:
        return self.pieces[-1].end

    @property
    def counts(self) -> str:
        return self.owner or self.holders[0]

    def keeps_state(self, worker: str) -> bool:
        """Return True if a worker keeps masters and moments of this buffer."""
        return worker == self.owner or (self.owner is None and worker in self.holders)


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the buffer with that index, which are summed at once.

    A bucket may begin or end inside a piece.
    """

    buffer: int
    start: int
    stop: int

    def touches(self, piece: ParameterPiece) -> bool:
        return piece.offset < self.stop and self.start < piece.stop

    def pieces_in(self, buffer: GradientBuffer) -> list[ParameterPiece]:
        """Return the pieces of its buffer that the bucket touches."""
        return [piece for piece in buffer.pieces if self.touches(piece)]


def pad_to_alignment(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


_BufferKey = tuple[tuple[str, ...], str | None, bool]
"""Holders, owner and `is_token_count` of a buffer."""


def plan_buffers(plan: Plan, config: PreTrainedConfig) -> tuple[GradientBuffer, ...]:
    """Return all buffers of a plan; every worker gets the same list."""
    specs = family_of(config).parameter_specs(config)
    holders = unit_holders(plan, config)
    owners = unit_owners(plan, config, holders)
    by_completion = sorted(holders, key=lambda name: (_backward_rank(specs[name]), name))
    pieces: dict[_BufferKey, list[ParameterPiece]] = defaultdict(list)
    for order, name in enumerate(by_completion):
        spec = specs[name]
        together: dict[_BufferKey, list[int]] = defaultdict(list)
        for unit in sorted(holders[name]):
            owner = owners.get((name, unit))
            key = holders[name][unit], owner, spec.is_token_count
            together[key].append(unit)
        for key, units in together.items():
            before = pieces[key]
            offset = before[-1].end if before else 0
            shape = local_shape(spec, units)
            before.append(ParameterPiece(name, tuple(units), shape, offset, order))

    group_of = {worker: stage.workers for stage in plan.stages for worker in stage.workers}
    buffers = []
    for (held, owner, is_token_count), of_buffer in pieces.items():
        receiver = owner
        if owner is not None and owner not in held:
            receiver = min(set(held).intersection(group_of[owner]))
        buffers.append(GradientBuffer(held, owner, receiver, tuple(of_buffer), is_token_count))
    return tuple(buffers)


def plan_buckets(
    buffers: Sequence[GradientBuffer], bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the buckets of all buffers, in the order in which backward passes complete them.

    The last layers come first. Every worker gets the same list.
    """
    size = max(ALIGNMENT, bucket_bytes // 4 // ALIGNMENT * ALIGNMENT)
    ranked: dict[tuple[int, int, int], Bucket] = {}
    for index, buffer in enumerate(buffers):
        for start in range(0, buffer.num_elements, size):
            bucket = Bucket(index, start, min(start + size, buffer.num_elements))
            # Its sum can start only once the last of its parameters has its gradient.
            last = max(piece.order for piece in bucket.pieces_in(buffer))
            ranked[last, index, start] = bucket
    return tuple(ranked[rank] for rank in sorted(ranked))


def _backward_rank(spec: ParameterSpec) -> float:
    """Return a number that rises in the order in which a backward pass completes layers."""
    if spec.layer == HEAD:
        return -math.inf
    if spec.layer == EMBEDDING:
        return math.inf
    return float(-spec.layer)


def groups_by_holders(
    plan: Plan, config: PreTrainedConfig, buffers: Sequence[GradientBuffer], most: int | None = None
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the sync group of each set of two or more holders of a shard.

    The group is these workers, or a superset if a worker would otherwise be in more than `most`
    groups. All workers build the groups in sorted order.
    """
    family = family_of(config)
    units = family.key_value_units(config)
    group_of = sync_groups(plan, tied=family.tied_head(config), most=most, key_value_units=units)
    shared = [buffer.holders for buffer in buffers if len(buffer.holders) > 1]
    return {holders: group_of[holders] for holders in shared}


@dataclass(frozen=True)
class Run:
    """Units that are adjacent both in a worker's tensor and in a piece.

    They lie along `dim`, from `start` in the tensor and from `position` in the piece.
    """

    dim: int
    start: int
    position: int
    length: int

    def view_in(self, tensor: Tensor) -> Tensor:
        """Return the view of this run in the worker's tensor."""
        return tensor.narrow(self.dim, self.start, self.length)

    def view_in_piece(self, piece: Tensor) -> Tensor:
        """Return the view of this run in the piece."""
        return piece.narrow(self.dim, self.position, self.length)


def runs_of(piece: ParameterPiece, spec: ParameterSpec, held: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs that map a piece to a worker's tensor.

    The tensor is the concatenation of the ascending units `held`. If the piece has exactly these
    units, there is one run.
    """
    if piece.units == tuple(held):
        return (Run(0, 0, 0, piece.shape[0]),)
    assert spec.split_dim is not None, f"{piece.parameter} has units apart, but is not split"
    runs = list[Run]()
    start = 0
    position = 0
    # Of the units held, those of the piece and those of others take turns.
    for mine, units in itertools.groupby(held, piece.units.__contains__):
        length = sum(spec.unit_length(unit) for unit in units)
        if mine:
            runs.append(Run(spec.split_dim, start, position, length))
            position += length
        start += length
    return tuple(runs)


class LocalBuffers:
    """Buffers of a plan that concern one worker: it holds a part of them, or is in their group.

    share: share of the tensors that its stage cuts. cuts_sequence: True if its stage is sequence
    parallel. units: units that it computes with, by parameter. owned: units with masters and
    moments of this worker, by parameter.
    """

    def __init__(
        self, plan: Plan, config: PreTrainedConfig, me: str, most_groups: int | None
    ) -> None:
        place = place_of(plan, me)
        assert place is not None, f"{me} is not in the plan"
        self.me = me
        self.share = place.share
        self.ranks = place.stage.workers
        """Workers of its stage."""
        self.cuts_sequence = place.stage.sequence_parallel
        self.buffers = plan_buffers(plan, config)
        self.members = groups_by_holders(plan, config, self.buffers, most_groups)
        self.specs = family_of(config).parameter_specs(config)
        self.units: dict[str, tuple[int, ...]] = {}
        for worker, name, _, units in held_units(plan, config):
            if worker == me:
                self.units[name] = units

        self.moved: dict[int, tuple[str, str]] = {}
        """Receiver and owner by index of the buffers that this worker sends to another rank of its
        stage or receives from it, in the order that all ranks have.
        """
        held = []
        kept = []
        owned: dict[str, list[int]] = defaultdict(list)
        for index, buffer in enumerate(self.buffers):
            if me in buffer.holders:
                held.append(index)
            if buffer.keeps_state(me):
                kept.append(index)
                for piece in buffer.pieces:
                    owned[piece.parameter] += piece.units
            receiver, owner = buffer.receiver, buffer.owner
            if receiver and owner and receiver != owner and me in (receiver, owner):
                self.moved[index] = receiver, owner
        self.held = tuple(held)
        """Indices of the buffers that it computes with."""
        self.kept = tuple(kept)
        """Indices of the buffers whose masters and moments it keeps."""
        self.owned: Mapping[str, tuple[int, ...]] = {
            name: tuple(sorted(units)) for name, units in owned.items()
        }

        own_groups = {group for group in self.members.values() if me in group}
        self.groups = tuple(sorted(own_groups))

    def buffer_of(self, bucket: Bucket) -> GradientBuffer:
        return self.buffers[bucket.buffer]

    def stage_group(self, groups: GenerationGroups) -> Group | None:
        """Return the group of this worker's stage, which exists; None if nothing moves in it."""
        return groups.group(self.ranks, "tensor") if self.moved else None

    def group_of(self, index: int) -> tuple[str, ...] | None:
        """Return the members of the group that sums a buffer; None if one worker holds it."""
        return self.members.get(self.buffers[index].holders)

    def runs(self, piece: ParameterPiece) -> tuple[Run, ...]:
        """Return the runs that map a piece to the tensor that this worker computes with."""
        name = piece.parameter
        return runs_of(piece, self.specs[name], self.units[name])
