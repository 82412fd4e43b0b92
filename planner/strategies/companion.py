"""What goes on beside the search of a large fleet, on a second processor where the request has one: proving the bound, and the other
searches that would take too long in turn."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.plan import Plan
from planner.search.cost_tables import tables_of
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.bound import lower_bound_s
from planner.strategies.engine import COLUMNS_GPUS
from planner.strategies.rivals import late_rivals

_TO_START_S = 0.5  # until the other process has begun


@dataclass(frozen=True, slots=True)
class Companion:
    """lower_bound_s: zero where no pipeline holds the model. plans: of other searches."""

    lower_bound_s: float
    plans: tuple[Plan, ...]


def accompany(request: Request) -> Companion:
    """For a fleet of more than `COLUMNS_GPUS`, from nothing but the request."""
    begin = request.clock()

    def hurry() -> bool:
        return request.clock() - begin > request.time_limit_s

    bound_s = bound_over_paths_s(request, tables_of(request), hurry)
    return Companion(bound_s, () if hurry() else tuple(late_rivals(request)))


def bound_over_paths_s(request: Request, tables: Tables, hurry: Callable[[], bool] = lambda: False) -> float:
    """The bound of `bound.py`, for all that the request asks."""
    supply = [resource.num_gpus for resource in tables.resources]
    depth = min(request.deepest(tables.num_blocks), sum(supply))
    return lower_bound_s(
        tables, request.global_batch_sequences, supply, depth, request.min_node_disjoint_holders, hurry
    )


def begin_companion(request: Request) -> Callable[[], Companion] | None:
    """Begins it and returns what waits for it; None where the fleet is small. Without a second processor it is done when asked for."""
    if len(request.fleet.workers) <= COLUMNS_GPUS:
        return None
    begin = request.clock()

    def after(late_s: float) -> Request:
        return replace(request, beside=None, time_limit_s=max(0.0, request.time_limit_s - late_s))

    def alone() -> Companion:
        return accompany(after(request.clock() - begin))

    if request.beside is None:
        return alone
    begun = request.beside(accompany, after(_TO_START_S))
    return lambda: begun() or alone()
