"""What the driver makes of evaluations: one event each, a number that follows rollbacks, and the
best checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from autohet.control.ledger.ledger import Ledger
from autohet.control.ledger.run_summary import ledger_status, ledger_summary
from autohet.control.values import evaluation_log
from autohet.control.values.change import Change
from autohet.control.values.effects import Decision, Round
from autohet.control.values.evaluation_log import EvaluationLog
from autohet.control.values.observation import NodeView, Observation
from autohet.driver.callbacks.trackers import Scalars
from autohet.driver.job.elastic_trainer import History
from autohet.runtime.job import EvaluationSection, Job
from autohet.runtime.messages import NOT_EVALUATED, DataState, EvaluationRecord, Phase, WorkerReport
from planner.errors import ConfigError
from planner.inputs.fleet import Node, NodeType
from tests.driver.test_controller import KIND, make, run, trained
from tests.harness.fake_job import fake_job
from tests.harness.scripted_workforce import ScriptedWorkforce


def said(worker: str, step: int, loss: float, generation: int = 1) -> WorkerReport:
    record = EvaluationRecord(step, loss, 640, 10, 1.5, generation)
    return WorkerReport(
        worker, 1, generation, Phase.TRAINING, step, generation, evaluations=(record,)
    )


def seen(*reports: WorkerReport) -> Observation:
    return Observation(10.0, {}, reports={report.worker: report for report in reports})


def events_of(decided: Round) -> list[Mapping[str, Any]]:
    found = [each.document() for each in decided.events if isinstance(each, Decision)]
    return [event for event in found if event["kind"] == "evaluation"]


def test_an_evaluation_is_told_once_and_shown() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    decided.collect(ledger.record(seen(said("a/0", 4, 2.5), said("b/0", 4, 2.5)), 1))
    decided.collect(ledger.record(seen(said("a/0", 8, 2.0)), 1))
    events = events_of(decided)
    assert [(e["step"], e["evaluation_loss"]) for e in events] == [(4, 2.5), (8, 2.0)]
    status = ledger_status(ledger)
    assert (status["evaluation_loss"], status["evaluation_step"]) == (2.0, 8)
    evaluations = ledger_summary(ledger, [], None)["evaluations"]
    assert [(each["step"], each["loss"]) for each in evaluations] == [(4, 2.5), (8, 2.0)]


def test_what_a_run_went_back_behind_is_evaluated_again() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    decided.collect(ledger.record(seen(said("a/0", 4, 2.5)), 1))
    decided.collect(ledger.record(seen(said("a/0", 8, 2.0)), 1))
    decided.collect(
        ledger.begin_generation(2, Change("death", ("b",), 1.0, 1.0, 8, None, restore_step=6))
    )
    assert ledger.evaluations.keys() == {4}
    decided.collect(ledger.record(seen(said("a/0", 8, 1.0)), 2))
    assert ledger.evaluations.keys() == {4}, "words of a generation that is over"
    decided.collect(ledger.record(seen(said("a/0", 8, 1.9, generation=2)), 2))
    assert ledger.evaluations[8].loss == 1.9


def test_epochs_end_a_run_once_the_rows_are_counted() -> None:
    job = fake_job()
    training = replace(
        job.training, steps=None, max_epochs=1.5, warmup_steps=0, global_batch_sequences=16
    )
    ledger = Ledger(replace(job, training=training))
    assert ledger.last_step is None
    kind = NodeType("t4", "T4", 1, 1 << 34, 1e9, 1e9)
    view = NodeView(Node("a", kind), 0.0, data=DataState(1, 1, "digest", 100))
    Round().collect(ledger.record(Observation(10.0, {"a": view}), 1))
    assert (ledger.last_step, ledger_status(ledger)["steps"]) == (10, 10)
    assert ledger.training.with_rows(100) == ledger.training
    bounded = replace(training, steps=4)
    assert (bounded.last_step(100), bounded.last_step(0)) == (4, None)


def test_a_report_with_an_evaluation_is_news_once() -> None:
    report = said("a/0", 4, 2.5)
    assert report.is_news_after(report.without_news())
    assert not report.without_news().evaluations


def test_trackers_and_history_have_it_at_the_step_before() -> None:
    step = {"kind": "step", "step": 3, "generation": 1, "time": 1.0, "tokens": 64, "seconds": 0.5}
    numbers = {"loss": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5}
    evaluation = {"kind": "evaluation", "step": 4, "evaluation_loss": 2.5, "generation": 1}
    history, scalars = History(), Scalars()
    for event in ({**step, **numbers}, evaluation):
        history.on_event(event)
    assert scalars.of(evaluation) == (3, {"evaluation_loss": 2.5})
    (row,) = history.rows()
    assert (row["evaluation_loss"], row["learning_rate"], row["epoch"]) == (2.5, 0.1, 0.5)


def test_a_log_keeps_the_lowest_and_the_newest_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_log, "MOST_LOSSES", 50)
    log = EvaluationLog()
    for step in range(150):
        log.take(step, 0.5 if step == 7 else 10.0 + step)
    assert len(log.losses) <= 100
    assert 7 in log.losses
    assert 149 in log.losses
    log.take(8, float("nan"))
    assert log.best_steps()[0] == 7
    assert 8 not in log.best_steps()


def test_losses_of_other_evaluation_rows_are_not_compared() -> None:
    section = EvaluationSection(source="x", every_steps=4)
    log = EvaluationLog(section, {4: 0.1, 8: 0.2}, "one")
    assert log.use_rows(None) is None
    assert log.use_rows("one") is None
    assert log.losses
    sentence = log.use_rows("two")
    assert sentence is not None
    assert "until step 8" in sentence
    assert log.losses == {}
    # The same rows, of which fewer are read, are other rows.
    log.take(12, 0.3)
    fewer = EvaluationLog(replace(section, max_sequences=2), log.losses, log.rows)
    assert fewer.use_rows("two") is not None


def test_a_run_drops_losses_of_the_evaluation_rows_of_before_once_it_knows_its_own() -> None:
    job = fake_job(evaluation={"source": "x", "every_steps": 4})
    ledger, decided = Ledger(job), Round()
    ledger.evaluation_log = EvaluationLog(job.evaluation, {4: 0.1}, "before")
    kind = NodeType("t4", "T4", 1, 1 << 34, 1e9, 1e9)
    data = DataState(1, 1, "digest", 100, evaluation_digest="now")
    view = NodeView(Node("a", kind), 0.0, data=data)
    decided.collect(ledger.record(Observation(10.0, {"a": view}), 1))
    assert ledger.evaluation_log.losses == {}
    (event,) = [each for each in decided.events if isinstance(each, Decision)]
    assert "evaluation rows have changed" in str(event.document())


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_early_stopping_is_that_of_transformers(
    losses: list[int], patience: int, threshold: int
) -> None:
    arguments = TrainingArguments(
        output_dir="unused",
        load_best_model_at_end=True,
        eval_strategy="steps",
        save_strategy="steps",
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    theirs = EarlyStoppingCallback(patience, float(threshold))
    state, control = TrainerState(), TrainerControl()
    section = EvaluationSection(
        source="x", early_stopping_patience=patience, early_stopping_threshold=float(threshold)
    )
    ours = NOT_EVALUATED
    for loss in losses:
        theirs.on_evaluate(arguments, state, control, metrics={"eval_loss": float(loss)})
        # As its Trainer does after the callback.
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric = float(loss)
        ours = ours.after(float(loss), section)
        assert ours.ends_run(section) == control.should_training_stop
        if control.should_training_stop:
            return


@pytest.mark.parametrize(
    ("step", "due"), [(0, False), (4, True), (5, False), (8, True), (10, True)]
)
def test_when_an_evaluation_is_due(step: int, due: bool) -> None:
    section = EvaluationSection(source="x", every_steps=4)
    assert section.is_due(step, 10) == due
    assert EvaluationSection(source="x", every_steps=4, at_start=True).is_due(0, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": {"keep_best": 2}}, "keep_best is 2, but nothing is evaluated"),
        (
            {
                "evaluation": {"source": "x", "every_steps": 30},
                "checkpoint": {"keep_best": 2, "every_steps": 100},
            },
            "checkpoint.every, 100 steps, is no multiple of evaluation.every_steps, 30",
        ),
        (
            {
                "evaluation": {"source": "x", "every_steps": 50},
                "checkpoint": {"keep_best": 2, "keep": "all"},
            },
            "keep_best is 2, but checkpoint.keep is all",
        ),
        (
            {"evaluation": {"source": [{"path": "x", "weight": 1.0}]}},
            "evaluation.source has weights",
        ),
        ({"evaluation": {"source": "x"}, "parallelism": {"spmd": True}}, "parallelism.spmd"),
        ({"evaluation": {"source": "x", "max_sequences": 0}}, "max_sequences is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    document = {
        "model": {"config": {"model_type": "llama"}},
        "training": {"global_batch_sequences": 4, "sequence_length": 8},
        "data": {"source": "y"},
    }
    with pytest.raises(ConfigError, match=message):
        Job.from_document(document | changes)


class Evaluating(ScriptedWorkforce):
    """Workers that evaluate every fourth step, as the worker's training loop does."""

    losses_by_step: Mapping[int, float] = {}
    section: Any = None

    def _step(self, process: Any) -> WorkerReport:
        report = super()._step(process)
        step, order = process.report.step, process.order
        if step not in self.losses_by_step:
            return report
        loss = self.losses_by_step[step]
        record = EvaluationRecord(step, loss, 640, 10, 1.5, order.generation)
        before = getattr(process, "progress", {}).get(order.generation, order.evaluation_progress)
        process.progress = {order.generation: before.after(loss, self.section)}
        receipts = report.receipts
        if process.progress[order.generation].ends_run(self.section):
            process.report = replace(process.report, phase=Phase.FINISHED)
            receipts = ((order.generation, step, ("written",)),)
        return replace(process.report, steps=report.steps, evaluations=(record,), receipts=receipts)


@pytest.mark.parametrize("kill_at", [None, 9, 13, 18])
def test_a_run_stops_early_at_the_same_step_whatever_happens_to_its_fleet(
    kill_at: int | None,
) -> None:
    workforce = Evaluating(KIND)
    workforce.losses_by_step = {4: 3.0, 8: 2.0, 12: 2.1, 16: 2.2, 20: 2.0, 24: 1.0}
    controller, _ = make(workforce=workforce)
    memory = controller.memory
    workforce.section = EvaluationSection(source="x", every_steps=4, early_stopping_patience=3)
    memory.job = replace(memory.job, evaluation=workforce.section)
    memory.ledger.evaluation_log = EvaluationLog(workforce.section)
    if kill_at is not None:
        run(controller, trained(controller, kill_at))
        workforce.kill("small-3")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert "lowest loss is 2.0000 after step 8" in controller.ended.reason
    assert workforce.commits[-1] == memory.ledger.committed_steps == memory.ledger.last_step == 20
    assert controller.summary()["steps"] == 20


def test_an_order_for_an_evaluated_step_that_ended_the_run_trains_no_further() -> None:
    section = EvaluationSection(source="x", every_steps=4, early_stopping_patience=1)
    log = EvaluationLog(section, {4: 1.0, 8: 2.0, 12: 0.5})
    assert [step for step in (4, 8, 9, 12) if log.ends_run(step)] == [8]
    log.go_back_to(8)
    ledger = Ledger(fake_job())
    ledger.evaluation_log = log
    ledger.go_on_from(9)
    assert ledger.last_step == 40, "a larger patience let it go on, and the smaller one is judged"
