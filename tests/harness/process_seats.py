"""What a fleet of processes keeps of each node, of each worker, and of what its agents were
asked.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autohet.control.values.observation import NodeView
from tests.harness.remote_process import RemoteProcess


@dataclass
class Seat:
    """A node in use.

    `dead`: it is gone, whether that is known yet or not; `silent_since`: frozen or cut off.
    """

    view: NodeView
    agent: RemoteProcess
    directories: tuple[Path, Path]
    dead: bool = False
    silent_since: float | None = None
    released: bool = False


@dataclass
class Member:
    """A worker's process, and the newest that it said."""

    process: RemoteProcess
    asked_at: float
    call: int
    heard_at: float | None = None
    report: Any = None
    error: str | None = None


@dataclass
class ProcessCalls:
    """Implements the product's `AgentCalls` for agents in plain processes."""

    arrived: dict[tuple[RemoteProcess, int], Any] = field(default_factory=dict)

    def ask(self, agent: RemoteProcess, method: str, *arguments: Any) -> tuple[RemoteProcess, int]:
        return agent, agent.ask(method, *arguments)

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        found = [
            (asked.pop(call), self.arrived.pop(call))
            for call in list(asked)
            if call in self.arrived
        ]
        for call in [call for call in asked if call[0].gone]:
            del asked[call]
        return found
