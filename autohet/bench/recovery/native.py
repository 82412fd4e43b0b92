"""Network of the recovery benchmark at `--scale 1`.

It has one namespace per node joined by a bridge, `tc` at the cards' speed, one agent process per
node, and an S3 protocol server in a namespace of its own that gives each node its own share.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from autohet.bench.recovery.bare import BareSender
from autohet.bench.recovery.object_server import ObjectServer
from autohet.bench.recovery.storage import BUCKET, point_s3_clients_at
from autohet.bench.recovery.surroundings import Task, Wiring
from autohet.bench.recovery.workers import CLOSE, BenchProcess, serve_agent
from autohet.driver.loop.stop_signals import ignore_signals
from autohet.emulate.namespaces import NamespaceNetwork, enter_namespace, namespace_network
from recovery.transfer.links import LinkRates

STORAGE_NODE = "s3"
MEMORY_FILE_SYSTEM = "/dev/shm"


def _serve_objects(connection: Any, namespace: str, host: str, directory: str) -> None:
    enter_namespace(namespace)
    server = ObjectServer(directory, host)
    sender = BareSender(MEMORY_FILE_SYSTEM, host)
    connection.send((server.endpoint, sender.port))
    connection.recv()
    server.close()
    sender.close()


class NativeNetwork:
    """Rows of nodes: the n-th node of a task is in the n-th namespace.

    `durable` is the directory that the S3 server serves.
    """

    def __init__(
        self,
        network: NamespaceNetwork,
        num_nodes: int,
        links: LinkRates,
        durable: str,
        stack: ExitStack,
    ) -> None:
        self._network = network
        self._rows = [f"row{number}" for number in range(num_nodes)]
        self._stack = stack
        self.head = network.head
        self.durable = durable
        hosts = {row: network.add(row) for row in (*self._rows, STORAGE_NODE)}
        self._hosts = hosts
        for row in self._rows:
            network.limit(row, links.network_bytes_per_s * 8e-6)
        network.limit_to(STORAGE_NODE, dict.fromkeys(self._rows, links.s3_bytes_per_s * 8e-6))

        space = network.namespace(STORAGE_NODE)
        storage = self._process(_serve_objects, space, hosts[STORAGE_NODE], durable)
        self.endpoint, port = storage.answer()
        self._bare_storage = (hosts[STORAGE_NODE], int(port))

        self._agents = []
        for row in self._rows:
            agent = self._process(serve_agent, network.namespace(row), hosts[row])
            self._agents.append(agent)
        # all start at once, before the first of them is waited for
        for agent in self._agents:
            agent.answer()

    def _process(self, target: Callable[..., None], *arguments: Any) -> BenchProcess:
        process = BenchProcess(target, *arguments)
        self._stack.callback(process.end)
        return process

    @contextmanager
    def wire(self, task: Task) -> Iterator[Wiring]:
        """Start agents that serve the task's directories while the block runs."""
        nodes = list(dict.fromkeys(task.node_by_worker[worker] for worker in task.participants))
        used = list(zip(nodes, self._rows, self._agents, strict=False))
        agents: dict[str, tuple[str, int, str]] = {}
        hosts = {}
        spaces = {}
        for node, row, agent in used:
            memory = str(task.node_directory(node, "memory"))
            disk = str(task.node_directory(node, "disk"))
            agent.connection.send((memory, disk, node))
            agents[node] = agent.answer()
            hosts[node] = self._hosts[row]
            spaces[node] = self._network.namespace(row)
        try:
            yield Wiring(hosts, spaces, agents, self._bare_storage)
        finally:
            for _, _, agent in used:
                agent.connection.send(CLOSE)
                agent.answer()


@contextmanager
def native_network(num_nodes: int, links: LinkRates) -> Iterator[tuple[NativeNetwork, str]]:
    """Yield the network, and the URI of the storage in it.

    The environment points S3 clients of this process and its children at the storage.
    """
    stack = ExitStack()
    try:
        parent = MEMORY_FILE_SYSTEM if os.path.isdir(MEMORY_FILE_SYSTEM) else None
        durable = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="autohet-bench-s3-", dir=parent)
        )
        Path(durable, "job").mkdir()
        network = stack.enter_context(namespace_network())
        native = NativeNetwork(network, num_nodes, links, durable, stack)
        stack.enter_context(point_s3_clients_at(native.endpoint))
        yield native, f"s3://{BUCKET}/job"
    finally:
        with ignore_signals():
            stack.close()
