"""Seconds and dollars that changes cost, and the part of the time in which steps that count ran."""

from dataclasses import replace
from typing import Any

import pytest

from autohet.control.values.change import Change
from autohet.driver.events.event_log import EventLog
from tests.driver.test_controller import KIND, make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


def change_at(**known):
    """A change of a run whose steps take 2 s under either plan; its last step ended at 100 s."""
    given = {
        "cause": "notice",
        "nodes": ("a",),
        "happened_at": 95.0,
        "detected_at": 95.0,
        "step_before": 10,
        "plan_before": None,
        "restore_step": 10,
        "last_step_at": 100.0,
        "first_step_at": 103.0,
        "step_s": 2.0,
        "step_before_s": 2.0,
        "usd_per_hour": 36.0,
    }
    return Change(**given | known)


@pytest.mark.parametrize(
    ("known", "stalled", "redone"),
    [
        pytest.param({}, 1.0, 0.0, id="a notice costs what is beyond one usual step"),
        pytest.param({"first_step_at": 101.9}, 0.0, 0.0, id="never less than nothing"),
        pytest.param(
            {"cause": "death", "happened_at": 101.5, "first_step_at": 106.0},
            2.5,
            1.5,
            id="the step that a death breaks off is done again",
        ),
        pytest.param(
            {"cause": "death", "happened_at": 101.5, "first_step_at": 106.0, "restore_step": 7},
            2.5,
            1.5 + 3 * 2.0,
            id="and so are the steps since the restored one",
        ),
        pytest.param(
            {"cause": "death", "happened_at": 101.5, "first_step_at": 106.0, "restore_step": 11},
            2.0,
            0.0,
            id="a step that the survivors rolled over counts",
        ),
        pytest.param({"last_step_at": None}, 0.0, 0.0, id="the first start follows no step"),
    ],
)
def test_seconds_of_a_change(known, stalled, redone):
    change = change_at(**known)
    assert change.seconds()["stalled"] == stalled
    assert change.seconds()["redone"] == redone
    # 36 USD an hour is one cent a second.
    assert change.usd_lost == pytest.approx(0.01 * (stalled + redone))


def test_steps_of_the_next_plan_are_expected_to_miss_their_prediction_alike():
    change = change_at(predicted_step_s=4.0)
    change.expect_step(predicted_before_s=1.0, before_s=1.5)
    assert change.step_s == 6.0


@pytest.mark.parametrize("strike", ["warn", "kill"])
def test_goodput_and_dollars_of_a_run(strike):
    workforce = ScriptedWorkforce(replace(KIND, usd_per_hour=2.0))
    controller, _ = make(workforce=workforce)
    heard: list[dict[str, Any]] = []
    controller.events = EventLog(None, lambda: workforce.now, heard.append)
    run(controller, trained(controller, 15))
    node = controller.memory.members[0].split("/")[0]
    if strike == "warn":
        workforce.warn(node, 60)
    else:
        workforce.kill(node)
    run(controller, lambda: controller.ended)
    (change,) = [each for each in heard if each["kind"] == "reconfigure"]
    steps = [each for each in heard if each["kind"] == "step"]
    first = next(each for each in steps if each["generation"] == change["generation"])
    last = steps[steps.index(first) - 1]

    lost_s = change["seconds"]["stalled"] + change["seconds"]["redone"]
    assert lost_s == pytest.approx(first["time"] - last["time"] - first["seconds"], abs=0.3)
    num_nodes = 4 if strike == "warn" else 3
    assert change["usd_lost"] == pytest.approx(lost_s * num_nodes * 2.0 / 3600, rel=1e-3)

    passed_s = steps[-1]["time"] - steps[0]["time"] + steps[0]["seconds"]
    summary = controller.summary()
    assert summary["goodput"] == pytest.approx(1 - lost_s / passed_s, abs=0.05)
    assert change["goodput"] < 1
