"""Searches for plans: `plan_with(strategy, request)`; planner/README.md says what each strategy does."""

from collections.abc import Callable

from planner.errors import ConfigError
from planner.search.memory import search_with_memory
from planner.search.problem import Answer, Idle, Rejected, Request, SearchReport
from planner.strategies.exhaustive import search_exhaustive
from planner.strategies.fasop import search_fasop
from planner.strategies.hap import search_hap
from planner.strategies.metis import search_metis
from planner.strategies.pareto import search_objective
from planner.strategies.symmetric import search_megatron, search_varuna

STRATEGIES: dict[str, Callable[[Request], Answer]] = {
    "autohet": search_with_memory,
    "metis": search_metis,
    "fasop": search_fasop,
    "hap": search_hap,
    "megatron": search_megatron,
    "varuna": search_varuna,
    "exhaustive": search_exhaustive,
}

__all__ = ["STRATEGIES", "Answer", "Idle", "Rejected", "Request", "SearchReport", "plan_with"]


def plan_with(strategy: str, request: Request) -> Answer:
    """The best plan that the strategy finds for the request's objective.

    InfeasibleError where none fits; ConfigError for an unknown strategy. With objective "pareto" `Answer.front` is
    the front.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy '{strategy}' does not exist; strategies are: {', '.join(STRATEGIES)}")
    return search_objective(STRATEGIES[strategy], request)
