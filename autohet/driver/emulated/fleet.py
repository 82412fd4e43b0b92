"""EMULATED fleet on this machine: real Ray nodes whose labels pose as GPU types.

Emulated are the GPU types (labels and paced compute) and the machines (processes). Ray,
torch.distributed, the state, its loss and its recovery are real, and so are the events. A node that
dies here takes its host memory and its disk directory with it.
"""

import functools
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import services, utils
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._raylet import NODE_TYPE_NAME_ENV  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster as LocalCluster

from autohet.driver.ray.cluster import NAME_LABEL, private_session
from autohet.driver.ray.cluster_file import first_nodes
from planner.errors import ConfigError

logger = logging.getLogger("autohet")

HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
OBJECT_STORE_BYTES = 80 << 20
AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
START_S = 300.0
"""Seconds for a raylet to register; Ray's own limit of 30 s is too short for a busy machine."""


@dataclass
class EmulatedNode:
    """Emulated machine: its Ray node and the directories that die with it."""

    name: str
    node_type: str
    ray_node: Any
    doomed_at: float | None = None


@dataclass
class EmulatedFleet:
    """Owns the local Ray cluster that poses as a fleet.

    `close` ends every process that it started.
    """

    document: Mapping[str, Any]
    directories: Callable[[str], tuple[str, ...]] = lambda name: ()
    nodes: dict[str, EmulatedNode] = field(default_factory=dict)
    head_arguments: Mapping[str, Any] = field(default_factory=dict)
    cluster: LocalCluster | None = None
    _counts: dict[str, int] = field(default_factory=dict)
    _threads: list[threading.Thread] = field(default_factory=list)
    _reserved: list[socket.socket] = field(default_factory=list)

    def start(self, counts: Mapping[str, int] | None = None) -> str:
        """Start the head and `counts` nodes of each type (default: min_workers).

        Returns the address for `ray.init`.
        """
        head_arguments = {
            "num_cpus": 2,
            "num_gpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "session_name": private_session(),
            **self._reserve_ports(),
            **self.head_arguments,
        }
        with _environment(HEALTH_CHECKS), _as_machines(), _without_address_file():
            self.cluster = LocalCluster(initialize_head=True, head_node_args=head_arguments)

        if counts is None:
            counts = first_nodes(self.document)
        for name, count in counts.items():
            for _ in range(count):
                self.add(name, wait=False)
        self.cluster.wait_for_nodes(timeout=60)
        return str(self.cluster.address)

    def add(
        self,
        node_type: str,
        name: str | None = None,
        *,
        wait: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> EmulatedNode:
        """Add a machine of `node_type`.

        Its processes see `environment` in addition to this process's own.
        """
        assert self.cluster is not None
        entry = self.document["available_node_types"].get(node_type)
        if entry is None:
            raise ConfigError(
                f"the cluster has no node type '{node_type}'; it has"
                f" {', '.join(self.document['available_node_types'])}"
            )
        index = self._counts.get(node_type, 0)
        self._counts[node_type] = index + 1
        name = name or f"{node_type}-{index}"
        resources = entry.get("resources", {})

        # Ray sets the labels of its own prefix, and refuses them from others.
        labels = {}
        for key, value in entry.get("labels", {}).items():
            if not key.startswith("ray.io/"):
                labels[key] = value
        labels[NAME_LABEL] = name

        variables = {**(environment or {}), NODE_TYPE_NAME_ENV: node_type}
        with _environment(variables), _as_machines():
            ray_node = self.cluster.add_node(
                wait=wait,
                num_cpus=resources.get("CPU", 1),
                num_gpus=resources.get("GPU", 1),
                labels=labels,
                object_store_memory=OBJECT_STORE_BYTES,
                **self._reserve_ports(),
            )
        self.nodes[name] = EmulatedNode(name, node_type, ray_node)
        return self.nodes[name]

    def _reserve_ports(self) -> dict[str, int]:
        """Return free ports for the agents of a node, which nobody else is given until `close`.

        A raylet that gives its agents no ports waits for them to name theirs, and aborts after 15 s
        (Ray 2.60, ray issue 65983): too short for a busy machine.
        """
        found = {}
        for name in AGENT_PORTS:
            reserved = socket.socket()
            reserved.bind(("", 0))
            # Agents set this too, and so can listen at a port that is bound here.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._reserved.append(reserved)
            found[name] = reserved.getsockname()[1]
        return found

    def kill(self, name: str, *, wait: bool = True) -> None:
        """Kill the machine at once, with its host memory and its disk.

        wait: False if Ray's own processes, which take longer to end, are not waited for.
        """
        node = self.nodes.pop(name)
        # Left alone, they would end a second after their raylet.
        for process_id in _worker_processes(node.ray_node):
            _signal(process_id, signal.SIGKILL)
        if wait:
            self._remove(node)
        else:
            thread = threading.Thread(target=self._remove, args=(node,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _remove(self, node: EmulatedNode) -> None:
        assert self.cluster is not None
        self.cluster.remove_node(node.ray_node, allow_graceful=False)
        self._erase(node.name)

    def _erase(self, name: str) -> None:
        """Erase the machine's host memory and disk, and directories that held nothing else."""
        for path in self.directories(name):
            directory = Path(path)
            shutil.rmtree(directory, ignore_errors=True)
            for parent in (directory.parent, directory.parent.parent):
                with suppress(OSError):
                    parent.rmdir()

    def freeze(self, process_id: int) -> None:
        """Freeze a worker's process, so that it stops answering without ending."""
        _signal(process_id, signal.SIGSTOP)

    def doom(self, name: str, at: float) -> None:
        """Schedule the machine's end for `at` (this process's clock), whatever runs there."""
        self.nodes[name].doomed_at = at

    def reap(self, now: float) -> list[str]:
        """Kill the machines whose scheduled end has come; return their names."""
        due = []
        for name, node in self.nodes.items():
            if node.doomed_at is not None and now >= node.doomed_at:
                due.append(name)
        for name in due:
            self.kill(name, wait=False)
        return due

    def close(self) -> None:
        for thread in self._threads:
            thread.join(START_S)
        if ray.is_initialized():
            ray.shutdown()
        if self.cluster is not None:
            self.cluster.shutdown()
            self.cluster = None
        for name in self.nodes:
            self._erase(name)
        self.nodes.clear()
        while self._reserved:
            self._reserved.pop().close()


def _signal(process_id: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


def _worker_processes(ray_node: Any) -> list[int]:
    """Return the ids of the processes that a machine's raylet has started."""
    found: list[int] = []
    for raylet in ray_node.all_processes.get(PROCESS_TYPE_RAYLET, ()):
        for path in Path(f"/proc/{raylet.process.pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


@contextmanager
def _as_machines() -> Iterator[None]:
    """Start Ray's processes as if they were machines of their own.

    They are outside this process's group: a signal to the group (by a terminal, `timeout`, a
    service manager) would end the cluster before the newest step is committed, and the driver with
    it. A raylet has START_S seconds to register.
    """
    module: Any = services
    before = (module.ConsolePopen, module.get_node)
    module.ConsolePopen = functools.partial(_start_process, module.ConsolePopen)
    module.get_node = functools.partial(_await_node, module.get_node)
    try:
        yield
    finally:
        module.ConsolePopen, module.get_node = before


def _start_process(popen: Callable[..., Any], command: list[str], **options: Any) -> Any:
    """Start one of Ray's processes in a group of its own.

    A raylet is told the port that its agent listens at, which Ray's own call leaves out.
    """
    listen = re.search(r"--listen-port=([1-9]\d*)", " ".join(command))
    if listen:
        command = [*command, f"--dashboard_agent_listen_port={listen[1]}"]
    return popen(command, process_group=0, **options)


def _await_node(get_node: Callable[..., Any], *arguments: Any) -> Any:
    """Call Ray's `get_node` until the node has registered."""
    until = time.monotonic() + START_S
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.1)


@contextmanager
def _without_address_file() -> Iterator[None]:
    """Keep Ray from naming this cluster to every program here as the one to join."""
    module: Any = utils
    before = module.write_ray_address
    module.write_ray_address = lambda *_: None
    try:
        yield
    finally:
        module.write_ray_address = before


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started within the context."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
