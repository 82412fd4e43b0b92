"""Nodes that join: each is asked about, whenever its processes come up, and none keeps the others
waiting for ever.
"""

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
