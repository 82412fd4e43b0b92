"""A whole search while training goes on: what happens meanwhile is seen at once, and what it found
is judged by what is there then.
"""

import time

from autohet.control.job_state import Quiescing, Training
from autohet.driver.loop.background_search import BackgroundPlanning
from tests.driver.test_controller import causes, make, run, trained
from tests.driver.test_second_thoughts import decisions
from tests.harness.promises import RememberedPlanning


def make_slow(looks, nodes=3):
    """A controller whose searches are over after so many looks; one is under way, for small-9 that
    has joined.
    """
    controller, workforce = make(steps=200, nodes=nodes)
    controller.memory.planning = RememberedPlanning(controller.memory.planning.inputs)
    controller.memory.planning.looks = looks
    run(controller, trained(controller, 5))
    workforce.join("small-9")
    run(controller, lambda: considering(controller) is not None)
    return controller, workforce


def considering(controller):
    return controller.state.considering if isinstance(controller.state, Training) else None


def test_training_goes_on_until_the_search_is_over_then_the_arrival_is_taken_in():
    controller, _ = make_slow(looks=30)
    before = controller.memory.ledger.committed_steps
    assert controller.status()["reason"] == "looking for a better plan, since small-9 joined"
    run(controller, lambda: considering(controller) is None)
    assert isinstance(controller.state, Quiescing)
    assert controller.memory.ledger.committed_steps > before
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert "small-9/0" in controller.memory.members


def test_a_death_during_a_search_is_answered_at_once_and_the_search_dropped():
    controller, workforce = make_slow(looks=10**6)
    search = considering(controller).search
    workforce.kill(controller.memory.members[0].split("/")[0])
    run(controller, lambda: bool(causes(controller)), ticks=200)
    assert search.dropped
    assert causes(controller) == ["death"]
    assert "small-9/0" in controller.memory.members  # it is there to be planned on
    run(controller, lambda: controller.ended)
    assert controller.ended.ok


def test_who_joins_during_a_search_is_searched_for_together_with_the_first():
    controller, workforce = make_slow(looks=20, nodes=2)
    search = considering(controller).search
    workforce.join("small-8")
    run(
        controller,
        lambda: (
            considering(controller) is not None and considering(controller).search is not search
        ),
    )
    assert search.dropped
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert {"small-8/0", "small-9/0"} <= set(controller.memory.members)
    assert any(
        reason.endswith("since small-9 joined, small-8 joined") for reason in decisions(controller)
    )


def test_what_was_found_for_a_node_that_is_leaving_since_is_searched_anew():
    controller, workforce = make_slow(looks=40)
    search = considering(controller).search
    workforce.warn("small-9", 600)
    run(controller, lambda: considering(controller) is None)
    assert isinstance(controller.state, Training)
    assert search.looks == 0
    assert "stay as it is although small-9 joined" in decisions(controller)[-1]
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert causes(controller) == []


def test_who_cannot_take_part_when_a_search_ends_is_asked_about_once_it_can(monkeypatch):
    controller, workforce = make_slow(looks=20)
    process = workforce.processes.pop("small-9/0")
    monkeypatch.setattr(workforce, "hire", lambda workers: None)  # slow to start again
    first = considering(controller).search
    run(
        controller,
        lambda: considering(controller) is None or considering(controller).search is not first,
    )
    run(controller, lambda: considering(controller) is None)
    assert "stay as it is although small-9 joined" in decisions(controller)[-1]
    workforce.processes["small-9/0"] = process
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert "small-9/0" in controller.memory.members


def test_a_search_in_its_own_process_finds_what_this_one_would_and_ends_when_dropped():
    controller, _ = make(nodes=4)
    run(controller, trained(controller, 2))
    planning, current = (
        BackgroundPlanning(controller.memory.planning.inputs),
        controller.memory.proposal,
    )
    fleet = current.cost.fleet
    dropped, search = (planning.search(fleet, current) for _ in range(2))
    dropped.drop()
    assert dropped.background_call() is None
    assert dropped.background_call.child.returncode < 0
    there, here = (
        found(search, within_s=30),
        controller.memory.planning.propose(fleet, current, thorough=True),
    )
    assert search.background_call() is not None
    assert (there.plan, there.stay, there.reason, there.searched) == (
        here.plan,
        here.stay,
        here.reason,
        True,
    )
    assert there.predicted_step_s == here.predicted_step_s


def found(search, within_s):
    deadline = time.monotonic() + within_s
    while (proposal := search.result()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return proposal
