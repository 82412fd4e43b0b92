"""When durable checkpoints are made where the job names no steps: as often as costs least, by what
the run measures.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.optimize import minimize_scalar

from autohet.control.checkpoint_pace import MOST_S, optimum_s, pace_checkpoints
from autohet.control.job_memory import CheckpointPace
from autohet.control.job_state import Training
from autohet.control.planning.outlook import Outlook
from autohet.control.values.actions import RequestCheckpoint
from autohet.driver.loop.controller import Controller
from autohet.runtime.job.checkpoint import CheckpointSection
from planner.errors import ConfigError
from planner.inputs.fleet import NodeType
from recovery.peers.replication_rounds import Turns
from tests.driver.test_controller import make, run, trained
from tests.harness.fake_job import fake_job
from tests.harness.scripted_workforce import TICK_S, ScriptedWorkforce


@pytest.mark.parametrize(
    ("section", "steps", "seconds"),
    [
        ({}, None, None),
        ({"every": "auto"}, None, None),
        ({"every": 500}, 500, None),
        ({"every": "500 steps"}, 500, None),
        ({"every": "1 step"}, 1, None),
        ({"every_steps": 7}, 7, None),
        ({"every": "90s"}, None, 90.0),
        ({"every": "10 minutes"}, None, 600.0),
        ({"every": "1h30m"}, None, 5400.0),
        ({"every": "0.5 h"}, None, 1800.0),
        ({"every": "2 days"}, None, 172800.0),
    ],
)
def test_the_interval_is_a_number_of_steps_a_duration_or_left_to_the_run(
    section: dict[str, Any], steps: int | None, seconds: float | None
) -> None:
    found = fake_job(checkpoint=section).checkpoint
    assert (found.fixed_steps, found.every_s) == (steps, seconds)


@pytest.mark.parametrize(
    "section",
    [
        {"every": "often"},
        {"every": 0},
        {"every": "0 steps"},
        {"every": "0s"},
        {"every": -3},
        {"every": "-5m"},
        {"every": "10 m 5"},
        {"every": "10mm"},
        {"every": ""},
        {"every": "10m", "every_steps": 5},
        {"every": 5, "every_steps": 5},
    ],
)
def test_another_interval_is_refused_by_its_key(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every"):
        CheckpointSection(**section)


@pytest.mark.parametrize("cost_s", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("life_s", [600.0, 7200.0, 1e6])
def test_the_optimum_loses_least_under_exponential_lives(cost_s: float, life_s: float) -> None:
    """Daly's equation 20: the expected time per second of work, for every interval."""

    def slowdown(interval_s: float) -> float:
        return life_s * (math.exp((interval_s + cost_s) / life_s) - 1) / interval_s

    bounds = (cost_s / 100, 50 * math.sqrt(cost_s * life_s))
    best = minimize_scalar(slowdown, bounds=bounds, method="bounded")
    assert slowdown(optimum_s(cost_s, life_s)) <= 1.002 * best.fun
    assert optimum_s(2.5 * life_s, life_s) == life_s


def test_nodes_that_go_together_are_one_loss() -> None:
    kind = NodeType("spot", "A10G", 1, 24 << 30, 32e9, 3e9, spot=True)
    outlook = Outlook()
    names = [f"spot-{index}" for index in range(6)]
    there = {name: SimpleNamespace(node_type=kind) for name in names}
    together_s = single_s = 0.0
    for now in range(0, 20 * 7200, 3600):
        nodes = {} if now % 7200 else there
        seen: Any = SimpleNamespace(now=float(now), nodes=nodes, notices={})
        outlook.look(seen)
        if nodes:
            together_s = outlook.fleet_life_s(seen, names)
            single_s = outlook.fleet_life_s(seen, names[:1])
    assert outlook.losses == 20
    assert together_s == pytest.approx(3600, rel=0.1), "the fleet is lost each hour that it lives"
    assert single_s == pytest.approx(3600, rel=0.1)


def commits(controller: Controller, workforce: ScriptedWorkforce, until: int) -> list[int]:
    run(controller, trained(controller, until))
    return list(workforce.commits)


def make_with(checkpoint: dict[str, Any], **elastic: Any) -> tuple[Controller, ScriptedWorkforce]:
    controller, workforce = make(steps=400, **elastic)
    job = fake_job(steps=400, elastic={"step_timeout_s": 30, "debounce_s": 0.2}, **checkpoint)
    return Controller(
        job,
        workforce,
        controller.memory.planning,
        controller.memory.orders,
        controller.events,
    ), workforce


def test_a_duration_is_one_of_training_and_counts_from_the_step_before() -> None:
    controller, workforce = make_with({"checkpoint": {"every": "2s"}})
    steps = commits(controller, workforce, 100)
    gaps = {later - earlier for earlier, later in itertools.pairwise(steps)}
    assert len(steps) >= 3
    assert gaps == {round(2 / TICK_S)}, "of measured steps, not of predicted ones"


def test_a_request_that_a_change_of_the_fleet_undoes_is_made_again() -> None:
    """The asked worker's node dies before the step in flight ends."""
    controller, workforce = make_with({"checkpoint": {"every": "2s"}})
    run(controller, lambda: len(workforce.commits) == 2)
    newest = workforce.commits[-1]
    run(controller, trained(controller, newest + 18))
    asked: list[str] = []
    workforce.request_checkpoint = asked.append  # type: ignore[method-assign]
    run(controller, lambda: bool(asked))
    del workforce.request_checkpoint
    workforce.kill(asked[0].split("/")[0])
    run(controller, lambda: len(workforce.commits) == 3)
    assert workforce.commits[-1] <= newest + 25


def test_the_interval_follows_what_is_measured_within_its_bound() -> None:
    controller, _ = make(steps=400)
    run(controller, trained(controller, 5))
    memory = controller.memory

    def interval_s(cost_s: float, step_s: float, life_s: float) -> float:
        memory.ledger.checkpoints._costs.clear()
        memory.ledger.checkpoints.note_cost(cost_s)
        memory.ledger.step_seconds[memory.generation] = [step_s] * 5
        memory.outlook.fleet_life_s = lambda *_: life_s  # type: ignore[method-assign]
        memory.checkpoint_pace = pace = CheckpointPace()
        list(pace_checkpoints(memory, controller.workforce.observe()))
        assert pace.steps is not None
        return pace.steps * step_s

    assert interval_s(5, 0.5, 7200) == pytest.approx(optimum_s(5, 7200), abs=0.5)
    assert interval_s(20, 0.5, 7200) > 1.5 * interval_s(5, 0.5, 7200)
    assert interval_s(5, 0.5, 1800) < 0.6 * interval_s(5, 0.5, 7200)
    assert interval_s(100, 0.5, 1e7) == MOST_S
    assert interval_s(5, 118, 7200) == 2 * 118, "the nearest number of steps"
    assert interval_s(5, 3000, 7200) == 3000, "each step"


def test_the_interval_is_said_once_with_its_reasons() -> None:
    controller, _ = make(steps=200)
    run(controller, lambda: controller.ended)
    said = [
        e["reason"]
        for e in controller.events.records
        if e["kind"] == "decision" and "checkpoint every" in e["reason"]
    ]
    assert len(said) == 1
    assert "costs" in said[0]
    assert "expected to change" in said[0]


def test_a_job_that_names_steps_is_asked_for_nothing() -> None:
    controller, _ = make_with({"checkpoint": {"every": 5}})
    run(controller, trained(controller, 50))
    assert isinstance(controller.state, Training)
    found = list(pace_checkpoints(controller.memory, controller.workforce.observe()))
    assert not [each for each in found if isinstance(each, RequestCheckpoint)]


def test_what_is_asked_for_waits_for_the_upload_before_and_for_an_evaluated_step() -> None:
    turns = Turns(None, unit=5)
    taken = []
    for step in range(1, 40):
        if turns.take(step, writing=10 <= step < 14, asked=step in (3, 9, 31)):
            taken.append(step)
    assert taken == [5, 15, 35]


def test_the_best_checkpoints_are_made_at_evaluated_steps() -> None:
    evaluation = {"source": "held-out", "every_steps": 30}
    job = fake_job(evaluation=evaluation, checkpoint={"keep_best": 2})
    assert job.checkpoint_unit == 30
    assert fake_job(evaluation=evaluation).checkpoint_unit == 1
