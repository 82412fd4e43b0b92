"""`observations.jsonl`: record of a run's observations, planner answers and decisions by tick.

The decisions follow from the other two, which `autohet replay` shows.

The first line is the run (`job`, where it went on from, the `market` in which nodes may be bought).
A driver that is started again writes such a line anew, below what the killed one has left. Every
other line is a tick: `seen` has the fields of the observation that differ from the tick before (of
mappings the keys that differ, and which are `gone`), `answers` those of the planner in order,
`decided` the events without their time, `actions` with a SHA-256 of each one's whole content, and
the `state` that follows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic

from autohet.driver.control.actions import Action
from autohet.driver.control.effects import Decision, Round
from autohet.driver.control.observation import Observation
from autohet.driver.control.states import State
from autohet.driver.planning.proposals import (
    Pending,
    PendingSearch,
    Planning,
    PlanProposal,
    PlanResult,
    Q,
    T,
)
from autohet.driver.recording.value_codec import encode
from planner.cluster import Fleet
from planner.errors import ConfigError

logger = logging.getLogger("autohet")
VERSION = 7
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
        first = {"version": VERSION, **{name: encode(fact) for name, fact in facts.items()}}
        self._write(first, before="\n" if self._file.tell() else "")

    def answered(self, answer: RecordedAnswer | RecordedResult) -> None:
        """Keep an answer of the planner for the line of this tick."""
        if isinstance(answer, RecordedAnswer) and answer.proposal is not None:
            answer = replace(answer, proposal=replace(answer.proposal, cost=None))  # type: ignore[arg-type]
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

    def _write(self, line: Mapping[str, Any], before: str = "") -> None:
        try:
            if not self._file.closed:
                self._file.write(before + json.dumps(line) + "\n")
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


def difference(before: Observation | None, seen: Observation) -> dict[str, Any]:
    """Return the fields of `seen` that differ from `before`, encoded."""
    found: dict[str, Any] = {}
    for name in FIELDS:
        new = getattr(seen, name)
        old = None if before is None else getattr(before, name)
        if before is not None and (new is old or (name != "checkpoint" and new == old)):
            continue
        if name in MAPPINGS:
            old = old or {}
            changed = {
                key: encode(item) for key, item in new.items() if key not in old or old[key] != item
            }
            found[name] = {
                "set": changed,
                "gone": sorted(old.keys() - new.keys()),
                "order": list(new),
            }
            if found[name]["order"] == list(old):
                del found[name]["order"]
        else:
            found[name] = encode(new)
    return found


def decided_document(decided: Round, state: State) -> dict[str, Any]:
    """Return a tick's events, actions and error, as they are read back from JSON."""
    documents = [each.document() for each in decided.events if isinstance(each, Decision)]
    return {
        "decided": json.loads(json.dumps(documents)),
        "actions": [shown(action) for action in decided.actions],
        "state": type(state).__name__,
        "error": None if decided.error is None else type(decided.error).__name__,
    }


def shown(action: Action) -> dict[str, Any]:
    """Return an action's kind, whom it is for, and a digest of all that it says."""
    whole = json.dumps(encode(action)).encode()
    names = ("workers", "step", "generation", "node", "counts")
    content = {name: getattr(action, name) for name in names if hasattr(action, name)}
    plain = {
        name: list(item) if isinstance(item, tuple) else item for name, item in content.items()
    }
    return {"do": type(action).__name__, **plain, "sha256": hashlib.sha256(whole).hexdigest()}


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
        self, fleet: Fleet, current: PlanProposal | None, *, redundant: bool = True
    ) -> PlanResult:
        answer = self._inner.ask(fleet, current, redundant=redundant)
        self._recorder.answered(
            RecordedAnswer(fleet, answer.proposal, answer.why_not, answer.seconds)
        )
        return answer

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        self._searches += 1
        return _RecordedSearch(
            self._inner.search(fleet, current), fleet, self._searches, self._recorder
        )

    def consider(self, work: Callable[[Planning, Q], T], question: Q) -> Pending[T]:
        self._searches += 1
        return _RecordedPending(
            self._inner.consider(work, question), question, self._searches, self._recorder
        )


class _RecordedPending(Generic[T]):
    def __init__(self, inner: Pending[T], question: Any, number: int, recorder: Recorder) -> None:
        self._inner = inner
        self._question = question
        self._number = number
        self._recorder = recorder

    def result(self) -> T | None:
        found = self._inner.result()
        if found is not None:
            self._recorder.answered(RecordedResult(self._question, found, self._number))
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
            self._recorder.answered(
                RecordedAnswer(self._fleet, None, str(error), number=self._number)
            )
            raise
        if found is not None:
            self._recorder.answered(RecordedAnswer(self._fleet, found, "", number=self._number))
        return found

    def drop(self) -> None:
        self._inner.drop()
