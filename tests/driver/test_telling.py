"""What is decided is told after deciding and before it is done; also where deciding, or telling,
raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.driver.control.controller import Controller
from autohet.driver.control.decisions import Decision, Remark, Untold
from autohet.driver.control.events import EventLog
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
    first, second, *_ = (worker.split("/")[0] for worker in controller.members)
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
    decide, interrupt = controller.decide, workforce.interrupt
    monkeypatch.setattr(controller, "decide", lambda seen: (decide(seen), order.append("decided")))
    monkeypatch.setattr(
        workforce, "interrupt", lambda *call: (order.append("interrupt"), interrupt(*call))
    )
    run(controller, lambda: "interrupt" in order)
    last = order[len(order) - 1 - order[::-1].index("decided") :]
    assert "death" in last
    assert last[0] == "decided"
    assert last[-1] == "interrupt"


def test_what_was_decided_before_an_error_is_told_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, _, drain = struck()
    monkeypatch.setattr(controller, "_survivors", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        run(controller, lambda: False)
    assert {"notice", "death"} <= {*told(controller)}
    drain.assert_called_once()
    assert not controller.untold


def test_what_cannot_be_told_keeps_neither_the_rest_nor_the_actions_back() -> None:
    controller, _, drain = struck()
    listener = Mock(side_effect=[ZeroDivisionError] + [None] * 99)
    controller.events = EventLog(None, listener=listener)
    with pytest.raises(ZeroDivisionError):
        run(controller, lambda: False)
    assert controller.untold
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
    events, untold = EventLog(None, listener=heard.append), Untold()
    untold.remark("100% of it", warning=True)
    untold.add("decision", 2, "Deciding to go on", node="a")
    with caplog.at_level("INFO", logger="autohet"):
        for each in untold:
            events.tell(each)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "100% of it"),
        ("INFO", "Deciding to go on"),
    ]
    assert [(e["kind"], e["generation"], e["reason"], e["node"]) for e in heard] == [
        ("decision", 2, "Deciding to go on", "a")
    ]
    assert Remark("100% of it", warning=True) in untold
    assert Decision("plan", 1, "said", {"reason": "given"}).document()["reason"] == "given"
