"""Emulated nodes with addresses of their own on this machine.

Each node has a network namespace. A bridge, whose ports can be shut, joins them.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from autohet.driver.loop.stop_signals import ignore_signals

CLONE_NEWNET = 0x40000000
INTERFACE = "ahnode"
"""Name of a node's own network interface, inside its namespace."""


@dataclass
class NamespaceNetwork:
    """Network bridge in this process's namespace, where the driver runs, with up to 250 nodes.

    `close` removes all that was made.
    """

    tag: str = field(default_factory=lambda: f"ah{os.getpid() % 100_000}")
    _numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.head = f"{self._net}.1"
        _ip(f"link add {self.tag} type bridge")
        _ip(f"addr add {self.head}/24 dev {self.tag}")
        _ip(f"link set {self.tag} up")

    def add(self, node: str) -> str:
        """Create a namespace for the node; return its address."""
        if node in self._numbers:
            return self.address(node)
        number = self._numbers[node] = len(self._numbers) + 2
        space = self.namespace(node)
        port = self._port(node)
        _ip(f"netns add {space}")
        _ip(f"link add {port} type veth peer name {INTERFACE} netns {space}")
        _ip(f"link set {port} master {self.tag} up")
        _ip(f"-n {space} addr add {self._net}.{number}/24 dev {INTERFACE}")
        for interface in ("lo", INTERFACE):
            _ip(f"-n {space} link set {interface} up")
        return self.address(node)

    def address(self, node: str) -> str:
        return f"{self._net}.{self._numbers[node]}"

    def namespace(self, node: str) -> str:
        return f"{self.tag}-{self._numbers[node]}"

    def _port(self, node: str) -> str:
        return f"{self.tag}p{self._numbers[node]}"

    def limit(self, node: str, megabits: float) -> None:
        """Limit the node's traffic in both directions by a token bucket each.

        One bucket limits packets that the node sends, the other those that the bridge sends to it.
        """
        latency = "400ms" if megabits < 1000 else "20ms"
        bucket = f"tbf rate {megabits:g}mbit burst {_burst_of(megabits)} latency {latency}"
        replace = f"tc qdisc replace dev {self._port(node)} root {bucket}"
        subprocess.run(replace.split(), check=True)
        self._tc(node, f"qdisc replace dev {INTERFACE} root {bucket}")

    def limit_to(self, sender: str, megabits_by_node: Mapping[str, float]) -> None:
        """Limit the traffic from `sender` to each of these nodes.

        Each target has a token bucket of its own (HTB); all other traffic is unlimited.
        """
        self._tc(sender, f"qdisc replace dev {INTERFACE} root handle 1: htb default 0")
        for node, megabits in megabits_by_node.items():
            flow = f"1:{self._numbers[node]:x}"
            burst = _burst_of(megabits)
            bucket = f"htb rate {megabits:g}mbit burst {burst} cburst {burst} quantum 200000"
            self._tc(sender, f"class add dev {INTERFACE} parent 1: classid {flow} {bucket}")
            match = f"u32 match ip dst {self.address(node)}/32 flowid {flow}"
            self._tc(sender, f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 {match}")

    def _tc(self, node: str, arguments: str) -> None:
        command = f"ip netns exec {self.namespace(node)} tc {arguments}"
        subprocess.run(command.split(), check=True, timeout=10)

    def close(self) -> None:
        """Remove the bridge, namespaces and links, also those that were made only in part."""
        for node in self._numbers:
            _remove(f"link del {self._port(node)}")
            _remove(f"netns del {self.namespace(node)}")
        _remove(f"link del {self.tag}")


@contextmanager
def namespace_network() -> Iterator[NamespaceNetwork]:
    with ignore_signals():
        network = NamespaceNetwork()
    try:
        yield network
    finally:
        # A second Ctrl-C would leave namespaces behind.
        with ignore_signals():
            network.close()


def why_no_namespaces() -> str | None:
    """Return the reason why network namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"ahprobe{os.getpid() % 100_000}"
    try:
        _ip(f"netns add {probe}")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace can be made here: {getattr(error, 'stderr', None) or error}"
    try:
        _ip(f"-n {probe} link add one type veth peer name other")
        _ip(f"-n {probe} link add joined type bridge")
    except subprocess.CalledProcessError as error:
        return f"no virtual interface can be made here: {error.stderr}"
    finally:
        _ip(f"netns del {probe}")
    return None


def enter_namespace(namespace: str) -> None:
    """Move the calling thread into the namespace, with threads and processes it starts later."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _burst_of(megabits: float) -> int:
    """Return the bytes of a token bucket that does not slow its link down.

    A fast link sends packets of 64 KiB and is looked at once a millisecond.
    """
    return max(64 << 10, round(megabits * 1e6 / 8 / 1000))


def _remove(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], stderr=subprocess.DEVNULL, timeout=10)


def _ip(arguments: str) -> None:
    command = ["ip", *arguments.split()]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
