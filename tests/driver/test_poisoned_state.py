"""A restored state whose steps change no weights: the next older checkpoint is tried, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autohet.control.ledger.skipped_steps import SKIPPED_FROM
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.runtime.messages import StepRecord
from autohet.simulate.fleet.manifest import SimulatedManifest
from planner.inputs.fleet import Fleet
from recovery.checkpoint.commit import find_newest, list_checkpoints
from recovery.state.ancestry import Ancestry, Descent
from recovery.storage.open import open_storage
from tests.driver.test_controller import KIND, make, run
from tests.driver.test_durable import ticks_until
from tests.driver.test_skipped_steps import Skipping
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all

NEWEST, OLDER = 20, 10


class Poisoned(Skipping):
    """Every step of a generation that began at a step in `poison` is skipped, but the first.

    older: the checkpoint that the storage finds when it is asked to fall back.
    """

    poison: Any = ()
    older: Any = None
    answers = True
    asked: Any = ()
    starts: Any = ()

    def begin(self, orders: Any) -> None:
        super().begin(orders)
        self.starts = (*self.starts, next(iter(orders.values())).start_step)

    def _as_told(self, worker: str, record: StepRecord) -> StepRecord:
        start = self.starts[-1]
        poisoned = start in self.poison and record.step > start
        self.skipped = {record.step} if poisoned else ()
        return super()._as_told(worker, record)

    def fall_back(self, step: int, generation: int) -> None:
        self.asked = (*self.asked, (step, generation))
        if not self.answers:
            return
        if self.older is not None:
            found = self.checkpoint.followed_by(self.older.step, "here/older", self.older)
            self.checkpoint = found
        self.checkpoint = replace(self.checkpoint, fallback=step)


def poisoned(*poison: int, older: bool = True, **training: Any) -> tuple[Any, Poisoned]:
    """A driver that goes on from step 20, with a checkpoint of step 10 before it."""
    workforce = Poisoned(KIND)
    controller, _ = make(workforce=workforce)
    memory = controller.memory
    memory.job = replace(memory.job, training=replace(memory.job.training, **training))
    fleet = Fleet(1, tuple(view.node for view in workforce.nodes.values()))
    layout = memory.orders._layout(memory.planning.ask(fleet, None).proposal.plan)
    manifests = {step: SimulatedManifest(step, 3, layout.shards) for step in (OLDER, NEWEST)}
    workforce.poison = poison
    workforce.older = manifests[OLDER] if older else None
    ancestry = Ancestry().followed_by(Descent(generation=3, parent=None, first_step=0))
    found = workforce.checkpoint.followed_by(NEWEST, "here/20", manifests[NEWEST])
    workforce.checkpoint = replace(found, ancestry=ancestry)
    memory.generation = 3
    return controller, workforce


@pytest.mark.parametrize("limit", [5, 3, None])
def test_the_older_checkpoint_is_gone_on_from_where_the_newest_is_poisoned(
    limit: int | None,
) -> None:
    controller, workforce = poisoned(NEWEST, max_skipped_steps=limit)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason
    assert workforce.starts == (NEWEST, OLDER)
    assert workforce.asked == ((NEWEST, 4),)
    (said,) = (
        e["reason"]
        for e in controller.events.records
        if e["kind"] == "decision" and "go back to the checkpoint" in e["reason"]
    )
    assert "step 10" in said
    assert "step 20 was restored" in said
    assert set(controller.memory.ledger.records) == set(range(OLDER, 40))
    (change,) = controller.summary()["reconfigurations"]
    assert change["steps_lost"] >= NEWEST - OLDER
    assert change["bytes_by_tier"] is not None


def test_it_is_tried_once_and_then_the_job_ends() -> None:
    controller, workforce = poisoned(NEWEST, OLDER)
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok
    assert "steps in a row changed no weights" in controller.ended.reason
    assert workforce.starts == (NEWEST, OLDER)
    assert len(workforce.asked) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_without_an_older_one_or_an_answer_the_job_ends_as_before(answers: bool) -> None:
    controller, workforce = poisoned(NEWEST, older=False)
    workforce.answers = answers
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok
    assert workforce.starts == (NEWEST,)


def test_steps_that_fail_long_after_a_restore_have_another_cause() -> None:
    controller, workforce = poisoned()
    original = workforce._as_told

    def late(worker: str, record: StepRecord) -> StepRecord:
        workforce.poison = (NEWEST,) if record.step >= NEWEST + 8 else ()
        return original(worker, record)

    workforce._as_told = late  # type: ignore[method-assign]
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok
    assert not workforce.asked


def test_a_death_on_the_way_back_leads_to_the_older_checkpoint_all_the_same() -> None:
    controller, workforce = poisoned(NEWEST)
    run(controller, lambda: bool(workforce.asked))
    workforce.kill("small-3")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert workforce.starts[-1] == OLDER
    assert NEWEST not in workforce.starts[1:]


def commit(durable: Durable, step: int, generation: int, layout: Any) -> None:
    receipts = write_all(durable.storage, step, layout, full_state(layout.tensors, step))
    durable.commit(step, generation, layout, receipts)
    durable.work_pool.submit(int).result(30)


def test_the_storage_passes_over_what_was_given_up_and_takes_it_again_when_it_is_trained_again(
    tmp_path: Path,
) -> None:
    layout, storage = two_worker_layout(state_specs()), open_storage(str(tmp_path))
    durable = Durable(storage, RunFacts("job", {}, {}), Retention(2), lease_s=60.0)
    durable.take_lease()
    driver = durable.lease.driver
    durable.claim(Descent(generation=1, parent=None, first_step=0, driver=driver))
    durable.claim_pool.submit(int).result(20)
    for step in (OLDER, NEWEST):
        commit(durable, step, 1, layout)
    durable.record(SKIPPED_FROM, NEWEST + 1)
    commit(durable, NEWEST + 4, 1, layout)
    assert len(list_checkpoints(storage)) == 3, "nothing is removed while steps are skipped"

    durable.fall_back(NEWEST, 1)
    ticks_until(durable, lambda: durable.state().fallback == NEWEST)
    assert durable.state().step == OLDER
    commit(durable, NEWEST + 6, 1, layout)
    assert durable.state().step == OLDER, "a commit of the poisoned generation came late"
    durable.refresh()
    ticks_until(durable, durable.fresh)
    assert durable.state().step == OLDER

    durable.record(SKIPPED_FROM, None)
    durable.claim(Descent(generation=2, parent=1, first_step=OLDER, driver=driver))
    durable.claim_pool.submit(int).result(20)
    assert find_newest(storage).info.step == OLDER, "another driver passes over it, too"
    commit(durable, NEWEST, 2, layout)
    durable.refresh()
    ticks_until(durable, durable.fresh)
    assert durable.state().step == NEWEST
    assert durable.state().manifest.generation == 2
    durable.fall_back(OLDER, 2)
    ticks_until(durable, lambda: durable.state().fallback == OLDER)
    assert durable.state().step == NEWEST, "there is none before it"
    durable.close()
