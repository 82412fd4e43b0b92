"""Calls of a workforce that are no-ops or errors without agents, autoscaler, rehearsal or user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autohet.driver.control.observation import Part, Prune
from autohet.runtime.messages import AgentEndpoint


class NoAgents:
    """Agent calls of `Workforce`, none of which a simulation carries out."""

    def start_agents(self, nodes: Sequence[str]) -> None:
        raise AssertionError("nodes come with their agents")

    def prune(self, what: Prune) -> None:
        """Prune snapshots: no-op, since only the newest of them counts here."""

    def ask_holdings(self) -> None:
        """Ask agents for their holdings: no-op, and no agent answers."""

    def hand_over(self, parts: Mapping[str, Sequence[Part]], to: Sequence[AgentEndpoint]) -> None:
        """Copy parts to other agents: no-op, since only rounds of copies move state here."""

    def end_agent(self, node: str) -> None:
        """End an agent: no-op, since a released node is gone."""

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Drain a node: no-op, since its replacement comes by itself."""

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        raise AssertionError("there is no autoscaler")

    def give_back(self, node: str) -> None:
        raise AssertionError("there is no autoscaler")

    def rehearse(self, what: Any) -> None:
        raise AssertionError("there is no script")

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish the status: no-op."""
