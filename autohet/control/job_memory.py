"""Memory of one job: all that the controller remembers between two observations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autohet.control.job_state import Fallback, State, Waiting
from autohet.control.ledger.ledger import Ledger
from autohet.control.planning.agent_gc import AgentGc
from autohet.control.planning.outlook import Outlook
from autohet.control.script import Script

if TYPE_CHECKING:
    from autohet.control.planning.buyer import Buyer
    from autohet.control.planning.goal import Goal
    from autohet.control.planning.orders import OrderBuilder
    from autohet.control.planning.proposals import Planner, PlanProposal
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Notice
    from autohet.runtime.job import Job
    from autohet.runtime.job.elastic import Timeouts
    from planner.inputs.fleet import NodeType
    from planner.plans.plan import Plan


@dataclass
class NodeMemory:
    """Facts that are remembered by the name of a node or worker; they end with the node."""

    present: frozenset[str] = frozenset()
    """Nodes in the observation before."""
    joined: dict[str, float] = field(default_factory=dict)
    """Time at which the last node of each name joined."""
    announced: dict[str, NodeType] = field(default_factory=dict)
    """Nodes that an event has announced, with the type as announced last."""
    notices: dict[str, Notice] = field(default_factory=dict)
    """Notices that are logged, by node."""
    risks: set[str] = field(default_factory=set)
    """Nodes whose risk is logged."""
    released: set[str] = field(default_factory=set)
    """Leaving nodes that were released."""
    left_out_until: dict[str, float] = field(default_factory=dict)
    """Time until which each node is left out of plans, after failures of one cause."""
    logged_dead: set[str] = field(default_factory=set)
    """Lost workers whose death is logged."""
    unfit: set[str] = field(default_factory=set)
    """Workers of which it is logged that they cannot take part."""
    wrong: set[str] = field(default_factory=set)
    """Workers of which it is decided what follows from their wrong arithmetic."""
    corrupt: dict[str, Notice] = field(default_factory=dict)
    """Notices of nodes that are drained since a worker's arithmetic is wrong."""


@dataclass
class SpeedMemory:
    """Compute times of this run where they differ from the profile's."""

    slowdowns: dict[str, float] = field(default_factory=dict)
    """Compute time of each slow node, as a multiple of its type's."""
    slow_since: dict[str, float] = field(default_factory=dict)
    """Time at which the slowdown of each node was measured last."""
    rate_factors: dict[str, float] = field(default_factory=dict)
    """Measured compute time of each GPU type, as a multiple of its profile's."""


@dataclass
class EndMemory:
    """Decision to end the job once its newest step is in durable storage."""

    reason: str | None = None
    """Reason of the end; None while the job is to go on."""
    may_pass: bool = False
    """True if a restarted driver may do better, since the cause may be over by then."""
    failed_ticks: str | None = None
    """Cause of the failed ticks for which the job is to stop; None without any."""


@dataclass
class WarningMemory:
    """Sentences that were logged for the present plan."""

    host_memory: list[str] = field(default_factory=list)
    """Host memory that nodes of the plan lack."""
    copies: list[str] = field(default_factory=list)
    """Copies to other nodes that are spaced or missing."""


@dataclass
class CheckpointPace:
    """Interval of a job's durable checkpoints, and the newest step that one was requested for.

    steps: interval; None before the first one was computed. look_at: time at which it is computed
    again; infinite if the job names the steps. logged_steps: the interval that was logged last.
    """

    steps: int | None = None
    requested: int = 0
    generation: int = 0
    look_at: float = -math.inf
    logged_steps: int = 0

    def due_in_steps(self, committed: int) -> int | None:
        """Return the number of steps until the next request; None while no interval is known."""
        if self.steps is None:
            return None
        return max(0, self.requested + self.steps - 1 - committed)


@dataclass
class JobMemory:
    """All that is remembered of one job between two observations."""

    job: Job
    """The job, which never changes."""
    planning: Planner
    """The planner, with the horizon that it was told last."""
    orders: OrderBuilder
    """Layouts and ancestry of all generations, and copies that proved bad."""
    state: State = field(default_factory=lambda: Waiting("the job has just started", since=0.0))
    """Present state."""
    generation: int = 0
    """Number of the newest generation that was claimed."""
    members: tuple[str, ...] = ()
    """Workers of the generation that trains, or trained last."""
    proposal: PlanProposal | None = None
    """Plan that the members train on, with its prediction."""
    prepares: bool = False
    """True if workers can build a generation while they train in the one before it."""
    cuts_over: bool = False
    """True if workers can begin a prepared generation without a stop."""
    prepares_at_death: bool = False
    """True if survivors prepare the plan without the dead while they leave the step."""
    keeps_passes: bool = False
    """True if workers of whole pipelines can keep the passes of a step that a death has ended."""
    reserved: int = 0
    """Highest number of a generation that was prepared; no other generation gets it."""
    planned_nodes: frozenset[str] = frozenset()
    """Living nodes that the plan was made for."""
    asked_prices: dict[str, float | None] = field(default_factory=dict)
    """Price of each node of the last fleet that the planner was asked about, in USD per hour."""
    plans: list[tuple[int, Plan, float]] = field(default_factory=list)
    """Generation, plan and predicted seconds a step of all generations that have trained."""
    postponed: Change | None = None
    """Change that goes on when the job, stopped for want of nodes, trains again."""
    buyer: Buyer | None = None
    """Adapts the request for nodes; None where the autoscaler cannot be asked for others."""
    goal: Goal | None = None
    """Deadline and budget; None where the job has neither."""
    nodes: NodeMemory = field(default_factory=NodeMemory)
    """Facts by name of a node or worker."""
    speeds: SpeedMemory = field(default_factory=SpeedMemory)
    """Measured compute times."""
    end: EndMemory = field(default_factory=EndMemory)
    """Decision to end the job."""
    warnings: WarningMemory = field(default_factory=WarningMemory)
    """Warnings on the present plan."""
    restored_step: int | None = None
    """Step of the last restore that a poisoned state may come from."""
    fallback: Fallback | None = None
    """The one try of an older checkpoint, once a restored state has proved poisoned."""
    checkpoint_pace: CheckpointPace = field(default_factory=CheckpointPace)
    """Interval of durable checkpoints, where the job names no steps."""
    outlook: Outlook = field(default_factory=Outlook)
    """Lives of nodes by type."""
    agent_gc: AgentGc = field(default_factory=AgentGc)
    """Copies that agents keep, and nodes that are about to go."""
    ledger: Ledger = field(init=False)
    """Steps, checkpoints and changes of the run."""
    script: Script = field(init=False)
    """Events of a rehearsal that have not happened yet."""
    timeouts: Timeouts = field(init=False)
    """Time limits under the present plan."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.job)
        self.script = Script(self.job)
        self.timeouts = self.job.elastic.timeouts()
        if self.job.checkpoint.fixed_steps is not None:
            self.checkpoint_pace.look_at = math.inf

    @property
    def steps_left(self) -> float:
        """Steps of the run that are not committed yet; infinite while their number is unknown."""
        last = self.ledger.last_step
        return math.inf if last is None else last - self.ledger.committed_steps

    @property
    def closing_s(self) -> float:
        """Seconds from the decision to end until the newest step is in durable storage."""
        step_s = 0.0 if self.proposal is None else self.proposal.predicted_step_s
        return 2 * step_s + (self.ledger.checkpoints.upload_s or 0.0)

    @property
    def redo_s(self) -> float:
        """Seconds of training that are repeated if all nodes die at once."""
        steps = self.job.checkpoint.fixed_steps or self.checkpoint_pace.steps
        if self.proposal is None or steps is None:
            return 0.0
        return steps * self.proposal.predicted_step_s
