"""The last checkpoint before an end or a wait, with a storage that fails."""

import pytest

from autohet.driver.control.states import Closing, Training, Waiting
from tests.driver.test_controller import run, trained
from tests.driver.test_overtaken import make_faulty


@pytest.mark.parametrize("fault", ["no upload", "no manifest"])
def test_a_storage_that_fails_does_not_end_a_job_that_stops_to_wait(fault):
    controller, workforce = make_faulty(nodes=2, min_workers=2)
    run(controller, trained(controller, 15))
    workforce.storage = fault
    workforce.warn("small-1", None)
    run(controller, lambda: isinstance(controller.state, Waiting))
    assert "not in durable storage: " in controller.events.records[-1]["reason"]
    done = controller.ledger.committed_steps
    workforce.join("small-2")
    run(controller, lambda: isinstance(controller.state, Training))
    assert controller.summary()["steps_lost"] == 0
    assert controller.ledger.committed_steps >= done


@pytest.mark.parametrize(("fault", "ticks"), [("no upload", 3), ("no manifest", 4)])
def test_a_failed_checkpoint_of_an_earlier_generation_does_not_condemn_the_next_one(fault, ticks):
    controller, workforce = make_faulty()
    run(controller, lambda: isinstance(controller.state, Closing))
    workforce.storage = fault
    for _ in range(ticks):
        controller.tick()
    workforce.kill("small-3")
    controller.tick()  # which brings the death and the error together
    assert controller.ledger.checkpoint_errors or workforce.seen.checkpoint.error
    workforce.storage = "works"
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason


def test_a_checkpoint_that_is_written_before_its_generation_is_known_to_be_ready_counts():
    """A node dies while the last step is made durable; the survivors' generation begins there, and
    has done all in no time.
    """
    controller, workforce = make_faulty()
    run(controller, lambda: isinstance(controller.state, Closing))
    workforce.kill("small-3")
    workforce.upload_s = 0.0
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason
    assert controller.ledger.checkpoint_step == 60
