"""A fleet of processes whose nodes are on a network of their own, from which one can be cut off
while it works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autohet.emulate.namespaces import NamespaceNetwork, served_in_namespace
from tests.harness.process_fleet import ProcessFleet
from tests.harness.remote_process import RemoteProcess


@dataclass
class NamespaceFleet(ProcessFleet):
    """As `ProcessFleet`, which stands for Ray's own connections too: they go the way of the
    network.
    """

    network: NamespaceNetwork | None = None

    def address_of(self, name: str | None) -> str:
        assert self.network is not None
        return self.network.head if name is None else self.network.add(name)

    def _spawn(self, name: str, build: Callable[..., Any], *arguments: Any) -> RemoteProcess:
        assert self.network is not None
        node = name.split("-", 1)[1].split("/")[0]
        return super()._spawn(
            name, served_in_namespace, self.network.namespace(node), build, *arguments
        )

    def cut_node(self, name: str) -> None:
        """Nothing reaches the node or comes from it until `join_node`; its processes go on."""
        assert self.network is not None
        self.network.cut(name)
        for process in self.processes_of(name):
            process.hold()
        self._seats[name].silent_since = self.clock()

    def join_node(self, name: str, processes: Sequence[RemoteProcess]) -> None:
        """The node is back, with these processes; what was said to them and by them meanwhile
        arrives.
        """
        assert self.network is not None
        self.network.heal(name)
        for process in processes:
            process.let_through()
        if name in self._seats:
            self._seats[name].silent_since = None
