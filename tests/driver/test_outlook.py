"""What a run expects of its fleet: by node type, from a prior and from what was seen."""

from dataclasses import replace

import pytest

from autohet.control.planning.outlook import (
    LEAST_S,
    MOST_S,
    MOVE_PRIOR_S,
    SPOT_PRIOR_S,
    Outlook,
    gather_s,
    move_s,
)
from autohet.control.values.change import Change
from autohet.control.values.observation import NodeView, Notice, Observation
from planner.inputs.fleet import Node, NodeType

SPOT = NodeType("spot", "A10G", 1, 24 << 30, 32e9, 3e9, spot=True)
STEADY = replace(SPOT, name="steady", spot=False)


def seen(now: float, notices: dict[str, Notice] | None = None, **nodes: NodeType) -> Observation:
    return Observation(
        now, {name: NodeView(Node(name, kind), 0.0) for name, kind in nodes.items()}, notices or {}
    )


def test_before_anything_was_seen_the_prior_counts_and_more_nodes_live_shorter() -> None:
    outlook, fleet = Outlook(), {f"n{i}": SPOT for i in range(10)}
    outlook.look(seen(0.0, **fleet))
    assert outlook.horizon_s(seen(0.0, **fleet), ["n0"]) == MOST_S
    assert outlook.horizon_s(seen(0.0, **fleet), list(fleet)) == pytest.approx(SPOT_PRIOR_S / 10)
    assert outlook.horizon_s(seen(0.0, **fleet), []) == MOST_S


def test_each_type_has_its_own_life() -> None:
    outlook = Outlook()
    for tick in range(10):
        outlook.look(seen(100.0 * tick, a=SPOT, b=STEADY, **({"c": SPOT} if tick % 2 else {})))
    assert outlook.ends == {"spot": 4}
    assert outlook.life_s("spot", spot=True) < SPOT_PRIOR_S / 4
    assert outlook.life_s("steady", spot=False) > SPOT_PRIOR_S
    assert LEAST_S <= outlook.horizon_s(seen(0.0, a=SPOT), ["a"]) <= MOST_S


def test_a_notice_and_the_end_that_follows_are_one_event() -> None:
    outlook, warned = Outlook(), {"a": Notice("a", "test", 10.0, 130.0)}
    outlook.look(seen(0.0, a=SPOT))
    for now in (10.0, 20.0):
        outlook.look(seen(now, warned, a=SPOT))
    outlook.look(seen(30.0))
    assert outlook.ends == {"spot": 1}
    assert outlook.lived_s == {"spot": 10.0}, "its life ends with the notice"


def test_what_the_job_gives_back_is_no_end() -> None:
    outlook = Outlook()
    outlook.look(seen(0.0, a=SPOT, b=SPOT, c=SPOT))
    outlook.look(
        seen(10.0, {"a": Notice("a", "Ray is draining it", 10.0)}, a=SPOT, c=SPOT), {"a", "b"}
    )
    outlook.look(seen(20.0))
    assert outlook.ends == {"spot": 1}, "c alone was taken"


def change(cause: str, total_s: float) -> Change:
    found = Change(cause, (), 0.0, 0.0, 0, None, predicted_step_s=1.0)
    found.stood_at, found.ready_at, found.first_step_at = 0.0, total_s - 2.0, total_s
    return found


def test_a_move_costs_what_this_runs_moves_have_cost() -> None:
    assert move_s([change("start", 500.0).timing()]) == MOVE_PRIOR_S
    assert move_s([change("notice", 21.0).timing()] * 20) == pytest.approx(
        (MOVE_PRIOR_S + 8 * 20.0) / 9
    )


def test_arrivals_are_gathered_as_long_as_a_change_costs() -> None:
    assert gather_s([], 2.0) == 2.0
    assert gather_s([change("notice", 21.0).timing()] * 20, 2.0) == pytest.approx(
        move_s([change("notice", 21.0).timing()] * 20)
    )
    assert gather_s([change("notice", 2000.0).timing()] * 20, 2.0) == 60.0
