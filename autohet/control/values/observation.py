"""Observation of the controller at one tick: frozen values.

A workforce gathers them, Ray's or a simulated one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from planner.inputs.fleet import Fleet, Node, NodeType, node_of
from recovery.state.ancestry import NOTHING_KNOWN, Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId

if TYPE_CHECKING:
    from autohet.runtime.messages import (
        AgentEndpoint,
        DataState,
        GenerationOrder,
        PreparationOrder,
        StateTransfer,
        WorkerReport,
    )

T = TypeVar("T")
Age = tuple[int, int]
"""Age of a copy of training state: (generation, step).

The larger one of two is newer, and belongs to the run's present history.
"""
HeldPart = tuple[Source, tuple[ShardId, ...]]
"""Source of one copy, and some of its shards."""


@dataclass(frozen=True)
class Notice:
    """Notice that a node will be taken away, or (`risk`) may be.

    `deadline` is on the controller's clock; None where the source names none.
    """

    node: str
    source: str
    seen_at: float
    deadline: float | None = None
    risk: bool = False


@dataclass(frozen=True)
class NodeView:
    """Living node: what the planner knows of it, and its agent once that is up."""

    node: Node
    joined_at: float
    endpoint: AgentEndpoint | None = None
    data: DataState | None = None
    """Progress of the agent's data preparation; None where there is nothing to prepare."""
    agent_started: bool = True

    @property
    def node_type(self) -> NodeType:
        return self.node.node_type

    @property
    def preparing(self) -> bool:
        """True while the agent prepares the node's data."""
        if self.data is None:
            return False
        return not self.data.ready and self.data.error is None

    @property
    def may_work(self) -> bool:
        """True if the agent is up and the node's data is ready."""
        has_data = self.data is None or self.data.ready
        return self.endpoint is not None and has_data

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers of its GPUs."""
        indices = range(self.node_type.num_gpus)
        return tuple(f"{self.node.name}/{index}" for index in indices)


@dataclass(frozen=True)
class Loss:
    """Loss of a worker: its process ended, its node died, or it was silent for too long.

    `for_good`: every start attempt failed, so it is not started again for a while.
    """

    worker: str
    reason: str
    seen_at: float
    last_heard: float
    for_good: bool = False


@dataclass(frozen=True)
class CheckpointState:
    """Newest committed checkpoint that is known, and the error of the last attempt to commit.

    `error_step` and `error_generation` say which attempt that was.
    """

    step: int | None = None
    uri: str | None = None
    manifest: Any | None = None
    error: str | None = None
    error_step: int | None = None
    error_generation: int | None = None
    is_retried: bool = False
    """True if that attempt will be retried."""
    committed: tuple[tuple[int, str], ...] = ()
    """Checkpoints that this process has known as the newest, as (step, URI), in order.

    Between two looks there may be several.
    """
    ancestry: Ancestry = NOTHING_KNOWN
    """Ancestry of all generations, according to the storage's journal."""
    claimed: int = 0
    """Newest generation whose claim was answered.

    Its entry is in the journal, or cannot be put there just now.
    """
    unclaimed: int | None = None
    """Newest generation whose entry could not be put into the journal."""
    damaged: tuple[str, ...] = ()
    """Errors of damaged checkpoints that are passed over, in the order in which they were found."""
    unknown: str = ""
    """Reason why the checkpoints of the present history are not known; nothing is removed then."""
    fallback: int | None = None
    """Step of the last `FallBack` that was answered: `manifest` is older, if there is one."""
    is_misplaced: bool = False
    """True if what this driver has written is gone: another storage lies at its place."""
    superseded: str | None = None
    """Reason why this driver is to end: another has taken the job over."""

    def followed_by(self, step: int, uri: str, manifest: Any) -> CheckpointState:
        """Return the state once this checkpoint is known as the newest."""
        newer: tuple[tuple[int, str], ...] = ()
        if step != self.step:
            newer = ((step, uri),)
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


class StartState(Enum):
    """State of a node that was requested and has not joined."""

    REQUESTED = "requested"
    """The provider has not answered yet."""
    UNSCHEDULABLE = "unschedulable"
    """Kubernetes has no room for its pod."""
    STARTING = "starting"
    """It has a machine, which boots, pulls its image or installs."""
    STUCK = "stuck"
    """Its start has failed, and is retried."""


@dataclass(frozen=True)
class StartingNode:
    """Node that was requested and has not joined.

    since: time since which it has been in this state, on the controller's clock. why: words of
    Kubernetes or of the autoscaler; empty without any.
    """

    name: str
    node_type: str
    state: StartState
    since: float
    why: str = ""


@dataclass(frozen=True)
class Launches:
    """Launches of nodes: failed attempts since the autoscaler began by type, and nodes to come.

    cause: reason of the last failure, as a sentence; empty where it is not known. causes: reason of
    each type's last failure. polled_at: time at which `starting` was read; 0 without any.
    """

    failed: Mapping[str, int]
    cause: str = ""
    causes: Mapping[str, str] = field(default_factory=dict)
    starting: tuple[StartingNode, ...] = ()
    polled_at: float = 0.0


@dataclass(frozen=True)
class Failures:
    """Number of the driver's ticks in a row, up to this one, that raised.

    cause: what the last of them raised, as a cause in a sentence.
    """

    in_a_row: int
    cause: str


@dataclass(frozen=True)
class Prune:
    """Limits up to which agents may remove copies.

    In host memory they may remove what is older than `memory_before`, on disk steps before
    `disk_before`. They keep what `living` workers write themselves in `generation`.
    """

    memory_before: Age
    disk_before: int
    living: frozenset[str]
    generation: int | None = None


@dataclass(frozen=True)
class Observation:
    """Snapshot of everything that a decision may depend on, at one moment."""

    now: float
    nodes: Mapping[str, NodeView]
    notices: Mapping[str, Notice] = field(default_factory=dict)
    """Notices of the nodes that leave, by node."""
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)
    """Reports of living workers, and last reports of some lost ones.

    A worker in `losses` is included if it had just reported when it was found to be lost.
    """
    losses: Mapping[str, Loss] = field(default_factory=dict)
    inventories: Mapping[str, Any] | None = None
    checkpoint: CheckpointState = CheckpointState()
    stop_reason: str | None = None
    risks: Mapping[str, Notice] = field(default_factory=dict)
    """Risks by node: nodes that may be taken, or are not well, and have no other notice.

    They are used, and what they hold is copied to others.
    """

    store: tuple[str, int] = ("", 0)
    """Host and port of the rendezvous store for a generation that begins now."""
    newest_copies: Mapping[str, Age | None] = field(default_factory=dict)
    """Age of the newest copy that each released node's agent took in; None: it took none.

    A released node is included once its agent takes no more copies.
    """
    holdings: Mapping[str, Sequence[Holding]] | None = None
    """Answers of agents to `AskHoldings`, by node.

    None while some answers are missing, or if none was asked for.
    """
    transfers: tuple[StateTransfer, ...] = ()
    """Copies that agents have handed over since the last look.

    Reports of workers contain the workers' own copies.
    """
    launches: Launches | None = None
    """Failed launches of nodes, and nodes that have not joined yet.

    None where nothing is requested of the autoscaler, or it has not answered yet.
    """
    prices: Mapping[str, float] = field(default_factory=dict)
    """Prices that EC2 asks now for spot node types that may be bought, alive or not; USD per hour.
    """
    usual_prices: Mapping[str, float] = field(default_factory=dict)
    """Medians of these prices over the last days; USD per hour."""
    failures: Failures | None = None
    """Failures of the last ticks; None if the tick before finished."""
    busy: Mapping[str, str] = field(default_factory=dict)
    """Nodes on which workers wait for GPUs, by name, each with who uses these."""
    left_out: frozenset[str] = frozenset()
    """Nodes that the controller leaves out of plans for a while."""

    def without_nodes(self, names: Collection[str]) -> Observation:
        """Return the observation as if these nodes, their notices and their risks were gone."""
        return replace(
            self,
            nodes=_without(self.nodes, names),
            notices=_without(self.notices, names),
            risks=_without(self.risks, names),
        )

    def node_of(self, worker: str) -> str:
        return node_of(worker)

    def nodes_of(self, workers: Iterable[str]) -> dict[str, str]:
        """Return each worker's node, living or not."""
        return {worker: node_of(worker) for worker in workers}

    def nodes_with(self, workers: Iterable[str]) -> set[str]:
        """Return the nodes of these workers, living or not."""
        return {node_of(worker) for worker in workers}

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all nodes; None where one of them has no price."""
        return Fleet(0, tuple(view.node for view in self.nodes.values())).usd_per_hour()

    def answers(self, worker: str) -> bool:
        """Return True if the worker's process runs and reports."""
        return worker in self.reports and worker not in self.losses

    def reports_of(self, workers: Iterable[str]) -> list[WorkerReport]:
        """Return the reports of those of these workers that have one."""
        return [self.reports[worker] for worker in workers if worker in self.reports]

    def agents(self) -> dict[str, AgentEndpoint]:
        """Return the endpoints of the agents that are up, by node."""
        return {
            name: view.endpoint for name, view in self.nodes.items() if view.endpoint is not None
        }


def _without(known: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    return {name: value for name, value in known.items() if name not in names}


class Workers(Protocol):
    """Worker processes of a job, one for each GPU in use. Their names are `node/gpu`.

    Every direction returns at once; its effect shows in a later observation.
    """

    def hire(self, workers: Sequence[str]) -> None:
        """Start a process for each worker that has none."""
        ...

    def dismiss(self, workers: Sequence[str]) -> None:
        """End these workers' processes, whatever they are doing."""
        ...

    def prepare(self, orders: Mapping[str, PreparationOrder]) -> None:
        """Have workers build what a generation needs beside its state, while they train on.

        Their reports show the result.
        """
        ...

    def withdraw(self, workers: Sequence[str], generation: int) -> None:
        """Have workers train on instead of beginning this prepared generation at its step.

        Their reports show which of them had not voted for it yet.
        """
        ...

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        """Send every worker its orders for a generation."""
        ...

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        """Have all workers stop after the same step; with `checkpoint`, that step is uploaded."""
        ...

    def request_checkpoint(self, worker: str) -> None:
        """Have all workers make the next step durable on which this worker votes."""
        ...

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        """Interrupt whatever these workers wait for in this generation, or in one before it.

        Later generations are not interrupted. keep: workers of gated steps end their passes first.
        """
        ...

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        """Have prepared workers of this generation apply the step whose vote another worker saw.

        Their reports show the result.
        """
        ...


class NodeAgents(Protocol):
    """Agents of a job's nodes, which hold copies of training state.

    Every direction returns at once; its effect shows in a later observation.
    """

    def start_agents(self, nodes: Sequence[str]) -> None:
        """Start the agents of nodes that have joined."""
        ...

    def prune(self, what: Prune) -> None:
        """Have every agent remove the copies that newer state has made useless."""
        ...

    def ask_holdings(self) -> None:
        """Ask every agent which copies it holds, for `Observation.holdings`."""
        ...

    def hand_over(
        self, parts: Mapping[str, Sequence[HeldPart]], to: Sequence[AgentEndpoint]
    ) -> None:
        """Have agents copy `parts` (by node) of what they hold to the agents at `to`.

        The answer to `ask_holdings` is used.
        """
        ...

    def release_node(self, node: str) -> None:
        """Release a node that is to go: its agent takes no more copies.

        The agent reports in `Observation.newest_copies` how new the last copy is.
        """
        ...

    def end_agent(self, node: str) -> None:
        """End a released node's agent; the node may go then."""
        ...


class Autoscaler(Protocol):
    """Cluster's own scheduler of nodes, which replaces them and starts new ones."""

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Have the cluster schedule nothing new on a node that leaves, and replace it.

        `deadline` is on the controller's clock.
        """
        ...

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        """Request this number of nodes of each type from now on."""
        ...

    def give_back(self, node: str) -> None:
        """Give back a node that is not wanted any more; its end shows as its notice."""
        ...


class Workforce(Protocol):
    """Processes, nodes and storage of a job, as the controller directs them.

    Every direction returns at once; its effect shows in a later observation.
    """

    @property
    def workers(self) -> Workers: ...

    @property
    def node_agents(self) -> NodeAgents: ...

    @property
    def autoscaler(self) -> Autoscaler: ...

    def wait(self) -> None:
        """Let time pass until the next round is due."""
        ...

    def observe(self) -> Observation:
        """Return what is known now.

        Changes nothing beyond what is known: no process, no node, nothing that is stored.
        """
        ...

    def claim_generation(self, entry: Descent) -> None:
        """Put a generation's entry into the storage's journal.

        `CheckpointState.claimed` shows when the generation's orders may go out.
        """
        ...

    def request_inventories(self) -> None:
        """Ask every agent for its snapshots, and the durable storage for its newest checkpoint."""
        ...

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        """Write the manifest of a checkpoint whose every shard is uploaded."""
        ...

    def fall_back(self, step: int, generation: int) -> None:
        """Pass over the checkpoints from `step` on, if an older one is intact."""
        ...

    def rehearse(self, what: Any) -> None:
        """Make a scripted event (`actions.Rehearse`) happen."""
        ...

    def publish(self, status: Mapping[str, Any]) -> None:
        """Make the job's status visible to `autohet status`."""
        ...
