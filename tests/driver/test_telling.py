"""What is decided is told after deciding and before it is done; also where deciding, or telling,
raises.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.control import fleet
from autohet.control.job_memory import JobMemory
from autohet.control.values.effects import Decision, Effects, Remark, event
from autohet.control.values.observation import Observation
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop import controller as control
from autohet.driver.loop.controller import Controller
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


def told(controller: Controller) -> list[str]:
    return [str(event["kind"]) for event in controller.events.records]


def struck() -> tuple[Controller, ScriptedWorkforce, Mock]:
    """A run that trains, of which a node has just died and another has a notice; drains are
    counted.
    """
    controller, workforce = make(steps=400)
    run(controller, trained(controller, 5))
    first, second, *_ = (worker.split("/")[0] for worker in controller.memory.members)
    workforce.kill(first)
    workforce.warn(second, 60)
    workforce.drain = drain = Mock()  # type: ignore[method-assign]
    return controller, workforce, drain


def test_nothing_is_told_while_it_is_decided_and_all_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, workforce, _ = struck()
    order: list[str] = []
    controller.events = EventLog(None, listener=lambda event: order.append(event["kind"]))
    decide, interrupt = control.decide, workforce.interrupt

    def decide_and_note(memory: JobMemory, seen: Observation) -> Effects:
        yield from decide(memory, seen)
        order.append("decided")

    monkeypatch.setattr(control, "decide", decide_and_note)
    monkeypatch.setattr(
        workforce,
        "interrupt",
        lambda *call, **named: (order.append("interrupt"), interrupt(*call, **named)),
    )
    run(controller, lambda: "interrupt" in order)
    last = order[len(order) - 1 - order[::-1].index("decided") :]
    assert "death" in last
    assert last[0] == "decided"
    assert last[-1] == "interrupt"


def test_what_was_decided_before_an_error_is_told_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _, drain = struck()
    monkeypatch.setattr(fleet, "survivors", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run(controller, lambda: False)
    assert {"notice", "death"} <= {*told(controller)}
    drain.assert_called_once()
    assert not controller.pending_events


def test_what_cannot_be_told_keeps_neither_the_rest_nor_the_actions_back() -> None:
    controller, _, drain = struck()
    listener = Mock(side_effect=[ZeroDivisionError] + [None] * 99)
    controller.events = EventLog(None, listener=listener)
    with pytest.raises(ZeroDivisionError):
        run(controller, lambda: False)
    assert controller.pending_events
    drain.assert_called_once()
    controller.tick()
    kinds = [call.args[0]["kind"] for call in listener.call_args_list]
    assert {"notice", "death"} <= {*kinds}
    assert kinds.count("death") == 1
    assert kinds.count(kinds[0]) == 1, "what cannot be told is not tried again"


def test_an_end_from_outside_is_told_at_once() -> None:
    controller, _ = make(steps=400)
    run(controller, trained(controller, 5))
    controller.give_up("no tick comes to its end")
    assert told(controller)[-1] == "failed"


def test_a_remark_is_logged_and_no_event(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Mapping[str, Any]] = []
    events = EventLog(None, listener=heard.append)
    with caplog.at_level("INFO", logger="autohet"):
        events.tell(Remark("100% of it", warning=True))
        events.tell(event("decision", 2, "Deciding to go on", node="a"))
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "100% of it"),
        ("INFO", "Deciding to go on"),
    ]
    assert [(e["kind"], e["generation"], e["reason"], e["node"]) for e in heard] == [
        ("decision", 2, "Deciding to go on", "a")
    ]
    assert Decision("plan", 1, "said", {"reason": "given"}).document()["reason"] == "given"
