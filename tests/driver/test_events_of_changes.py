"""Whatever befalls the fleet, an event tells of it, with its reason."""

from autohet.driver.states import Building, Quiescing, Waiting
from tests.driver.test_controller import make, run, trained
from tests.driver.test_overtaken import make_faulty


def deaths(controller):
    return [event["workers"] for event in controller.events.records if event["kind"] == "death"]


def test_a_worker_that_dies_while_the_job_waits_is_told_of():
    controller, workforce = make(nodes=2, min_workers=2)
    run(controller, trained(controller, 5))
    workforce.kill("small-1")
    run(controller, lambda: isinstance(controller.state, Waiting))
    workforce.kill("small-0")
    controller.tick()
    assert deaths(controller) == [["small-1/0"], ["small-0/0"]]
    controller.tick()
    assert len(deaths(controller)) == 2, "once"


def test_a_worker_that_dies_while_a_generation_without_it_is_built_is_told_of():
    controller, workforce = make_faulty()
    run(controller, trained(controller, 5))
    workforce.builds = 20
    workforce.warn("small-3", 60)
    run(controller, lambda: isinstance(controller.state, Building))
    left_out = next(w for w in controller.members if w not in controller.state.participants)
    workforce.kill(left_out.split("/")[0])
    controller.tick()
    assert deaths(controller)[0] == [left_out]


def test_an_arrival_that_dies_while_others_quiesce_is_told_of():
    controller, workforce = make_faulty(nodes=3)
    run(controller, trained(controller, 5))
    workforce.builds = 20
    workforce.join("small-9")
    run(controller, lambda: isinstance(controller.state, Building))
    workforce.kill("small-1")
    workforce.deafen("small-2/0")  # the others stand only when this one is given up
    run(controller, lambda: isinstance(controller.state, Quiescing))
    workforce.kill("small-9")
    controller.tick()
    assert deaths(controller) == [["small-1/0"], ["small-9/0"]]
    assert controller.state.change.nodes == ("small-1", "small-9")
