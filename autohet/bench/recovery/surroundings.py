"""Surroundings of one worker of the recovery benchmark.

They are its store, its agent, and its links to the other workers and to storage. Two kinds: links
throttled in software, all on one address; or the links of this machine, each node in a network
namespace of its own with its agent in a separate process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from autohet.bench.recovery.content import known_content
from autohet.bench.recovery.links import (
    Lanes,
    ServedStore,
    ThrottledGroup,
    ThrottledProxy,
    ThrottledStorage,
    ThrottledStore,
)
from recovery.checkpoint.durable_reads import DurableReads
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_format import SUFFIX, FileMap
from recovery.peers.server import ShardServer
from recovery.state.layout import Layout, ShardId
from recovery.storage.open import open_storage
from recovery.transfer.restore import Access
from recovery.transfer.schedule import TransferSchedule
from recovery.transfer.tiers import Into

TOKEN = "bench"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Wiring:
    """Network of a task's nodes on this machine: addresses, namespaces and agents by node.

    `bare_storage` is the address that serves bare bytes of storage.
    """

    hosts: Mapping[str, str]
    namespaces: Mapping[str, str]
    agents: Mapping[str, tuple[str, int, str]]
    bare_storage: tuple[str, int]


@dataclass(frozen=True)
class Task:
    """Task of all workers: one policy of one scenario.

    `disk_step` is the step of the givers' disk snapshots; `wiring` None: links are throttled in
    software.
    """

    name: str
    before: Layout
    after: Layout
    transfers: TransferSchedule
    participants: tuple[str, ...]
    node_by_worker: Mapping[str, str]
    live_step: int
    givers: tuple[str, ...]
    disk_step: int | None
    directory: str
    storage: str
    wiring: Wiring | None = None

    def node_directory(self, node: str, kind: str) -> Path:
        return Path(self.directory, node, kind)


@dataclass
class Surroundings:
    """Inputs of `restore` from the worker's node.

    `group_over` wraps its process group; `s3_shards` is filled with the shards that came from S3.
    """

    access: Access
    group_over: Callable[[Any], Any] = lambda group: group
    s3_shards: set[ShardId] = field(default_factory=set)


def surroundings(
    task: Task, worker: str, lanes: Lanes, store: PrefixStore, stack: ExitStack
) -> Surroundings:
    """Make the surroundings of a worker; `stack` closes everything that is made.

    Waits for the other participants if their ports are needed.
    """
    node = task.node_by_worker[worker]
    if task.disk_step is not None and worker in task.givers:
        write_disk(task.node_directory(node, "disk"), task.before, worker, task.disk_step)
    places = (
        str(task.node_directory(node, "memory")),
        str(task.node_directory(node, "disk")),
        node,
    )
    storage = open_storage(task.storage)
    stack.callback(storage.close)
    s3_shards: set[ShardId] = set()
    if task.wiring is not None:
        own = stack.enter_context(closing(AgentStore(*places)))
        agents = {name: agent for name, agent in task.wiring.agents.items() if name != node}
        return Surroundings(
            Access(own, agents, _durable(storage, s3_shards, stack), TIMEOUT_S), s3_shards=s3_shards
        )
    own = stack.enter_context(closing(ThrottledStore(*places, lanes)))
    agents = _throttled_agents(task, worker, lanes, places, store, stack)
    durable = _durable(ThrottledStorage(storage, lanes), s3_shards, stack)

    def throttled(group: Any) -> ThrottledGroup:
        return ThrottledGroup(group, lanes, node, task.node_by_worker)

    return Surroundings(Access(own, agents, durable, TIMEOUT_S), throttled, s3_shards)


def _throttled_agents(
    task: Task,
    worker: str,
    lanes: Lanes,
    places: tuple[str, str, str],
    store: PrefixStore,
    stack: ExitStack,
) -> dict[str, tuple[str, int, str]]:
    """Start this worker's own server, in its process, and proxies in front of the others'."""
    served = stack.enter_context(closing(ServedStore(*places, lanes)))
    server = stack.enter_context(ShardServer(served, TOKEN, host="127.0.0.1"))
    store.set(f"agent/{worker}", str(server.port))
    agents: dict[str, tuple[str, int, str]] = {}
    for peer, node in task.node_by_worker.items():
        if peer in task.participants and node != places[2]:
            proxy = ThrottledProxy(("127.0.0.1", int(store.get(f"agent/{peer}"))), lanes)
            stack.callback(proxy.close)
            agents.setdefault(node, ("127.0.0.1", proxy.port, TOKEN))
    return agents


def _durable(storage: Any, s3_shards: set[ShardId], stack: ExitStack) -> Any:
    reads = stack.enter_context(DurableReads(storage))

    def read(
        uri: str, step: int, shards: Sequence[ShardId], into: Into
    ) -> Iterator[tuple[ShardId, Tensor]]:
        for shard, tensor in reads(uri, step, shards, into):
            s3_shards.add(shard)
            yield shard, tensor

    return read


def write_disk(directory: Path, layout: Layout, worker: str, step: int) -> None:
    """Write a committed snapshot of the worker's known state to its node's disk."""
    file_map = FileMap.of(worker, layout.tensors, sorted(layout.shards_by_worker[worker]))
    writer = SnapshotFileWriter(directory / f"{worker.replace('/', '%2F')}.g0.0{SUFFIX}", file_map)
    whole = torch.frombuffer(writer.buffer, dtype=torch.uint8)
    writer.begin()
    for shard, extent in file_map.extents.items():
        content = (
            known_content(layout.tensors[shard.tensor], shard.unit, step).view(-1).view(torch.uint8)
        )
        whole[extent.offset : extent.offset + extent.num_bytes] = content
    writer.commit(step, 0)
    del whole
    writer.close()
