"""The other searches that would take too long in turn, beside that of a large fleet: on a second processor where the request has one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.plan import Plan
from planner.search.problem import Request
from planner.strategies.engine import COLUMNS_GPUS
from planner.strategies.rivals import late_rivals

_TO_START_S = 0.5  # until the other process has begun


@dataclass(frozen=True, slots=True)
class Companion:
    """plans: of other searches."""

    plans: tuple[Plan, ...]


def accompany(request: Request) -> Companion:
    """For a fleet of more than `COLUMNS_GPUS`, from nothing but the request."""
    return Companion(tuple(late_rivals(request)))


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
