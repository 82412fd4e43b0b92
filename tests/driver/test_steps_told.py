"""What a restarted driver says of steps that the one before it ran: those run again are lost, those
that no event tells of have no loss.
"""

import json
from pathlib import Path

from autohet.control.ledger.ledger import NOTHING_TOLD, ToldSteps
from autohet.control.planning.orders import OrderBuilder
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.run_record import steps_told
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.value_codec import decode, encode
from autohet.runtime.facts.layout import layout_builder, layout_of_plan
from planner.inputs.fleet import Fleet, Node
from tests.driver.test_controller import run, trained
from tests.driver.test_controller_states import SMALL, inputs_of
from tests.harness.faulty_workforce import FaultyWorkforce
from tests.harness.promises import RememberedPlanning

DURABLE = 20


def restarted(told: ToldSteps) -> Controller:
    """A driver that finds a checkpoint of step 20, and that its predecessor told of these steps."""
    job, inputs, config = inputs_of(1)
    force, planning = FaultyWorkforce(SMALL), RememberedPlanning(inputs, clock=lambda: 0.0)
    controller = Controller(
        job, force, planning, OrderBuilder(job, layout_builder(config)), EventLog(None)
    )
    fleet = Fleet(1, tuple(Node(f"small-{index}", SMALL) for index in range(2)))
    layout = layout_of_plan(planning.propose(fleet, None).plan, config)
    force.make_durable(DURABLE, 3, layout, (3,) * DURABLE)
    controller.memory.generation = 3
    controller.memory.ledger.go_on_from(DURABLE, told)
    for index in range(2):
        force.join(f"small-{index}")
    run(controller, trained(controller, DURABLE + 3))
    return controller


def test_steps_that_are_run_again_count_as_lost_and_missing_losses_are_named() -> None:
    controller = restarted(ToldSteps(10, frozenset({*range(10, 17), 18, 19, *range(20, 25)})))
    (restore,) = [e for e in controller.events.records if e["kind"] == "restore"]
    assert restore["steps_lost"] == 5
    assert restore["steps_without_loss"] == [17]
    (change,) = [e for e in controller.events.records if e["kind"] == "reconfigure"]
    assert (change["cause"], change["steps_lost"]) == ("start", 5)
    assert controller.summary()["steps_lost"] == 5


def test_a_first_driver_lost_nothing() -> None:
    controller = restarted(NOTHING_TOLD)
    assert not [e for e in controller.events.records if e["kind"] == "reconfigure"]
    (restore,) = [e for e in controller.events.records if e["kind"] == "restore"]
    assert restore["steps_lost"] == 0
    assert "steps_without_loss" not in restore


def test_told_steps_are_those_of_the_last_run_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        {"kind": "started", "step": 0},
        {"kind": "step", "step": 90},
        {"kind": "started", "step": 3},
        {"kind": "step", "step": 3},
        {"kind": "started", "step": 3, "restart": True},
        {"kind": "step", "step": 5},
        {"kind": "checkpoint", "step": 4},
    ]
    text = "".join(json.dumps({"time": 0.0, "generation": 1, **line}) + "\n" for line in lines)
    path.write_text(text + '{"time": 1.0, "ki')
    assert steps_told(path) == ToldSteps(3, frozenset({3, 5}), 4, newest=(1, 5))
    assert steps_told(path).missing(6) == [4]
    assert steps_told(tmp_path / "none") == NOTHING_TOLD


def test_what_was_told_is_recorded_and_read_again() -> None:
    told = ToldSteps(3, frozenset({3, 5}))
    assert decode(json.loads(json.dumps(encode(told)))) == told
