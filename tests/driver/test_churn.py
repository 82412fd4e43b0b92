"""Nodes that come one after another, and nodes that leave and come again: SIMULATED time, the real
controller. The share of the time without a step is bounded.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autohet.control.planning.outlook import (
    CHURN_S,
    MAX_LOST_SHARE,
    ON_THEIR_WAY_S,
    Outlook,
    gathers_arrivals_until,
)
from autohet.control.values.observation import Launches, Notice, StartingNode, StartState
from autohet.driver.loop.controller import Controller
from autohet.runtime.job import Job
from autohet.simulate.costs import Costs
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent
from tests.driver.test_controller import causes, make, run, trained
from tests.driver.test_outlook import SPOT, seen
from tests.driver.test_simulation import CLUSTER, job_document
from tests.harness.scripted_workforce import ScriptedWorkforce

CHURN_FROM_S = 400.0
"""Time from which nodes come and go; all train by then."""


CHURN_END_S = CHURN_FROM_S + 1800.0
KILLED = {"detect_s": 0.24}
"""Detection of a pod or a process that ends: its connections do, too (0.08 to 0.24 s in demos)."""


def simulate(
    trace: list[TraceEvent], end_s: float = CHURN_END_S, **costs: float
) -> tuple[dict[str, Any], float]:
    """Return the document, and the share of the seconds after CHURN_FROM_S that no step took."""
    job = Job.from_document(job_document(horizon_s=None))
    costs = {"boot_s": 20.0, "process_start_s": 5.0, **costs}
    scenario = Scenario(job, CLUSTER, trace, end_s, Costs(**costs))
    found = TraceSimulation(scenario).run("local_first")
    trained_s = 0.0
    for span in found["stretches"]:
        ends_s = span["begin_s"] + span["num_steps"] * span["step_s"]
        trained_s += max(0.0, min(end_s, ends_s) - max(CHURN_FROM_S, span["begin_s"]))
    return found, 1.0 - trained_s / (end_s - CHURN_FROM_S)


def arrival(at: float, name: str, kind: str = "small") -> TraceEvent:
    return TraceEvent(at, "arrival", name, kind)


@pytest.mark.parametrize("apart_s", [5.0, 20.0, 21.5])
def test_eight_arrivals_one_after_another_are_two_moves_at_the_most(apart_s: float) -> None:
    """Wrong: each is answered once the debounce is over, and costs a move."""
    names = [(f"small-{i}", "small") for i in range(1, 4)] + [(f"big-{i}", "big") for i in range(4)]
    names.append(("pair-0", "pair"))
    trace = [arrival(0.0, "small-0")]
    trace += [arrival(300.0 + i * apart_s, *name) for i, name in enumerate(names)]
    found, _ = simulate(trace, 900.0)
    assert 1 <= len(found["reconfigurations"]) <= 2


SMALL = tuple(f"small-{i}" for i in range(4))


def flapping(
    names: Sequence[str], notice_s: float | None, events: int = 21, away_s: float = 15.0
) -> list[TraceEvent]:
    """Return a trace in which these nodes in turn leave and come again within 30 minutes."""
    trace = [arrival(0.0, name) for name in SMALL]
    period_s = 1800.0 / events
    for index in range(events):
        at = CHURN_FROM_S + index * period_s
        name = names[index % len(names)]
        kind = "small"
        if notice_s is not None:
            trace.append(TraceEvent(at - notice_s, "notice", name, kind, gone_s=at))
        trace += [TraceEvent(at, "death", name, kind), arrival(at + away_s, name)]
    return sorted(trace, key=lambda event: event.time_s)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a simulation compute on GPUs: communicators are built while all stand."""
    monkeypatch.setattr(Job, "computes_on_cpu", property(lambda job: False))


@pytest.mark.parametrize("notice_s", [30.0, None])
def test_consolidations_cost_a_bounded_share_of_the_time(notice_s: float | None) -> None:
    """A node in use leaves 21 times in 30 minutes, and its replacement is used before the next one.

    Wrong: a change stops all, or is charged as if it did; a newcomer is cold though it is prepared.
    """
    found, share = simulate(flapping(SMALL, notice_s), **KILLED)
    moves = Counter(change["cause"] for change in found["reconfigurations"])
    assert moves["death" if notice_s is None else "notice"] == 21
    assert moves["arrival"] >= 20
    assert share <= MAX_LOST_SHARE
    assert found["steps_lost"] == 0


@pytest.mark.parametrize("names", [SMALL, SMALL[3:]])
def test_consolidations_of_gpus_use_replacements_only_as_the_bound_allows(
    names: tuple[str, ...], on_gpus: None
) -> None:
    """Each move builds communicators. All four nodes in turn: 21 moves are not avoidable, and what
    they will cost is kept free. Wrong: the first minutes' arrivals spend the bound of 30 minutes.
    """
    found, share = simulate(flapping(names, 30.0), **KILLED)
    assert share <= MAX_LOST_SHARE
    moves = Counter(change["cause"] for change in found["reconfigurations"])
    assert moves["arrival"] >= 5
    assert found["steps_lost"] == 0


@pytest.mark.parametrize(("events", "away_s"), [(5, 300.0), (21, 60.0), (60, 10.0)])
def test_other_rhythms_of_one_node_are_bounded_alike(
    events: int, away_s: float, on_gpus: None
) -> None:
    """Wrong: the simulated generation halts when a node dies that had left it."""
    _, share = simulate(flapping(SMALL[3:], 30.0, events, away_s), **KILLED)
    assert share <= MAX_LOST_SHARE


def test_deaths_that_only_ray_notices_cost_a_bounded_share_beside_detection(on_gpus: None) -> None:
    """Wrong: each replacement is used at once, and its death stops all again.

    The bound of 3% cannot be kept where all four nodes die in turn. The simulator charges a death
    0.24 s of detection, 0.3 of replanning, 0.6 to rebuild, 1.32 for two communicators and 0.1 for a
    warm step: 21 times 2.56 s are 2.99% of 1,800 s. Half a step that breaks off each time adds
    0.58% for each second of a step, here (1.38 s on four GPUs) 0.81%: 3.8% if no other move is
    made. It is 6.4%: 18 times a replacement is used by a second move once the survivors train.
    Leaving it idle instead costs 5.1% of the time, and 17% fewer steps are trained (896 for 1,082).
    """
    found, share = simulate(flapping(SMALL[3:], None))
    broken_off_s = 0.5 * found["changes_by_cause"]["death"] * found["stretches"][-1]["step_s"]
    assert share <= MAX_LOST_SHARE + broken_off_s / 1800.0
    assert any("have gone within 30 minutes" in each for each in found["decisions"])


def test_a_node_that_stays_after_others_came_and_went_is_used_in_the_end(on_gpus: None) -> None:
    found, _ = simulate(flapping(SMALL[3:], None), CHURN_END_S + 1200.0)
    last = found["reconfigurations"][-1]
    assert (last["cause"], last["nodes"]) == ("arrival", ["small-3"])


def pool(**nodes: Any) -> tuple[Controller, ScriptedWorkforce]:
    return make(steps=10**6, **nodes)


def starting(workforce: ScriptedWorkforce, *names: str) -> None:
    nodes = tuple(StartingNode(name, "small", StartState.STARTING, 0.0) for name in names)
    workforce.launches = Launches({}, starting=nodes, polled_at=workforce.now)


def passes(controller: Controller, workforce: ScriptedWorkforce, seconds: float) -> None:
    end = workforce.now + seconds
    run(controller, lambda: workforce.now >= end)


def test_an_arrival_waits_for_what_is_known_to_start_and_no_longer() -> None:
    controller, workforce = pool(nodes=2)
    run(controller, trained(controller, 5))
    starting(workforce, "i-2")
    workforce.join("small-8")
    passes(controller, workforce, 20.0)
    assert causes(controller) == []
    workforce.launches = Launches({})
    workforce.join("small-9")
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert {"small-8/0", "small-9/0"} <= set(controller.memory.members)


def test_what_has_no_room_is_not_waited_for() -> None:
    controller, workforce = pool(nodes=2)
    run(controller, trained(controller, 5))
    node = StartingNode("pod", "small", StartState.UNSCHEDULABLE, workforce.now)
    workforce.launches = Launches({}, starting=(node,), polled_at=workforce.now)
    workforce.join("small-9")
    passes(controller, workforce, 10.0)
    assert causes(controller) == ["arrival"]


def test_the_first_of_several_waits_for_a_bounded_time() -> None:
    assert gathers_arrivals_until([0.0, 7.0], 2.0, 0) == 9.0
    assert gathers_arrivals_until([0.0, 7.0], 2.0, 1) == ON_THEIR_WAY_S
    late = ON_THEIR_WAY_S + 20.0
    assert gathers_arrivals_until([0.0, late], 2.0, 5) == late + 2.0


def ended(*names: str) -> tuple[Outlook, Any]:
    """Return an outlook in which these nodes have ended from 100 s on, and an observation."""
    outlook = Outlook()
    fleet = dict.fromkeys(names, SPOT)
    outlook.look(seen(99.0, **fleet))
    for index, name in enumerate(names):
        del fleet[name]
        outlook.look(seen(100.0 + index, **fleet))
    replacement = seen(200.0, new=SPOT)
    (view,) = replacement.nodes.values()
    return outlook, replace(replacement, nodes={"new": replace(view, joined_at=150.0)})


def test_a_replacement_is_on_probation_where_nodes_come_and_go_and_changes_cost_too_much() -> None:
    outlook, now = ended("a", "b")
    # One more end after the first in 100 s makes 17 in the 1,700 s to come.
    spare_s = MAX_LOST_SHARE * CHURN_S - 17 * 1.0 - 2 * 1.0
    assert outlook.on_probation(now, ["new"], 1.0, spare_s, 2) == {}
    assert outlook.on_probation(now, ["new"], 1.0, spare_s + 0.1, 2) != {}
    found = outlook.on_probation(now, ["new"], 5.0, 0.0, 2)
    assert found == pytest.approx({"new": 150.0 + 10 / MAX_LOST_SHARE})
    assert outlook.on_probation(now, ["new"], 5.0, 0.0, 1) == {}, "it would double the speed"
    later = replace(now, now=151.0 + 10 / MAX_LOST_SHARE)
    assert outlook.on_probation(later, ["new"], 5.0, 1e9, 2) == {}, "it has lived for long enough"
    quiet = replace(now, now=102.0 + CHURN_S)
    assert outlook.on_probation(quiet, ["new"], 1e9, 1e9, 2) == {}, "nothing has gone of late"
    once, now = ended("a")
    assert once.on_probation(now, ["new"], 5.0, 1e9, 2) == {}, "one end is no coming and going"
    (view,) = now.nodes.values()
    before = replace(now, nodes={"new": replace(view, joined_at=50.0)})
    assert outlook.on_probation(before, ["new"], 5.0, 1e9, 2) == {}, "it replaces none of them"


def test_a_node_with_a_notice_counts_as_gone_from_then_on() -> None:
    outlook = Outlook()
    outlook.look(seen(0.0, a=SPOT))
    outlook.look(seen(50.0, {"a": Notice("a", "test", 50.0)}, a=SPOT))
    outlook.look(seen(150.0))
    assert outlook.recent_ends == {"spot": [50.0]}
