"""State Quiescing: all survivors stop, and apply the newest step that any of them has committed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.ending import find_new_deaths, judge_failure, log_death
from autohet.control.job_state import Quiescing, State, Waiting
from autohet.control.ledger.failures import is_lost
from autohet.control.planning.agent_gc import any_order
from autohet.control.replanning import (
    ask_for_plan,
    begin_change,
    plan_decision,
    preparation_order,
)
from autohet.control.states.sourcing import adopt
from autohet.control.values import fleet_event
from autohet.control.values.actions import Dismiss, Interrupt, Prepare, RollForward
from autohet.runtime.messages import STANDING_PHASES, Phase

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.effects import Deciding, Effects
    from autohet.control.values.observation import Observation


def interrupt_after_death(
    memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    """Log the death of members, and interrupt the others."""
    yield from log_death(memory, trouble, seen)
    change = begin_change(memory, trouble, seen)
    # Those that wait for the dead in a collective would wait until its own, longer, time limit.
    survivors = fleet.survivors(seen, memory.members)
    keeping = _find_keeping(memory, seen)
    others = tuple(worker for worker in survivors if worker not in keeping)
    yield Interrupt(others, memory.generation)
    limit_s = memory.timeouts.quiesce_s
    if keeping:
        whole = tuple(worker for worker in survivors if worker in keeping)
        yield Interrupt(whole, memory.generation, keep=True)
        limit_s += memory.timeouts.step_s
    state = Quiescing(
        change, seen.now + limit_s, interrupted=True, broken=memory.members, keeping=keeping
    )
    yield from _prepare_rest(state, memory, seen)
    return state


def _find_keeping(memory: JobMemory, seen: Observation) -> frozenset[str]:
    """Return the workers of whole pipelines, which can end their passes of a gated step."""
    order = any_order(memory.ledger.orders)
    found: set[str] = set()
    if order is None or not order.gated:
        return frozenset()
    alive = fleet.survivors(seen, memory.members)
    for pipeline in order.plan.pipelines:
        are_alive = all(worker in alive for worker in pipeline.workers)
        if are_alive and not any(_has_left(seen, worker) for worker in pipeline.workers):
            found.update(pipeline.workers)
    return frozenset(found)


def _has_left(seen: Observation, worker: str) -> bool:
    """Return True if the worker has left a step, and keeps nothing of it."""
    report = seen.reports[worker]
    return report.phase in STANDING_PHASES and report.kept_step is None


def _give_up_passes(state: Quiescing, memory: JobMemory, seen: Observation) -> Effects:
    """Interrupt all survivors, since the step is run again from its start."""
    state.keeping = frozenset()
    yield Interrupt(fleet.survivors(seen, memory.members), memory.generation)
    state.deadline = seen.now + memory.timeouts.quiesce_s


def step(state: Quiescing, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Replan once all survivors stand after the same step."""
    alive = fleet.survivors(seen, memory.members)
    yield from _escalate(state, memory, seen, alive)
    if any(worker in state.keeping and _has_left(seen, worker) for worker in alive):
        yield from _give_up_passes(state, memory, seen)
    yield from _prepare_rest(state, memory, seen)
    moving = [worker for worker in alive if seen.reports[worker].phase not in STANDING_PHASES]
    if moving:
        state.quiet_since = None
        yield from _escalate_or_wait(state, memory, seen, moving)
        return state

    if state.quiet_since is None:
        state.quiet_since = seen.now
    if (yield from _roll_forward(state, memory, seen, alive)):
        return state
    if state.change.cause == "death" and _is_cause_unknown(state, memory, seen):
        return state
    # From here on no worker takes a step: the time without one begins.
    state.change.stood_at = seen.now
    return (yield from _replan(state, memory, seen))


def _escalate(
    state: Quiescing, memory: JobMemory, seen: Observation, alive: tuple[str, ...]
) -> Effects:
    """Turn a stop under way into an interrupt after a death."""
    trouble = find_new_deaths(memory, seen)
    if trouble is None and not state.interrupted:
        trouble = fleet.find_failures(seen, memory.members)
    if trouble is None:
        return
    state.broken = state.broken or memory.members
    if not state.interrupted:
        state.interrupted = True
        # The plan that was made before the stop counted on the workers that are lost.
        state.proposal = None
        state.prepared = None
        yield Interrupt(alive, memory.generation)
        state.deadline = seen.now + memory.timeouts.quiesce_s
    else:
        left = state.keeping & _find_keeping(memory, seen)
        broken = tuple(worker for worker in alive if worker in state.keeping - left)
        if broken:
            state.keeping = left
            yield Interrupt(broken, memory.generation)
    yield from log_death(memory, trouble, seen)
    state.change.overtaken(trouble.nodes, trouble.happened_at, seen.now, trouble.reason)


def _escalate_or_wait(
    state: Quiescing, memory: JobMemory, seen: Observation, moving: list[str]
) -> Effects:
    """Wait for workers that still move; act at the deadline.

    First all are interrupted; at the next deadline those that do not stop are ended.
    """
    if seen.now < state.deadline:
        return
    if not state.interrupted:
        state.interrupted = True
        survivors = fleet.survivors(seen, memory.members)
        yield Interrupt(survivors, memory.generation)
    elif state.keeping:
        yield from _give_up_passes(state, memory, seen)
    else:
        why = f"{', '.join(moving)} did not stop in time"
        yield from _end_late(memory, moving, why, seen)
    state.deadline = seen.now + memory.timeouts.quiesce_s


def _end_late(memory: JobMemory, late: list[str], why: str, seen: Observation) -> Effects:
    """End workers that are late: they count as dead."""
    workers = tuple(late)
    death = fleet_event.FleetEvent(
        cause="death", nodes=(), workers=workers, happened_at=seen.now, reason=why
    )
    yield from log_death(memory, death, seen)
    yield Dismiss(workers)


def _roll_forward(
    state: Quiescing, memory: JobMemory, seen: Observation, alive: Collection[str]
) -> Deciding[bool]:
    """Return True while prepared survivors apply a step that another survivor has committed.

    A survivor that is late with it is ended: its tensors may change at any time, so no plan counts
    on them, and no later generation takes them over.
    """
    # Votes of the dead count, too: what one worker saw, all had contributed to.
    generation, vote = memory.ledger.newest_vote()
    if vote is None:
        return False
    step_of_vote, _ = vote
    behind = fleet.find_behind(seen, alive, generation, step_of_vote)
    if not behind:
        return False

    # Each gets the order once; a worker that is found later moves the deadline of all.
    new = [worker for worker in behind if worker not in state.rolling]
    if new:
        state.rolling |= frozenset(new)
        state.roll_deadline = seen.now + memory.timeouts.quiesce_s
        yield RollForward(tuple(new), generation, vote)
    elif state.roll_deadline is not None and seen.now > state.roll_deadline:
        names = ", ".join(behind)
        why = f"{names} did not apply step {step_of_vote} in time, which others have committed"
        yield from _end_late(memory, behind, why, seen)
    return True


def _prepare_rest(state: Quiescing, memory: JobMemory, seen: Observation) -> Effects:
    """Have the survivors of a death prepare the plan without the dead, while they stop; once."""
    is_due = state.broken and state.change.cause == "death" and not state.has_prepared
    are_known = any(is_lost(seen, worker) for worker in state.broken)
    if not memory.prepares_at_death or not is_due or not are_known:
        return
    state.has_prepared = True
    proposal, _ = ask_for_plan(memory, seen, fleet.usable_nodes(seen), state.change)
    if proposal is None:
        return
    yield plan_decision(memory, proposal, state.change.reason)
    order = preparation_order(memory, proposal, seen)
    yield Prepare(dict.fromkeys(order.participants, order))
    state.proposal = proposal
    state.prepared = order.generation


def _is_cause_unknown(state: Quiescing, memory: JobMemory, seen: Observation) -> bool:
    """Return True while survivors stand and the dead worker is not known yet.

    The heartbeat is to tell, within bounds. Losses of earlier generations explain nothing.
    """
    participants = state.broken or memory.members
    if any(is_lost(seen, worker) for worker in participants):
        return False
    reports = seen.reports_of(memory.members)
    if any(report.phase is Phase.FAILED for report in reports):
        return False
    stood_at = seen.now if state.quiet_since is None else state.quiet_since
    return seen.now - stood_at < 1.5 * memory.timeouts.heartbeat_s


def _replan(state: Quiescing, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Adopt the plan that was made before the stop, if it still holds; else ask for one."""
    change = state.change
    proposal = state.proposal
    if state.broken:
        seen, ended = yield from judge_failure(memory, state.broken, seen)
        if ended is not None:
            return ended

    prepared = state.prepared
    if proposal is None or is_overtaken(proposal, seen):
        prepared = None
        usable = fleet.usable_nodes(seen)
        proposal, why = ask_for_plan(memory, seen, usable, change)
        if proposal is None:
            return Waiting(why, seen.now, change)
        yield plan_decision(memory, proposal, change.reason)
    for report in seen.reports_of(proposal.plan.workers):
        outcome = report.prepared
        if outcome is not None and outcome.generation == prepared and outcome.error is not None:
            prepared = None
    return (yield from adopt(change, proposal, memory, seen, prepared))


def is_overtaken(proposal: PlanProposal, seen: Observation) -> bool:
    """Return True if a worker of the plan is lost, or its node leaves or is left out."""
    for worker in proposal.plan.workers:
        node = seen.node_of(worker)
        if not seen.answers(worker) or node in seen.notices or node in seen.left_out:
            return True
    return False
