"""Budget of a node's host memory for each worker's snapshots, shared out before training.

Pure, except for `capacity_of`. All workers of a node compute the same answer by themselves: it
follows from the layout and from what does not change (the sizes of the memory file system and of
the machine's memory), never from what happens to be free.

Order of allocation, as long as there is room: snapshots of what this node alone holds (they are the
only second copy); copies of what other nodes alone hold; snapshots of everything.

State without room is left out at every step. If a worker took a snapshot only at every tenth step,
it could be restored only with the others' snapshots of that same step, and they keep the newest
two. One file instead of two would be no copy while it is being written. The less frequent tier is
durable storage.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recovery.local.private_files import make_private_directory
from recovery.local.snapshot_format import map_of
from recovery.state.layout import Layout, ShardId

FILES = 2
"""Files per worker: a snapshot is written into the older one."""
ROUNDS = 3
"""Steps whose copies of other nodes' shards may be here at once.

A complete round, an open one, and one that is being removed.
"""
USABLE = 0.9
"""Usable share of the memory file system and of the machine's memory; workers need the rest."""


@dataclass(frozen=True)
class Budget:
    """Budget of a node: the shards that each worker's snapshots hold, and the bytes for copies.

    `copies_bytes` are left for other nodes' copies; `sentence` describes all of it. `suffices` is
    true if no worker has to leave anything out, which needs `wanted_bytes` of host memory.
    """

    shards_by_worker: Mapping[str, frozenset[ShardId]]
    copies_bytes: int
    suffices: bool
    sentence: str
    wanted_bytes: int


def capacity_of(directory: Path | str, taken_bytes: int = 0) -> int:
    """Return the bytes of host memory that snapshots and copies may use.

    Makes the directory if it is absent. taken_bytes: bytes of the machine's memory that state in
    host memory takes. Raises OSError.
    """
    make_private_directory(directory)
    system = os.statvfs(directory)
    in_file_system = USABLE * system.f_blocks * system.f_frsize
    in_machine = max(0, USABLE * _machine_bytes() - taken_bytes)
    return int(min(in_file_system, in_machine))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_remedy(directory: Path | str, wanted_bytes: int) -> str:
    """Return a sentence on how to give a node room for `wanted_bytes` of snapshots.

    A container's memory file system has 64 MB by default, another half of the machine's memory.
    Raises OSError.
    """
    system = os.statvfs(directory)
    size = system.f_blocks * system.f_frsize
    machine = _machine_bytes()
    needed = math.ceil(wanted_bytes / USABLE / 1e9)
    if wanted_bytes > USABLE * machine:
        return (
            f"All snapshots need {needed} GB, but the machine has {machine / 1e9:.0f} GB of memory:"
            " use nodes with more, or set checkpoint.snapshot_every_steps to 0"
        )
    mount = Path(directory).absolute()
    while not mount.is_mount():
        mount = mount.parent
    return (
        f"All snapshots need {needed} GB, but {mount} has {_size(size)}: start the container with"
        f" --shm-size={needed}g, or run mount -o remount,size={needed}G {mount}"
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e9:.0f} GB"


def share_out(
    node: str,
    layout: Layout,
    node_by_worker: Mapping[str, str],
    capacity_bytes: int,
    *,
    replicates: bool,
) -> Budget:
    """Return the budget of `node`; see the module.

    If not all workers' snapshots fit, the smallest come first: more of them fit.
    """
    mine = sorted(worker for worker in layout.workers if node_by_worker[worker] == node)
    whole = {worker: layout.shards_by_worker[worker] for worker in mine}
    nodes = tuple(node_by_worker.items())
    sole_by_node = layout.derive(("sole", nodes), lambda: _sole_by_node(layout, node_by_worker))
    only_here = sole_by_node.get(node, frozenset())
    sole = {worker: shards & only_here for worker, shards in whole.items()}

    left = capacity_bytes
    kept = dict.fromkeys(mine, frozenset[ShardId]())
    left = _grant(kept, sole, layout, left)

    wanted = 0
    if replicates:
        num_nodes = len(set(node_by_worker.values()))
        # Other nodes push equal parts of what each alone holds.
        theirs = 0
        for other, shards in sole_by_node.items():
            if other != node:
                theirs += sum(layout.shard_bytes(shard) for shard in shards)
        wanted = ROUNDS * theirs // max(1, num_nodes - 1)
    copies = min(wanted, left)

    left = _grant(kept, whole, layout, left - copies)

    everything = sum(_files_bytes(worker, layout, whole[worker]) for worker in mine)
    return Budget(
        shards_by_worker=kept,
        copies_bytes=copies + left,
        suffices=kept == whole and copies == wanted,
        sentence=_sentence(node, layout, kept, sole, capacity_bytes, copies + left),
        wanted_bytes=everything + wanted,
    )


def _sole_by_node(
    layout: Layout, node_by_worker: Mapping[str, str]
) -> dict[str, frozenset[ShardId]]:
    """Map each node to the shards that no other node holds."""
    holders: dict[ShardId, str] = {}
    shared: set[ShardId] = set()
    for worker, shards in layout.shards_by_worker.items():
        node = node_by_worker[worker]
        for shard in shards:
            first = holders.setdefault(shard, node)
            if first != node:
                shared.add(shard)

    found: dict[str, set[ShardId]] = {}
    for shard, node in holders.items():
        if shard not in shared:
            found.setdefault(node, set()).add(shard)
    return {node: frozenset(shards) for node, shards in found.items()}


def _grant(
    kept: dict[str, frozenset[ShardId]],
    asked: Mapping[str, frozenset[ShardId]],
    layout: Layout,
    left: int,
) -> int:
    """Grant workers what they ask for, smallest first; return the bytes left.

    A worker gets nothing if its request does not fit into what is left.
    """
    extra = {}
    for worker in kept:
        asked_bytes = _files_bytes(worker, layout, asked[worker])
        extra[worker] = asked_bytes - _files_bytes(worker, layout, kept[worker])
    for worker in sorted(kept, key=lambda name: (extra[name], name)):
        if extra[worker] <= left and asked[worker]:
            kept[worker] = asked[worker]
            left -= extra[worker]
    return left


def _files_bytes(worker: str, layout: Layout, shards: frozenset[ShardId]) -> int:
    if not shards:
        return 0
    return FILES * map_of(worker, layout, shards).file_bytes


def _sentence(
    node: str,
    layout: Layout,
    kept: Mapping[str, frozenset[ShardId]],
    sole: Mapping[str, frozenset[ShardId]],
    capacity: int,
    copies: int,
) -> str:
    parts = []
    for worker, shards in kept.items():
        if not shards:
            what = f"{worker} keeps NOTHING of its state"
            if sole[worker]:
                what += ", although no other node has it"
        elif shards != layout.shards_by_worker[worker]:
            what = f"{worker} keeps what no other node has"
        else:
            what = f"{worker} keeps all of its state"
        used = FILES * sum(layout.shard_bytes(shard) for shard in shards)
        parts.append(f"{what} ({used / 1e6:.0f} MB)")

    return (
        f"Of {capacity / 1e6:.0f} MB of host memory for snapshots on {node}, {'; '.join(parts)}; "
        f"{copies / 1e6:.0f} MB are left for other nodes' copies"
    )
