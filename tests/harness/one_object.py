"""Base of fakes that are workers, agents and autoscaler of a workforce in one object."""

from collections.abc import Mapping
from typing import Any

from autohet.simulate.fleet.no_agents import NoAgents, NoAutoscaler


class OneObject(NoAgents, NoAutoscaler):
    """Gives a fake `Workforce` its three parts: itself."""

    @property
    def workers(self) -> Any:
        return self

    @property
    def node_agents(self) -> Any:
        return self

    @property
    def autoscaler(self) -> Any:
        return self

    def rehearse(self, what: Any) -> None:
        raise AssertionError("there is no script")

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish the status: no-op."""
