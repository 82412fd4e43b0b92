"""Searches for plans: `plan_with(strategy, request)`; see README.md in this folder for what each strategy does."""

from collections.abc import Callable

from planner.errors import ConfigError
from planner.strategies.autohet import search_autohet
from planner.strategies.grids import search_megatron, search_varuna
from planner.strategies.request import Answer, Idle, Rejected, Request, SearchReport

STRATEGIES: dict[str, Callable[[Request], Answer]] = {
    "autohet": search_autohet,
    "megatron": search_megatron,
    "varuna": search_varuna,
}

__all__ = ["STRATEGIES", "Answer", "Idle", "Rejected", "Request", "SearchReport", "plan_with"]


def plan_with(strategy: str, request: Request) -> Answer:
    """The best plan that the strategy finds. InfeasibleError where none fits; ConfigError for an unknown strategy."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy is '{strategy}'; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](request)
