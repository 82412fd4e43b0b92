"""Directions of a workforce that mean nothing where nodes have no agents, and where no autoscaler,
rehearsal or person takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autohet.driver.control.observation import Part, Prune
from autohet.runtime.messages import AgentEndpoint


class NoAgents:
    """That part of `Workforce`."""

    def start_agents(self, nodes: Sequence[str]) -> None:
        raise AssertionError("nodes come with their agents")

    def prune(self, what: Prune) -> None:
        """Of all that is kept only the newest counts."""

    def ask_holdings(self) -> None:
        """Nobody answers."""

    def hand_over(self, parts: Mapping[str, Sequence[Part]], to: Sequence[AgentEndpoint]) -> None:
        """Only rounds bring copies elsewhere."""

    def end_agent(self, node: str) -> None:
        """A node that was released is gone."""

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """What replaces a node comes by itself."""

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        raise AssertionError("there is no autoscaler")

    def give_back(self, node: str) -> None:
        raise AssertionError("there is no autoscaler")

    def rehearse(self, what: Any) -> None:
        raise AssertionError("there is no script")

    def publish(self, status: Mapping[str, Any]) -> None:
        """Nobody looks."""
