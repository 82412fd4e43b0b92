"""The states of a job's controller. Each carries its reason and its deadline; the controller moves
between them, one tick at a time.

Waiting -> Sourcing -> Building -> Training -> Closing -> Ended
              ^            |          |
              |            v          v
              +------- Quiescing <----+          (a notice, a death, an arrival; or the same during Building)
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field

from autohet.driver.control.change import Change
from autohet.driver.control.orders import Book
from autohet.driver.control.planning import Proposal, Search
from autohet.driver.control.policy import Trouble
from planner.cluster import Node


@dataclass
class Waiting:
    """Too few workers, or no plan for those there are. Goes on as soon as a plan exists."""

    reason: str
    since: float
    change: Change | None = None
    announced: bool = False
    said: str = ""
    said_at: float = 0.0
    tried: tuple[Node, ...] = ()
    """Whom the planner had no plan for, at the prices of then."""


@dataclass
class Quiescing:
    """Bringing every survivor to a stand: by a stop after the current step, or by an interrupt;
    then those that lack a step whose vote somebody saw roll forward, until `roll_deadline`.

    broken: participants of the generation that a failure has ended; empty where none has.
    """

    change: Change
    deadline: float
    interrupted: bool
    broken: tuple[str, ...] = ()
    proposal: Proposal | None = None
    rolling: frozenset[str] = frozenset()
    roll_deadline: float | None = None
    quiet_since: float | None = None


@dataclass
class Sourcing:
    """All stand. Finding out who holds what (agents and durable storage are asked only if live
    memory does not hold all); then the generation of `book` is claimed in the journal, for which
    its orders wait until `claimed_by`.
    """

    change: Change
    proposal: Proposal
    deadline: float
    asked: bool = False
    book: Book | None = None
    claimed_by: float = 0.0


@dataclass
class Building:
    """Orders are out: groups are being built and state restored."""

    change: Change
    proposal: Proposal
    generation: int
    participants: tuple[str, ...]
    deadline: float


@dataclass
class Considering:
    """Whether another plan is worth a move, asked because of `trouble` at `since` on the
    controller's clock.
    """

    trouble: Trouble
    search: Search
    since: float


@dataclass
class Leaving:
    """Where all move to once no further notices are waited for: the plan without `change.nodes`,
    chosen among `usable` nodes. patience_s, needs_s: as in `gathering.gathers_until`, of which
    `until` came.
    """

    change: Change
    proposal: Proposal
    usable: tuple[str, ...]
    patience_s: float
    needs_s: float
    until: float


@dataclass
class Training:
    generation: int
    since: float
    declined: frozenset[str] = field(default_factory=frozenset)
    considering: Considering | None = None
    leaving: Leaving | None = None

    @property
    def reason(self) -> str:
        if self.leaving is not None:
            return f"waiting for further notices, since {self.leaving.change.reason}"
        return (
            ""
            if self.considering is None
            else f"looking for a better plan, since {self.considering.trouble.reason}"
        )


@dataclass
class Closing:
    """The last step is done or a stop was asked for: the newest step is being committed to durable
    storage.
    """

    reason: str
    ok: bool
    deadline: float
    step: int | None = None
    then_wait: str | None = None


@dataclass
class Saving:
    """Ticks failed for so long that all members were told to stop, whatever the state was: their
    step is being committed, and nothing else is decided any more.
    """

    reason: str
    deadline: float


@dataclass
class Ended:
    """may_pass: a driver that is started again may do better."""

    ok: bool
    reason: str
    may_pass: bool = False


State = Waiting | Quiescing | Sourcing | Building | Training | Closing | Saving | Ended


def drop_search(state: State) -> None:
    """What a state that is left or given up has looked for, nobody wants to know any more."""
    if isinstance(state, Training) and state.considering is not None:
        state.considering.search.drop()
