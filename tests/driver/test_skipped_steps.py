"""Steps that change no weights: one event each with its cause, and the end of a job that has too
many in a row.
"""

from dataclasses import replace
from typing import Any

import pytest

from autohet.control.ledger.skipped_steps import SkippedSteps, is_skipped, skipped_by_vote
from autohet.control.values.effects import Round
from autohet.runtime.messages import Skipped, SkipReason, StepRecord, WorkerReport
from tests.driver.test_controller import KIND, make, run
from tests.harness.scripted_workforce import ScriptedWorkforce

BROKEN = "model.layers.0.mlp.up_proj.weight"
NOT_FINITE = Skipped(SkipReason.NOT_FINITE)


class Skipping(ScriptedWorkforce):
    """Workers whose steps in `skipped` change no weights; the worker `small-0/0` knows why."""

    skipped: Any = ()
    reason = SkipReason.NOT_FINITE

    def _step(self, process: Any) -> WorkerReport:
        report = super()._step(process)
        records = tuple(self._as_told(report.worker, each) for each in report.steps)
        return replace(report, steps=records)

    def _as_told(self, worker: str, record: StepRecord) -> StepRecord:
        if record.step not in self.skipped:
            return record
        names = (BROKEN,) if worker == "small-0/0" else ()
        gradients = ("model.norm.weight",)
        told = Skipped(self.reason, "9.9", names, gradients, loss_not_finite=True)
        return replace(record, loss=float("nan"), gradient_norm=float("nan"), skipped=told)


def skipping(skipped: Any, steps: int = 40, **changes: Any) -> tuple[Any, Any]:
    workforce = Skipping(KIND)
    workforce.skipped = skipped
    controller, _ = make(steps=steps, workforce=workforce)
    training = replace(controller.memory.job.training, **changes)
    controller.memory.job = replace(controller.memory.job, training=training)
    return controller, workforce


def events(controller: Any) -> list[dict[str, Any]]:
    return [each for each in controller.events.records if each["kind"] == "skipped"]


def test_a_run_that_never_updates_ends_as_a_failure_with_a_checkpoint() -> None:
    controller, workforce = skipping(range(1000))
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok
    assert "steps in a row changed no weights" in controller.ended.reason
    assert f"{BROKEN} on small-0/0" in controller.ended.reason
    assert controller.summary()["steps"] < 12
    assert workforce.commits == [controller.summary()["steps"]]
    told = events(controller)
    assert [each["step"] for each in told] == list(range(controller.summary()["steps"]))
    assert {each["causes"][0]["worker"] for each in told} == {"small-0/0"}
    assert told[0]["causes"][0]["parameters"] == [BROKEN]
    assert len(told[0]["causes"]) == 4, "every worker's finding is in one event"


def test_a_few_skips_apart_are_events_and_the_run_is_done() -> None:
    controller, _ = skipping({3, 4, 9, 10, 11, 39})
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert [each["step"] for each in events(controller)] == [3, 4, 9, 10, 11, 39]


@pytest.mark.parametrize(("limit", "ok"), [(2, False), (3, False), (4, True), (None, True)])
def test_the_bound_counts_steps_in_a_row(limit: int | None, ok: bool) -> None:
    controller, _ = skipping({20, 21, 22}, max_skipped_steps=limit)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok == ok


@pytest.mark.parametrize("limit", [5, None])
def test_a_short_run_of_skips_alone_is_no_success(limit: int | None) -> None:
    controller, _ = skipping(range(1000), steps=2, max_skipped_steps=limit)
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok


def test_skips_that_the_job_asks_for_do_not_end_it() -> None:
    controller, workforce = skipping(range(10, 30))
    workforce.reason = SkipReason.REQUESTED
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert {each["reason"] for each in events(controller)} == {"training.skip_steps names it"}


def record(step: int, skipped: bool) -> StepRecord:
    told = Skipped(SkipReason.NOT_FINITE) if skipped else None
    return StepRecord(step, 1.0, 1.0, 64, 1.0, 1, 0.0, skipped=told)


def test_skips_before_and_after_a_restart_are_one_row() -> None:
    steps = SkippedSteps()
    steps.go_on_from(6)
    Round().collect(steps.log_finished(1, {}, 10, ()))
    assert (steps.in_a_row, steps.first) == (0, None), "a restarted run gets to try a step"
    records = {10: record(10, True)}
    Round().collect(steps.log_finished(1, records, 11, ()))
    assert (steps.in_a_row, steps.first) == (5, 6)
    records[11] = record(11, False)
    records[12] = record(12, True)
    Round().collect(steps.log_finished(1, records, 13, ()))
    assert (steps.in_a_row, steps.first) == (1, 12)


def test_a_step_that_only_a_vote_proves_counts_by_its_loss() -> None:
    for loss, gradient_norm in ((float("nan"), 1.0), (1.0, float("inf"))):
        assert is_skipped(replace(record(0, False), skipped=skipped_by_vote(loss, gradient_norm)))
    assert skipped_by_vote(1.0, 1.0) is None
    assert not is_skipped(record(0, False))


def test_an_event_does_not_wait_for_ever_for_a_worker_that_is_gone() -> None:
    decided = Round()
    steps = SkippedSteps()
    steps.take("a", 3, NOT_FINITE)
    decided.collect(steps.log_finished(1, {3: record(3, True)}, 4, ("a", "b")))
    assert not decided.events
    decided.collect(steps.log_finished(1, {3: record(3, True)}, 9, ("a", "b")))
    assert len(decided.events) == 1
    steps.take("a", 9, NOT_FINITE)
    decided.collect(steps.finish(1))
    assert len(decided.events) == 2
