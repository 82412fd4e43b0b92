"""What a ledger keeps when one generation follows another."""

from __future__ import annotations

import json
from pathlib import Path

from autohet.driver.control.change import Change
from autohet.driver.control.events import EventLog
from autohet.driver.control.ledger import Ledger
from autohet.driver.control.observation import Observation
from autohet.runtime.messages import Phase, StepRecord, WorkerReport
from tests.driver.test_upkeep import orders, reports
from tests.harness.fake_job import fake_job


def test_steps_that_come_with_the_news_of_readiness_are_kept() -> None:
    ledger = Ledger(None, EventLog(None))  # type: ignore[arg-type]
    record = StepRecord(16, 1.0, 1.0, 64, 0.01, 2, 10.0)
    report = WorkerReport("a/0", 1, 2, Phase.TRAINING, 17, 2, steps=(record,))
    ledger.take(Observation(10.0, {}, reports={"a/0": report}), 2)
    change = Change("notice", ("b",), 9.0, 9.0, 16, None, restore_step=16)
    ledger.begin_generation(2, change)
    assert ledger.committed_steps == 17


def test_a_vote_that_came_before_the_news_of_readiness_can_roll_the_others_forward() -> None:
    ledger = Ledger(None, EventLog(None))  # type: ignore[arg-type]
    older = WorkerReport("b/0", 1, 3, Phase.BUILDING, 18, 2, vote=(17, "of generation 2"))
    seer = WorkerReport("a/0", 1, 3, Phase.TRAINING, 17, 3, vote=(16, "of generation 3"))
    ledger.take(Observation(10.0, {}, reports={"a/0": seer, "b/0": older}), 3)
    assert ledger.newest_vote(3) == (16, "of generation 3")
    assert ledger.newest_vote(2) is None


def test_a_step_that_only_a_snapshot_proves_keeps_its_place_among_the_losses() -> None:
    ledger = Ledger(fake_job(), EventLog(None))
    steps = (StepRecord(0, 3.0, 1.0, 64, 0.01, 1, 10.0), StepRecord(1, 2.0, 1.0, 64, 0.01, 1, 10.0))
    report = WorkerReport("a/0", 1, 1, Phase.TRAINING, 2, 1, steps=steps)
    ledger.take(Observation(10.0, {}, reports={"a/0": report}), 1)
    ledger.begin_generation(2, Change("death", ("a",), 10.0, 10.0, 2, None, restore_step=3))
    assert ledger.committed_steps == 3
    summary = ledger.summary(2, [])
    assert (summary["steps"], summary["losses"], summary["final_loss"]) == (3, [3.0, 2.0, None], 2.0)


def test_a_snapshot_is_told_once_every_worker_has_it_and_its_copies(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    ledger = Ledger(fake_job(), events)
    ledger.orders = orders()
    for a, b in (((12, None), (12, 11)), ((12, 11), (13, 12)), ((13, 11), (13, 12)), ((14, 13), (14, 13))):
        ledger.take(Observation(10.0, {}, reports=reports(a, b)), 2)
    ledger.orders = orders(3, start=12)  # gone back
    ledger.take(Observation(11.0, {}, reports=reports((12, 12), (12, 12), generation=3)), 3)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["generation"], e["step"]) for e in told if e["kind"] == "snapshot"] == [(2, 11), (2, 13), (3, 12)]
