"""What a controller promises at every tick, whatever happens: kept beside it, judged by what a
`FaultyWorkforce` knows to be true.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from autohet.control import fleet
from autohet.control.job_memory import JobMemory
from autohet.control.job_state import (
    Building,
    Closing,
    Ended,
    Quiescing,
    Sourcing,
    State,
    Training,
)
from autohet.control.planning.outlook import gather_s
from autohet.control.planning.proposals import PendingSearch, PlanProposal
from autohet.control.states import cutting_over, quiescing, sourcing, waiting
from autohet.control.values.change import Change
from autohet.control.values.effects import Deciding
from autohet.control.values.observation import Observation
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.planning import Planning
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet
from tests.harness.faulty_workforce import FaultyWorkforce
from tests.harness.scripted_workforce import TICK_S

SLACK_S = 3 * TICK_S


class RememberedPlanning(Planning):
    """The real planner, asked once for each question: examples repeat themselves. `considered`: the
    nodes of its last question.

    hasty: its answers of small fleets count as repairs that a search has to follow, as on large
    ones. looks: how often a search is looked at before it is over.
    """

    answers: dict[Any, Any] = {}  # noqa: RUF012
    considered: frozenset[str] = frozenset()
    hasty = False
    looks = 0

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        return _SlowSearch(super().search(fleet, current).result, self.looks)

    def propose(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        thorough: bool | None = None,
    ) -> PlanProposal:
        self.considered = frozenset(node.name for node in fleet.nodes)
        names = tuple((node.name, node.node_type) for node in fleet.nodes)
        question = (
            self.job.parallelism.min_pipelines,
            names,
            current and current.plan,
            redundant,
            thorough,
        )
        if question not in self.answers:
            try:
                self.answers[question] = super().propose(
                    fleet, current, redundant=redundant, thorough=thorough
                )
            except ConfigError as error:
                self.answers[question] = error
        answer = self.answers[question]
        if isinstance(answer, ConfigError):
            raise answer
        return (
            replace(answer, searched=False)
            if self.hasty and current is not None and not thorough
            else answer
        )


class _SlowSearch:
    """Found at once, told after so many looks."""

    def __init__(self, found: Callable[[], PlanProposal | None], looks: int) -> None:
        self.looks = looks
        self.dropped = False
        self.error = None
        try:
            self.found = found()
        except ConfigError as error:
            self.error = error

    def result(self) -> PlanProposal | None:
        assert not self.dropped
        if self.looks > 0:
            self.looks -= 1
            return None
        if self.error is not None:
            raise self.error
        return self.found

    def drop(self) -> None:
        self.dropped = True


class CheckedController(Controller):
    """Adopts plans for workers that answer, on nodes that stay, or the test fails.

    `considered`: nodes that the present plan was chosen beside.
    """

    workforce: FaultyWorkforce
    considered: frozenset[str] = frozenset()

    def tick(self) -> Observation:
        def checked(
            change: Change,
            proposal: PlanProposal,
            memory: JobMemory,
            seen: Observation,
            prepared: int | None = None,
        ) -> Deciding[State]:
            self._check_adopted(proposal, seen)
            return (yield from sourcing.adopt(change, proposal, memory, seen, prepared))

        def followed(state: Sourcing, *arguments: Any) -> Deciding[Building]:
            self._note(state.proposal)
            return (yield from sourcing.build(state, *arguments))

        with (
            patch.object(waiting, "adopt", checked),
            patch.object(quiescing, "adopt", checked),
            patch.object(cutting_over, "build", followed),
        ):
            return super().tick()

    def _check_adopted(self, proposal: PlanProposal, seen: Observation) -> None:
        for worker in proposal.plan.workers:
            node = seen.node_of(worker)
            assert seen.nodes[node].endpoint is not None, f"{node} has no agent"
            assert node not in seen.notices, f"{node} is leaving"
            assert worker in seen.reports.keys() - seen.losses.keys(), f"{worker} does not answer"
        self._note(proposal)

    def _note(self, proposal: PlanProposal) -> None:
        self.considered = frozenset(node.name for node in proposal.cost.fleet.nodes)
        self.workforce.compute_s = self.memory.planning.compute_s(proposal, {})


class Promises:
    """Ticks a controller and checks what came of it."""

    def __init__(
        self, controller: CheckedController, workforce: FaultyWorkforce, first_step: int = 0
    ) -> None:
        self.controller = controller
        self.workforce = workforce
        self.first_step = first_step
        self.entered = (controller.state, 0.0)
        self.arrived: set[str] = set()
        self.noticed: set[str] = set()
        self._joined: dict[str, float] = {}
        self._closing: tuple[Closing, float] | None = None
        self._storage_failed_at = -1.0
        self._ran: set[tuple[int, int]] = set()
        self._mourned: set[str] = set()
        self._untold: set[str] = set()
        self._events = self._changes = self._trained = 0
        self._overlooked: dict[str, int] = {}
        self._failures: Counter[str] = Counter()
        self._failed_at_step = self._most_failures = 0

    def tick(self) -> None:
        controller = self.controller
        workforce = self.workforce
        ended = controller.ended
        generation = controller.memory.generation
        calls = workforce.calls
        watched = (*controller.memory.members, *getattr(controller.state, "participants", ()))
        seen = controller.tick()
        assert controller.memory.generation >= generation
        if ended is not None:
            assert controller.ended is ended
            assert workforce.calls == calls
        if controller.state is not self.entered[0]:
            self.entered = (controller.state, workforce.now)
        if isinstance(controller.state, Closing):
            self._closing = (controller.state, self.entered[1])
        if workforce.storage != "works":
            self._storage_failed_at = workforce.now
        self._deadline()
        self._read_events(seen)
        self._deaths_are_told(seen, watched)
        self._ledger()
        self._steps_lost()
        self._no_node_is_overlooked(seen)
        if ended is None and controller.ended is not None:
            self._reason(controller.ended)

    def _deadline(self) -> None:
        state, since = self.entered
        times = self.controller.memory.timeouts
        limit_s = {
            Quiescing: times.step_s + 3 * times.quiesce_s + 1.5 * times.heartbeat_s,
            Sourcing: times.quiesce_s,
            Building: times.rendezvous_s + times.transfer_s,
            Closing: times.step_s + times.checkpoint_s,
        }.get(type(state))
        if isinstance(state, Sourcing) and state.wait is not None:
            limit_s = 2 * times.quiesce_s + times.checkpoint_s
        assert limit_s is None or self.workforce.now - since <= limit_s + SLACK_S, (
            f"{state} lasts too long"
        )

    def _read_events(self, seen: Observation) -> None:
        """A reason with every decision; an event for every node and notice that is seen."""
        events = self.controller.events.records
        for event in events[self._events :]:
            if event["kind"] in ("decision", "death", "slow", "plan", "finished", "failed"):
                assert event["reason"]
            if event["kind"] == "arrival":
                self.arrived.add(event["node"])
                self._mourned.discard(event["node"])
            if event["kind"] == "notice":
                self.noticed.add(event["node"])
            if event["kind"] == "death":
                self._mourned |= {*event["nodes"], *event["workers"]}
                self._count_failures(event)
        self._events = len(events)
        replaced = self._replaced(seen)
        self.arrived -= replaced
        self.noticed -= replaced
        shown = seen.nodes.keys() - replaced
        introduced = {name for name in shown if seen.nodes[name].endpoint is not None}
        assert introduced <= self.arrived, "a node that has said what it is has its arrival event"
        assert seen.notices.keys() & shown <= self.noticed, "a notice has its event"
        self.arrived &= shown
        self.noticed &= shown

    def _replaced(self, seen: Observation) -> set[str]:
        """Return the nodes that took the name of another node since the last tick.

        The controller takes notice of them in the next one.
        """
        joined = {name: view.joined_at for name, view in seen.nodes.items()}
        replaced = {name for name, at in joined.items() if self._joined.get(name, at) != at}
        self._joined = joined
        return replaced

    def _count_failures(self, death: Mapping[str, Any]) -> None:
        """Of one worker, or for one reason, since the last new step."""
        step = self.controller.memory.ledger.committed_steps
        if step != self._failed_at_step:
            self._failures.clear()
        self._failed_at_step = step
        self._failures.update([*death["workers"], death["reason"]])
        self._most_failures = max(self._most_failures, *self._failures.values())

    def _deaths_are_told(self, seen: Observation, watched: tuple[str, ...]) -> None:
        """By the next tick."""
        lost = (
            set()
            if self.controller.ended
            else {worker for worker in watched if worker in seen.losses}
        )
        untold = {
            w for w in lost if w not in self._mourned and seen.node_of(w) not in self._mourned
        }
        assert not untold & self._untold, f"no event tells of the loss of {untold}"
        self._untold = untold

    def _ledger(self) -> None:
        ledger = self.controller.memory.ledger
        assert min(ledger.records, default=self.first_step) >= self.first_step
        if isinstance(self.controller.state, Training):
            assert self.workforce.seen is not None
            reports = [
                self.workforce.seen.reports.get(worker) for worker in self.controller.memory.members
            ]
            self._one_history()
            assert ledger.committed_steps == max(
                report.step for report in reports if report is not None
            )

    def _one_history(self) -> None:
        """What the members' states came from is what the events tell: each step in the generation
        that ran it last. Only of a step that nobody lived to tell of is there nothing.
        """
        told = {
            step: record.generation
            for step, record in self.controller.memory.ledger.records.items()
        }
        for worker in self.controller.memory.members:
            process = self.workforce.processes.get(worker)
            if (
                process is not None
                and process.report.live_generation == self.controller.memory.generation
            ):
                true = {s: g for s, g in enumerate(process.history) if s in told}
                assert true == {s: told[s] for s in true}, (
                    f"{worker} goes on from a history that was left"
                )
                untold = {
                    (g, s)
                    for s, g in enumerate(process.history)
                    if s >= self.first_step and s not in told
                }
                assert not untold & self.workforce.reported, (
                    f"{untold} were reported, and are forgotten"
                )

    def _steps_lost(self) -> None:
        """Each change owns up to every step that is run again, and no part of it takes less than no
        time.
        """
        controller = self.controller
        state = self.controller.state
        if isinstance(state, Training) and state.generation != self._trained:
            self._trained = state.generation
            change = controller.memory.ledger.open_change
            assert change is not None
            lost = {s for g, s in self._ran if g < state.generation and s >= change.restore_step}
            assert change.steps_lost == len(lost), (
                f"{change.steps_lost} said to be lost, but {sorted(lost)} were"
            )
            self._ran = {(g, s) for g, s in self._ran if s not in lost}
        self._ran |= {
            (record.generation, step) for step, record in controller.memory.ledger.records.items()
        }
        for change in controller.memory.ledger.changes[self._changes :]:
            assert all(part >= 0 for part in change.seconds().values()), change.seconds()
        self._changes = len(controller.memory.ledger.changes)

    def _no_node_is_overlooked(self, seen: Observation) -> None:
        """While all train, a node that may be planned on is asked about soon after the last one
        that it is gathered with.
        """
        controller = self.controller
        if (
            not isinstance(controller.state, Training) or controller.state.leaving is not None
        ):  # who leaves, and who came, is one change
            self._overlooked = {}
            return
        known = (
            controller.considered
            | controller.memory.planning.considered
            | controller.memory.nodes.left_out_until.keys()
            | controller.state.on_probation
        )
        new = [name for name in fleet.usable_nodes(seen) if name not in known]
        self._overlooked = {name: self._overlooked.get(name, 0) + 1 for name in new}
        gathering_s = gather_s(
            controller.memory.ledger.timings, controller.memory.job.elastic.arrivals_debounce_s
        )
        limit_s = max(controller.memory.timeouts.worker_start_s, gathering_s) + 2.0
        newest = max((seen.nodes[name].joined_at for name in new), default=seen.now)
        late = [
            name
            for name, ticks in self._overlooked.items()
            if min(ticks * TICK_S, seen.now - newest) > limit_s
        ]
        assert not late, f"{late} could be planned on, and nobody asked"

    def _reason(self, ended: Ended) -> None:
        """A run that does not succeed has one of the few reasons for which it may fail, and it is
        true.
        """
        controller = self.controller
        workforce = self.workforce
        limits = controller.memory.job.elastic
        closing, since = self._closing or (None, 0.0)
        causes = {
            "the training state is lost": workforce.newest_whole_step() is None,
            "times and no step between": self._most_failures > limits.max_failures_in_a_row,
            "waited": workforce.now > limits.wait_for_fleet_s,
            "not in durable storage": closing is not None
            and not closing.then_wait
            and self._storage_failed_at >= since - SLACK_S,
            "stopped": workforce.stop_reason is not None,
        }
        told = [true for known, true in causes.items() if known in ended.reason]
        assert ended.ok or (told and all(told)), ended.reason
