"""A driver that dies while its workers train: they train on, and the next driver adopts them."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Inherited, Training
from autohet.control.states.waiting import inherit
from autohet.driver.job.run_record import steps_told
from recovery.state.ancestry import Descent
from tests.faults.conftest import Scene
from tests.harness.exact_job import LONG, differing_shards, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import StruckRun, losses_by_step, read_events
from tests.harness.waits import HANG_S

GAP_S = 1.0


def tick_until_step(run: StruckRun, step: int) -> None:
    until = time.monotonic() + HANG_S
    while run.controller.memory.ledger.committed_steps < step:
        assert time.monotonic() < until, run.state()
        run.tick()


@pytest.mark.faults
def test_the_next_driver_adopts_what_trains_and_the_old_one_counts_no_more(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    job = exact_job(tmp_path, long_scene.shared, memory, training=LONG)
    with nothing_left(memory):
        first = StruckRun(job, tmp_path)
        first.start()
        tick_until_step(first, 5)
        assert first.durable._keeper is not None
        first.durable._keeper.close()  # it is dead, or frozen: it renews nothing
        order = next(iter(first.controller.memory.ledger.orders.values()))
        starts = dict(first.fleet.starts)
        time.sleep(GAP_S)

        fleet: Any = first.fleet
        fleet.add = lambda *_: None
        (tmp_path / "second").mkdir()
        second = StruckRun(job, tmp_path / "second", fleet=lambda *_: fleet)
        fleet.durable = second.durable
        second.start()
        assert first.events.path is not None
        told = steps_told(first.events.path)
        assert told.newest == (order.generation, told.until - 1)
        second.controller.memory.ledger.go_on_from(0, told)
        newest = second.durable.state().ancestry.newest
        inherit(second.controller.memory, Inherited((order,), (), newest))
        second.tick()
        assert isinstance(second.controller.state, Training)
        first.durable.claim(
            Descent(generation=order.generation + 1, parent=order.generation, first_step=6)
        )
        first.durable.commit(6, order.generation, order.layout, ())
        for pool in (first.durable.claim_pool, first.durable.work_pool):
            pool.submit(lambda: None).result()
        assert "has taken the job over" in str(first.durable.state().superseded)
        until = time.monotonic() + HANG_S
        while second.controller.ended is None:
            assert time.monotonic() < until, second.state()
            second.tick()
        assert second.controller.ended.ok, second.controller.ended.reason
        assert second.durable.state().superseded is None
        second.close(forget=True)
        first.durable.close()
        first.events.close()
    assert dict(fleet.starts) == starts, "no process was started"
    assert second.events.path is not None
    events = read_events(first.events.path) + read_events(second.events.path)
    assert Counter(e["step"] for e in events if e["kind"] == "step") == Counter(
        range(LONG["steps"])
    )
    assert sum(event["kind"] == "restore" for event in events) == 1
    assert losses_by_step(events) == list(long_scene.reference.losses)
    assert differing_shards(str(tmp_path / "checkpoints"), long_scene.reference) == []
