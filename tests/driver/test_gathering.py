"""Notices that come one after another are one change, which is over before the first of them is
due.
"""

import logging
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autohet.control.job_state import Closing, Training
from autohet.control.planning.orders import URGENT
from autohet.control.planning.outlook import MOVE_PRIOR_S, gathers_until, needed_s, slowest_move_s
from autohet.control.values.change import Change
from autohet.control.values.observation import Notice
from autohet.driver.loop.controller import Controller
from autohet.runtime.job.elastic import ElasticSection
from recovery.state.layout import Layout, ShardId, TensorSpec
from tests.driver.test_controller import causes, make, run, trained
from tests.driver.test_outlook import SPOT, seen
from tests.harness.promises import RememberedPlanning
from tests.harness.scripted_workforce import TICK_S, ScriptedWorkforce

LIMITS = ElasticSection(step_timeout_s=60).timeouts()


def fleet(nodes: int = 5, builds: int = 2, **elastic: Any) -> tuple[Controller, ScriptedWorkforce]:
    """A job in training that has seen no checkpoint, whose time limit is short; searches take no
    time.
    """
    controller, workforce = make(steps=10**6, nodes=nodes, **{"checkpoint_timeout_s": 1, **elastic})
    controller.memory.planning = RememberedPlanning(
        controller.memory.planning.inputs, clock=lambda: 0.0
    )
    workforce.builds = builds
    run(controller, trained(controller, 5))
    return controller, workforce


def passes(controller: Controller, workforce: ScriptedWorkforce, seconds: float) -> None:
    end = workforce.now + seconds
    run(controller, lambda: workforce.now >= end)


def decisions(controller: Controller) -> list[str]:
    return [event["reason"] for event in controller.events.records if event["kind"] == "decision"]


def has_left(controller: Controller) -> bool:
    """Whether the first generation is over: nothing is waited for any more."""
    return not isinstance(controller.state, Training) or controller.memory.generation == 2


def test_notices_some_seconds_apart_are_one_change() -> None:
    controller, workforce = fleet()
    for name in ("small-0", "small-1", "small-2"):
        workforce.warn(name, 120)
        passes(controller, workforce, 3.0)
        assert isinstance(controller.state, Training)
        assert "waiting for further notices" in controller.state.reason
    run(controller, lambda: bool(causes(controller)))
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 100))
    (change,) = controller.summary()["reconfigurations"]
    assert (change["cause"], change["nodes"]) == ("notice", ["small-0", "small-1", "small-2"])
    assert change["steps_lost"] == 0


def test_what_is_decided_is_said_at_once_and_training_goes_on() -> None:
    controller, workforce = fleet()
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    assert any("since small-0 leaves in" in reason for reason in decisions(controller))
    assert sum("Deciding to go on for" in reason for reason in decisions(controller)) == 1
    step = controller.memory.ledger.committed_steps
    passes(controller, workforce, 2.0)
    assert controller.memory.ledger.committed_steps > step
    assert sum("Deciding to go on for" in reason for reason in decisions(controller)) == 1, (
        "said once"
    )


@pytest.mark.parametrize("deadline_s", [None, 5.0, 30.0])
def test_a_short_notice_and_one_without_a_deadline_are_acted_on_at_once(
    deadline_s: float | None,
) -> None:
    controller, workforce = fleet()
    deadline = None if deadline_s is None else workforce.now + deadline_s
    workforce.notices["small-0"] = Notice("small-0", "test", workforce.now, deadline)
    passes(controller, workforce, 1.0)
    assert has_left(controller)


def test_a_notice_without_a_deadline_ends_the_waiting_for_others() -> None:
    controller, workforce = fleet()
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    workforce.notices["small-1"] = Notice("small-1", "test", workforce.now)
    passes(controller, workforce, 0.5)
    assert has_left(controller)
    run(controller, lambda: bool(causes(controller)))
    assert [change["nodes"] for change in controller.summary()["reconfigurations"]] == [
        ["small-0", "small-1"]
    ]


def test_a_deadline_that_is_moved_up_ends_the_waiting() -> None:
    controller, workforce = fleet()
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    workforce.notices["small-0"] = Notice(
        "small-0", "test", workforce.notices["small-0"].seen_at, workforce.now + 20
    )
    passes(controller, workforce, 0.5)
    assert has_left(controller)


def test_a_death_meanwhile_is_answered_at_once_with_all_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "autohet")
    controller, workforce = fleet()
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    workforce.warn("small-1", 120)
    passes(controller, workforce, 0.1)
    workforce.kill("small-2")
    passes(controller, workforce, 0.5)
    assert has_left(controller)
    run(controller, lambda: bool(causes(controller)))
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 100))
    assert causes(controller) == ["death"]
    assert [line for line in caplog.messages if line.startswith("lost small-2")], "said at once"
    assert {worker.split("/")[0] for worker in controller.memory.members} <= {"small-3", "small-4"}


def test_a_node_that_comes_meanwhile_is_in_the_same_change() -> None:
    controller, workforce = fleet(nodes=4)
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    workforce.join("small-9")
    run(controller, lambda: bool(causes(controller)))
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 100))
    assert causes(controller) == ["notice"]
    assert "small-9/0" in controller.memory.members


def test_where_the_next_notice_leaves_no_plan_all_stop_with_a_checkpoint_at_once() -> None:
    controller, workforce = fleet(nodes=4, min_workers=3)
    workforce.warn("small-0", 120)
    passes(controller, workforce, 1.0)
    workforce.warn("small-1", 120)
    passes(controller, workforce, 0.2)
    assert isinstance(controller.state, Closing)


def test_an_idle_leaver_is_let_go_while_others_are_waited_for() -> None:
    controller, workforce = fleet(nodes=4)
    workforce.join("small-9")
    passes(controller, workforce, 0.2)
    workforce.warn("small-0", 120)
    workforce.warn("small-9", 120)
    passes(controller, workforce, 1.0)
    assert isinstance(controller.state, Training)
    assert controller.memory.generation == 1
    assert workforce.released == ["small-9"]


@given(
    builds=st.integers(1, 30),
    first_s=st.floats(20.0, 130.0),
    later=st.lists(st.tuples(st.floats(0.1, 8.0), st.floats(-20.0, 20.0)), max_size=4),
)
@example(builds=1, first_s=20.0, later=[(1.0, -10.0), (7.0, 0.0)])
@example(builds=20, first_s=20.0, later=[(4.5, 20.0)] * 4)
@settings(max_examples=12)
def test_the_last_notice_never_pushes_the_change_past_the_first_deadline(
    builds: int, first_s: float, later: list[tuple[float, float]]
) -> None:
    """later: seconds after the notice before, and by how much its deadline differs from the first
    one's. Nobody trains at its deadline.
    """
    controller, workforce = fleet(nodes=7, builds=builds)
    workforce.warn("small-0", first_s)
    first = workforce.now + first_s
    for index, (gap_s, more_s) in enumerate(later, 1):
        passes(controller, workforce, gap_s)
        workforce.warn(f"small-{index}", max(8.0, first + more_s - workforce.now))
    deadlines = {name: notice.deadline or 0.0 for name, notice in workforce.notices.items()}

    def all_have_left() -> bool:
        late = {worker.split("/")[0] for worker in controller.memory.members} & deadlines.keys()
        assert all(workforce.now < deadlines[node] for node in late)
        return not late

    run(controller, all_have_left)
    assert controller.summary()["steps_lost"] == 0


def notice(seen_at: float, deadline: float | None) -> Notice:
    return Notice("n", "test", seen_at, deadline)


def test_patience_counts_from_the_last_notice_and_the_need_from_the_first_deadline() -> None:
    assert gathers_until([notice(0.0, 120.0), notice(7.0, 150.0)], 5.0, 40.0) == 12.0
    assert gathers_until([notice(0.0, 120.0), notice(79.0, 150.0)], 5.0, 40.0) == 80.0
    assert gathers_until([notice(0.0, 120.0), notice(7.0, None)], 5.0, 40.0) == float("-inf")


def change(cause: str, *, rebuild_s: float, first_step_s: float, replan_s: float = 0.0) -> Change:
    stood = Change(cause, (), 0.0, 0.0, 0, None, replan_s=replan_s)
    stood.stood_at, stood.ready_at, stood.first_step_at = 0.0, rebuild_s, rebuild_s + first_step_s
    return stood


def test_the_need_is_what_this_run_has_measured_and_its_limits_before() -> None:
    facts: dict[str, Any] = {"search_s": 10.0, "step_s": 2.0, "state_s": 3.0}
    start = change("start", rebuild_s=20.0, first_step_s=5.0).timing()
    short, long = (
        change("notice", rebuild_s=of, first_step_s=1.0, replan_s=of).timing() for of in (1.0, 4.0)
    )
    need = lambda changes, upload_s=0.0: needed_s(changes, LIMITS, upload_s=upload_s, **facts)  # noqa: E731
    assert need([]) == (2 + 10 + LIMITS.quiesce_s + LIMITS.rendezvous_s + 3) / URGENT
    assert need([start]) == (2 + 10 + 25 + 3) / URGENT
    assert need([start, short, long, short]) == (2 + 4 + 5 + 3) / URGENT
    assert need([start, *[short] * 8]) == (2 + 1 + 2 + 3) / URGENT
    assert need([start, short], 9.0) == need([start, short]) + 9.0
    assert needed_s([short], LIMITS, upload_s=None, **facts) == need([short]) + LIMITS.checkpoint_s


def test_the_slowest_move_is_of_the_node_that_holds_most_for_its_network() -> None:
    state = TensorSpec("param/w", (4,), "float32", 0, (0, 1, 4))
    one, three = frozenset({ShardId("param/w", 0)}), frozenset({ShardId("param/w", 1)})
    layout = Layout({"param/w": state}, {"a/0": one, "b/0": three, "b/1": one, "gone/0": three})
    assert slowest_move_s(layout, seen(0.0, a=SPOT, b=SPOT)) == 16 / SPOT.inter_node_bytes_per_s


def test_before_its_first_change_a_run_waits_as_long_as_one_is_taken_to_cost() -> None:
    controller, workforce = fleet()
    workforce.warn("small-0", 120)
    at = workforce.now
    run(controller, lambda: not isinstance(controller.state, Training))
    assert workforce.now - at == pytest.approx(MOVE_PRIOR_S, abs=2 * TICK_S)
