"""The planner in a simulation: a fleet that was searched is not searched again, whichever of its
equal nodes are there.
"""

import pytest

from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.simulate.costs import Costs
from autohet.simulate.remembered_planning import RememberedPlanning, SearchCache, rename_nodes
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import Fleet, Node
from planner.plans.plan_checks import check_plan
from tests.driver.test_simulation import job_document
from tests.harness.local_fleet import cluster_document

KINDS = {kind.name: kind for kind in cluster_from_document(cluster_document()).node_types}


def fleet_of(*names):
    return Fleet(0, tuple(Node(name, KINDS[name.rpartition("-")[0]]) for name in names))


def planning_of(memory, **parts):
    return RememberedPlanning(
        planning_inputs(Job.from_document(job_document())), memory, Costs(), **parts
    )


def test_equal_fleets_are_searched_once_and_answers_name_the_nodes_that_are_there():
    memory = SearchCache()
    planning = planning_of(memory)
    first = planning.answer(fleet_of("small-0", "small-1", "big-0"), None)
    assert memory.num_searches == 1
    second = planning.answer(fleet_of("small-2", "small-7", "big-3"), None)
    assert memory.num_searches == 1
    assert {worker.rpartition("/")[0] for worker in second.plan.workers} <= {
        "small-2",
        "small-7",
        "big-3",
    }
    assert second.predicted_step_s == pytest.approx(first.predicted_step_s)
    check_plan(second.plan, 4)


def test_what_one_policy_has_found_another_places():
    """Counted names of a plan that followed another go beyond the fleet's number of nodes."""
    memory = SearchCache()
    first = planning_of(memory)
    before = first.answer(fleet_of("small-0", "small-1", "small-2"), None)
    first.answer(fleet_of("small-1", "small-2"), before.plan)
    found = planning_of(memory).answer(fleet_of("small-0", "small-1"), None)
    assert {worker.rpartition("/")[0] for worker in found.plan.workers} <= {"small-0", "small-1"}
    check_plan(found.plan, 4)


def test_what_is_remembered_is_what_the_planner_would_say():
    planning = planning_of(SearchCache())
    fleet = fleet_of("small-0", "small-1", "big-0")
    found = planning.answer(fleet, None)
    assert found.predicted_step_s == pytest.approx(
        planning.make_cost(fleet).predict(found.plan).step_time_s
    )
    left = fleet_of("small-1", "big-0")
    after = planning.answer(left, found.plan)
    assert after.predicted_step_s == pytest.approx(
        planning.make_cost(left).predict(after.plan).step_time_s
    )
    assert set(after.plan.workers) <= set(left.workers)


def test_fleets_that_differ_are_told_apart():
    counts_of = planning_of(SearchCache()).counts_of
    assert counts_of(fleet_of("small-0", "big-0")) != counts_of(fleet_of("small-0", "small-1"))
    planning = planning_of(SearchCache())
    alone = planning.answer(fleet_of("small-0"), None)
    both = planning.answer(fleet_of("small-0", "small-1"), None)
    assert both.predicted_step_s < alone.predicted_step_s


def test_where_no_repair_fits_the_fleet_is_searched():
    planning = planning_of(SearchCache())
    before = planning.answer(fleet_of("small-0"), None)
    for thorough in (None, True):
        assert planning.answer(fleet_of("big-0"), before.plan, thorough=thorough).plan.workers == (
            "big-0/0",
        )
    last_resort = planning.answer(fleet_of("pair-0"), before.plan, thorough=False)
    assert {worker.rpartition("/")[0] for worker in last_resort.plan.workers} == {"pair-0"}


def test_no_plan_is_remembered_as_such():
    memory = SearchCache()
    document = job_document(min_pipelines=2)
    planning = RememberedPlanning(planning_inputs(Job.from_document(document)), memory, Costs())
    for _ in range(2):
        with pytest.raises(ConfigError, match="min_pipelines is 2"):
            planning.answer(fleet_of("small-0"), None)


def test_the_driver_is_busy_while_workers_wait_and_a_search_beside_training_answers_later():
    spent, wakes, now = [], [], [100.0]
    planning = planning_of(SearchCache(), now=lambda: now[0], busy=spent.append, wake=wakes.append)
    fleet = fleet_of("small-0", "small-1")
    current = planning.propose(fleet, None)
    assert spent == [Costs().search_seconds(2, waiting=True)]
    search = planning.search(fleet, current)
    assert search.result() is None
    assert wakes == [100.0 + Costs().search_seconds(2, waiting=False)]
    now[0] = wakes[0]
    assert search.result().stay


def test_renaming_keeps_the_plan():
    planning = planning_of(SearchCache())
    plan = planning.answer(fleet_of("small-0", "small-1"), None).plan
    there = rename_nodes(plan, {"small-0": "a-0", "small-1": "a-1"})
    assert rename_nodes(there, {"a-0": "small-0", "a-1": "small-1"}) == plan
