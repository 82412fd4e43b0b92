"""A fleet of processes whose nodes are on a network of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autohet.emulate.namespaces import NamespaceNetwork, enter_namespace
from tests.harness.process_fleet import ProcessFleet
from tests.harness.remote_process import RemoteProcess


def served_in_namespace(
    tell: Callable[[Any], None], namespace: str, build: Callable[..., Any], *arguments: Any
) -> Any:
    """Call `build(tell, *arguments)` in a process that has entered the namespace, as have threads
    that it starts.
    """
    enter_namespace(namespace)
    return build(tell, *arguments)


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
