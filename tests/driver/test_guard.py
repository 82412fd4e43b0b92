"""An exception in a tick is answered by a policy: tried again, then a checkpoint and an end with
its cause.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.control import decide
from autohet.control.decide import MOST_FAILURES, RETRIES, FailureAnswer, answer_failures
from autohet.control.job_state import Considering, Ended, Training
from autohet.control.states import training
from autohet.control.values.actions import GiveBack
from autohet.control.values.fleet_event import FleetEvent
from autohet.driver.loop.controller import Controller, Guard
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


def guarded(controller: Controller, workforce: ScriptedWorkforce) -> Guard:
    return Guard(controller, controller.tick, pause=lambda seconds: None)


def go_on(guard: Guard, controller: Controller, ticks: int = 3000) -> Ended:
    for _ in range(ticks):
        guard.tick()
        if controller.ended:
            return controller.ended
    raise AssertionError(f"nothing after {ticks} ticks: {controller.state}")


def failing(call: Callable[..., Any], times: float) -> Callable[..., Any]:
    left = [times]

    def wrapper(*arguments: Any, **named: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("RpcError: the GCS does not answer")
        return call(*arguments, **named)

    return wrapper


def sentences(controller: Controller) -> str:
    return "\n".join(
        str(event.get("reason"))
        for event in controller.events.records
        if event["kind"] == "decision"
    )


@pytest.mark.parametrize("what", ["observe", "announce", "step"])
def test_an_error_that_passes_costs_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workforce = make(steps=20)
    run(controller, trained(controller, 5))
    target = {"observe": workforce, "announce": decide, "step": training}[what]
    monkeypatch.setattr(target, what, failing(getattr(target, what), RETRIES))
    assert go_on(guarded(controller, workforce), controller).ok
    assert controller.summary()["steps"] == 20
    assert None not in controller.summary()["losses"], "what a failed tick has seen is not lost"
    assert (
        "Deciding to try again, since there was an error in the driver: RuntimeError: RpcError"
        in sentences(controller)
    )


def test_an_error_of_one_state_ends_the_job_with_a_checkpoint_and_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training cannot be looked after any more, not even to stop it: it is stopped past the
    controller.
    """
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    assert isinstance(controller.state, Training)
    search = Mock()
    controller.state.considering = Considering(FleetEvent("arrival", (), (), 0.0, ""), search, 0.0)
    monkeypatch.setattr(training, "step", failing(training.step, float("inf")))
    ended = go_on(guarded(controller, workforce), controller)
    assert not ended.ok
    search.drop.assert_called()
    assert "an error in the driver: RuntimeError: RpcError: the GCS does not answer" in ended.reason
    assert "not in durable storage" not in ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]


def test_where_nothing_answers_the_job_ends_and_says_what_is_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(workforce, "observe", failing(workforce.observe, float("inf")))
    ended = go_on(guarded(controller, workforce), controller, ticks=20)
    assert "its newest step is not in durable storage" in ended.reason
    assert workforce.commits == []


@pytest.mark.parametrize(
    ("in_a_row", "stopping", "saving", "answer"),
    [
        (1, False, False, "RETRY"),
        (RETRIES, False, False, "RETRY"),
        (RETRIES + 1, False, False, "STOP"),
        (RETRIES + 1, True, False, "RETRY"),
        (2 * RETRIES, True, False, "RETRY"),
        (2 * RETRIES + 1, True, False, "SAVE"),
        (2 * RETRIES + 1, True, True, "RETRY"),
        (MOST_FAILURES, True, True, "RETRY"),
        (MOST_FAILURES + 1, True, True, "GIVE_UP"),
    ],
)
def test_what_is_done_about_failures_goes_further_the_more_there_are(
    in_a_row: int, stopping: bool, saving: bool, answer: str
) -> None:
    assert answer_failures(in_a_row, stopping=stopping, saving=saving) is FailureAnswer[answer]


def test_a_job_that_was_stopped_for_failures_says_so_though_they_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stop was decided on; ticks that succeed from then on carry it out, with a checkpoint, by
    the state machine.
    """
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(workforce, "observe", failing(workforce.observe, RETRIES + 1))
    ended = go_on(guarded(controller, workforce), controller)
    assert "stopped by an error in the driver: RuntimeError: RpcError" in ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]


def test_what_cannot_be_saved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(training, "step", failing(training.step, float("inf")))
    monkeypatch.setattr(
        workforce, "request_stop", lambda workers, *, checkpoint: workforce.processes.popitem()
    )
    ended = go_on(guarded(controller, workforce), controller)
    assert "its newest step is not in durable storage: not all workers are there" in ended.reason
    assert workforce.commits == []


def test_one_that_fails_while_it_saves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    ledger = controller.memory.ledger
    monkeypatch.setattr(ledger, "record", failing(ledger.record, float("inf")))
    ended = go_on(guarded(controller, workforce), controller, ticks=20)
    assert "Deciding to give up" in sentences(controller)
    assert "its newest step is not in durable storage" in ended.reason


def test_an_action_that_always_fails_keeps_no_checkpoint_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the first to be tried in every tick, and whatever is decided stands behind it."""
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(workforce, "give_back", failing(workforce.give_back, float("inf")))
    controller.pending_actions.append(GiveBack("small-0"))
    ended = go_on(guarded(controller, workforce), controller)
    assert "RpcError" in ended.reason
    assert "not in durable storage" not in ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]


def test_a_part_that_always_fails_keeps_no_recovery_back() -> None:
    """What was decided before it failed is done, and stays remembered: to take that back would
    leave the dead node's peers as they are.
    """
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    controller.memory.buyer = Mock(
        released=frozenset(), decide=Mock(side_effect=RuntimeError("RpcError"))
    )
    workforce.kill(controller.memory.members[0].split("/")[0])
    ended = go_on(guarded(controller, workforce), controller)
    assert controller.memory.generation == 2
    assert [event["kind"] for event in controller.events.records].count("death") == 1
    assert "not in durable storage" not in ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]


def test_a_checkpoint_whose_parts_are_written_is_committed_though_an_action_before_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers have told of their parts, and do not tell again."""
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(workforce, "give_back", failing(workforce.give_back, float("inf")))
    controller.pending_actions.append(GiveBack("small-0"))
    workforce.request_stop(controller.memory.members, checkpoint=True)
    ended = go_on(guarded(controller, workforce), controller)
    assert "not in durable storage" not in ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]
