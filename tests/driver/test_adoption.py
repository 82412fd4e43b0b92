"""A driver that takes over living workers: it changes nothing where all train, and plans anew with
the same processes where they do not.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Adopting, Inherited, Training
from autohet.control.ledger.ledger import ToldSteps
from autohet.control.states.waiting import inherit
from autohet.control.values.actions import (
    Action,
    Begin,
    CommitCheckpoint,
    Dismiss,
    Hire,
    Interrupt,
    RequestStop,
)
from autohet.control.values.observation import Loss
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.run_record import steps_told
from autohet.driver.loop import controller as loop
from autohet.driver.loop.controller import Controller
from autohet.runtime.messages import Phase
from tests.driver.test_controller import causes, make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce

CHANGES = (Begin, Hire, Dismiss, Interrupt, RequestStop)


def adopt(
    before: Controller,
    workforce: ScriptedWorkforce,
    told: ToldSteps | None = None,
    newest: int | None = None,
    committed: int = -1,
) -> Controller:
    """The next driver of the run, which knows what its workers and its events say."""
    after, _ = make(nodes=0, workforce=workforce)
    generations = {
        process.order.generation: process.order for process in workforce.processes.values()
    }
    orders = tuple(generations[number] for number in sorted(generations))
    memory = after.memory
    workforce.checkpoint = replace(workforce.checkpoint, ancestry=before.memory.orders.ancestry)
    if told is None:
        records = before.memory.ledger.records
        told = ToldSteps(0, frozenset(records), None, (orders[-1].generation, max(records)))
    memory.ledger.go_on_from(0, told)
    newest = newest or orders[-1].generation
    inherit(memory, Inherited(orders, newest=newest, committed=committed))
    return after


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """The actions that are carried out from now on."""
    found: list[Action] = []
    execute = loop.execute

    def note(action: Action, workforce: Any) -> None:
        found.append(action)
        execute(action, workforce)

    monkeypatch.setattr(loop, "execute", note)
    return found


def test_where_all_train_nothing_is_changed_and_each_step_has_one_event(
    tmp_path: Path, done: list[Action]
) -> None:
    before, workforce = make()
    before.events = EventLog(tmp_path / "events.jsonl")
    run(before, trained(before, 5))
    generation = before.memory.generation
    # What the first driver has observed last, it has not recorded: it is reported again.
    again = {worker: workforce._live(p) for worker, p in workforce.processes.items()}
    done.clear()
    after = adopt(before, workforce, steps_told(tmp_path / "events.jsonl"))
    after.events = EventLog(tmp_path / "events.jsonl")
    observe = workforce.observe
    told_twice = before.memory.ledger.records[3]

    def with_news() -> Any:
        seen = observe()
        workforce.observe = observe  # type: ignore[method-assign]
        reports = {}
        for worker, report in seen.reports.items():
            steps = (told_twice, *again[worker].steps, *report.steps)
            reports[worker] = replace(report, steps=steps)
        return replace(seen, reports=reports)

    workforce.observe = with_news  # type: ignore[method-assign]
    after.tick()
    assert isinstance(after.state, Training)
    assert after.memory.generation == generation
    run(after, lambda: bool(after.ended))
    assert after.ended is not None
    assert after.ended.ok
    assert not [action for action in done if isinstance(action, CHANGES)]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    steps = Counter(line["step"] for line in lines if line["kind"] == "step")
    assert steps == Counter(range(40))
    assert not [line for line in lines[-40:] if line["kind"] in ("restore", "reconfigure")]


def halt(workforce: ScriptedWorkforce, worker: str) -> None:
    process = workforce.processes[worker]
    process.report = replace(process.report, phase=Phase.HALTED, error="PeerLost")


def die(workforce: ScriptedWorkforce, worker: str) -> None:
    workforce.lose(worker)
    workforce.losses[worker] = Loss(worker, "no driver was there", workforce.now, workforce.now)


@pytest.mark.parametrize(
    ("what", "cause"),
    [(halt, ["death"]), (die, ["death"]), (None, [])],
    ids=["halt", "die", "old"],
)
def test_where_not_all_train_the_living_processes_are_planned_on_anew(
    what: Callable[[ScriptedWorkforce, str], None] | None, cause: list[str], done: list[Action]
) -> None:
    """None: all train, in a generation that is not the newest in the journal."""
    before, workforce = make()
    run(before, trained(before, 5))
    generation = before.memory.generation
    processes = dict(workforce.processes)
    victim = before.memory.members[-1]
    done.clear()
    newest = generation
    if what is not None:
        what(workforce, victim)
    else:
        newest += 1
    after = adopt(before, workforce, newest=newest)
    run(after, trained(after, 6))
    assert after.memory.generation > generation
    survivors = {worker for worker, p in workforce.processes.items() if processes.get(worker) is p}
    assert survivors >= processes.keys() - {victim}
    hired = {worker for action in done if isinstance(action, Hire) for worker in action.workers}
    assert hired <= {victim}
    run(after, lambda: bool(after.ended))
    assert after.ended is not None
    assert after.ended.ok
    assert causes(after)[:1] == cause
    assert min(after.memory.ledger.records) >= 5, "no step is run again"


def test_a_repair_waits_for_the_agents_of_the_living(done: list[Action]) -> None:
    """Wrong: it is planned for the one node whose agent the driver has heard first."""
    before, workforce = make()
    run(before, trained(before, 5))
    die(workforce, before.memory.members[-1])
    done.clear()
    after = adopt(before, workforce)
    alive = set(workforce.processes)
    heard = dict(workforce.nodes)
    for name in list(heard)[1:]:
        workforce.nodes[name] = replace(heard[name], endpoint=None)
    for _ in range(5):
        after.tick()
        assert isinstance(after.state, Adopting)
    workforce.nodes.update(heard)
    run(after, trained(after, 6))
    first = next(action for action in done if isinstance(action, Begin))
    assert alive <= set(first.orders)


def test_a_stop_that_came_while_no_driver_was_there_stops_it() -> None:
    before, workforce = make()
    run(before, trained(before, 5))
    after = adopt(before, workforce)
    workforce.stop_reason = "autohet stop"
    run(after, lambda: bool(after.ended))
    assert after.ended is not None
    assert (after.ended.ok, "autohet stop" in after.ended.reason) == (False, True)
    assert workforce.commits


def test_a_part_that_is_told_again_of_a_committed_step_commits_nothing(done: list[Action]) -> None:
    """The storage had the receipts of step 4 before, and the next driver has committed it."""
    before, workforce = make()
    run(before, trained(before, 5))
    done.clear()
    after = adopt(before, workforce, committed=4)
    observe = workforce.observe

    def with_receipts() -> Any:
        seen = observe()
        reports = {}
        for worker, report in seen.reports.items():
            told = [(report.generation, step, ("written",)) for step in (4, 6)]
            reports[worker] = replace(report, receipts=tuple(told))
        return replace(seen, reports=reports)

    workforce.observe = with_receipts  # type: ignore[method-assign]
    after.tick()
    assert [action.step for action in done if isinstance(action, CommitCheckpoint)] == [6]
