"""State Training: all members train; a notice, a death or an arrival may end that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control import fleet, speeds
from autohet.control.ending import release_leaver, stop_with_checkpoint
from autohet.control.job_state import Closing, Considering, Leaving, Quiescing, State, Training
from autohet.control.planning.agent_gc import any_order
from autohet.control.planning.outlook import (
    gather_s,
    gathers_until,
    needed_s,
    patience_s,
    slowest_move_s,
)
from autohet.control.replanning import (
    ask_for_plan,
    begin_change,
    build_fleet,
    drop_search,
    node_factors,
    plan_decision,
    shortage_reason,
)
from autohet.control.states.poisoned import give_up_restored
from autohet.control.states.quiescing import interrupt_after_death
from autohet.control.values import fleet_event
from autohet.control.values.actions import Dismiss, RequestStop
from autohet.control.values.effects import Deciding, Effects, event
from autohet.runtime.messages import Phase
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Observation

Paces = tuple[dict[str, list[float]], dict[str, float], dict[str, str]]
"""Compute seconds of each worker's last steps, its planned seconds a step, and its GPU type.

Each is a mapping by worker.
"""


def step(state: Training, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Answer the most urgent news: death, stop, end, notice, arrival, speed, finished search."""
    members = memory.members
    trouble = fleet.find_deaths_or_failures(seen, members)
    if trouble is not None:
        return (yield from interrupt_after_death(memory, trouble, seen))

    if seen.stop_reason:
        reason = memory.end.reason or f"stopped by {seen.stop_reason}"
        return (yield from stop_with_checkpoint(memory, seen, reason))
    if memory.ledger.skipped.in_a_row or memory.fallback is not None:
        following = yield from give_up_restored(state, memory, seen)
        if following is not None:
            return following
    memory.end.reason = memory.end.reason or _too_many_skipped_reason(memory)
    if memory.end.reason is not None:
        return (yield from stop_with_checkpoint(memory, seen, memory.end.reason))
    reports = seen.reports_of(members)
    finished = [report for report in reports if report.phase is Phase.FINISHED]
    if len(finished) == len(members):
        deadline = seen.now + memory.timeouts.checkpoint_s
        return Closing(
            reason="trained to the last step",
            ok=True,
            deadline=deadline,
            step=memory.ledger.last_step,
        )

    yield from _release_idle_leavers(memory, seen)
    leaving = fleet.find_leavers(seen, memory.members)
    if leaving is not None:
        return (yield from _on_notice(state, memory, leaving, seen))
    state.leaving = None

    # A node that comes again by its old name is asked about again.
    state.declined &= seen.nodes.keys()
    arrived = _find_arrivals(state, memory, seen)
    if arrived:
        return (yield from _on_arrival(state, memory, arrived, seen))

    slowed = {}
    paces = _paces(memory)
    if paces is not None:
        rates = speeds.find_rates(*paces, memory.speeds.rate_factors)
        if rates:
            return (yield from _on_rates(state, memory, rates, seen))
        slowed = _find_slow(memory, paces)
    slowed = slowed or _find_forgiven(memory, seen)
    if slowed:
        return (yield from _on_slow(state, memory, slowed, seen))

    if state.considering is not None:
        return (yield from _weigh(state, state.considering, memory, seen))
    return (yield from _reconsider_repair(state, memory, seen))


def _too_many_skipped_reason(memory: JobMemory) -> str | None:
    """Return the reason to end the job if its newest steps changed no weights; else None.

    That holds for too many steps in a row, or for all steps of a run that is over.
    """
    skipped = memory.ledger.skipped
    if not skipped.in_a_row:
        return None
    limit = memory.job.training.max_skipped_steps
    is_over = memory.ledger.committed_steps == memory.ledger.last_step
    has_skipped_all = is_over and skipped.first == 0
    is_too_many = limit is not None and skipped.in_a_row >= limit
    if not has_skipped_all and not is_too_many:
        return None
    return (
        f"{skipped.in_a_row} steps in a row changed no weights (training.max_skipped_steps:"
        f" {limit}), the last since {skipped.cause}; the checkpoint has the weights as they"
        f" were before step {skipped.first}"
    )


# Notices
# --------------------------------------------------------------------------------------


def _release_idle_leavers(memory: JobMemory, seen: Observation) -> Effects:
    """Release each leaving node that no member is on."""
    used = seen.nodes_with(memory.members)
    for name in seen.notices:
        is_released = name in memory.nodes.released
        if name in used or is_released or name not in seen.nodes:
            continue
        workers = seen.nodes[name].workers
        reporting = [worker for worker in workers if worker in seen.reports]
        yield Dismiss(tuple(reporting))
        yield from release_leaver(memory, name, seen)


def _on_notice(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    """Plan while training continues, wait for further notices as long as is safe, then stop.

    The stop comes after the current step.
    """
    leaving = state.leaving
    if leaving is None or leaving.change.nodes != trouble.nodes:
        return (yield from _plan_without(state, memory, trouble, seen))
    # A notice of the same nodes may have got another deadline.
    notices = [seen.notices[name] for name in trouble.nodes]
    leaving.until = gathers_until(notices, leaving.patience_s, leaving.needs_s)
    if seen.now < leaving.until:
        return state
    if leaving.usable != fleet.usable_nodes(seen):
        # The plan was made for other nodes than are there now.
        return (yield from _plan_without(state, memory, trouble, seen))
    return (yield from _move(memory, leaving.change, leaving.proposal, seen))


def _plan_without(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    """Plan for the nodes that stay, at once.

    All workers move to that plan when no further notices are waited for. If no plan exists, they
    stop with a checkpoint.
    """
    drop_search(state)
    state.considering = None
    change = begin_change(memory, trouble, seen)
    usable = fleet.usable_nodes(seen)
    proposal, why = ask_for_plan(memory, seen, usable, change)
    if proposal is None:
        reason = f"{trouble.reason} and {why}"
        sentence = f"Deciding to stop and wait, since {reason}"
        yield event("decision", memory.generation, sentence)
        memory.postponed = change
        return (yield from stop_with_checkpoint(memory, seen, reason, then_wait=why))

    yield plan_decision(memory, proposal, trouble.reason)
    waits_s = patience_s(memory.ledger.timings)
    needs_s = _needed_s(memory, seen)
    notices = [seen.notices[name] for name in trouble.nodes]
    until = gathers_until(notices, waits_s, needs_s)
    if seen.now >= until:
        return (yield from _move(memory, change, proposal, seen))
    state.leaving = Leaving(
        change=change,
        proposal=proposal,
        usable=usable,
        patience_s=waits_s,
        needs_s=needs_s,
        until=until,
    )
    sentence = (
        f"Deciding to go on for {until - seen.now:.1f} s before that, since one change answers"
        " all notices that come until then"
    )
    yield event("decision", memory.generation, sentence)
    return state


def _needed_s(memory: JobMemory, seen: Observation) -> float:
    """Return the seconds before the first deadline at which a change must begin to be in time.

    This is as far as this run can know: see `outlook.needed_s`.
    """
    assert memory.proposal is not None
    state_s = 0.0
    order = any_order(memory.ledger.orders)
    if order is not None:
        state_s = slowest_move_s(order.layout, seen)
    return needed_s(
        memory.ledger.timings,
        memory.timeouts,
        search_s=memory.job.parallelism.search_time_limit_s,
        step_s=memory.proposal.predicted_step_s,
        state_s=state_s,
        upload_s=memory.ledger.checkpoints.upload_s,
    )


def _move(
    memory: JobMemory, change: Change, proposal: PlanProposal, seen: Observation
) -> Deciding[State]:
    """Stop all survivors after the current step, to continue under this plan."""
    survivors = fleet.survivors(seen, memory.members)
    yield RequestStop(survivors, checkpoint=False)
    deadline = seen.now + memory.timeouts.step_s
    return Quiescing(change, deadline, interrupted=False, proposal=proposal)


# Arrivals and speeds
# --------------------------------------------------------------------------------------


def _find_arrivals(state: Training, memory: JobMemory, seen: Observation) -> tuple[str, ...]:
    arrived = fleet.find_arrivals(seen, memory.planned_nodes, state.declined)
    if not arrived:
        return ()
    debounce_s = memory.job.elastic.arrivals_debounce_s
    gathering_s = gather_s(memory.ledger.timings, debounce_s)
    start_s = memory.timeouts.worker_start_s
    if fleet.more_may_arrive(seen, arrived, memory.planned_nodes, gathering_s, start_s):
        return ()
    return arrived


def _on_arrival(
    state: Training, memory: JobMemory, arrived: tuple[str, ...], seen: Observation
) -> Deciding[State]:
    # Each is considered once, whatever the answer.
    state.declined = state.declined | frozenset(arrived)
    reason = f"{', '.join(arrived)} joined"
    trouble = fleet_event.FleetEvent(
        cause="arrival", nodes=arrived, workers=(), happened_at=seen.now, reason=reason
    )
    return (yield from _reconsider(state, memory, trouble, seen))


def _paces(memory: JobMemory) -> Paces | None:
    """Return the compute seconds of each worker, measured and planned.

    None until all workers can be judged.
    """
    if not memory.job.elastic.slow_ratio:
        return None
    measured = memory.ledger.paces.compute_s(memory.members)
    if not measured or memory.proposal is None:
        return None

    planned = memory.proposal.cost.fleet
    type_by_worker = {}
    type_by_node = {}
    for worker in memory.members:
        gpu_type = planned.gpu_type(worker)
        type_by_worker[worker] = gpu_type
        type_by_node[planned.node_of(worker).name] = gpu_type
    factors = node_factors(memory, type_by_node)
    return measured, memory.planning.compute_s(memory.proposal, factors), type_by_worker


def _find_slow(memory: JobMemory, paces: Paces) -> dict[str, float]:
    measured, planned, _ = paces
    ratio = memory.job.elastic.slow_ratio
    return speeds.find_slow(measured, planned, memory.speeds.slowdowns, ratio)


def _find_forgiven(memory: JobMemory, seen: Observation) -> dict[str, float]:
    """Return the slow nodes that have been idle for a while: they are tried again.

    While a node is idle, it is unknown whether it still is slow.
    """
    used = seen.nodes_with(memory.members)
    past = seen.now - memory.job.elastic.slow_forgiven_s
    forgiven = {}
    for name in memory.speeds.slowdowns:
        if name in used:
            continue
        measured_at = memory.speeds.slow_since[name]
        if measured_at <= past:
            forgiven[name] = 1.0
    return forgiven


def _on_rates(
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
    return (yield from _reconsider(state, memory, trouble, seen))


def _on_slow(
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
    return (yield from _reconsider(state, memory, trouble, seen))


def _speed_phrase(name: str, factor: float) -> str:
    if factor > 1.0:
        return f"{name} computes {factor:.2f} times as long as its type"
    return f"{name} is taken to be as fast as its type again"


# Searches while training continues
# --------------------------------------------------------------------------------------


def _reconsider_repair(state: Training, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Compare a plan that is only a repair with a whole search, once the job trains again.

    The repair was the best one while all workers stood.
    """
    is_searched = memory.proposal is None or memory.proposal.searched
    has_taken_no_step = memory.ledger.open_change is not None
    if is_searched or has_taken_no_step:
        return state
    reason = "the plan so far is only a repair"
    trouble = fleet_event.FleetEvent(
        cause="search", nodes=(), workers=(), happened_at=seen.now, reason=reason
    )
    return (yield from _reconsider(state, memory, trouble, seen))


def _reconsider(
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
    return (yield from _weigh(state, state.considering, memory, seen))


def _weigh(
    state: Training, considering: Considering, memory: JobMemory, seen: Observation
) -> Deciding[State]:
    """Apply the search's answer once it is there: move to its plan, or stay."""
    trouble = considering.trouble
    try:
        proposal = considering.search.result()
    except ConfigError as error:
        state.considering = None
        return (yield from _keep_plan(state, memory, trouble, str(error)))
    if proposal is None:
        return state
    state.considering = None
    if proposal.stay:
        return (yield from _keep_plan(state, memory, trouble, proposal.reason))
    # A node of the plan may have gone while the search ran.
    nodes = seen.nodes_with(proposal.plan.workers)
    if not nodes <= {*fleet.usable_nodes(seen)}:
        return (yield from _reconsider(state, memory, trouble, seen))

    change = begin_change(memory, trouble, seen)
    # The search cost no training time, but it is part of what the event's answer took.
    change.replan_s = seen.now - considering.since
    yield plan_decision(memory, proposal, trouble.reason)
    return (yield from _move(memory, change, proposal, seen))


def _keep_plan(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, why: str
) -> Deciding[State]:
    if memory.proposal is not None:
        # No search of its own is due: this one has found nothing better.
        memory.proposal = replace(memory.proposal, searched=True)
    sentence = f"Deciding to stay as it is although {trouble.reason}, since {why}"
    yield event("decision", memory.generation, sentence)
    return state
