"""`observations.jsonl`: record of a run's observations, planner answers and decisions by tick.

The decisions follow from the other two, which `autohet replay` shows.

The first line is the run (`job`, where it went on from, the `market` in which nodes may be bought).
A driver that is started again writes such a line anew, below what the killed one has left. Every
other line is a tick: `seen` has the fields of the observation that differ from the tick before (of
mappings the keys that differ, and which are `gone`), `answers` those of the planner in order,
`decided` the events without their time, `actions` with a SHA-256 of each one's whole content, and
the `state` that follows.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic

from autohet.control.job_state import State
from autohet.control.planning.proposals import (
    Pending,
    PendingSearch,
    Planner,
    PlanProposal,
    PlanResult,
    Q,
    T,
)
from autohet.control.values.actions import Action
from autohet.control.values.effects import Decision, Round
from autohet.control.values.observation import Observation
from autohet.driver.loop.planning import Planning
from autohet.driver.loop.value_codec import encode
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json
from planner.inputs.fleet import Fleet

logger = logging.getLogger("autohet")
VERSION = 9
READABLE = (7, 8, 9)
"""Versions that a replay reads; 8 has a job's deadline or budget, 9 generations without a stop."""
MAPPINGS = ("nodes", "notices", "reports", "losses", "risks")
FIELDS = tuple(field.name for field in fields(Observation))


@dataclass(frozen=True)
class RecordedAnswer:
    """Recorded answer of the planner about `fleet`.

    number: the search that it answers; None where the planner answered at once. why_not: the reason
    where no plan exists.
    """

    fleet: Fleet
    proposal: PlanProposal | None
    why_not: str
    seconds: float = 0.0
    number: int | None = None


@dataclass(frozen=True)
class RecordedResult:
    """Recorded result of the question `number` of `Planning.consider`."""

    question: Any
    value: Any
    number: int


class Recorder:
    """Writer of one driver's part of a record.

    What it cannot write ends the recording with a warning, never the run.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._before: Observation | None = None
        self._answers: list[RecordedAnswer | RecordedResult] = []
        """Answers of the planner in this tick."""

    def begin(self, **facts: Any) -> None:
        """Write the first line of this driver: what the controller is made from.

        The line before may be cut off.
        """
        encoded = {name: encode(fact) for name, fact in facts.items()}
        has_lines = self._file.tell() > 0
        self._write({"version": VERSION, **encoded}, before="\n" if has_lines else "")

    def record_answer(self, answer: RecordedAnswer | RecordedResult) -> None:
        """Keep an answer of the planner for the line of this tick."""
        if isinstance(answer, RecordedAnswer) and answer.proposal is not None:
            # A replay makes the cost model anew from the job: it need not be recorded.
            proposal = replace(answer.proposal, cost=None)  # type: ignore[arg-type]
            answer = replace(answer, proposal=proposal)
        self._answers.append(answer)

    def write_tick(self, seen: Observation, decided: Round, state: State) -> None:
        """Write the line of a tick. state: the state that follows."""
        try:
            line = {
                "seen": difference(self._before, seen),
                "answers": [encode(answer) for answer in self._answers],
                **decided_document(decided, state),
            }
            self._write(line)
        except TypeError as failure:
            self._end(failure)
        self._before = seen
        self._answers = []

    def _write(self, line: Json, before: str = "") -> None:
        try:
            if not self._file.closed:
                text = json.dumps(line)
                self._file.write(f"{before}{text}\n")
        except OSError as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        if not self._file.closed:
            logger.warning("The observations of this run are not recorded from here on: %s", error)
            self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            logger.warning("The last observations of this run are not recorded: %s", error)


def recorder_beside(events: Path | None) -> Recorder | None:
    """Return the recorder of a run that writes these events, if it writes any."""
    if events is None:
        return None
    prefix = "" if events.stem == "events" else f"{events.stem}-"
    return Recorder(events.with_name(f"{prefix}observations.jsonl"))


def difference(before: Observation | None, seen: Observation) -> Document:
    """Return the fields of `seen` that differ from `before`, encoded."""
    found: Document = {}
    for name in FIELDS:
        new = getattr(seen, name)
        old = None if before is None else getattr(before, name)
        if before is not None and _is_same(name, old, new):
            continue
        if name in MAPPINGS:
            found[name] = _mapping_difference(old or {}, new)
        else:
            found[name] = encode(new)
    return found


def _is_same(field: str, old: Any, new: Any) -> bool:
    if new is old:
        return True
    return field != "checkpoint" and bool(new == old)


def _mapping_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    changed = {key: encode(item) for key, item in new.items() if key not in old or old[key] != item}
    gone = old.keys() - new.keys()
    document: Document = {"set": changed, "gone": sorted(gone)}
    if list(new) != list(old):
        # Decisions depend on the order, which a replay would not know from what has changed.
        document["order"] = list(new)
    return document


def decided_document(decided: Round, state: State) -> Document:
    """Return a tick's events, actions and error, as they are read back from JSON."""
    documents = [each.document() for each in decided.events if isinstance(each, Decision)]
    error = None
    if decided.error is not None:
        error = type(decided.error).__name__
    return {
        # JSON turns tuples into lists and keys into strings.
        "decided": json.loads(json.dumps(documents)),
        "actions": [action_document(action) for action in decided.actions],
        "state": type(state).__name__,
        "error": error,
    }


def action_document(action: Action) -> Document:
    """Return an action's kind, whom it is for, and a digest of all that it says."""
    document: Document = {"do": type(action).__name__}
    for name in ("workers", "step", "generation", "node", "counts"):
        if hasattr(action, name):
            value = getattr(action, name)
            if isinstance(value, tuple):
                value = list(value)
            document[name] = value

    whole = json.dumps(encode(action))
    digest = hashlib.sha256(whole.encode())
    document["sha256"] = digest.hexdigest()
    return document


class RecordedPlanning(Planning):
    """Planner of a job whose answers are recorded."""

    def __init__(self, inner: Planning, recorder: Recorder) -> None:
        super().__init__(inner.inputs, inner.clock)
        self._inner = inner
        self._recorder = recorder
        self._searches = 0

    def expect(self, horizon_s: float, move_s: float) -> None:
        super().expect(horizon_s, move_s)
        self._inner.expect(horizon_s, move_s)

    def ask(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        in_place: bool = False,
    ) -> PlanResult:
        answer = self._inner.ask(fleet, current, redundant=redundant, in_place=in_place)
        recorded = RecordedAnswer(
            fleet=fleet, proposal=answer.proposal, why_not=answer.why_not, seconds=answer.seconds
        )
        self._recorder.record_answer(recorded)
        return answer

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        self._searches += 1
        search = self._inner.search(fleet, current)
        return _RecordedSearch(search, fleet, self._searches, self._recorder)

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        self._searches += 1
        pending = self._inner.consider(work, question)
        return _RecordedPending(pending, question, self._searches, self._recorder)


class _RecordedPending(Generic[T]):
    def __init__(self, inner: Pending[T], question: Any, number: int, recorder: Recorder) -> None:
        self._inner = inner
        self._question = question
        self._number = number
        self._recorder = recorder

    def result(self) -> T | None:
        found = self._inner.result()
        if found is not None:
            recorded = RecordedResult(self._question, found, self._number)
            self._recorder.record_answer(recorded)
        return found

    def drop(self) -> None:
        self._inner.drop()


class _RecordedSearch:
    def __init__(self, inner: PendingSearch, fleet: Fleet, number: int, recorder: Recorder) -> None:
        self._inner = inner
        self._fleet = fleet
        self._number = number
        self._recorder = recorder

    def result(self) -> PlanProposal | None:
        try:
            found = self._inner.result()
        except ConfigError as error:
            recorded = RecordedAnswer(self._fleet, None, str(error), number=self._number)
            self._recorder.record_answer(recorded)
            raise
        if found is not None:
            recorded = RecordedAnswer(self._fleet, found, "", number=self._number)
            self._recorder.record_answer(recorded)
        return found

    def drop(self) -> None:
        self._inner.drop()
