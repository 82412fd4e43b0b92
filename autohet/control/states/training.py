"""State Training: all members train; a notice, a death or an arrival may end that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autohet.control import fleet, speeds
from autohet.control.ending import release_leaver, stop_and_wait, stop_with_checkpoint
from autohet.control.fleet import on_their_way
from autohet.control.job_state import (
    Closing,
    Leaving,
    Preparing,
    State,
    Training,
)
from autohet.control.planning.agent_gc import any_order
from autohet.control.planning.outlook import (
    CHURN_S,
    gather_s,
    gathers_arrivals_until,
    gathers_until,
    move_s,
    needed_s,
    patience_s,
    prepares_until,
    recent_cost_s,
    slowest_move_s,
)
from autohet.control.replanning import (
    ask_for_plan,
    begin_change,
    drop_search,
    node_factors,
    plan_decision,
    stop_to_move,
)
from autohet.control.states import cutting_over
from autohet.control.states.cutting_over import MOST_TRIES, move_once_prepared, prepare_generation
from autohet.control.states.quiescing import interrupt_after_death, is_overtaken
from autohet.control.states.searching import (
    is_beyond_bound,
    on_arrival,
    on_rates,
    on_slow,
    reconsider,
    weigh,
)
from autohet.control.states.ways_back import give_up_restored
from autohet.control.values import fleet_event
from autohet.control.values.actions import Dismiss
from autohet.control.values.effects import Deciding, Effects, event
from autohet.runtime.messages import Phase

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation

Paces = tuple[dict[str, list[float]], dict[str, float], dict[str, str]]
"""Compute seconds of each worker's last steps, its planned seconds a step, and its GPU type.

Each is a mapping by worker.
"""


def step(state: Training, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Answer the most urgent news.

    In this order: death, stop, end, notice, arrival, price, speed, finished search.
    """
    members = memory.members
    trouble = fleet.find_deaths_or_failures(seen, members)
    cutting = state.preparing if state.preparing and state.preparing.cut_over else None
    if trouble is not None:
        if cutting is not None:
            cutting_over.give_up(cutting, memory)
        return (yield from interrupt_after_death(memory, trouble, seen))
    if cutting is not None:
        following = yield from _cut_over(state, cutting, memory, seen)
        if following is not None:
            return following

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
        closing = yield from _close_finished(memory, seen, finished[0].step)
        if closing is not None:
            return closing

    yield from _release_idle_leavers(memory, seen)
    leaving = fleet.find_leavers(seen, memory.members)
    if leaving is not None:
        return (yield from _on_notice(state, memory, leaving, seen))
    if state.leaving is not None:
        # Its nodes stay after all, and so does the plan.
        state.leaving = None
        state.preparing = None
    if state.preparing is not None:
        if is_overtaken(state.preparing.proposal, seen):
            return (yield from _replace_overtaken(state, state.preparing, memory, seen))
        return (yield from move_once_prepared(state, state.preparing, memory, seen))

    # A node that comes again by its old name is asked about again.
    state.declined &= seen.nodes.keys()
    arrived = yield from _find_arrivals(state, memory, seen)
    if arrived:
        return (yield from on_arrival(state, memory, arrived, seen))

    repriced = _find_repriced(memory, seen)
    if repriced is not None:
        return (yield from reconsider(state, memory, repriced, seen))

    slowed = {}
    paces = _measure_paces(memory)
    if paces is not None:
        rates = speeds.find_rates(*paces, memory.speeds.rate_factors)
        if rates:
            return (yield from on_rates(state, memory, rates, seen))
        slowed = _find_slow(memory, paces)
    slowed = slowed or _find_forgiven(memory, seen)
    if slowed:
        return (yield from on_slow(state, memory, slowed, seen))

    if state.considering is not None:
        return (yield from weigh(state, state.considering, memory, seen))
    return (yield from _reconsider_repair(state, memory, seen))


def _close_finished(memory: JobMemory, seen: Observation, step: int) -> Deciding[Closing | None]:
    """Return the end of a run whose last step is trained; None while a rehearsal is to go on."""
    deadline = seen.now + memory.timeouts.checkpoint_s
    reason = "trained to the last step"
    log = memory.ledger.evaluation_log
    script = memory.script
    if log.section and log.ends_run(step):
        reason = log.early_end_reason
    elif (script.joining or script.left) and script.awaits_answer(step):
        if script.waits_until is None:
            script.waits_until = seen.now + 2 * memory.timeouts.worker_start_s
            sentence = (
                "Deciding to wait with the end, since no plan is decided for a node that joins"
            )
            yield event("decision", memory.generation, sentence)
        if seen.now < script.waits_until:
            return None
    return Closing(reason=reason, ok=True, deadline=deadline, step=step)


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
    """Release each leaving node that no member is on.

    Its workers end their parts of a checkpoint first, for half of the notice's time at most.
    """
    used = seen.nodes_with(memory.members)
    for name, notice in seen.notices.items():
        is_released = name in memory.nodes.released
        if name in used or is_released or name not in seen.nodes:
            continue
        workers = seen.nodes[name].workers
        reporting = [worker for worker in workers if worker in seen.reports]
        alive = [worker for worker in reporting if worker not in seen.losses]
        patience_s = memory.timeouts.checkpoint_s
        if notice.deadline is not None:
            patience_s = min(patience_s, (notice.deadline - notice.seen_at) / 2)
        are_uploading = any(seen.reports[worker].uploading for worker in alive)
        if are_uploading and seen.now < notice.seen_at + patience_s:
            continue
        yield Dismiss(tuple(alive))
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
    return (yield from _leave(state, leaving, memory, seen))


def _leave(
    state: Training, leaving: Leaving, memory: JobMemory, seen: Observation
) -> Deciding[State]:
    """Move without the leaving nodes, at the latest when their deadline asks for it."""
    preparing = state.preparing
    if preparing is None:
        return (yield from stop_to_move(memory, leaving.change, leaving.proposal, seen))
    # The notices may have got other deadlines.
    notices = [seen.notices[name] for name in leaving.change.nodes]
    latest = prepares_until(notices, leaving.needs_s, seen.now)
    preparing.deadline = min(preparing.deadline, latest)
    return (yield from move_once_prepared(state, preparing, memory, seen))


def _plan_without(
    state: Training, memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    """Plan for the nodes that stay, at once.

    All workers move to that plan when no further notices are waited for. If no plan exists, they
    stop with a checkpoint.
    """
    drop_search(state)
    state.considering = None
    state.preparing = None
    change = begin_change(memory, trouble, seen)
    usable = fleet.usable_nodes(seen)
    proposal, why = ask_for_plan(memory, seen, usable, change)
    if proposal is None:
        return (yield from stop_and_wait(memory, change, why, seen))

    yield plan_decision(memory, proposal, trouble.reason)
    waits_s = patience_s(memory.ledger.timings)
    needs_s = _needed_s(memory, seen)
    notices = [seen.notices[name] for name in trouble.nodes]
    until = gathers_until(notices, waits_s, needs_s)
    leaving = Leaving(
        change=change,
        proposal=proposal,
        usable=usable,
        patience_s=waits_s,
        needs_s=needs_s,
        until=until,
    )
    state.leaving = leaving
    latest = prepares_until(notices, needs_s, seen.now)
    if memory.prepares:
        yield from prepare_generation(state, memory, change, proposal, seen, latest)
    if seen.now >= until:
        return (yield from _leave(state, leaving, memory, seen))
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


def _replace_overtaken(
    state: Training, preparing: Preparing, memory: JobMemory, seen: Observation
) -> Deciding[State]:
    """Drop a preparation whose plan lacks a worker now; a search looks at what is there."""
    state.preparing = None
    if state.leaving is not None:
        # Notices are answered anew in the next round.
        state.leaving = None
        return state
    change = preparing.change
    trouble = fleet_event.FleetEvent(
        cause=change.cause,
        nodes=change.nodes,
        workers=(),
        happened_at=change.happened_at,
        reason=change.reason,
    )
    return (yield from reconsider(state, memory, trouble, seen))


def _cut_over(
    state: Training, preparing: Preparing, memory: JobMemory, seen: Observation
) -> Deciding[State | None]:
    """Follow a cut-over to its end: the next generation begins, or another try is made.

    None: it is given up, and what is more urgent decides.
    """
    building = yield from cutting_over.step(preparing, memory, seen)
    if building is not None:
        return building
    if preparing.cut_over is not None:
        return state
    if is_overtaken(preparing.proposal, seen):
        return (yield from _replace_overtaken(state, preparing, memory, seen))
    state.preparing = None
    if seen.stop_reason:
        return None
    change = preparing.change
    if preparing.attempt < MOST_TRIES:
        yield from prepare_generation(
            state, memory, change, preparing.proposal, seen, preparing.latest
        )
    if state.preparing is None:
        return (yield from stop_to_move(memory, change, preparing.proposal, seen))
    state.preparing.attempt = preparing.attempt + 1
    return state


# Arrivals, prices and speeds
# --------------------------------------------------------------------------------------


def _find_arrivals(
    state: Training, memory: JobMemory, seen: Observation
) -> Deciding[tuple[str, ...]]:
    """Return the nodes that have come, once no more of them are waited for."""
    state.look_at = None
    arrived = fleet.find_arrivals(seen, memory.planned_nodes, state.declined)
    if not arrived:
        return ()
    timings = memory.ledger.timings
    lost_s, mean_s = recent_cost_s(memory.ledger.changes, seen.now)
    cost_s = max(move_s(timings), mean_s)
    num_used = len(seen.nodes_with(memory.members))
    probation = memory.outlook.on_probation(seen, arrived, cost_s, lost_s, num_used)
    yield from _announce_probation(state, memory, seen, probation)
    proven = [name for name in arrived if name not in probation]
    if not proven:
        state.look_at = min(probation.values())
        return ()

    elastic = memory.job.elastic
    joined_at = [seen.nodes[name].joined_at for name in proven]
    coming = on_their_way(seen, elastic.patience)
    debounce_s = gather_s(timings, elastic.arrivals_debounce_s)
    until = gathers_arrivals_until(joined_at, debounce_s, len(coming))
    start_s = memory.timeouts.worker_start_s
    starts_until = fleet.starting_until(seen, memory.planned_nodes, start_s)
    until = max(until, starts_until or until)
    if seen.now < until:
        state.look_at = until
        return ()
    return tuple(proven)


def _announce_probation(
    state: Training, memory: JobMemory, seen: Observation, probation: Mapping[str, float]
) -> Effects:
    """Log once why no move is made yet for each of these nodes."""
    for name in sorted(probation.keys() - state.on_probation):
        kind = seen.nodes[name].node_type.name
        number = len(memory.outlook.recent_ends[kind])
        sentence = (
            f"Deciding to leave {name} idle for {probation[name] - seen.now:.0f} s unless the fleet"
            f" changes anyway, since {number} {kind} have gone within {CHURN_S / 60:.0f} minutes"
        )
        yield event("decision", memory.generation, sentence)
    state.on_probation = frozenset(probation)


def _find_repriced(memory: JobMemory, seen: Observation) -> fleet_event.FleetEvent | None:
    """Return the changes of prices since the last search, where the job decides by price."""
    wishes = memory.job.parallelism
    if wishes.objective == "time" and wishes.max_usd_per_hour is None:
        return None
    used = seen.nodes_with(memory.members)
    must = used if is_beyond_bound(memory, seen) else ()
    return fleet.find_repriced(seen, fleet.usable_nodes(seen), memory.asked_prices, must)


def _measure_paces(memory: JobMemory) -> Paces | None:
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
    return (yield from reconsider(state, memory, trouble, seen))
