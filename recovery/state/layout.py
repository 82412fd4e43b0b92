"""Layout of the training state: the shards that each worker holds, without tensors or torch.

A tensor of state is named `"<kind>/<parameter>"` (kind: param, exp_avg, exp_avg_sq). It is cut
along one dimension at fixed boundaries into *units*, at the finest tensor-parallel degree; a unit
is the atomic shard: stored, checksummed and moved whole. A worker's local tensor is the
concatenation of its units in ascending order, so another TP degree regroups whole units.
"""

from __future__ import annotations

import math
import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

ITEM_BYTES_BY_DTYPE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class ShardId(NamedTuple):
    """Identifier of one unit of one tensor; the same in every generation and at every holder."""

    tensor: str
    unit: int

    def __str__(self) -> str:
        return f"{self.tensor}[{self.unit}]"


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A whole tensor of training state and where it may be cut.

    `cuts` are the unit boundaries along `split_dim`: `cuts[0] == 0`, ascending, `cuts[-1] ==
    shape[split_dim]`; units may be uneven. A tensor that is never cut has `split_dim` None, one
    unit, and `cuts` (0, 1) (any pair does).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split_dim: int | None = None
    cuts: tuple[int, ...] = (0, 1)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES_BY_DTYPE:
            known = ", ".join(ITEM_BYTES_BY_DTYPE)
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is not one of {known}")

        if self.split_dim is None:
            if len(self.cuts) != 2:
                raise ValueError(
                    f"{self.name}: a tensor without split_dim has one unit, cuts (0, 1), not"
                    f" {self.cuts}"
                )
            return

        if not 0 <= self.split_dim < len(self.shape):
            raise ValueError(
                f"{self.name}: split_dim {self.split_dim} is not a dimension of shape {self.shape}"
            )

        size = self.shape[self.split_dim]
        if not _are_cuts_of(size, self.cuts):
            raise ValueError(
                f"{self.name}: cuts {self.cuts} must ascend from 0 to {size},"
                f" the size of dimension {self.split_dim}"
            )

    @property
    def num_units(self) -> int:
        return len(self.cuts) - 1

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES_BY_DTYPE[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """Return all units of this tensor, ascending."""
        return tuple(ShardId(self.name, unit) for unit in range(self.num_units))

    def unit_shape(self, unit: int) -> tuple[int, ...]:
        return self.local_shape((unit,))

    def unit_offset(self, unit: int) -> tuple[int, ...]:
        """Return the index of the unit's first element in the whole tensor."""
        self._check_unit(unit)
        offset = [0] * len(self.shape)
        if self.split_dim is not None:
            offset[self.split_dim] = self.cuts[unit]
        return tuple(offset)

    def unit_slices(self, unit: int) -> tuple[slice, ...]:
        """Return the slices that take the unit out of the whole tensor."""
        slices = [
            slice(start, start + size)
            for start, size in zip(self.unit_offset(unit), self.unit_shape(unit), strict=True)
        ]
        return tuple(slices)

    def unit_bytes(self, unit: int) -> int:
        self._check_unit(unit)
        return self._bytes_by_unit[unit]

    @cached_property
    def _bytes_by_unit(self) -> tuple[int, ...]:
        sizes = []
        for unit in range(self.num_units):
            num_elements = math.prod(self.unit_shape(unit))
            sizes.append(num_elements * self.item_bytes)
        return tuple(sizes)

    def local_shape(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the concatenation of `units` along `split_dim`."""
        for unit in units:
            self._check_unit(unit)
        if self.split_dim is None:
            return self.shape

        shape = list(self.shape)
        shape[self.split_dim] = sum(self.unit_extent(unit) for unit in units)
        return tuple(shape)

    def unit_extent(self, unit: int) -> int:
        """Return the unit's size along `split_dim`."""
        return self.cuts[unit + 1] - self.cuts[unit]

    def _check_unit(self, unit: int) -> None:
        if not 0 <= unit < self.num_units:
            raise IndexError(f"{self.name} has units 0 to {self.num_units - 1}, not {unit}")


def _are_cuts_of(size: int, cuts: Sequence[int]) -> bool:
    """Return True if `cuts` are two or more boundaries that ascend from 0 to `size`."""
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != size:
        return False
    return all(low < high for low, high in pairwise(cuts))


@dataclass(frozen=True)
class Layout:
    """The whole state and who holds which shard of it, in one generation.

    `tensors` maps each state name to its spec; `shards_by_worker` maps each worker's name to its
    shards. A shard may have several holders (pipelines that hold the same layer; replicated tensors
    of a tensor-parallel group).
    """

    tensors: Mapping[str, TensorSpec]
    shards_by_worker: Mapping[str, frozenset[ShardId]]

    def __post_init__(self) -> None:
        # Workers may share one set of shards, which is then checked once.
        distinct = {
            id(shards): (worker, shards) for worker, shards in self.shards_by_worker.items()
        }

        for worker, shards in distinct.values():
            for shard in shards:
                spec = self.tensors.get(shard.tensor)
                if not (spec is not None and 0 <= shard.unit < spec.num_units):
                    raise ValueError(
                        f"{worker} is to hold {shard}, which is no shard of this state"
                    )

    @cached_property
    def _holders_by_shard(self) -> dict[ShardId, tuple[str, ...]]:
        holders: dict[ShardId, list[str]] = {}
        for worker in sorted(self.shards_by_worker):
            for shard in self.shards_by_worker[worker]:
                holders.setdefault(shard, []).append(worker)
        return {shard: tuple(workers) for shard, workers in holders.items()}

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self.shards_by_worker)

    @cached_property
    def shards(self) -> frozenset[ShardId]:
        """Every shard of the state, held or not."""
        shards: set[ShardId] = set()
        for spec in self.tensors.values():
            shards.update(spec.shards)
        return frozenset(shards)

    def holders(self, shard: ShardId) -> tuple[str, ...]:
        """Return the workers that hold `shard`, sorted by name; empty if none does."""
        return self._holders_by_shard.get(shard, ())

    def shard_bytes(self, shard: ShardId) -> int:
        return self.tensors[shard.tensor].unit_bytes(shard.unit)

    def bytes_of(self, worker: str) -> int:
        """Bytes of state that `worker` holds."""
        return sum(self.shard_bytes(shard) for shard in self.shards_by_worker[worker])

    def units_of(self, worker: str) -> dict[str, tuple[int, ...]]:
        """Map each tensor that the worker holds a part of to the worker's ascending units.

        By state name, sorted by name.
        """
        return self.derive(
            ("units", worker), lambda: units_by_tensor(self.shards_by_worker[worker])
        )

    def derive(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return what `make` derives from this layout alone; make it once for each key."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    @cached_property
    def _derived(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle specs and shards alone, packed: orders take a layout to each node."""
        place: dict[ShardId, int] = {}
        for spec in self.tensors.values():
            for shard in spec.shards:
                place[shard] = len(place)
        sets: dict[int, array[int]] = {}
        for shards in self.shards_by_worker.values():
            if id(shards) not in sets:
                sets[id(shards)] = array("I", sorted(place[shard] for shard in shards))
        numbers = {key: number for number, key in enumerate(sets)}
        set_of = {worker: numbers[id(held)] for worker, held in self.shards_by_worker.items()}
        specs = [(e.name, e.shape, e.dtype, e.split_dim, e.cuts) for e in self.tensors.values()]
        return _unpack, (zlib.compress(pickle.dumps((specs, list(sets.values()), set_of)), 1),)

    @property
    def num_bytes(self) -> int:
        """Bytes of one whole copy of the state."""
        return sum(spec.num_bytes for spec in self.tensors.values())


def _unpack(packed: bytes) -> Layout:
    """Return the layout that `Layout.__reduce__` has packed."""
    rows, sets, set_of = pickle.loads(zlib.decompress(packed))
    tensors = {row[0]: TensorSpec(*row) for row in rows}
    shards = [shard for spec in tensors.values() for shard in spec.shards]
    held = [frozenset(shards[place] for place in places) for places in sets]
    return Layout(tensors, {worker: held[number] for worker, number in set_of.items()})


def units_by_tensor(shards: Iterable[ShardId]) -> dict[str, tuple[int, ...]]:
    """Group shards by tensor: state name -> ascending units, sorted by name."""
    units: dict[str, list[int]] = {}
    for shard in sorted(shards):
        units.setdefault(shard.tensor, []).append(shard.unit)
    return {name: tuple(of_tensor) for name, of_tensor in units.items()}


def assign_writers(
    layout: Layout, node_by_worker: Mapping[str, str] | None = None
) -> dict[str, frozenset[ShardId]]:
    """Assign every held shard to exactly one of its holders, which writes it.

    Bytes are balanced over nodes, then over workers. Longest processing time first (Graham 1969),
    shards with the fewest holders before all others. A node's workers share its link, so a node's
    load counts before a worker's. Deterministic; a worker may get the empty set.
    """
    nodes = node_by_worker or {worker: worker for worker in layout.workers}
    node_load = dict.fromkeys(nodes.values(), 0)
    worker_load = dict.fromkeys(layout.workers, 0)
    written: dict[str, set[ShardId]] = {worker: set() for worker in layout.workers}

    def turn(shard: ShardId) -> tuple[int, int, ShardId]:
        return (len(layout.holders(shard)), -layout.shard_bytes(shard), shard)

    def load(worker: str) -> tuple[int, int, str]:
        return (node_load[nodes[worker]], worker_load[worker], worker)

    held = [shard for shard in layout.shards if layout.holders(shard)]
    for shard in sorted(held, key=turn):
        writer = min(layout.holders(shard), key=load)
        num_bytes = layout.shard_bytes(shard)
        written[writer].add(shard)
        node_load[nodes[writer]] += num_bytes
        worker_load[writer] += num_bytes
    return {worker: frozenset(shards) for worker, shards in written.items()}
