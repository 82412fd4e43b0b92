"""Replay of a recorded run through its controller, without Ray, storage or a search.

Its decisions must be the recorded ones, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autohet.control.decide import decide
from autohet.control.job_memory import JobMemory
from autohet.control.ledger.ledger import NOTHING_TOLD
from autohet.control.planning.buyer import Buyer
from autohet.control.planning.goal import Goal
from autohet.control.planning.orders import OrderBuilder
from autohet.control.planning.proposals import (
    Pending,
    PendingCall,
    PendingSearch,
    Planner,
    PlanProposal,
    PlanResult,
    Q,
    T,
)
from autohet.control.states.waiting import inherit
from autohet.control.values.effects import Round
from autohet.control.values.evaluation_log import EvaluationLog
from autohet.control.values.observation import Observation
from autohet.driver.loop.emulated_paces import paces_of
from autohet.driver.loop.planning import Planning, make_planning
from autohet.driver.loop.recorder import (
    MAPPINGS,
    READABLE,
    RecordedAnswer,
    RecordedResult,
    decided_document,
)
from autohet.driver.loop.value_codec import decode
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json, read_text
from planner.inputs.fleet import Fleet

FIRST = '{"version": '
"""Start of each driver's first line, and of no other line."""


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    difference: the first decision that differs from the record; None without any. drivers: number
    of recorded drivers, one after the other, that were replayed.
    """

    ticks: int
    decisions: int
    actions: int
    difference: str | None
    drivers: int = 1

    def followed_by(self, other: Replayed) -> Replayed:
        """Return the sum of this and of the next driver's replay."""
        difference = other.difference
        if difference and self.drivers:
            difference = f"driver {self.drivers + 1}, {difference}"
        return Replayed(
            ticks=self.ticks + other.ticks,
            decisions=self.decisions + other.decisions,
            actions=self.actions + other.actions,
            difference=difference,
            drivers=self.drivers + other.drivers,
        )


class OtherQuestion(Exception):
    """Question of the controller to the planner that the recorded run did not ask at this point."""


class AnsweredPlanning(Planning):
    """Planner of a replay: gives the recorded answers, to the recorded questions alone."""

    def __init__(self, planning: Planning) -> None:
        super().__init__(planning.inputs, planning.clock)
        self._planning = planning
        self.answers: list[RecordedAnswer | RecordedResult] = []
        self._searches = 0

    def ask(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        in_place: bool = False,
    ) -> PlanResult:
        answer = self._next(fleet, None)
        return PlanResult(self._made(answer), answer.why_not, answer.seconds)

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        self._searches += 1
        return PendingCall(partial(self.found, fleet, self._searches))

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        self._searches += 1
        return PendingCall(partial(self.result, question, self._searches))

    def result(self, question: Any, number: int) -> Any:
        """Return the recorded result of that question, or None if it has none at this tick."""
        if not self.answers:
            return None
        answer = self.answers[0]
        if not isinstance(answer, RecordedResult) or answer.number != number:
            return None
        if answer.question != question:
            raise OtherQuestion(f"the planner is asked {question}, and was asked {answer.question}")
        del self.answers[0]
        return answer.value

    def found(self, fleet: Fleet, number: int) -> PlanProposal | None:
        """Return the plan that the recorded search found, or None if it has none at this tick."""
        if not self.answers or self.answers[0].number != number:
            return None
        answer = self._next(fleet, number)
        if answer.proposal is None:
            raise ConfigError(answer.why_not)
        return self._made(answer)

    def _next(self, fleet: Fleet, number: int | None) -> RecordedAnswer:
        answer = None
        if self.answers:
            answer = self.answers.pop(0)
        if not isinstance(answer, RecordedAnswer) or answer.number != number:
            names = [node.name for node in fleet.nodes]
            raise OtherQuestion(f"the planner is asked about {names}, and was not then")
        if answer.fleet != fleet:
            raise OtherQuestion(
                f"the planner is asked about {fleet}, and was asked about {answer.fleet}"
            )
        return answer

    def _made(self, answer: RecordedAnswer) -> PlanProposal | None:
        """Return the recorded proposal with its cost model, which is not recorded."""
        if answer.proposal is None:
            return None
        cost = self._planning.make_cost(answer.fleet)
        return replace(answer.proposal, cost=cost)


def no_record(path: Path) -> ConfigError:
    return ConfigError(f"'{path}' is no record of a run's observations (version {READABLE[-1]})")


def lives_of(path: Path) -> list[list[tuple[int, str]]]:
    """Return the lines of a record, with their numbers, by the driver that wrote them.

    Raises ConfigError where the file cannot be read, or begins with no driver's first line.
    """
    lines = read_text(path, "observations").splitlines()
    if not lines or not lines[0].startswith(FIRST):
        raise no_record(path)

    lives: list[list[tuple[int, str]]] = []
    for number, line in enumerate(lines, 1):
        if line.startswith(FIRST):
            lives.append([])
        if line:
            lives[-1].append((number, line))
    return lives


def documents_of(life: Sequence[tuple[int, str]], path: Path) -> Iterator[Document]:
    """Yield the documents in one driver's lines.

    A last line that is cut off (its driver was killed) is ignored; another raises ConfigError.
    """
    for number, line in life:
        try:
            yield json.loads(line)
        except ValueError:
            if number < life[-1][0]:
                raise ConfigError(f"line {number} of '{path}' is not JSON") from None


def next_observation(before: Observation | None, document: Json) -> Observation:
    """Return the observation that differs from `before` by what was recorded."""
    found: dict[str, Any] = {}
    for name, item in document.items():
        if name not in MAPPINGS:
            found[name] = decode(item)
            continue
        new: dict[str, Any] = {}
        if before is not None:
            new.update(getattr(before, name))
        for key in item["gone"]:
            new.pop(key, None)
        for key, value in item["set"].items():
            new[key] = decode(value)
        # Without an order that was recorded, it is the one before.
        order = item.get("order", list(new))
        found[name] = {key: new[key] for key in order}
    if before is None:
        return Observation(**found)
    return replace(before, **found)


def replay(memory: JobMemory, planning: AnsweredPlanning, documents: Iterable[Json]) -> Replayed:
    """Replay one driver's recorded ticks; stop at the first difference.

    The memory must be the driver's own at its start.
    """
    seen: Observation | None = None
    so_far = Replayed(ticks=0, decisions=0, actions=0, difference=None)
    for line in documents:
        seen = next_observation(seen, line["seen"])
        planning.answers = [decode(answer) for answer in line["answers"]]
        made = _decide(memory, seen)
        so_far = replace(
            so_far,
            ticks=so_far.ticks + 1,
            decisions=so_far.decisions + len(made["decided"]),
            actions=so_far.actions + len(made["actions"]),
        )
        for name in ("error", "decided", "actions", "state"):
            if made[name] != line[name]:
                difference = first_difference(line[name], made[name])
                what = f"tick {so_far.ticks} (at {seen.now:.3f} s): {name} {difference}"
                return replace(so_far, difference=what)
        if planning.answers:
            what = f"tick {so_far.ticks}: the planner was asked more then"
            return replace(so_far, difference=what)
    return so_far


def _decide(memory: JobMemory, seen: Observation) -> Document:
    decided = Round()
    try:
        decided.collect(decide(memory, seen))
    except OtherQuestion as failure:
        document = decided_document(decided, memory.state)
        return {**document, "error": str(failure)}
    except Exception:  # noqa: BLE001 (the error is compared with the recorded one)
        pass
    return decided_document(decided, memory.state)


def first_difference(then: Any, now: Any) -> str:
    """Describe the first entry in which two lists differ, or else the two values."""
    if isinstance(then, list) and isinstance(now, list):
        for index, (old, new) in enumerate(zip_longest(then, now)):
            if old != new:
                return f"{index}: {json.dumps(old)} then, {json.dumps(new)} now"
    return f"{json.dumps(then)} then, {json.dumps(now)} now"


def memory_at_start(
    header: Mapping[str, Any], planning: AnsweredPlanning, orders: OrderBuilder
) -> JobMemory:
    """Return the recorded run's memory as it was before its first tick."""
    job = header["job"]
    memory = JobMemory(job, planning, orders)
    market = header.get("market")
    if market is not None:
        memory.buyer = Buyer(job, planning, market)
    goal = header.get("goal")
    memory.goal = None if goal is None else Goal(goal)
    memory.generation = header["generation"]
    memory.prepares = header.get("prepares", False)
    memory.cuts_over = header.get("cuts_over", False)
    memory.keeps_passes = header.get("keeps_passes", False)
    memory.prepares_at_death = header.get("prepares_at_death", False)
    told = header.get("told", NOTHING_TOLD)
    if header["first_step"] or told != NOTHING_TOLD:
        scales = header.get("loss_scales", "")
        memory.ledger.go_on_from(header["first_step"], told, scales)
        found = header.get("evaluations", {"losses": {}, "rows": None})
        losses = {int(step): loss for step, loss in found["losses"].items()}
        memory.ledger.evaluation_log = EvaluationLog(job.evaluation, losses, found["rows"])
    inherited = header.get("inherited")
    if inherited is not None and inherited.orders:
        inherit(memory, inherited)
    return memory


def replay_run(path: Path, *, paced: bool | None = None) -> Replayed:
    """Replay the observations recorded at `path`, for one driver of the run after the other.

    The replay ends with the first driver that decides otherwise than recorded. paced: true if
    workers were slowed to their types' speeds; None: as the job's emulation says, like in every run
    of the product.

    Raises:
        ConfigError: the file is no such record, or the model or profile that the job names is not
        here any more.
    """
    replayed = Replayed(ticks=0, decisions=0, actions=0, difference=None, drivers=0)
    for life in lives_of(path):
        driver = _replay_driver(documents_of(life, path), path, paced)
        replayed = replayed.followed_by(driver)
        if replayed.difference is not None:
            break
    return replayed


def _replay_driver(documents: Iterator[Document], path: Path, paced: bool | None) -> Replayed:
    first = next(documents, None)
    if first is None:
        # The driver was killed while it wrote its first line.
        return Replayed(ticks=0, decisions=0, actions=0, difference=None)
    if first.get("version") not in READABLE:
        raise no_record(path)
    header = {name: decode(fact) for name, fact in first.items() if name != "version"}
    job: Job = header["job"]
    zones = header.get("zones")
    planning = AnsweredPlanning(make_planning(job, zones=zones))
    if paced is None:
        paced = job.emulation is not None
    pace = paces_of if paced else None
    config = load_config(job.model, job.training)
    orders = OrderBuilder(job, layout_builder(config), pace, header["driver"], zones=zones)
    memory = memory_at_start(header, planning, orders)
    return replay(memory, planning, documents)
