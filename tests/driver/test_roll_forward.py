"""A step that one survivor has committed counts at another only where it is whole there; who is
late with it is ended.
"""

from dataclasses import replace

from autohet.control.job_state import Building, Quiescing, Training
from autohet.driver.loop.controller import Controller
from autohet.runtime.messages import Phase, RollForwardOutcome
from autohet.runtime.step.votes import Vote
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


def struck(answer: str) -> tuple[Controller, ScriptedWorkforce, str, int]:
    """All but a witness were interrupted in the vote; one of those who have to roll forward answers
    as `answer` says.
    """
    controller, force = make(steps=60)
    run(controller, trained(controller, 5))
    step, (late, *_, witness) = controller.memory.ledger.committed_steps, controller.memory.members
    vote = Vote(4.0, 640.0, 64, members=len(controller.memory.members))
    for worker, process in force.processes.items():
        halted = replace(process.report, phase=Phase.HALTED)
        saw = worker == witness
        process.report = (
            replace(halted, step=step + 1, vote=(step, vote))
            if saw
            else replace(halted, prepared_step=step)
        )
    told: list[tuple[str, int]] = []
    real = force.roll_forward

    def roll_forward(workers, generation, seen):
        told.extend((worker, generation) for worker in workers)
        real([worker for worker in workers if worker != late], generation, seen)
        if late in workers and answer == "fails":
            process = force.processes[late]
            process.report = replace(
                process.report,
                whole=False,
                rolled=RollForwardOutcome(generation, step, "CUDA error"),
            )

    force.roll_forward = roll_forward  # type: ignore[method-assign, assignment]
    run(controller, lambda: bool(told))
    assert (late, 1) in told, "with the generation whose step it is"
    return controller, force, late, step


def test_who_is_late_with_a_roll_forward_is_ended_and_never_overtaken() -> None:
    controller, force, late, step = struck("is late")
    run(controller, lambda: not isinstance(controller.state, Quiescing))
    assert late not in force.processes or force.processes[late].report.generation == 0, (
        "its process was ended"
    )
    run(
        controller,
        lambda: (
            isinstance(controller.state, (Building, Training)) and controller.memory.generation > 1
        ),
    )
    assert (
        controller.state.change.restore_step == step + 1
        if isinstance(controller.state, Building)
        else True
    )
    assert any(
        e["kind"] == "death" and "did not apply step" in e["reason"]
        for e in controller.events.records
    )
    run(controller, lambda: controller.ended)
    assert controller.ended is not None
    assert controller.ended.ok


def test_a_roll_forward_that_failed_is_waited_for_no_longer_and_its_state_is_not_used() -> None:
    controller, force, late, _ = struck("fails")
    began = force.now
    run(controller, lambda: isinstance(controller.state, Building))
    assert force.now - began < controller.memory.timeouts.quiesce_s, "the outcome was read"
    orders = controller.memory.ledger.orders
    transfers = next(iter(orders.values())).transfers
    asked = {
        source.name
        for part in transfers.parts.values()
        for fetch in (*part.fetches, *part.message_fallbacks)
        for source in fetch.sources
    }
    assert late not in asked, "nobody restores from a state that is half updated"
    part = transfers.parts.get(late)
    assert part is None or not part.keep, "not even itself"
