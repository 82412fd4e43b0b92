"""What the controller sees at one tick: frozen values, gathered by a workforce (Ray's or a
simulated one).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from autohet.runtime.messages import (
    AgentEndpoint,
    DataState,
    GenerationOrder,
    Transfer,
    WorkerReport,
)
from planner.cluster import Node, node_of
from recovery.state.ancestry import NOTHING_KNOWN, Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId

T = TypeVar("T")
Age = tuple[int, int]
"""(Generation, step) of a copy of training state: of two the larger is newer, and belongs to the
run's present history.
"""
Part = tuple[Source, tuple[ShardId, ...]]
"""Shards of one copy."""


@dataclass(frozen=True)
class Notice:
    """A node will be taken away, or (`risk`) may be.

    `deadline` is on the controller's clock; None where the source names none.
    """

    node: str
    source: str
    seen_at: float
    deadline: float | None = None
    risk: bool = False


@dataclass(frozen=True)
class NodeView:
    """A living node: what the planner knows of it, and its agent once that is up."""

    node: Node
    joined_at: float
    endpoint: AgentEndpoint | None = None
    data: DataState | None = None
    """How far its agent has prepared the training data; None where nothing is to be prepared."""
    agent_started: bool = True

    @property
    def preparing(self) -> bool:
        return self.data is not None and not self.data.ready and self.data.error is None

    @property
    def may_work(self) -> bool:
        """Its agent is up, and its data is there."""
        return self.endpoint is not None and (self.data is None or self.data.ready)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"{self.node.name}/{index}" for index in range(self.node.node_type.num_gpus))


@dataclass(frozen=True)
class Loss:
    """A worker that is gone: its process ended, its node died, or it has said nothing for too long.
    `for_good`: it is not started again for a while, since it never came up, however often it was.
    """

    worker: str
    reason: str
    seen_at: float
    last_heard: float
    for_good: bool = False


@dataclass(frozen=True)
class CheckpointState:
    """The newest committed checkpoint that is known; the error of the last attempt to commit, and
    which attempt it was.
    """

    step: int | None = None
    uri: str | None = None
    manifest: Any | None = None
    error: str | None = None
    error_step: int | None = None
    error_generation: int | None = None
    is_retried: bool = False
    """Whether that attempt is going to be made again."""
    committed: tuple[tuple[int, str], ...] = ()
    """(step, URI) of all that this process has known as the newest, in order: between two looks
    there may be several.
    """
    ancestry: Ancestry = NOTHING_KNOWN
    """What the storage's journal says of all generations."""
    claimed: int = 0
    """The newest generation that was claimed and is answered for: its entry is in the journal, or
    cannot be put there just now.
    """
    unclaimed: int | None = None
    """The newest generation whose entry could not be put."""
    damaged: tuple[str, ...] = ()
    """What is wrong with checkpoints that are passed over, in the order in which it was found."""
    unknown: str = ""
    """Why it is not known which checkpoints the present history has: nothing is removed then."""
    superseded: str | None = None
    """Why this driver is to end: another has taken the job over."""

    def followed_by(self, step: int, uri: str, manifest: Any) -> CheckpointState:
        """The state once this checkpoint is known as the newest."""
        newer = () if step == self.step else ((step, uri),)
        return replace(
            self,
            step=step,
            uri=uri,
            manifest=manifest,
            error=None,
            error_step=None,
            error_generation=None,
            is_retried=False,
            committed=self.committed + newer,
        )


@dataclass(frozen=True)
class Launches:
    """Launches of nodes that failed since the autoscaler began, by type; why the last did, in a
    sentence (empty: not known), and why the last of each type did.
    """

    failed: Mapping[str, int]
    cause: str = ""
    causes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failures:
    """Ticks of the driver that raised, in a row until this one; what the last of them raised, as a
    cause in a sentence.
    """

    in_a_row: int
    cause: str


@dataclass(frozen=True)
class Prune:
    """What agents may remove: in host memory what is older than `memory_before`, on disk steps
    before `disk_before`; but not what `living` workers write themselves in `generation`.
    """

    memory_before: Age
    disk_before: int
    living: frozenset[str]
    generation: int | None = None


@dataclass(frozen=True)
class Observation:
    """Everything that a decision may depend on, at one moment."""

    now: float
    nodes: Mapping[str, NodeView]
    notices: Mapping[str, Notice] = field(default_factory=dict)
    """Nodes that leave."""
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    """Of the living; and last words of those among `losses` that had just spoken when they were
    found to be lost.
    """
    losses: Mapping[str, Loss] = field(default_factory=dict)
    inventories: Mapping[str, Any] | None = None
    checkpoint: CheckpointState = CheckpointState()
    stop_reason: str | None = None
    risks: Mapping[str, Notice] = field(default_factory=dict)
    """Nodes that may be taken, or are not well, and have no other notice: they are used, and what
    they hold is copied to others.
    """

    store: tuple[str, int] = ("", 0)
    """Host and port of the rendezvous store for a generation that begins now."""
    newest_copies: Mapping[str, Age | None] = field(default_factory=dict)
    """Of each released node whose agent takes no more copies, the age of the newest one that it
    took (None: it took none).
    """
    holdings: Mapping[str, Sequence[Holding]] | None = None
    """What agents have answered to `AskHoldings`, by node; None while some are still waited for, or
    none was asked.
    """
    transfers: tuple[Transfer, ...] = ()
    """What agents have handed over since the last look; what workers copy is in their reports."""
    launches: Launches | None = None
    """None where the autoscaler is asked for nothing, or has not answered yet."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Of spot node types that may be bought, alive or not, what EC2 asks for one now, in dollars an
    hour.
    """
    failures: Failures | None = None
    """None where the tick before came to its end."""
    left_out: frozenset[str] = frozenset()
    """Nodes that the controller does not plan on for a while."""

    def without_nodes(self, names: Collection[str]) -> Observation:
        """The observation as if these nodes were gone, with their notices and risks."""
        return replace(
            self,
            nodes=_without(self.nodes, names),
            notices=_without(self.notices, names),
            risks=_without(self.risks, names),
        )

    def node_of(self, worker: str) -> str:
        return node_of(worker)


def _without(known: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in known.items() if name not in names}


class Workforce(Protocol):
    """The processes of a job, as the controller directs them.

    Every direction returns at once; its effect shows in a later observation. Names of workers are
    `node/gpu`.
    """

    def wait(self) -> None:
        """Let time pass until the next round is due."""
        ...

    def observe(self) -> Observation:
        """What is known now.

        Changes nothing beyond what is known: no process, no node, nothing that is stored.
        """
        ...

    def start_agents(self, nodes: Sequence[str]) -> None:
        """Start the agents of nodes that have joined."""
        ...

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Let the cluster put nothing new on a node that leaves, and replace it; `deadline` on the
        controller's clock.
        """
        ...

    def prune(self, what: Prune) -> None:
        """Let every agent forget what newer state has made useless."""
        ...

    def ask_holdings(self) -> None:
        """Ask every agent what it holds, for `Observation.holdings`."""
        ...

    def hand_over(self, parts: Mapping[str, Sequence[Part]], to: Sequence[AgentEndpoint]) -> None:
        """Let agents, by node, copy these parts of what they hold to the agents at `to`.

        The answer to `ask_holdings` is used.
        """
        ...

    def end_agent(self, node: str) -> None:
        """End a released node's agent, upon which the node may go."""
        ...

    def hire(self, workers: Sequence[str]) -> None:
        """Start a process for each worker that has none."""
        ...

    def dismiss(self, workers: Sequence[str]) -> None:
        """End these workers' processes, whatever they are doing."""
        ...

    def claim_generation(self, entry: Descent) -> None:
        """Put a generation's entry into the storage's journal; `CheckpointState.claimed` says when
        its orders may go out.
        """
        ...

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        """Send every worker its orders for a generation."""
        ...

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        """All workers stop after the same step; with `checkpoint`, that step is uploaded."""
        ...

    def interrupt(self, workers: Sequence[str], generation: int) -> None:
        """Wake these workers out of whatever they wait for in this generation, or one before it:
        later ones go on.
        """
        ...

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        """Let prepared workers of this generation apply the step whose vote another worker saw;
        their reports say what came of it.
        """
        ...

    def request_inventories(self) -> None:
        """Ask every agent which snapshots it holds, and the durable storage for its newest
        checkpoint.
        """
        ...

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        """Write the manifest of a checkpoint whose every shard is uploaded."""
        ...

    def release_node(self, node: str) -> None:
        """The node is to go: its agent takes no more copies, and says in
        `Observation.newest_copies` how new the last one is.
        """
        ...

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        """Ask the autoscaler for so many nodes of each type from now on."""
        ...

    def give_back(self, node: str) -> None:
        """The node is not wanted any more; its end shows as its notice."""
        ...

    def rehearse(self, what: Any) -> None:
        """Let a scripted event (`actions.Rehearse`) happen."""
        ...

    def publish(self, status: Mapping[str, Any]) -> None:
        """Make the job's status visible to `autohet status`."""
        ...
