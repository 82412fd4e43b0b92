"""`autohet` is never worse than another strategy under the same cost model, on fleets where its own
columns are weak too.
"""

import pytest

from autohet.driver.loop.planning import make_planning
from autohet.runtime.job import Job
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.search.problem import limits
from planner.strategies import STRATEGIES, plan_with

pytestmark = pytest.mark.thorough


def request_of(job, cluster):
    planning = make_planning(Job.from_yaml(f"cluster_configs/jobs/{job}.yaml"))
    fleet = cluster_from_yaml(f"cluster_configs/{cluster}.yaml").fleet()
    return planning.request(fleet, planning.make_cost(fleet))


def _wanted(request, prediction):
    """What the job wants little of: seconds of a step, or dollars of a token."""
    cost = request.objective == "cost"
    return prediction.usd_per_million_tokens if cost else prediction.step_time_s


@pytest.mark.parametrize(
    ("job", "cluster"),
    [("llama-1b-bf16", "aws-mixed-spot"), ("demo", "local-emulated"), ("gpt2", "aws-mixed-spot")],
)
def test_no_other_strategy_of_pipelines_is_faster(job, cluster):
    request = request_of(job, cluster)
    ours = _wanted(request, plan_with("autohet", request).prediction)
    for strategy in STRATEGIES.keys() - {"autohet", "exhaustive", "metis", "hap"}:
        try:
            theirs = _wanted(request, plan_with(strategy, request).prediction)
            assert ours <= theirs * limits.PLAIN, strategy
        except InfeasibleError:
            continue
