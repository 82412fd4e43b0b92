"""Directions to agents and to the autoscaler that are no-ops or errors where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autohet.control.values.observation import HeldPart, Prune
from autohet.runtime.messages import AgentEndpoint


class NoAgents:
    """Implements `NodeAgents` without agents; only the release of a node has an effect."""

    def __init__(self, release: Callable[[str], None]) -> None:
        self._release = release

    def start_agents(self, nodes: Sequence[str]) -> None:
        raise AssertionError("nodes come with their agents")

    def prune(self, what: Prune) -> None:
        """Prune snapshots: no-op, since only the newest of them counts here."""

    def ask_holdings(self) -> None:
        """Ask agents for their holdings: no-op, and no agent answers."""

    def hand_over(
        self, parts: Mapping[str, Sequence[HeldPart]], to: Sequence[AgentEndpoint]
    ) -> None:
        """Copy parts to other agents: no-op, since only rounds of copies move state here."""

    def release_node(self, node: str) -> None:
        self._release(node)

    def end_agent(self, node: str) -> None:
        """End an agent: no-op, since a released node is gone."""


class NoAutoscaler:
    """Implements `Autoscaler` for nodes that come and go by themselves."""

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Drain a node: no-op, since its replacement comes by itself."""

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        raise AssertionError("there is no autoscaler")

    def give_back(self, node: str) -> None:
        raise AssertionError("there is no autoscaler")
