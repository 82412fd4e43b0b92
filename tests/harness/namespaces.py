"""Nodes with addresses of their own on this machine: a network namespace each, joined by a bridge whose ports can be shut."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CLONE_NEWNET = 0x40000000
INTERFACE = "ahnode"
"""What a node calls its own interface."""


@dataclass
class NamespaceNetwork:
    """One bridge in this process's namespace, where the driver is; up to 250 nodes. `close` removes all that was made."""

    tag: str = field(default_factory=lambda: f"ah{os.getpid() % 100_000}")
    _numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.head = f"{self._net}.1"
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("addr", "add", f"{self.head}/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")

    def add(self, node: str) -> str:
        """A namespace for the node; returns its address."""
        if node in self._numbers:
            return self.address(node)
        number = self._numbers[node] = len(self._numbers) + 2
        space, port = self.namespace(node), self._port(node)
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        _ip("link", "set", port, "master", self.tag, "up")
        _ip("-n", space, "addr", "add", f"{self._net}.{number}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _ip("-n", space, "link", "set", interface, "up")
        return self.address(node)

    def address(self, node: str) -> str:
        return f"{self._net}.{self._numbers[node]}"

    def namespace(self, node: str) -> str:
        return f"{self.tag}-{self._numbers[node]}"

    def _port(self, node: str) -> str:
        return f"{self.tag}p{self._numbers[node]}"

    def cut(self, node: str) -> None:
        """From now on nothing that is sent to or from the node arrives, and nobody is told."""
        _ip("link", "set", self._port(node), "down")

    def heal(self, node: str) -> None:
        _ip("link", "set", self._port(node), "up")

    def limit(self, node: str, megabits: int) -> None:
        """Both ways: what the node sends, and what the bridge gives it, by a token bucket."""
        bucket = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms")
        subprocess.run(["tc", "qdisc", "replace", "dev", self._port(node), *bucket], check=True)
        inside = ("ip", "netns", "exec", self.namespace(node))
        subprocess.run([*inside, "tc", "qdisc", "replace", "dev", INTERFACE, *bucket], check=True)

    def close(self) -> None:
        for node in self._numbers:
            subprocess.run(["ip", "link", "del", self._port(node)], stderr=subprocess.DEVNULL)
            _ip("netns", "del", self.namespace(node))
        _ip("link", "del", self.tag)


@contextmanager
def namespace_network() -> Iterator[NamespaceNetwork]:
    network = NamespaceNetwork()
    try:
        yield network
    finally:
        network.close()


def why_no_namespaces() -> str | None:
    """None where namespaces can be made, else what is in the way."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"ahprobe{os.getpid() % 100_000}"
    try:
        _ip("netns", "add", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace can be made here: {getattr(error, 'stderr', None) or error}"
    try:
        _ip("-n", probe, "link", "add", "one", "type", "veth", "peer", "name", "other")
        _ip("-n", probe, "link", "add", "joined", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no virtual interface can be made here: {error.stderr}"
    finally:
        _ip("netns", "del", probe)
    return None


def served_in_namespace(tell: Callable[[Any], None], namespace: str, build: Callable[..., Any], *arguments: Any) -> Any:
    """`build(tell, *arguments)` by a process that has gone into the namespace; threads that it starts are there too."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return build(tell, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
