"""The bound of a large fleet proved beside the search, where the request has a second processor for it."""

from collections.abc import Callable
from dataclasses import replace

from planner.strategies.bound import lower_bound_s
from planner.strategies.cost_tables import tables_of
from planner.strategies.engine import COLUMNS_GPUS
from planner.strategies.request import Request

_TO_START_S = 0.5  # until the other process has begun


def bound_of(request: Request) -> float:
    """The bound of a request whose fleet has more than `COLUMNS_GPUS`, from nothing but the request."""
    tables, begin = tables_of(request), request.clock()
    supply = [resource.num_gpus for resource in tables.resources]
    depth = min(request.deepest(tables.num_blocks), sum(supply))
    batch = request.global_batch_sequences
    return lower_bound_s(tables, batch, supply, depth, lambda: request.clock() - begin > request.time_limit_s)


def begin_bound(request: Request) -> Callable[[], float] | None:
    """Begins it and returns what waits for it; None where the request does not allow that, or the fleet is small."""
    if request.beside is None or len(request.fleet.workers) <= COLUMNS_GPUS:
        return None
    asked = replace(request, beside=None, time_limit_s=max(0.0, request.time_limit_s - _TO_START_S))
    proved = request.beside(bound_of, asked)

    def wait() -> float:
        known = proved()
        return bound_of(asked) if known is None else known

    return wait
