"""A deadline ends every strategy with its best plan so far, and the answer says what is missing."""

import dataclasses
import functools
import itertools

import pytest

from planner.plans.plan_checks import check_plan
from planner.search.problem.request import Request
from planner.strategies import STRATEGIES, Answer, plan_with
from tests.planner.cases import fleet, model, request

LARGE = (("A100", 4, 1), ("A10G", 4, 1), ("T4", 4, 1))
SMALL = (("A100", 1, 2), ("A10G", 1, 1))
WITHOUT_GRAPH = {"hap"}
"""Of the strategies, those that need the graph of a decoder."""


def asked_of(strategy: str, **wishes: object) -> Request:
    if strategy == "exhaustive":
        return request(fleet(*SMALL), 4, model(4), **wishes)
    return request(fleet(*LARGE), 24, model(12), **wishes)


@functools.cache
def whole_answer(strategy: str) -> Answer:
    return plan_with(strategy, asked_of(strategy))


def at_once(asked: Request) -> Request:
    """The request with a clock that passes its deadline at the second look."""
    return dataclasses.replace(asked, clock=itertools.count().__next__, deadline_s=1.0)


def is_called_complete(answer: Answer) -> bool:
    return answer.search.lower_bound_s is not None or not answer.search.cut


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - WITHOUT_GRAPH))
def test_every_strategy_ends_at_its_deadline_and_says_so(strategy: str) -> None:
    asked = asked_of(strategy)
    whole, cut = whole_answer(strategy), plan_with(strategy, at_once(asked))
    check_plan(cut.plan, asked.spec.num_layers)
    assert cut.prediction.fits
    assert cut.search.plans_evaluated < whole.search.plans_evaluated
    assert not is_called_complete(cut)
    assert "a better plan may exist" in cut.choice
    assert cut.search.cut in cut.choice
    assert whole.search.cut == ""
    assert "better plan" not in whole.choice


@pytest.mark.parametrize(("strategy", "of_all"), [("autohet", "tries"), ("exhaustive", "placem")])
def test_a_cut_search_says_how_much_of_how_much_is_missing(strategy: str, of_all: str) -> None:
    cut = plan_with(strategy, at_once(asked_of(strategy))).search.cut
    assert of_all in cut
    left, whole = (int(word) for word in cut.rpartition(", ")[2].split() if word.isdigit())
    assert 0 < left <= whole


@pytest.mark.parametrize("objective", ["pareto", "cost"])
def test_a_cut_comparison_of_fleets_says_how_many_were_looked_at(objective: str) -> None:
    two_types = fleet(("A100", 2, 1), ("A10G", 2, 1))
    asked = request(two_types, 24, model(12), objective=objective)
    whole, cut = plan_with("autohet", asked), plan_with("autohet", at_once(asked))
    assert cut.search.fleets_searched < whole.search.fleets_searched
    left = cut.search.fleets - cut.search.fleets_searched
    assert f"{left} of {cut.search.fleets} fleets" in cut.search.cut
    assert all(each.search.cut for each in cut.front)


@pytest.mark.parametrize("strategy", ["metis", "fasop"])
def test_a_budget_of_seconds_that_ends_a_search_is_told_too(strategy: str) -> None:
    asked = dataclasses.replace(
        asked_of(strategy), clock=itertools.count().__next__, time_limit_s=1.0
    )
    assert plan_with(strategy, asked).search.cut


def test_a_deadline_that_is_far_changes_nothing() -> None:
    endless = itertools.count().__next__
    patient = dataclasses.replace(asked_of("autohet"), clock=endless, deadline_s=1e9)
    assert plan_with("autohet", patient).plan == whole_answer("autohet").plan
