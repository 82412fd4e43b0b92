"""A repair gets the job going again; once it trains, a whole search says whether another plan is
worth a move.
"""

from autohet.control.job_state import Quiescing
from autohet.control.planning.proposals import PlanProposal
from autohet.driver.loop.planning import Planning
from planner.answers.repair import repair
from planner.inputs.fleet import Fleet
from tests.driver.test_controller import causes, make, run, trained


class HastyPlanning(Planning):
    """Where a plan is asked for in haste, the present one without its lost pipelines and `left_out`
    more. `asked`: thorough or not, and whether a change was under way.
    """

    def __init__(self, controller, left_out):
        super().__init__(controller.memory.planning.inputs)
        self.controller, self.left_out, self.asked = controller, left_out, []

    def propose(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        thorough: bool | None = None,
    ) -> PlanProposal:
        self.asked.append((thorough, self.controller.memory.ledger.open_change is not None))
        if current is None or thorough:
            return super().propose(fleet, current, redundant=redundant, thorough=thorough)
        cost = self.make_cost(fleet)
        whole = [p for p in current.plan.pipelines if set(p.workers) <= set(fleet.workers)]
        kept = {worker for p in whole[self.left_out :] for worker in p.workers}
        plan = repair(current.plan, self.request(fleet, cost), kept)
        assert plan is not None
        return PlanProposal(plan, cost.predict(plan), cost, searched=False)


def make_hasty(left_out):
    controller, workforce = make(steps=200)
    controller.memory.planning = HastyPlanning(controller, left_out)
    run(controller, trained(controller, 5))
    workforce.kill("small-3")
    run(controller, lambda: "death" in causes(controller))
    return controller


def decisions(controller):
    return [event["reason"] for event in controller.events.records if event["kind"] == "decision"]


def test_a_better_plan_than_the_repair_is_moved_to_once_the_job_trains_again():
    controller = make_hasty(left_out=1)
    repaired = controller.memory.proposal
    assert len(repaired.plan.workers) == 2
    run(controller, lambda: "search" in causes(controller))
    assert causes(controller) == ["death", "search"]
    assert len(controller.memory.proposal.plan.workers) == 3
    assert controller.memory.proposal.predicted_step_s < repaired.predicted_step_s
    assert decisions(controller)[-1].endswith("since the plan so far is only a repair")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps_lost"] == 0
    assert controller.memory.planning.asked == [(None, False), (None, False), (True, False)]


def test_a_repair_that_nothing_beats_stays_and_is_asked_about_once():
    controller = make_hasty(left_out=0)
    run(controller, lambda: controller.ended)
    assert causes(controller) == ["death"]
    assert controller.memory.planning.asked == [(None, False), (None, False), (True, False)]
    assert any(
        "stay as it is although the plan so far is only a repair" in reason
        for reason in decisions(controller)
    )


def test_a_node_that_dies_while_all_stop_for_the_better_plan_is_repaired_first():
    controller = make_hasty(left_out=1)
    assert isinstance(controller.state, Quiescing)
    assert controller.state.change.cause == "search"
    controller.memory.planning.left_out = 0
    controller.workforce.kill(controller.memory.members[0].split("/")[0])
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert causes(controller)[:2] == ["death", "death"]
    assert controller.summary()["steps"] == 200
