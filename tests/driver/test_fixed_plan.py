"""A plan that the job names is held to what the job asks of plans, before anything starts."""

import copy
import json

import pytest

from autohet.driver.job.preparation import check_inputs
from autohet.driver.loop.planning import make_planning
from planner.errors import ConfigError
from tests.harness import toy_model  # noqa: F401
from tests.harness.exact_job import CHAIN, PLAN, exact_job


def job_with(plan, directory, **parallelism):
    return exact_job(directory, directory, directory / "memory", plan, parallelism=parallelism)


def one_node(plan):
    """The plan with every worker on node a: several pipelines side by side."""
    moved = copy.deepcopy(plan)
    number = 0
    for pipeline in moved["pipelines"]:
        for stage in pipeline["stages"]:
            stage["workers"] = [f"a/{number + i}" for i in range(len(stage["workers"]))]
            number += len(stage["workers"])
    return moved


@pytest.mark.parametrize("key", ["min_pipelines", "redundancy"])
@pytest.mark.parametrize("plan", [CHAIN, one_node(PLAN)], ids=["one pipeline", "one node"])
def test_a_plan_whose_layers_lie_on_one_node_is_refused_where_two_are_asked_for(
    plan, key, tmp_path
):
    job = job_with(plan, tmp_path, **{key: 2})
    with pytest.raises(ConfigError, match=r"plan\.json.*lies on 1 node.* 2 are asked for"):
        check_inputs(job, None)


@pytest.mark.parametrize(
    ("plan", "wishes"), [(PLAN, {"min_pipelines": 2}), (CHAIN, {}), (one_node(PLAN), {})]
)
def test_a_plan_that_keeps_the_promise_or_makes_none_is_taken(plan, wishes, tmp_path):
    taken = make_planning(job_with(plan, tmp_path, **wishes)).read_fixed_plan()
    assert [list(stage.workers) for p in taken.pipelines for stage in p.stages] == [
        stage["workers"] for p in plan["pipelines"] for stage in p["stages"]
    ]


def test_a_plan_that_cannot_be_read_is_refused_before_anything_starts(tmp_path):
    job = job_with(PLAN, tmp_path)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        check_inputs(job, None)
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(ConfigError, match="plan"):
        check_inputs(job, None)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ConfigError, match="cannot read parallelism"):
        check_inputs(job, None)
