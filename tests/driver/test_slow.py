"""Workers that compute more slowly than planned: found beside their peers, planned on as they are,
forgiven when they recover.
"""

from dataclasses import replace
from statistics import median

import pytest

from autohet.control import speeds
from tests.driver.test_controller import KIND, causes, make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce


class PacedWorkforce(ScriptedWorkforce):
    """Each step's compute is what the plan says of it, times `machine` for all and `slow` for some
    nodes.
    """

    def __init__(self, machine):
        super().__init__(KIND)
        self.slow, self.machine, self.controller = {}, machine, None
        self.work = {}
        """By node: work of its microbatches by that of average rows."""

    def _step(self, process):
        report = super()._step(process)
        rated = self.controller.memory.planning.compute_s(self.controller.memory.proposal, {})[
            report.worker
        ]
        compute = rated * self.machine * self.slow.get(report.worker.split("/")[0], 1.0)
        work = self.work.get(report.worker.split("/")[0], 1.0)
        paced = {"parts_s": {"compute": compute * work}, "relative_work": work}
        return replace(report, steps=tuple(replace(r, **paced) for r in report.steps))


def make_paced(steps=300, nodes=4, machine=1.0, **elastic):
    workforce = PacedWorkforce(machine)
    controller, _ = make(
        steps, nodes=nodes, workforce=workforce, slow_ratio=1.5, slow_steps=5, **elastic
    )
    workforce.controller = controller
    return controller, workforce


def sequences_of(controller, node):
    return sum(
        p.num_sequences
        for p in controller.memory.proposal.plan.pipelines
        if any(node in w for s in p.stages for w in s.workers)
    )


def test_a_slow_node_gets_less_work_and_more_again_when_it_recovers():
    controller, workforce = make_paced(machine=3.0, nodes=3)
    run(controller, trained(controller, 5))
    node = max(("small-0", "small-1", "small-2"), key=lambda name: sequences_of(controller, name))
    before = sequences_of(controller, node)
    workforce.slow[node] = 1.6
    run(controller, lambda: bool(causes(controller)))
    assert causes(controller) == ["slow"]
    assert controller.memory.speeds.slowdowns == {node: 1.6}
    assert sequences_of(controller, node) < before
    run(controller, lambda: controller.memory.ledger.committed_steps >= 60)
    assert causes(controller) == ["slow"]  # as slow as it is now known to be: no news
    workforce.slow.clear()
    run(controller, lambda: not controller.memory.speeds.slowdowns)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps_lost"] == 0
    slow = [event for event in controller.events.records if event["kind"] == "slow"]
    assert [event["slowdowns"] for event in slow] == [{node: 1.6}, {node: 1.0}]


def test_a_node_with_longer_documents_is_not_slow():
    """Wrong: a microbatch of long documents is compared with the time of average ones."""
    controller, workforce = make_paced(steps=60, nodes=3)
    workforce.work["small-1"] = 2.5
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.memory.speeds.slowdowns == {}
    assert "slow" not in causes(controller)


def test_a_slow_node_that_is_left_idle_is_tried_again_after_a_while():
    controller, workforce = make_paced(steps=600, slow_forgiven_s=10.0)
    run(controller, trained(controller, 5))
    node = controller.memory.members[-1].split("/")[0]
    workforce.slow[node] = 6.0
    run(controller, lambda: bool(causes(controller)))
    assert sequences_of(controller, node) == 0
    workforce.slow.clear()
    run(controller, lambda: len(causes(controller)) == 2)
    assert sequences_of(controller, node) > 0
    assert controller.memory.speeds.slowdowns == {}


def test_a_slowness_that_no_other_plan_mends_changes_nothing():
    controller, workforce = make_paced(nodes=2, min_workers=2)
    run(controller, trained(controller, 5))
    workforce.slow = {"small-0": 1.55}
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert [e["nodes"] for e in controller.events.records if e["kind"] == "slow"] == [["small-0"]]
    kinds = [
        e
        for e in controller.events.records
        if e["kind"] == "decision" and "computes 1.55" in e["reason"]
    ]
    assert len(kinds) == 1


def test_a_machine_slower_than_its_profile_makes_nobody_slow():
    controller, _ = make_paced(machine=5.0)
    run(controller, lambda: controller.ended)
    assert causes(controller) == []


@pytest.mark.parametrize("shares", [[1, 1, 1, 1.6], [1, 1.6], [2, 2, 3.2, 2, 2]])
def test_the_typical_worker_is_the_measure(shares):
    measured = {f"n{i}/0": [share * 2.0] * 5 for i, share in enumerate(shares)}
    planned = dict.fromkeys(measured, 1.0)
    (slow,) = speeds.find_slow(measured, planned, {}, 1.5).items()
    assert slow == (
        f"n{shares.index(max(shares))}",
        pytest.approx(max(shares) / median(shares[:2]), rel=0.7),
    )
    assert speeds.find_slow(measured, planned, {}, 1.7) == {}
    assert speeds.find_slow(measured, planned, {}, 0) == {}


def test_one_fast_step_acquits():
    measured = {"a/0": [1.0] * 5, "b/0": [2.0, 2.0, 1.2, 2.0, 2.0], "c/0": [1.0] * 5}
    assert speeds.find_slow(measured, dict.fromkeys(measured, 1.0), {}, 1.5) == {}
