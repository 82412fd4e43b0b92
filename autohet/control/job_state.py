"""States of a job's controller, each with its reason and its deadline.

The controller moves between them, one tick at a time.

A driver that takes over living workers begins with Adopting, which leads to Training or Quiescing.

Waiting -> Sourcing -> Building -> Training -> Closing -> Ended
              ^            |          |
              |            v          v
              +------- Quiescing <----+          (a notice, a death, an arrival; or the same during Building)
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autohet.control.planning.orders import Book
    from autohet.control.planning.proposals import PendingSearch, PlanProposal
    from autohet.control.values.change import Change
    from autohet.control.values.fleet_event import FleetEvent
    from autohet.runtime.messages import GenerationOrder
    from planner.inputs.fleet import Node


@dataclass(frozen=True)
class Inherited:
    """Legacy of a driver that has ended: what living workers and the storage know of its run.

    orders: one worker's order of each generation that a living worker knows, oldest first.
    receipts: parts of checkpoints that are not committed, each with its worker, as in
    `WorkerReport.receipts`. newest: newest generation in the journal. committed: step of the newest
    checkpoint.
    """

    orders: tuple[GenerationOrder, ...]
    receipts: tuple[tuple[str, Any], ...] = ()
    newest: int | None = None
    committed: int = -1


@dataclass
class Waiting:
    """Waiting for workers: there are too few, or no plan for them.

    Ends as soon as a plan exists.
    """

    reason: str
    since: float
    change: Change | None = None
    announced: bool = False
    said: str = ""
    said_at: float = 0.0
    tried: tuple[Node, ...] = ()
    """Nodes, with their prices of that time, for which the planner had no plan."""


@dataclass
class Adopting:
    """Taking over `generation`, whose workers may have trained on without a driver.

    is_newest: the journal knows no later generation. deadline: limit on their first reports; None
    before the first tick.
    """

    generation: int
    is_newest: bool
    deadline: float | None = None


@dataclass
class Quiescing:
    """Stopping every survivor, after the current step or by an interrupt.

    Then survivors that lack a step whose vote any worker saw roll forward, until `roll_deadline`.

    broken: participants of the generation that a failure has ended; empty where none has.
    """

    change: Change
    deadline: float
    interrupted: bool
    broken: tuple[str, ...] = ()
    proposal: PlanProposal | None = None
    prepared: int | None = None
    """Number of the generation that the workers of `proposal` prepare, or have prepared.

    None: none does.
    """
    has_prepared: bool = False
    """True once the survivors of a death were asked to prepare a plan."""
    keeping: frozenset[str] = frozenset()
    """Workers that end their passes of a gated step first; empty once nothing can be kept."""
    rolling: frozenset[str] = frozenset()
    roll_deadline: float | None = None
    quiet_since: float | None = None


@dataclass
class Wait:
    """Wait before a start at step 0, since what was lost may still be found."""

    since: float
    asked_at: float
    empty_storage: str = ""
    """Sentence on the empty storage that is waited for; empty if none is."""


@dataclass
class Sourcing:
    """Finding out what each node holds, while all workers stand.

    Agents and durable storage are asked only if live memory does not hold all. Then the generation
    of `book` is claimed in the journal; its orders wait for that until `claimed_by`. wait: set
    while a start at step 0 waits for what may still be found.
    """

    change: Change
    proposal: PlanProposal
    deadline: float
    prepared: int | None = None
    """Number of the generation that all workers of the plan have prepared; None: none is."""
    asked: bool = False
    book: Book | None = None
    claimed_by: float = 0.0
    wait: Wait | None = None


@dataclass
class Building:
    """Building groups and restoring state: the orders are out."""

    change: Change
    proposal: PlanProposal
    generation: int
    participants: tuple[str, ...]
    deadline: float


@dataclass
class Fallback:
    """The one try of a checkpoint before `step`. is_over: it is restored, or there is none."""

    step: int
    until: float
    is_over: bool = False


@dataclass
class Considering:
    """Search for another plan, to decide whether a move is worth it.

    `trouble` caused it; `since` is its start on the controller's clock.
    """

    trouble: FleetEvent
    search: PendingSearch
    since: float


@dataclass
class Leaving:
    """Move that all workers make once no further notices are waited for.

    It leads to the plan without `change.nodes`, chosen among `usable` nodes. patience_s, needs_s:
    arguments of `outlook.gathers_until`, which returned `until`.
    """

    change: Change
    proposal: PlanProposal
    usable: tuple[str, ...]
    patience_s: float
    needs_s: float
    until: float


@dataclass
class Preparing:
    """Generation that workers build while they train in the one before it.

    participants: as in its `PreparationOrder`. latest: time at which the change must begin.
    deadline: the workers stop then, whatever is ready; not after `latest`.
    """

    generation: int
    change: Change
    proposal: PlanProposal
    participants: tuple[str, ...]
    latest: float
    deadline: float
    attempt: int = 1
    """Number of this preparation for the change: those before it were not begun in time."""
    cut_over: CutOver | None = None


@dataclass
class CutOver:
    """Orders of a prepared generation, which begins without a stop at `book.start_step`.

    They are sent once the generation is claimed in the journal, within the deadline of `sourcing`.
    is_sent: they are sent; from then on the workers' vote decides. is_withdrawn: the workers are
    asked to vote against it.
    """

    sourcing: Sourcing
    book: Book
    is_sent: bool = False
    is_withdrawn: bool = False


@dataclass
class Training:
    """Training, perhaps while another plan is looked for or further notices are waited for.

    declined: nodes that have joined, and for which the plan was not changed. on_probation: nodes of
    which it is logged that they have to live for longer first. look_at: time at which arrivals are
    answered if nothing else happens.
    """

    generation: int
    since: float
    declined: frozenset[str] = field(default_factory=frozenset)
    considering: Considering | None = None
    leaving: Leaving | None = None
    preparing: Preparing | None = None
    on_probation: frozenset[str] = field(default_factory=frozenset)
    look_at: float | None = None

    @property
    def reason(self) -> str:
        if self.leaving is not None:
            return f"waiting for further notices, since {self.leaving.change.reason}"
        if self.considering is not None:
            return f"looking for a better plan, since {self.considering.trouble.reason}"
        return ""


@dataclass
class Closing:
    """Committing the newest step to durable storage, after the last step or a requested stop."""

    reason: str
    ok: bool
    deadline: float
    step: int | None = None
    then_wait: str | None = None


@dataclass
class Saving:
    """Committing the members' step after ticks failed for long.

    All members were told to stop, whatever the state was, and nothing else is decided any more.
    """

    reason: str
    deadline: float


@dataclass
class Ended:
    """End of the job. may_pass: True if a restarted driver may do better.

    storage_is_back: True if the run is to start again at once, from what its storage holds now.
    """

    ok: bool
    reason: str
    may_pass: bool = False
    storage_is_back: bool = False


State = Waiting | Adopting | Quiescing | Sourcing | Building | Training | Closing | Saving | Ended
