"""What the controller decides to have done: frozen values, which the controller alone carries
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autohet.driver.control.observation import Part, Prune
from autohet.runtime.job import ScriptedEvent
from autohet.runtime.messages import AgentEndpoint, GenerationOrder
from recovery.state.ancestry import Descent


@dataclass(frozen=True)
class Hire:
    """Start a process for each of these workers."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class Dismiss:
    """End these workers' processes."""

    workers: tuple[str, ...]


@dataclass(frozen=True)
class ClaimGeneration:
    """Put a generation's entry into the journal."""

    entry: Descent


@dataclass(frozen=True)
class Begin:
    """Send the orders of a generation."""

    orders: Mapping[str, GenerationOrder]


@dataclass(frozen=True)
class RequestStop:
    """Stop after the current step; with `checkpoint`, upload it."""

    workers: tuple[str, ...]
    checkpoint: bool


@dataclass(frozen=True)
class Interrupt:
    """Wake these workers out of whatever they wait for in this generation, or one before it."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class RollForward:
    """Apply the prepared step whose vote another worker saw."""

    workers: tuple[str, ...]
    generation: int
    vote: tuple[int, Any]


@dataclass(frozen=True)
class RequestInventories:
    """Ask who holds which snapshots."""


@dataclass(frozen=True)
class CommitCheckpoint:
    """Write the manifest of a step whose every shard is uploaded."""

    step: int
    generation: int
    layout: Any
    receipts: tuple[Any, ...]


@dataclass(frozen=True)
class ReleaseNode:
    """The node is to go, and its agent takes no more copies."""

    node: str


@dataclass(frozen=True)
class EndAgent:
    """Nothing that the released node holds is needed any more."""

    node: str


@dataclass(frozen=True)
class StartAgents:
    """Start the agents of these nodes, which are new."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """Put nothing new on this node, and replace it, since it leaves by `deadline` on the
    controller's clock.
    """

    node: str
    reason: str
    deadline: float | None


@dataclass(frozen=True)
class AskHoldings:
    """Ask every agent what it holds."""


@dataclass(frozen=True)
class HandOver:
    """By node, the parts that its agent copies to the agents at `to`."""

    parts: Mapping[str, tuple[Part, ...]]
    to: tuple[AgentEndpoint, ...]


@dataclass(frozen=True)
class AskForNodes:
    """Ask the autoscaler for so many nodes of each type from now on."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class GiveBack:
    """The node is not wanted any more."""

    node: str


@dataclass(frozen=True)
class Rehearse:
    """Let a scripted event happen to `node` (arrival: its name, if the script gives one). there:
    whether it is known; processes: ids of its workers' processes.
    """

    event: ScriptedEvent
    node: str | None
    there: bool
    processes: Mapping[str, int]


Action = (
    Hire
    | Dismiss
    | ClaimGeneration
    | Begin
    | RequestStop
    | Interrupt
    | RollForward
    | RequestInventories
    | CommitCheckpoint
    | ReleaseNode
    | EndAgent
    | StartAgents
    | Drain
    | Prune
    | AskHoldings
    | HandOver
    | AskForNodes
    | GiveBack
    | Rehearse
)
