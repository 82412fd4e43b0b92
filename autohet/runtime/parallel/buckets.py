"""Where gradients lie: one flat buffer for each set of holders, and the buckets, slices of it, in
which they are summed.

A shard (parameter, unit) has *holders*, the workers that compute with it. Of a sharded layer one of
them owns it (`autohet.runtime.layout`), and the buffers of one set of holders are one for each
owner: what is summed for an owner lies side by side. A piece is what a buffer has of one parameter;
it begins at a multiple of ALIGNMENT elements, and so does every bucket: the vectorised AdamW then
treats each element alike, whatever lies beside it (its last few elements, fewer than a vector,
would be rounded otherwise).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.layout import held_units, unit_holders, unit_owners
from autohet.runtime.models import family_of
from autohet.runtime.models.family import EMBEDDING, HEAD, ParameterSpec, local_shape
from autohet.runtime.parallel.place import place_of
from planner.communicators import sync_groups
from planner.plan import Plan

BUCKET_BYTES = 32 << 20
ALIGNMENT = 16
"""In fp32 elements: a cache line, and no vector register is larger."""


@dataclass(frozen=True)
class Piece:
    """Some units of one parameter side by side along its split dimension: row-major, at `offset`
    elements of its buffer. `order`: how many of the model's parameters a backward pass completes
    before.
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
        """Where the next piece may begin."""
        return self.offset + aligned(self.num_elements)

    def of(self, flat: Tensor) -> Tensor:
        """Its part of a flat tensor that begins where its buffer does."""
        return flat[self.offset : self.offset + self.num_elements].view(self.shape)


@dataclass(frozen=True)
class Buffer:
    """Pieces with the same holders, in the order in which backward passes complete them. `owner`:
    who alone keeps their masters and moments; None where each holder does. Whoever `counts` them in
    the global norm is the owner, or the first holder.
    """

    holders: tuple[str, ...]
    owner: str | None
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return self.pieces[-1].end

    @property
    def counts(self) -> str:
        return self.owner or self.holders[0]

    def keeps_state(self, worker: str) -> bool:
        """Whether a worker has masters and moments of it."""
        return worker in self.holders and self.owner in (None, worker)


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the buffer of that index, which are summed at once.

    It may begin or end in the middle of a piece.
    """

    buffer: int
    start: int
    stop: int

    def touches(self, piece: Piece) -> bool:
        return piece.offset < self.stop and self.start < piece.offset + piece.num_elements


def aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def plan_buffers(plan: Plan, config: PreTrainedConfig) -> tuple[Buffer, ...]:
    """All buffers of a plan: the same list at every worker."""
    specs = family_of(config).parameter_specs(config)
    holders = unit_holders(plan, config)
    owners = unit_owners(plan, config, holders)
    pieces: dict[tuple[tuple[str, ...], str | None], list[Piece]] = defaultdict(list)
    for order, name in enumerate(
        sorted(holders, key=lambda name: (_backward_rank(specs[name]), name))
    ):
        together: dict[tuple[tuple[str, ...], str | None], list[int]] = defaultdict(list)
        for unit in sorted(holders[name]):
            together[holders[name][unit], owners.get((name, unit))].append(unit)
        for key, units in together.items():
            offset = pieces[key][-1].end if pieces[key] else 0
            pieces[key].append(
                Piece(name, tuple(units), local_shape(specs[name], units), offset, order)
            )
    return tuple(
        Buffer(held, owner, tuple(of_buffer)) for (held, owner), of_buffer in pieces.items()
    )


def plan_buckets(buffers: Sequence[Buffer], bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The buckets of all buffers, in the order in which backward passes complete them (last layers
    first): the same list everywhere.
    """
    size = max(ALIGNMENT, bucket_bytes // 4 // ALIGNMENT * ALIGNMENT)
    ranked = []
    for index, buffer in enumerate(buffers):
        for start in range(0, buffer.num_elements, size):
            bucket = Bucket(index, start, min(start + size, buffer.num_elements))
            last = max(piece.order for piece in buffer.pieces if bucket.touches(piece))
            ranked.append((last, index, start, bucket))
    return tuple(bucket for *_, bucket in sorted(ranked, key=lambda entry: entry[:3]))


def _backward_rank(spec: ParameterSpec) -> float:
    return {HEAD: -math.inf, EMBEDDING: math.inf}.get(spec.layer, float(-spec.layer))


def groups_by_holders(
    plan: Plan, config: PreTrainedConfig, buffers: Sequence[Buffer], most: int | None = None
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The group of each set of two or more holders that some shard has: these workers, or a
    superset where a worker would be in more than `most` groups. All workers build the groups in
    sorted order.
    """
    family = family_of(config)
    units = family.key_value_units(config)
    group_of = sync_groups(plan, tied=family.tied_head(config), most=most, key_value_units=units)
    return {each.holders: group_of[each.holders] for each in buffers if len(each.holders) > 1}


@dataclass(frozen=True)
class Run:
    """Some units side by side both in a worker's tensor and in a piece: along `dim`, from `start`
    there and from `position` here.
    """

    dim: int
    start: int
    position: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of the worker's tensor."""
        return tensor.narrow(self.dim, self.start, self.length)

    def of_piece(self, piece: Tensor) -> Tensor:
        return piece.narrow(self.dim, self.position, self.length)


def runs_of(piece: Piece, spec: ParameterSpec, held: Sequence[int]) -> tuple[Run, ...]:
    """Where a piece lies in a worker's tensor, the concatenation of the ascending units `held`; all
    of both: one run.
    """
    if piece.units == tuple(held):
        return (Run(0, 0, 0, piece.shape[0]),)
    assert spec.split_dim is not None, f"{piece.parameter} has units apart, but is not split"
    runs, start, position = list[Run](), 0, 0
    for mine, units in itertools.groupby(held, piece.units.__contains__):
        length = sum(spec.cuts[unit + 1] - spec.cuts[unit] for unit in units)
        if mine:
            runs.append(Run(spec.split_dim, start, position, length))
            position += length
        start += length
    return tuple(runs)


class LocalBuffers:
    """A plan's buffers as one worker meets them: those of which it holds a part, or in whose group
    it is.

    share: of what its stage cuts. cuts_sequence: whether its stage is sequence parallel. units: by
    parameter, what it computes with. owned: by parameter, what it has masters and moments of.
    """

    def __init__(
        self, plan: Plan, config: PreTrainedConfig, me: str, most_groups: int | None
    ) -> None:
        place = place_of(plan, me)
        assert place is not None, f"{me} is not in the plan"
        self.me, self.share = me, place.share
        self.cuts_sequence = place.stage.sequence_parallel
        self.buffers = plan_buffers(plan, config)
        self.members = groups_by_holders(plan, config, self.buffers, most_groups)
        self.specs = family_of(config).parameter_specs(config)
        self.units = {
            name: units for worker, name, _, units in held_units(plan, config) if worker == me
        }
        self.held = tuple(index for index, each in enumerate(self.buffers) if me in each.holders)
        self.kept = tuple(index for index in self.held if self.buffers[index].keeps_state(me))
        owned: dict[str, list[int]] = defaultdict(list)
        for index in self.kept:
            for piece in self.buffers[index].pieces:
                owned[piece.parameter] += piece.units
        self.owned: Mapping[str, tuple[int, ...]] = {
            name: tuple(sorted(units)) for name, units in owned.items()
        }
        self.groups = tuple(sorted({group for group in self.members.values() if me in group}))

    def group_of(self, index: int) -> tuple[str, ...] | None:
        """The members of the group over which a buffer is summed; None where one worker holds
        it.
        """
        return self.members.get(self.buffers[index].holders)

    def runs(self, piece: Piece) -> tuple[Run, ...]:
        """Where a piece lies in what this worker computes with."""
        return runs_of(piece, self.specs[piece.parameter], self.units[piece.parameter])
