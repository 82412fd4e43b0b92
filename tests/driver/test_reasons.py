"""What a decision's sentence says of workers and pipelines: all of a few, the sum of many."""

from dataclasses import replace

import pytest

from autohet.control.fleet import named
from autohet.control.planning.proposals import PlanProposal
from planner.plans.plan import Pipeline, Plan, Stage
from tests.driver.test_controller import KIND, make, run, trained
from tests.driver.test_second_thoughts import decisions
from tests.harness.scripted_workforce import ScriptedWorkforce


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (["a/0"], "a/0"),
        (["a/0", "b/0"], "a/0, b/0"),
        (["a/0", "a/1", "b/3"], "a (2 workers), b/3"),
        ([f"n{i}/0" for i in range(6)], "n0/0, n1/0, n2/0, n3/0, n4/0, n5/0"),
        ([f"n{i}/0" for i in range(9)], "n0/0, n1/0, n2/0, n3/0, n4/0, 4 more"),
    ],
)
def test_workers_of_one_node_are_said_together(workers, said):
    assert named(workers) == said


def test_a_node_of_several_workers_dies_in_one_word():
    controller, workforce = make(nodes=3, workforce=ScriptedWorkforce(replace(KIND, num_gpus=2)))
    run(controller, trained(controller, 5))
    workforce.kill("small-2")
    run(controller, lambda: controller.ended)
    assert any("lost small-2 (2 workers): killed" in reason for reason in decisions(controller))


@pytest.mark.parametrize(
    ("depths", "said"),
    [
        ((2,), "train on 1 pipeline (2 stages, 2 GPUs)"),
        ((2, 1), "train on 2 pipelines (2 + 1 stages, 3 GPUs)"),
        ((2,) * 8 + (1,) * 3, "train on 11 pipelines (8 x 2 + 3 x 1 stages, 19 GPUs)"),
    ],
)
def test_many_pipelines_are_counted(depths, said):
    names = iter(range(100))
    pipelines = tuple(
        Pipeline(tuple(Stage(s, 1, (f"n{next(names)}/0",)) for s in range(depth)), 1, 1)
        for depth in depths
    )
    assert PlanProposal(Plan("m", len(depths), 1, 4, pipelines), None, None).headline == said  # type: ignore[arg-type]
