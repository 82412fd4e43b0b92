"""An exception in a tick is answered by a policy: tried again, then a checkpoint and an end with its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autohet.driver.control.controller import Controller
from autohet.driver.control.guard import RETRIES, Guard
from autohet.driver.control.states import Ended, Training
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


def guarded(controller: Controller, workforce: ScriptedWorkforce) -> Guard:
    return Guard(controller, workforce, controller.tick, pause=lambda seconds: None)


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
    return "\n".join(str(event.get("reason")) for event in controller.events.records if event["kind"] == "decision")


@pytest.mark.parametrize("what", ["observe", "_announce", "_train"])
def test_an_error_that_passes_costs_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workforce = make(steps=20)
    run(controller, trained(controller, 5))
    target = workforce if what == "observe" else controller
    monkeypatch.setattr(target, what, failing(getattr(target, what), RETRIES))
    assert go_on(guarded(controller, workforce), controller).ok
    assert controller.summary()["steps"] == 20
    assert None not in controller.summary()["losses"], "what a failed tick has seen is not lost"
    assert "Deciding to try again, since there was an error in the driver: RuntimeError: RpcError" in sentences(
        controller
    )


def test_an_error_of_one_state_ends_the_job_with_a_checkpoint_and_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training cannot be looked after any more, not even to stop it: it is stopped past the controller."""
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    assert isinstance(controller.state, Training)
    monkeypatch.setattr(controller, "_train", failing(controller._train, float("inf")))
    ended = go_on(guarded(controller, workforce), controller)
    assert not ended.ok
    assert "an error in the driver: RuntimeError: RpcError: the GCS does not answer" in ended.reason
    assert "not in durable storage" not in ended.reason
    assert workforce.commits == [controller.ledger.committed_steps]


def test_where_nothing_answers_the_job_ends_and_says_what_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, workforce = make(steps=4000)
    run(controller, trained(controller, 5))
    monkeypatch.setattr(workforce, "observe", failing(workforce.observe, float("inf")))
    ended = go_on(guarded(controller, workforce), controller, ticks=20)
    assert "its newest step is not in durable storage" in ended.reason
    assert workforce.commits == []
