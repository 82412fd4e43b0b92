"""`autohet` is never worse than another strategy under the same cost model, on fleets where its own
columns are weak too.
"""

import itertools

import pytest

from autohet.driver.loop.planning import make_planning
from autohet.runtime.job import Job
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.search.problem import limits
from planner.strategies import STRATEGIES, plan_with
from planner.strategies.fasop import node_orders
from tests.planner.cases import fleet

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


@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_node_orders_may_be_thinned_evenly(most):
    """Some of all orders, the first of them included, that begin far apart."""
    asked = fleet(("A100", 5, 1), ("T4", 6, 1))
    orders, some = list(node_orders(asked)), list(node_orders(asked, most))
    assert len(orders) == 11
    assert len(some) <= min(most, 11)
    assert some[0] == orders[0]
    assert set(some) <= set(orders)
    turns = [orders.index(order) for order in some]
    assert all(
        later - earlier >= 11 // max(most, 1) for earlier, later in itertools.pairwise(turns)
    )
