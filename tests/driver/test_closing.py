"""The last checkpoint before an end or a wait, with a storage that fails."""

from dataclasses import replace

import pytest

from autohet.control.job_state import Closing, Training, Waiting
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
    done = controller.memory.ledger.committed_steps
    workforce.join("small-2")
    run(controller, lambda: isinstance(controller.state, Training))
    assert controller.summary()["steps_lost"] == 0
    assert controller.memory.ledger.committed_steps >= done


@pytest.mark.parametrize(("fault", "ticks"), [("no upload", 3), ("no manifest", 4)])
def test_a_failed_checkpoint_of_an_earlier_generation_does_not_condemn_the_next_one(fault, ticks):
    controller, workforce = make_faulty()
    run(controller, lambda: isinstance(controller.state, Closing))
    workforce.storage = fault
    for _ in range(ticks):
        controller.tick()
    workforce.kill("small-3")
    controller.tick()  # which brings the death and the error together
    assert controller.memory.ledger.checkpoints.errors or workforce.seen.checkpoint.error
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
    assert controller.memory.ledger.checkpoints.step == 60


@pytest.mark.parametrize("fault", ["upload later", "manifest later"])
def test_a_job_does_not_end_while_its_last_checkpoint_is_tried_again(fault):
    """The storage fails at the last step, and for some time; it is said at once which step is
    safe.
    """
    controller, workforce = make_faulty()
    run(controller, trained(controller, 50))
    safe = controller.memory.ledger.checkpoints.step
    workforce.storage = fault
    run(controller, lambda: controller.memory.ledger.checkpoints.failing is not None)
    (event,) = [each for each in controller.events.records if each["kind"] == "checkpoint_failed"]
    assert (event["safe_step"], event["is_retried"]) == (safe, True)
    assert "the storage is full" in event["error"]
    failing = controller.status()["checkpoint_failing"]
    assert failing["step"] == event["step"]
    run(controller, lambda: isinstance(controller.state, Closing))
    since = workforce.now
    run(controller, lambda: workforce.now > since + 30)
    assert controller.ended is None
    workforce.storage = "works"
    if workforce.uncommitted is not None:
        workforce.commit_checkpoint(*workforce.uncommitted)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason
    assert controller.memory.ledger.checkpoints.step == 60
    assert controller.status()["checkpoint_failing"] is None


def test_a_job_ends_once_its_last_checkpoint_was_tried_for_the_time_limit():
    controller, workforce = make_faulty()
    run(controller, trained(controller, 50))
    workforce.storage = "manifest later"
    run(controller, lambda: isinstance(controller.state, Closing))
    since = workforce.now
    run(controller, lambda: controller.ended, ticks=10**5)
    assert not controller.ended.ok
    assert "the storage is full" in controller.ended.reason
    assert workforce.now - since >= controller.memory.timeouts.checkpoint_s


def test_checkpoints_that_fail_in_the_middle_are_said_once_each_with_the_step_that_is_safe():
    controller, workforce = make_faulty(steps=90)
    run(controller, trained(controller, 20))
    safe = controller.memory.ledger.checkpoints.step
    workforce.storage = "no upload"
    run(controller, trained(controller, 55))
    failed = [each for each in controller.events.records if each["kind"] == "checkpoint_failed"]
    steps = [each["step"] for each in failed]
    assert len(steps) >= 2
    assert steps == sorted(set(steps))
    assert {each["safe_step"] for each in failed} == {safe}
    workforce.storage = "works"
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.memory.ledger.checkpoints.failing is None


def test_a_damaged_checkpoint_that_is_passed_over_is_said_once():
    controller, workforce = make_faulty()
    run(controller, trained(controller, 5))
    workforce.checkpoint = replace(workforce.checkpoint, damaged=("step 8 is cut short",))
    run(controller, lambda: controller.ended)
    said = [each["reason"] for each in controller.events.records if each["kind"] == "decision"]
    assert [why for why in said if "step 8 is cut short" in why] == [
        "Deciding to go on from an older checkpoint, since step 8 is cut short"
    ]
