"""How a run ends: a limit counts repetitions of one cause, never deaths that have nothing in
common; what is committed is made durable before an end.
"""

from dataclasses import replace

import pytest

from autohet.control.job_state import Building, Quiescing
from autohet.control.planning.orders import OrderBuilder
from autohet.driver.events.event_log import EventLog
from autohet.driver.events.living_nodes import LivingNodes
from autohet.driver.loop.controller import Controller
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.messages import Phase
from autohet.runtime.models.config import load_config
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import read_trace
from planner.inputs.cluster import cluster_from_document
from tests.driver.test_controller import KIND, run, trained
from tests.driver.test_simulation import job_document
from tests.harness.fake_job import fake_job
from tests.harness.local_fleet import cluster_document
from tests.harness.promises import RememberedPlanning
from tests.harness.scripted_workforce import ScriptedWorkforce


def make(steps=40, nodes=4, **elastic):
    """As in `test_controller`, with a planner that is quick and asked once for each question."""
    job = fake_job(
        steps=steps,
        elastic={"min_workers": 1, "step_timeout_s": 30, "debounce_s": 0.2, **elastic},
        parallelism={"search_time_limit_s": 0.05},
    )
    force = ScriptedWorkforce(KIND)
    for index in range(nodes):
        force.join(f"small-{index}")
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)))
    planning = RememberedPlanning(planning_inputs(job))
    return Controller(job, force, planning, orders, EventLog(None)), force


def is_rebuilding(controller):
    return lambda: isinstance(controller.state, Building) and controller.memory.generation > 1


def left_out(controller):
    said = [e["reason"] for e in controller.events.records if e["kind"] == "decision"]
    return [sentence for sentence in said if "leave out" in sentence]


def fail_all(force, error="boom"):
    for process in force.processes.values():
        if process.report.phase in (Phase.TRAINING, Phase.BUILDING):
            process.report = replace(process.report, phase=Phase.FAILED, error=error)


def test_deaths_inside_each_other_s_rebuilds_never_end_the_job():
    controller, force = make(nodes=9, max_failures_in_a_row=1)
    force.builds = 5
    run(controller, trained(controller, 3))
    force.kill(controller.memory.members[-1].split("/")[0])
    for _ in range(6):
        run(controller, lambda: is_rebuilding(controller)() or controller.ended)
        assert controller.ended is None, controller.ended
        force.kill(controller.state.participants[-1].split("/")[0])
        run(controller, lambda: isinstance(controller.state, Quiescing) or controller.ended)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason
    assert controller.summary()["steps_lost"] == 0
    assert not left_out(controller), "each is another's cause"


def test_worker_processes_that_die_inside_each_other_s_rebuilds_never_end_the_job():
    """Their nodes live, and start them again."""
    controller, force = make(nodes=8, max_failures_in_a_row=1)
    force.builds = 5
    run(controller, trained(controller, 3))
    struck = [controller.memory.members[-1]]
    force.lose(*struck)
    for _ in range(6):
        run(controller, lambda: is_rebuilding(controller)() or controller.ended)
        assert controller.ended is None, controller.ended
        struck.append(next(w for w in controller.state.participants if w not in struck))
        force.lose(struck[-1])
        run(controller, lambda: isinstance(controller.state, Quiescing) or controller.ended)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok, controller.ended.reason
    assert not left_out(controller), "each is another's cause"


def test_a_node_that_takes_the_name_of_one_that_is_gone_inherits_nothing():
    """Between two observations: a notice, a slow pace and a place in the plan were another's."""
    controller, force = make(nodes=4, steps=400)
    run(controller, trained(controller, 3))
    force.warn("small-3", 60.0)
    run(controller, lambda: "small-3" in controller.memory.nodes.notices)
    controller.memory.speeds.slowdowns = {"small-3": 3.0}
    force.kill("small-3")
    force.notices.clear()
    force.join("small-3")
    controller.tick()
    assert "small-3" not in controller.memory.nodes.notices
    assert controller.memory.speeds.slowdowns == {}
    run(
        controller,
        lambda: "small-3/0" in controller.memory.members and controller.memory.generation > 1,
    )
    told = [(e["kind"], e["node"]) for e in controller.events.records if "node" in e]
    assert told.count(("arrival", "small-3")) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("apart_s", [2, 8])
def test_simulated_deaths_some_seconds_apart_never_end_the_job(tmp_path, apart_s):
    """Ray tells of each death only after a while: until then the node looks alive, and a death
    that is known already explains nothing that comes later.
    """
    document = cluster_document()
    for kind in document["available_node_types"].values():
        kind["max_workers"] = 12
    document["max_workers"] = 40
    cluster = cluster_from_document(document)
    lines = ["time_s,event,node"] + [f"0,arrival,small-{i}" for i in range(7)]
    lines += [f"{3000 + apart_s * i},death,small-{i}" for i in range(6)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    job = Job.from_document(job_document())
    trace = read_trace(path, cluster, 120.0)
    found = TraceSimulation(Scenario(job, cluster, trace, 6000.0)).run("local_first")
    assert found["ended"] is None, found["ended"]
    assert found["steps_lost"] < 50, "never behind the newest checkpoint"
    attempts = sum(change["attempts"] for change in found["reconfigurations"])
    assert attempts <= 6, "no death is planned on twice"


def test_an_end_by_repeated_failures_makes_the_newest_step_durable_first():
    controller, force = make(max_failures_in_a_row=3, steps=400)
    run(controller, trained(controller, 7))
    step = controller.memory.ledger.committed_steps

    def fail_until_saving():
        if controller.memory.end.reason is None:
            fail_all(force)
        return controller.ended

    run(controller, fail_until_saving)
    assert not controller.ended.ok
    assert "boom" in controller.ended.reason
    assert force.commits, "the survivors held it all"
    assert force.commits[-1] >= step
    assert controller.ended.may_pass


def test_an_end_that_cannot_be_saved_says_which_step_is_safe():
    controller, force = make(max_failures_in_a_row=2)
    run(controller, trained(controller, 3))

    def fail():
        fail_all(force)
        return controller.ended

    run(controller, fail)
    assert "boom" in controller.ended.reason
    assert "not in durable storage" in controller.ended.reason
    assert controller.ended.may_pass


def test_a_node_that_fails_again_and_again_is_left_out_for_a_while():
    controller, force = make(max_failures_in_a_row=2)
    run(controller, trained(controller, 3))
    bad = controller.memory.members[0]

    def strike():
        process = force.processes[bad]
        if process.report.phase in (Phase.TRAINING, Phase.BUILDING):
            force.interrupt([w for w in force.processes if w != bad], controller.memory.generation)
            error = "CUDA error: uncorrectable ECC error"
            process.report = replace(process.report, phase=Phase.FAILED, error=error)
        return controller.ended

    run(controller, strike)
    assert controller.ended.ok, controller.ended.reason
    said = [e["reason"] for e in controller.events.records if e["kind"] == "decision"]
    assert any("leave out" in sentence and bad.split("/")[0] in sentence for sentence in said)


def test_errors_that_differ_only_in_numbers_are_one_cause():
    controller, force = make(max_failures_in_a_row=3)
    run(controller, trained(controller, 3))
    sizes = iter(range(10_000))

    def fail():
        fail_all(force, f"OutOfMemoryError: tried to allocate {next(sizes)} MiB")
        return controller.ended

    run(controller, fail)
    assert "OutOfMemoryError" in controller.ended.reason


def test_what_is_announced_before_it_is_known_is_announced_again():
    """An agent that takes long has its node announced as the cluster file describes it."""
    controller, force = make(nodes=2, steps=100)
    run(controller, trained(controller, 2))
    view = force.nodes["small-1"]
    known = replace(view.node.node_type, zone="us-east-1a", usd_per_hour=0.5)
    force.nodes["small-1"] = replace(view, node=replace(view.node, node_type=known))
    controller.tick()
    controller.tick()
    told = [e for e in controller.events.records if e.get("node") == "small-1"]
    assert [(e["kind"], e["zone"], e.get("updated")) for e in told] == [
        ("arrival", "", None),
        ("arrival", "us-east-1a", True),
    ]
    living = LivingNodes()
    for event in controller.events.records:
        living.take(event)
    assert living.gpus_by("zone") == {"": 1, "us-east-1a": 1}
    assert living.usd_per_hour == 0.5
