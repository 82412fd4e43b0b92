"""Actions that the controller decides on: frozen values, which the controller alone executes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autohet.control.values.observation import HeldPart, Prune

if TYPE_CHECKING:
    from autohet.runtime.job import ScriptedEvent
    from autohet.runtime.messages import AgentEndpoint, GenerationOrder, PreparationOrder
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
class Prepare:
    """Have workers build what a generation needs beside its state, while they train on."""

    orders: Mapping[str, PreparationOrder]


@dataclass(frozen=True)
class Withdraw:
    """Have these workers train on instead of beginning a generation whose orders are out."""

    workers: tuple[str, ...]
    generation: int


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
class RequestCheckpoint:
    """Have this worker's vote make the next step durable at all workers."""

    worker: str


@dataclass(frozen=True)
class Interrupt:
    """Interrupt whatever these workers wait for in this generation, or in one before it.

    keep: workers of gated steps end their passes first, and keep them.
    """

    workers: tuple[str, ...]
    generation: int
    keep: bool = False


@dataclass(frozen=True)
class RollForward:
    """Apply the prepared step whose vote another worker saw."""

    workers: tuple[str, ...]
    generation: int
    vote: tuple[int, Any]


@dataclass(frozen=True)
class RequestInventories:
    """Ask every agent which snapshots it holds."""


@dataclass(frozen=True)
class CommitCheckpoint:
    """Write the manifest of a step whose every shard is uploaded."""

    step: int
    generation: int
    layout: Any
    receipts: tuple[Any, ...]


@dataclass(frozen=True)
class FallBack:
    """Pass over the checkpoints from `step` on that `generation`, or one before, has written.

    No-op, but for the answer in `CheckpointState.fallback`, where no older one is intact.
    """

    step: int
    generation: int


@dataclass(frozen=True)
class ReleaseNode:
    """Release a node that is to go; its agent takes no more copies."""

    node: str


@dataclass(frozen=True)
class EndAgent:
    """End the agent of a released node, since nothing that it holds is needed any more."""

    node: str


@dataclass(frozen=True)
class StartAgents:
    """Start the agents of these nodes, which are new."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """Schedule nothing new on this node, and replace it.

    deadline: time on the controller's clock by which the node leaves; None where none is known.
    """

    node: str
    reason: str
    deadline: float | None


@dataclass(frozen=True)
class AskHoldings:
    """Ask every agent what it holds."""


@dataclass(frozen=True)
class HandOver:
    """Copy parts of what agents hold to the agents at `to`.

    parts: by node, what its agent copies.
    """

    parts: Mapping[str, tuple[HeldPart, ...]]
    to: tuple[AgentEndpoint, ...]


@dataclass(frozen=True)
class AskForNodes:
    """Request this number of nodes of each type from the autoscaler from now on."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class GiveBack:
    """Give back a node that is not wanted any more."""

    node: str


@dataclass(frozen=True)
class Rehearse:
    """Make a scripted event happen to `node` (arrival: its name, if the script gives one).

    there: True if the node is known. processes: process ids by worker of the node.
    """

    event: ScriptedEvent
    node: str | None
    there: bool
    processes: Mapping[str, int]


Action = (
    Hire
    | Dismiss
    | ClaimGeneration
    | Prepare
    | Withdraw
    | Begin
    | RequestStop
    | RequestCheckpoint
    | Interrupt
    | RollForward
    | RequestInventories
    | CommitCheckpoint
    | FallBack
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
