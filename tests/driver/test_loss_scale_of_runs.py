"""The scale of gradients in fp16 on its way: from steps to events, to manifests, and to the orders
of the next generation or the next driver.
"""

from types import SimpleNamespace
from typing import Any

from autohet.control.ledger.ledger import Ledger
from autohet.control.planning.orders import OrderBuilder, OrderTerms
from autohet.control.values.change import Change
from autohet.control.values.effects import Decision, Round
from autohet.control.values.observation import Observation
from autohet.driver.checkpoints.resumption import loss_scales
from autohet.driver.loop.replay import memory_at_start
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.messages import Phase, StepRecord, WorkerReport
from autohet.runtime.models.config import load_config
from autohet.runtime.step.loss_scale import FIRST_SCALE, LOSS_SCALE, LossScale
from tests.driver.test_orders import ONE, A, B, make_book, observe
from tests.harness.fake_job import fake_job

HALVED = LossScale(2, 8)


def said(worker: str, scales: dict[int, LossScale], generation: int = 1) -> WorkerReport:
    records = tuple(
        StepRecord(step, 2.0, 1.0, 64, 0.5, generation, float(step), loss_scale=scale)
        for step, scale in scales.items()
    )
    return WorkerReport(
        worker, 1, generation, Phase.TRAINING, max(scales) + 1, generation, steps=records
    )


def seen(*reports: WorkerReport) -> Observation:
    return Observation(10.0, {}, reports={report.worker: report for report in reports})


def ledger_of_a_run() -> tuple[Ledger, list[Any]]:
    """Four steps, of which the third overflowed twice."""
    decided, ledger = Round(), Ledger(fake_job())
    scales = {0: FIRST_SCALE, 1: FIRST_SCALE, 2: HALVED, 3: HALVED}
    decided.collect(ledger.record(seen(said(A, scales), said(B, scales)), 1))
    return ledger, [each.document() for each in decided.events if isinstance(each, Decision)]


def manifest_of(text: str | None) -> Any:
    return SimpleNamespace(scalars={LOSS_SCALE: text})


def test_step_events_tell_the_scale() -> None:
    _, events = ledger_of_a_run()
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["loss_scale"] for event in steps] == [1024.0, 1024.0, 256.0, 256.0]


def test_orders_give_the_scale_of_the_step_before() -> None:
    ledger, _ = ledger_of_a_run()
    book: OrderBuilder = make_book()
    terms = OrderTerms(10, loss_scales=ledger.loss_scales)
    orders = book.write(1, ONE, observe("a", "b"), (), terms).orders
    assert {order.loss_scale for order in orders.values()} == {FIRST_SCALE}, "it begins at step 0"
    assert ledger.loss_scales.before(4) == HALVED


def test_a_step_that_is_run_again_begins_with_its_old_scale() -> None:
    ledger, _ = ledger_of_a_run()
    Round().collect(
        ledger.begin_generation(2, Change("death", ("b",), 1.0, 1.0, 4, None, restore_step=2))
    )
    assert ledger.loss_scales.before(2) == FIRST_SCALE
    Round().collect(ledger.record(seen(said(A, {2: LossScale(2, 9)}, generation=2)), 2))
    assert ledger.loss_scales.text == "0:10 2:9"


def test_the_next_driver_goes_on_with_the_scale_of_its_checkpoint() -> None:
    ledger, _ = ledger_of_a_run()
    text = loss_scales(manifest_of(ledger.loss_scales.text))
    later = Ledger(fake_job())
    later.go_on_from(4, loss_scales=text)
    assert later.loss_scales.before(4) == HALVED
    assert loss_scales(manifest_of(None)) == ""


def test_a_replay_begins_with_the_recorded_scale() -> None:
    job = fake_job()
    header = {"job": job, "generation": 3, "first_step": 4, "loss_scales": "0:10 2:8"}
    planning: Any = None
    memory = memory_at_start(
        header, planning, OrderBuilder(job, layout_builder(load_config(job.model, job.training)))
    )
    assert memory.ledger.loss_scales.before(4) == HALVED
