"""What the controller decides to have done: frozen values, and `execute`, which alone carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autohet.driver.control.observation import Workforce
from autohet.runtime.messages import GenerationOrder
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
    """Wake these workers out of whatever they wait for."""

    workers: tuple[str, ...]


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
    """The node holds nothing that is needed any more."""

    node: str


Action = (
    Hire | Dismiss | ClaimGeneration | Begin | RequestStop | Interrupt | RollForward | RequestInventories
    | CommitCheckpoint | ReleaseNode
)  # fmt: skip


def execute(action: Action, workforce: Workforce) -> None:
    """Carry out one action. Returns at once; the effect shows in a later observation."""
    match action:
        case Hire(workers):
            workforce.hire(workers)
        case Dismiss(workers):
            workforce.dismiss(workers)
        case ClaimGeneration(entry):
            workforce.claim_generation(entry)
        case Begin(orders):
            workforce.begin(orders)
        case RequestStop(workers, checkpoint):
            workforce.request_stop(workers, checkpoint=checkpoint)
        case Interrupt(workers):
            workforce.interrupt(workers)
        case RollForward(workers, generation, vote):
            workforce.roll_forward(workers, generation, vote)
        case RequestInventories():
            workforce.request_inventories()
        case CommitCheckpoint(step, generation, layout, receipts):
            workforce.commit_checkpoint(step, generation, layout, receipts)
        case ReleaseNode(node):
            workforce.release_node(node)
