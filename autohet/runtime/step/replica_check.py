"""Check, in the vote of every N-th step, that all holders of a shard hold the same bits.

Replicas stay bit-equal by construction: all apply the same sums with the same arithmetic. A memory
bit flip, a GPU that computes wrongly or a defect of ours breaks that silently, and every later
step spreads the difference. So each worker sums, over the shards that it shares with others,

    c(w, u) h(w, u)
        c = |H(u)| - 1 for the first holder of u, -1 for the others
        h: the low bits of the shard's checksum

in integers that float64 holds exactly. The sum over all workers is one more number in the vote. It
is zero if all holders' checksums are equal; if they differ, it is zero with a chance of 2^-bits. If
it is not zero, the step did not happen: all workers exchange their checksums, holders that differ
take the shard's bits from the owner, and the step is run again from the repaired state. Errors that
steps since the last check have mixed into the gradients stay; with N = 1 there are none.

Frozen weights, which are no training state, are compared alike. Their holders read those that
differ from the origin again, so that they are right even if of two holders one differs.

The owner is the first, by name, of the holders with the most common bits. State that one worker
alone holds cannot be compared: moments that are sharded over the holders of their weights.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autohet.runtime.facts.layout import FROZEN, parameter_name
from autohet.runtime.groups import Group
from autohet.runtime.messages import ReplicaMismatch
from recovery.state.device_checksum import checksums
from recovery.state.layout import Layout, ShardId
from recovery.state.slices import unit_views

ORIGIN = "the origin"
"""Owner of the right bits of frozen weights."""
MOST_BITS = 32
EXACT_BITS = 53
"""Bits of the largest integers that are exact in float64."""


class ReplicasDiffer(RuntimeError):
    """Holders of a shard differ again right after a repair: a device is not to be trusted."""


@dataclass(frozen=True)
class _Shared:
    """A shard that several workers hold; `holders` are sorted by name."""

    shard: ShardId
    holders: tuple[str, ...]


class Comparison:
    """Shards of a layout that several workers hold, and which of them `worker` holds.

    layer_of: a parameter's layer, for messages.
    """

    def __init__(
        self, worker: str, layout: Layout, layer_of: Mapping[str, int | str] | None = None
    ) -> None:
        self.worker = worker
        self.layout = layout
        self.layer_of = layer_of or {}
        self.units = layout.units_of(worker)
        self.shared: list[_Shared] = []
        for shard in sorted(layout.shards):
            holders = layout.holders(shard)
            if len(holders) > 1:
                self.shared.append(_Shared(shard, holders))
        self.mine: list[int] = []
        """Places in `shared` of the shards that this worker holds."""
        for index, each in enumerate(self.shared):
            if worker in each.holders:
                self.mine.append(index)
        self.mask = exact_mask(len(each.holders) for each in self.shared)


class ReplicaCheck:
    """Replica check of one worker; every worker of the plan has one, with the same layout.

    Each vote asks for `contribution`. After a vote that reports a mismatch, all workers call
    `repair`.

    compare: returns what is compared, as all workers have it, each for itself. state: this worker's
    local tensors by state name. reload: reads frozen weights of this worker from the origin again,
    in place.
    """

    def __init__(
        self,
        compare: Callable[[], Comparison],
        state: Mapping[str, Tensor],
        world: Group,
        every_steps: int,
        reload: Callable[[Collection[str]], None] = lambda parameters: None,
    ) -> None:
        self._reload = reload
        self._compare = compare
        self._state = state
        self._world = world
        self._every = every_steps
        self._is_requested = False

    @property
    def _compared(self) -> Comparison:
        return self._compare()

    @property
    def _shared(self) -> list[_Shared]:
        return self._compared.shared

    def contribution(self, step: int) -> float:
        """Return this worker's integer for the vote of `step`; 0 if no check is due.

        The sum over all workers is zero unless holders of a shard differ.
        """
        is_due = self._every and step % self._every == 0
        if not is_due and not self._is_requested:
            return 0.0
        self._is_requested = False
        total = 0
        for index, checksum in zip(self._compared.mine, self._checksums(), strict=True):
            masked = checksum & self._compared.mask
            total += signed_part(self._shared[index].holders, self._compared.worker, masked)
        return float(total)

    def request(self) -> None:
        """Check in the next vote, whether a check is due or not; all workers call it."""
        self._is_requested = True

    def _checksums(self) -> list[int]:
        """Return the 64-bit checksum of each shard of `_mine`, in its order."""
        contents = []
        for index in self._compared.mine:
            view = self._view(self._shared[index].shard)
            contents.append(_bytes_of(view))
        return checksums(contents)

    def _view(self, shard: ShardId) -> Tensor:
        spec = self._compared.layout.tensors[shard.tensor]
        units = self._compared.units[shard.tensor]
        by_unit = unit_views(spec, units, self._state[shard.tensor])
        return by_unit[shard.unit]

    def repair(self, step: int) -> tuple[ReplicaMismatch, ...]:
        """Give every holder that differs the owner's bits.

        Return the shards that differed, the same at every worker. Blocks; all workers call it.
        """
        table = self._exchange()
        repaired = self._reload_frozen(table)
        found = []
        for index, each in enumerate(self._shared):
            held = self._held_checksums(table, index)
            if is_frozen(each.shard):
                # A holder whose bits changed by reading them again had wrong ones.
                right = self._held_checksums(repaired, index)
                wrong = tuple(holder for holder in each.holders if held[holder] != right[holder])
                if wrong:
                    found.append(self._mismatch(step, each.shard, wrong, ORIGIN))
                continue
            owner, others = judge(held)
            if others:
                self._send_from(owner, others, each.shard)
                found.append(self._mismatch(step, each.shard, others, owner))
        return tuple(found)

    def _held_checksums(self, table: Tensor, index: int) -> dict[str, int]:
        """Return the checksum of a shared shard by holder, in order of names."""
        found: dict[str, int] = {}
        for holder in self._shared[index].holders:
            rank = self._world.members.index(holder)
            found[holder] = int(table[rank, index])
        return found

    def _mismatch(
        self, step: int, shard: ShardId, workers: tuple[str, ...], owner: str
    ) -> ReplicaMismatch:
        layer = self._compared.layer_of[parameter_name(shard.tensor)]
        return ReplicaMismatch(step, shard.tensor, shard.unit, layer, workers, owner, self._every)

    def _reload_frozen(self, table: Tensor) -> Tensor:
        """Read frozen weights whose holders differ again; return the checksums of afterwards.

        All workers see the same table, so all or none exchange checksums again.
        """
        differing: set[int] = set()
        for index, each in enumerate(self._shared):
            if is_frozen(each.shard):
                checksums_of_holders = set(self._held_checksums(table, index).values())
                if len(checksums_of_holders) > 1:
                    differing.add(index)
        if not differing:
            return table
        parameters = set()
        for index in differing.intersection(self._compared.mine):
            parameters.add(parameter_name(self._shared[index].shard.tensor))
        self._reload(parameters)
        return self._exchange()

    def _exchange(self) -> Tensor:
        """Exchange checksums, as int64 bit patterns [workers, shared shards], on the host.

        An entry is 0 if the worker does not hold the shard.
        """
        row = [0] * len(self._shared)
        for index, checksum in zip(self._compared.mine, self._checksums(), strict=True):
            row[index] = checksum
        return exchange(self._world, row)

    def _send_from(self, owner: str, others: Iterable[str], shard: ShardId) -> None:
        """Send the owner's bits to one receiver after the other.

        All workers use the same order, so that no two wait for each other.
        """
        for tag, other in enumerate(others):
            if self._compared.worker == owner:
                outgoing = _bytes_of(self._view(shard)).to(self._world.device)
                work = self._world.send(outgoing, other, tag)
                self._world.wait_on_host(work)
            elif self._compared.worker == other:
                view = self._view(shard)
                device = self._world.device
                arrived = torch.empty(view.nbytes, dtype=torch.uint8, device=device)
                work = self._world.recv(arrived, owner, tag)
                self._world.wait_on_host(work)
                right_bits = arrived.view(view.dtype)
                view.copy_(right_bits.view(view.shape))


def exact_mask(sizes: Iterable[int]) -> int:
    """Return the bits of checksums to compare in a vote, for groups of holders of these sizes.

    The sizes of all terms then add up to less than 2**53, so that float64 holds each partial sum of
    the vote, whatever the order of the workers.
    """
    largest = 2 * sum(size - 1 for size in sizes)
    bits_of_factors = math.ceil(math.log2(max(2, largest)))
    num_bits = min(MOST_BITS, EXACT_BITS - 1 - bits_of_factors)
    return (1 << num_bits) - 1


def signed_part(holders: Sequence[str], me: str, masked: int) -> int:
    """Return one holder's term of a sum that is zero if all holders have the same masked bits."""
    return masked * (len(holders) - 1 if holders[0] == me else -1)


def exchange(world: Group, row: Sequence[int]) -> Tensor:
    """Exchange one row of 64-bit words of each worker: int64 bit patterns [workers, words].

    The table is on the host. Blocks; all workers call it.
    """
    signed = []
    for value in row:
        has_top_bit = value >> 63
        signed.append(value - (1 << 64) if has_top_bit else value)
    # Each entry is 0 at all workers but one, so that the sum is that worker's word.
    table = torch.zeros(world.size, len(row), dtype=torch.int64)
    table[world.rank] = torch.tensor(signed, dtype=torch.int64)
    table = table.to(world.device)
    work = world.start_all_reduce(table)
    world.wait_on_host(work)
    return table.cpu()


def is_frozen(shard: ShardId) -> bool:
    """Return True if a shard is one of a weight that the run does not train."""
    return shard.tensor.startswith(f"{FROZEN}/")


def judge(held: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
    """Return the owner of a shard, and the holders whose bits differ from the owner's.

    held: checksum by holder, in order of names.
    """
    counts = Counter(held.values())
    # `max` takes the first of equals, so the owner is the first by name.
    owner = max(held, key=lambda holder: counts[held[holder]])
    others = tuple(holder for holder, value in held.items() if value != held[owner])
    return owner, others


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
