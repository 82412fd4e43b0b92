"""Looks for a better plan while all train: after arrivals, changed prices and measured speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.ending import stop_and_wait
from autohet.control.job_state import (
    Considering,
    State,
    Training,
)
from autohet.control.replanning import (
    begin_change,
    build_fleet,
    plan_decision,
    shortage_reason,
    stop_to_move,
)
from autohet.control.states.cutting_over import prepare_generation
from autohet.control.values import fleet_event
from autohet.control.values.effects import Deciding, event
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation


def on_arrival(
    state: Training, memory: JobMemory, arrived: tuple[str, ...], seen: Observation
) -> Deciding[State]:
    """Search for a plan with nodes that have joined."""
    # Each is considered once, whatever the answer.
    state.declined = state.declined | frozenset(arrived)
    reason = f"{', '.join(arrived)} joined"
    trouble = fleet_event.FleetEvent(
        cause="arrival", nodes=arrived, workers=(), happened_at=seen.now, reason=reason
    )
    return (yield from reconsider(state, memory, trouble, seen))


def is_beyond_bound(memory: JobMemory, seen: Observation) -> bool:
    """Return True if the nodes that train cost more than the job allows."""
    bound = memory.job.parallelism.max_usd_per_hour
    if bound is None:
        return False
    used = seen.nodes_with(memory.members)
    return fleet.total_usd_per_hour(fleet.prices_of(seen, used), used) > bound * (1 + 1e-9)


def on_rates(
    state: Training, memory: JobMemory, rates: dict[str, float], seen: Observation
) -> Deciding[State]:
    """Plan with this run's measured rates of GPU types from now on.

    The planner decides whether that is worth a move now.
    """
    memory.speeds.rate_factors.update(rates)
    # They were compared with a plan of the old rates.
    memory.ledger.paces.forget()
    phrases = []
    for gpu_type, factor in sorted(rates.items()):
        phrases.append(
            f"{gpu_type} computes {factor:.2f} times as long as its profile says, beside the others"
        )
    reason = ", ".join(phrases)
    factors = dict(memory.speeds.rate_factors)
    yield event("calibration", memory.generation, rate_factors=factors, reason=reason)
    trouble = fleet_event.FleetEvent(
        cause="search", nodes=(), workers=(), happened_at=seen.now, reason=reason
    )
    return (yield from reconsider(state, memory, trouble, seen))


def on_slow(
    state: Training, memory: JobMemory, slowed: dict[str, float], seen: Observation
) -> Deciding[State]:
    """Plan with the measured slowdowns of these nodes from now on.

    The planner decides whether that is worth a move now.
    """
    for name, factor in slowed.items():
        memory.speeds.slow_since[name] = seen.now
        if factor > 1.0:
            memory.speeds.slowdowns[name] = factor
        else:
            memory.speeds.slowdowns.pop(name, None)
    memory.ledger.paces.forget()
    phrases = []
    for name, factor in sorted(slowed.items()):
        phrases.append(_speed_phrase(name, factor))
    reason = ", ".join(phrases)
    nodes = tuple(sorted(slowed))
    trouble = fleet_event.FleetEvent(
        cause="slow", nodes=nodes, workers=(), happened_at=seen.now, reason=reason
    )
    yield event("slow", memory.generation, nodes=list(nodes), slowdowns=slowed, reason=reason)
    return (yield from reconsider(state, memory, trouble, seen))


def _speed_phrase(name: str, factor: float) -> str:
    if factor > 1.0:
        return f"{name} computes {factor:.2f} times as long as its type"
    return f"{name} is taken to be as fast as its type again"


# Searches while training continues
# --------------------------------------------------------------------------------------


def reconsider(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    """Search for a better plan while training continues; move only if that is worth it.

    Nothing is lost, so there is time for a whole search. Another event meanwhile starts a new
    search.
    """
    if state.considering is not None:
        # One search answers both events.
        state.considering.search.drop()
        trouble = state.considering.trouble.joined(trouble)
    usable = fleet.usable_nodes(seen)
    # A node that cannot take part just now is asked about when it can.
    state.declined &= {*usable}
    shortage = shortage_reason(memory, seen, usable)
    if shortage:
        state.considering = None
        return (yield from _keep_plan(state, memory, trouble, shortage))

    whole = build_fleet(memory, seen, usable)
    search = memory.planning.search(whole, memory.proposal)
    state.considering = Considering(trouble, search, seen.now)
    return (yield from weigh(state, state.considering, memory, seen))


def weigh(
    state: Training, considering: Considering, memory: JobMemory, seen: Observation
) -> Deciding[State]:
    """Apply the search's answer once it is there: move to its plan, or stay."""
    trouble = considering.trouble
    try:
        proposal = considering.search.result()
    except ConfigError as error:
        state.considering = None
        if is_beyond_bound(memory, seen):
            change = begin_change(memory, trouble, seen)
            return (yield from stop_and_wait(memory, change, str(error), seen))
        return (yield from _keep_plan(state, memory, trouble, str(error)))
    if proposal is None:
        return state
    state.considering = None
    if proposal.stay:
        return (yield from _keep_plan(state, memory, trouble, proposal.reason))
    # A node of the plan may have gone while the search ran.
    nodes = seen.nodes_with(proposal.plan.workers)
    if not nodes <= {*fleet.usable_nodes(seen)}:
        return (yield from reconsider(state, memory, trouble, seen))

    change = begin_change(memory, trouble, seen)
    # The search cost no training time, but it is part of what the event's answer took.
    change.replan_s = seen.now - considering.since
    yield plan_decision(memory, proposal, trouble.reason)
    if memory.prepares:
        yield from prepare_generation(state, memory, change, proposal, seen)
    if state.preparing is not None:
        return state
    return (yield from stop_to_move(memory, change, proposal, seen))


def _keep_plan(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, why: str
) -> Deciding[State]:
    if memory.proposal is not None:
        # No search of its own is due: this one has found nothing better.
        memory.proposal = replace(memory.proposal, searched=True)
    sentence = f"Deciding to stay as it is although {trouble.reason}, since {why}"
    yield event("decision", memory.generation, sentence)
    return state
