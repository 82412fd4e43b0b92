"""Whatever befalls the fleet, an event tells of it, with its reason."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autohet.control.job_state import Building, Quiescing, Waiting
from autohet.control.values.observation import Loss
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.view import View
from autohet.runtime.messages import ReplicaMismatch, StepRecord
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
    left_out = next(w for w in controller.memory.members if w not in controller.state.participants)
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


def waits(controller):
    return [
        e["reason"]
        for e in controller.events.records
        if e["kind"] == "decision" and "wait" in e["reason"]
    ]


def test_a_wait_from_the_very_start_is_told_and_told_again_as_the_fleet_grows():
    controller, workforce = make(nodes=0, min_workers=3)
    run(controller, lambda: bool(waits(controller)), ticks=20)
    assert "the fleet has 0 workers; the job needs 3" in waits(controller)[0]
    workforce.join("small-0")
    run(controller, lambda: len(waits(controller)) == 2, ticks=20)
    assert "has 1 worker; the job needs 3" in waits(controller)[1]
    for _ in range(100):
        controller.tick()
    assert len(waits(controller)) == 2, "once for each size of the fleet"
    workforce.join("small-1")
    workforce.join("small-2")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok


def test_a_wait_is_shown_live(capsys, monkeypatch):
    controller, workforce = make(nodes=0, min_workers=3)
    monkeypatch.setattr("autohet.driver.job.view.LINE_PERIOD_S", 0.0)
    with View(emulated=False, console=Console(stderr=True, force_terminal=False)) as view:
        for count in range(3):
            workforce.join(f"small-{count}")
            for _ in range(4):
                view(controller, controller.tick())
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(set(shown))
    for count in range(3):
        assert any(f"has {count} worker" in line and "needs 3" in line for line in shown), shown


def idle_and_busy(controller, workforce):
    used = {worker.split("/")[0] for worker in controller.memory.members}
    return sorted(set(workforce.nodes) - used), sorted(used)


def take_away(workforce, name):
    """An idle node goes: nobody who trains is cut off."""
    del workforce.nodes[name]
    workforce.processes.pop(f"{name}/0", None)
    workforce.losses[f"{name}/0"] = Loss(f"{name}/0", "killed", workforce.now, workforce.now)


def test_the_death_of_an_idle_node_is_told_once():
    controller, workforce = make(steps=10**6, nodes=40)
    run(controller, trained(controller, 3))
    idle, _ = idle_and_busy(controller, workforce)
    assert len(idle) >= 2, "eight sequences, so eight pipelines at the most, of few stages each"
    take_away(workforce, idle[0])
    for _ in range(10):
        controller.tick()
    told = [e for e in controller.events.records if e["kind"] == "death"]
    assert [(event["nodes"], event["workers"]) for event in told] == [([idle[0]], [])]
    assert "idle" in told[0]["reason"]
    assert "killed" in told[0]["reason"]
    workforce.warn(idle[1], 1.0)
    for _ in range(5):
        controller.tick()
    take_away(workforce, idle[1])
    for _ in range(5):
        controller.tick()
    assert len([e for e in controller.events.records if e["kind"] == "death"]) == 1, (
        "a notice told of the other"
    )


def test_the_death_of_a_busy_node_is_told_once():
    controller, workforce = make(steps=10**6, nodes=4)
    run(controller, trained(controller, 3))
    _, busy = idle_and_busy(controller, workforce)
    workforce.kill(busy[0])
    run(controller, lambda: bool(controller.summary()["reconfigurations"]))
    assert [e["nodes"] for e in controller.events.records if e["kind"] == "death"] == [[busy[0]]]


def test_a_wait_for_want_of_nodes_names_the_jobs_own_option():
    controller, workforce = make(nodes=2)
    run(controller, trained(controller, 5))
    workforce.kill("small-1")
    run(controller, lambda: bool(waits(controller)))
    assert "parallelism.min_pipelines is 2" in waits(controller)[-1]
    assert "the fleet has 1" in waits(controller)[-1]


def test_replicas_that_parted_are_an_event_of_their_step():
    controller, _ = make(nodes=1)
    parted = ReplicaMismatch(
        7, "exp_avg/model.layers.3.mlp.up_proj.weight", 0, 3, ("a/0",), "b/0", 100
    )
    record = StepRecord(7, 1.0, 1.0, 64, 0.1, 1, 0.0, parted=(parted,))
    for decided in controller.memory.ledger.keep_step(record):
        controller.events.tell(decided)
    (event,) = [event for event in controller.events.records if event["kind"] == "parted"]
    assert (event["step"], event["layer"], event["workers"], event["owner"]) == (
        7,
        3,
        ("a/0",),
        "b/0",
    )
    assert "up_proj.weight[0] of layer 3" in event["reason"]


def test_a_disk_that_is_full_costs_the_record_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[dict[str, Any]] = []
    events = EventLog(Path("/dev/full"), listener=heard.append)
    for _ in range(2):
        events.emit("decision", 1, "Deciding to go on")
    assert len(heard) == 2
    events.close()
    assert caplog.text.count("cannot be written") == 1
