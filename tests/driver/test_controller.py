"""The real controller, planner and order book on a fake clock and a scripted workforce: no Ray, no
torch.distributed.
"""

import logging
from dataclasses import replace

import pytest

from autohet.control.job_state import Training, Waiting
from autohet.control.planning.orders import OrderBuilder
from autohet.control.values.observation import Notice
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.planning import make_planning
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.facts.planning import PlanningInputs
from autohet.runtime.messages import Phase
from autohet.runtime.models.config import load_config
from planner.inputs.fleet import NodeType
from tests.harness.fake_job import fake_job
from tests.harness.scripted_workforce import ScriptedWorkforce

KIND = NodeType("small", "A10G", 1, 24 << 30, 32e9, 3e9)


def make(steps=40, min_workers=1, nodes=4, workforce=None, **elastic):
    job = fake_job(
        steps=steps,
        elastic={"min_workers": min_workers, "step_timeout_s": 30, "debounce_s": 0.2, **elastic},
    )
    workforce = workforce or ScriptedWorkforce(KIND)
    for index in range(nodes):
        workforce.join(f"small-{index}")
    controller = Controller(
        job,
        workforce,
        make_planning(job),
        OrderBuilder(job, layout_builder(load_config(job.model, job.training))),
        EventLog(None),
    )
    return controller, workforce


def run(controller, until, ticks=3000):
    """Tick until a condition holds; a controller that gets nowhere is a failure."""
    for _ in range(ticks):
        controller.tick()
        if until():
            return
    raise AssertionError(f"nothing after {ticks} ticks: {controller.state}")


def trained(controller, step):
    return lambda: (
        isinstance(controller.state, Training) and controller.memory.ledger.committed_steps >= step
    )


def causes(controller):
    return [change["cause"] for change in controller.summary()["reconfigurations"]]


def test_an_undisturbed_run_trains_every_step_once_and_commits_the_last():
    controller, workforce = make(steps=12)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps"] == 12
    assert workforce.commits == [12]


@pytest.mark.parametrize("emulated", [True, False])
def test_what_host_memory_has_no_room_for_is_said_before_a_plan_is_trained(
    emulated, monkeypatch, caplog
):
    """In an emulation all nodes share one machine's, of which nothing is known."""
    if not emulated:
        monkeypatch.setattr(PlanningInputs, "fleet", lambda _, fleet: fleet)
    controller, _ = make(workforce=ScriptedWorkforce(replace(KIND, host_memory_bytes=10**6)))
    with caplog.at_level(logging.WARNING, "autohet"):
        run(controller, trained(controller, 1))
    (plan,) = (record for record in controller.events.records if record["kind"] == "plan")
    assert len(plan["lacks_host_memory"]) == (not emulated)
    said = [record.getMessage() for record in caplog.records]
    assert all(
        "snapshots of its" in sentence and said.count(sentence) == 1
        for sentence in plan["lacks_host_memory"]
    )


def test_a_notice_lets_the_leaver_serve_then_releases_it_and_loses_nothing():
    controller, workforce = make()
    run(controller, trained(controller, 5))
    leaver = controller.memory.members[0].split("/")[0]
    workforce.warn(leaver, 60)
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["notice"]
    assert controller.summary()["steps_lost"] == 0
    assert all(not worker.startswith(leaver + "/") for worker in controller.memory.members)
    assert leaver in workforce.released


def test_a_death_loses_no_step_while_every_shard_has_a_live_holder():
    controller, workforce = make()
    run(controller, trained(controller, 5))
    workforce.kill(controller.memory.members[-1].split("/")[0])
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert causes(controller) == ["death"]
    assert controller.summary()["steps_lost"] == 0
    assert controller.summary()["steps"] == 40


def test_a_death_in_the_first_build_starts_again_from_the_seed():
    controller, workforce = make()
    workforce.builds = 20
    run(
        controller,
        lambda: any(p.report.phase is Phase.BUILDING for p in workforce.processes.values()),
    )
    workforce.kill("small-3")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps"] == 40


def test_a_second_death_during_the_rebuild_is_survived():
    controller, workforce = make(nodes=5)
    run(controller, trained(controller, 5))
    workforce.builds = 20
    workforce.kill(controller.memory.members[-1].split("/")[0])
    run(
        controller,
        lambda: any(p.report.phase is Phase.BUILDING for p in workforce.processes.values()),
    )
    workforce.builds = 2
    workforce.kill(
        next(w for w, p in workforce.processes.items() if p.report.phase is Phase.BUILDING).split(
            "/"
        )[0]
    )
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps"] == 40


def test_an_arrival_is_taken_in():
    controller, workforce = make(steps=200, nodes=3)
    run(controller, trained(controller, 5))
    workforce.join("small-9")
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["arrival"]
    assert "small-9/0" in controller.memory.members


def test_below_the_minimum_it_waits_says_so_and_goes_on_when_a_node_comes():
    controller, workforce = make(nodes=2, min_workers=2)
    run(controller, trained(controller, 5))
    workforce.kill("small-1")
    run(controller, lambda: isinstance(controller.state, Waiting))
    run(
        controller,
        lambda: any(
            e["kind"] == "decision" and "wait" in e["reason"] for e in controller.events.records
        ),
    )
    workforce.join("small-7")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps"] == 40


def test_failures_without_a_step_between_are_bounded():
    controller, workforce = make(max_failures_in_a_row=3)
    run(controller, trained(controller, 3))

    def fail_everyone():
        for process in workforce.processes.values():
            if process.report.phase is Phase.TRAINING:
                process.report = process.report.__class__(
                    **{**process.report.__dict__, "phase": Phase.FAILED, "error": "boom"}
                )
        return controller.ended

    run(controller, fail_everyone)
    assert not controller.ended.ok
    assert "boom" in controller.ended.reason


def test_a_worker_that_dies_before_the_last_commit_does_not_make_it_a_success():
    controller, workforce = make(steps=10)
    workforce.commit_checkpoint = lambda *_: None
    run(controller, lambda: type(controller.state).__name__ == "Closing")
    del workforce.commit_checkpoint
    workforce.kill(controller.memory.members[-1].split("/")[0])
    run(controller, lambda: controller.memory.generation >= 2 or controller.ended)
    assert controller.ended is None


@pytest.mark.parametrize("moment", [1, 7])
def test_every_decision_gives_its_reason(moment):
    controller, workforce = make()
    run(controller, trained(controller, moment))
    workforce.kill(controller.memory.members[0].split("/")[0])
    run(controller, lambda: controller.ended)
    assert all(
        event["reason"] for event in controller.events.records if event["kind"] == "decision"
    )


def test_a_node_at_risk_is_told_of_once_and_trains_on():
    controller, workforce = make()
    run(controller, trained(controller, 5))
    at_risk = controller.memory.members[0].split("/")[0]
    workforce.risks[at_risk] = Notice(at_risk, "rebalance", workforce.now, risk=True)
    run(controller, lambda: controller.ended)
    assert causes(controller) == []
    assert [event["node"] for event in controller.events.records if event["kind"] == "risk"] == [
        at_risk
    ]


def test_notices_of_one_wave_are_one_change():
    controller, workforce = make(steps=80, nodes=5)
    run(controller, trained(controller, 5))
    first, second = (node for node in list(workforce.nodes)[:2])
    workforce.warn(first, 60)
    controller.tick()
    controller.tick()
    workforce.warn(second, 58)
    run(controller, lambda: controller.ended)
    assert [change["nodes"] for change in controller.summary()["reconfigurations"]] == [
        [first, second]
    ]
