"""The loss of a step whose only witness dies: the vote that it reported lets the others commit it,
and tells its loss.
"""

import json
import math
from dataclasses import replace

from autohet.driver.events.event_log import EventLog
from autohet.runtime.messages import Phase
from autohet.runtime.step.votes import Vote
from tests.driver.test_controller import make, run, trained


def test_the_loss_of_a_step_whose_only_witness_dies_is_that_of_its_vote(tmp_path):
    controller, force = make(steps=20)
    controller.events = EventLog(tmp_path / "events.jsonl")
    run(controller, trained(controller, 5))
    step = controller.memory.ledger.committed_steps
    witness = controller.memory.members[-1]
    for worker, process in force.processes.items():
        process.report = replace(process.report, phase=Phase.HALTED, prepared_step=step)
        if worker == witness:
            process.report = replace(
                process.report,
                vote=(step, Vote(4.0, 640.0, 64, members=len(controller.memory.members))),
            )
    controller.tick()
    assert step not in controller.memory.ledger.records, "nobody has told of it"
    force.kill(witness.split("/")[0])
    run(controller, lambda: controller.ended)
    summary = controller.summary()
    assert controller.ended.ok
    assert summary["steps"] == len(summary["losses"]) == 20
    assert summary["losses"][step] == 640 / 64
    assert summary["losses"][step - 1] == 1.0 / step, "as the workers told it"
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told if event["kind"] == "step"] == list(range(20))
    (event,) = [event for event in told if event["kind"] == "step" and event["step"] == step]
    assert math.isclose(event["gradient_norm"], math.sqrt(4.0) / 64)
    assert event["seconds"] is None
    controller.events.close()
