"""Nodes that join: each is asked about, whenever its processes come up, and none keeps the others
waiting for ever.
"""

import pytest

from autohet.control.job_state import Building
from tests.driver.test_controller import causes, run, trained
from tests.driver.test_overtaken import make_faulty


def test_a_node_that_comes_up_while_a_generation_is_built_is_asked_about():
    controller, workforce = make_faulty(steps=200, nodes=3)
    run(controller, trained(controller, 5))
    workforce.starts_s, workforce.builds = 1.0, 20
    workforce.join("small-9")
    run(controller, lambda: "small-9/0" in workforce.processes)
    workforce.kill("small-2")
    run(controller, lambda: isinstance(controller.state, Building))
    assert "small-9/0" not in workforce.seen.reports
    run(controller, lambda: "arrival" in causes(controller))
    assert "small-9/0" in controller.memory.members


def test_a_node_whose_process_never_starts_keeps_no_other_from_the_plan():
    controller, workforce = make_faulty(steps=400, nodes=3, worker_start_timeout_s=3)
    run(controller, trained(controller, 5))
    workforce.worker_start_s = 3.0
    workforce.stillborn.add("small-8")
    workforce.join("small-8")
    workforce.join("small-9")
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert "small-9/0" in controller.memory.members


def test_a_node_that_comes_back_by_its_name_is_asked_about_again():
    controller, workforce = make_faulty(steps=200, nodes=4)
    run(controller, trained(controller, 5))
    workforce.kill_agent("small-3")
    run(controller, lambda: len(causes(controller)) == 2)
    assert causes(controller) == ["death", "arrival"]
    assert "small-3/0" in controller.memory.members


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("fate", ["late", "not worth it", "never up"])
def test_a_rehearsal_answers_the_node_that_joins_however_late_it_is_up(fate, prepares):
    """Wrong: a busy machine's run is over before the node's process is up, or waits for ever."""
    script = [{"at_step": 10, "event": "arrival", "node_type": "small"}]
    controller, workforce = make_faulty(steps=20, nodes=3, worker_start_timeout_s=10, script=script)
    memory = controller.memory
    memory.prepares = memory.cuts_over = prepares
    if fate == "not worth it":
        memory.planning.expect = lambda *_: None
        memory.planning.horizon_s = 1.0

    def rehearse(_):
        workforce.starts_s = 8.0
        if fate == "never up":
            workforce.stillborn.add("small-9")
        workforce.join("small-9")

    workforce.rehearse = rehearse
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    is_used = fate == "late"
    assert causes(controller) == ["arrival"] * is_used
    assert controller.summary()["steps"] == memory.ledger.committed_steps == 20 + 3 * is_used
    assert ("small-9/0" in memory.members) == is_used
