"""States in which a driver begins.

Waiting: there are too few workers, or no plan for them. Adopting: workers have trained on without a
driver, and this one takes over their generation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.ending import fail, finish
from autohet.control.fleet import describe_starting
from autohet.control.job_state import (
    Adopting,
    Inherited,
    Quiescing,
    State,
    Training,
    Waiting,
)
from autohet.control.replanning import begin_change, build_fleet
from autohet.control.states.quiescing import interrupt_after_death
from autohet.control.states.sourcing import adopt
from autohet.control.values.actions import Interrupt
from autohet.control.values.effects import Deciding, Effects, event
from autohet.control.values.fleet_event import FleetEvent
from autohet.runtime.messages import Phase
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.observation import Observation


def step(state: Waiting, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Plan as soon as the fleet is large enough and has settled, or is late."""
    if seen.stop_reason:
        reason = f"stopped while waiting ({seen.stop_reason}): {state.reason}"
        saving = yield from _save_at_rest(state, memory, seen, reason)
        return saving or (yield from finish(memory, reason, ok=False))

    elastic = memory.job.elastic
    usable = fleet.usable_nodes(seen)
    num_workers = fleet.count_workers(seen, usable)
    is_short = num_workers < elastic.min_workers
    starting = fleet.starting_workers(seen)
    preparing = fleet.preparing_nodes(seen)
    holds = memory.buyer is not None and memory.buyer.waits
    if state.since == 0.0 or (preparing and is_short) or holds:
        # The data takes the time that it takes: the patience is for a fleet that does not come.
        state.since = seen.now

    joined_at = [view.joined_at for view in seen.nodes.values()]
    newest_at = max(joined_at, default=seen.now)
    is_quiet = seen.now - newest_at >= elastic.arrivals_debounce_s
    is_settled = is_quiet and not starting and not preparing
    is_late = seen.now - state.since > memory.timeouts.worker_start_s
    # The planner had no plan for `tried`: it is asked about other nodes, or another price.
    is_new = fleet.fleet_of(seen, usable, 0).nodes != state.tried
    if not is_short and (is_settled or is_late) and is_new:
        return (yield from _plan_from_rest(state, memory, seen, usable))

    if is_short:
        state.reason = fleet.shortage(
            num_workers, elastic.min_workers, len(starting), len(preparing)
        )
        coming = describe_starting(seen)
        if coming:
            state.reason += f" (nodes to come: {coming})"
        busy = fleet.describe_busy(seen)
        if busy:
            state.reason += f"; {busy}"
    yield from _announce_wait(memory, state, seen, late=is_late, short=is_short)
    if seen.now - state.since > elastic.fleet_patience_s:
        reason = f"waited {elastic.fleet_patience_s:.0f} s: {state.reason}"
        saving = yield from _save_at_rest(state, memory, seen, reason)
        return saving or (yield from fail(memory, reason))
    return state


def _save_at_rest(
    state: Waiting, memory: JobMemory, seen: Observation, reason: str
) -> Deciding[State | None]:
    """Make the newest step durable before a job ends whose fleet is too small.

    The survivors do this. None where nothing is newer than the last checkpoint, or no plan exists
    for the survivors.
    """
    safe = memory.ledger.checkpoints.step or 0
    is_durable = memory.ledger.committed_steps <= safe
    if is_durable or memory.end.reason is not None:
        return None

    memory.end.reason = reason
    saving = Waiting(state.reason, state.since, state.change)
    usable = fleet.usable_nodes(seen)
    found = yield from _plan_from_rest(saving, memory, seen, usable, redundant=False)
    # The same state: there is no plan for the survivors.
    return None if found is saving else found


def _plan_from_rest(
    state: Waiting,
    memory: JobMemory,
    seen: Observation,
    usable: tuple[str, ...],
    *,
    redundant: bool = True,
) -> Deciding[State]:
    state.tried = fleet.fleet_of(seen, usable, 0).nodes
    change = state.change
    if change is None:
        change = begin_change(memory, _start(seen), seen)
        change.step_before = memory.ledger.steps_run

    whole = build_fleet(memory, seen, usable)
    answer = memory.planning.ask(whole, None, redundant=redundant)
    if answer.proposal is None:
        # The new reason is logged, however soon after the one before.
        state.reason = answer.why_not
        state.announced = False
        return state

    change.stood_at = change.stood_at or seen.now
    change.reason = change.reason or "the fleet is ready"
    return (yield from adopt(change, answer.proposal, memory, seen))


def _start(seen: Observation, reason: str = "") -> FleetEvent:
    return FleetEvent(cause="start", nodes=(), workers=(), happened_at=seen.now, reason=reason)


def _announce_wait(
    memory: JobMemory, state: Waiting, seen: Observation, *, late: bool, short: bool
) -> Effects:
    """Log that the job waits, and why.

    After a change this is logged at once. At the start it is logged when workers take longer than
    arrivals do to settle (`elastic.arrivals_debounce_s`). It is logged again when the awaited fleet
    has grown or shrunk.
    """
    settle_s = memory.job.elastic.arrivals_debounce_s
    has_changed = state.reason != state.said and seen.now - state.said_at >= settle_s
    is_new = not state.announced or (short and has_changed)
    has_waited = short and seen.now - state.since >= settle_s
    is_due = late or state.change is not None or has_waited
    if is_new and is_due:
        state.announced = True
        state.said = state.reason
        state.said_at = seen.now
        yield event("decision", memory.generation, f"Deciding to wait, since {state.reason}")


# Workers that outlived their driver
# --------------------------------------------------------------------------------------


def inherit(memory: JobMemory, inherited: Inherited) -> None:
    """Set a new driver's memory to what an earlier driver has left, before the first tick."""
    newest = inherited.orders[-1]
    memory.generation = max(memory.generation, newest.generation)
    memory.members = newest.plan.workers
    memory.orders.inherit(inherited.orders)
    orders = dict.fromkeys(newest.participants, newest)
    memory.agent_gc.begin(orders)
    memory.ledger.inherit(orders)
    memory.ledger.checkpoints.inherit(inherited.receipts, inherited.committed)
    memory.state = Adopting(newest.generation, is_newest=inherited.newest == newest.generation)


def step_adopting(state: Adopting, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Go on with the generation if all its workers train in it; else stop them, and plan anew."""
    if state.deadline is None:
        state.deadline = seen.now + memory.timeouts.heartbeat_s
    members = memory.members
    unheard = [worker for worker in members if _is_unheard(worker, seen)]
    if unheard and seen.now < state.deadline:
        return state

    proposal = _predict(memory, seen)
    if proposal is not None:
        memory.proposal = proposal
        memory.timeouts = memory.job.elastic.timeouts(proposal.predicted_step_s)
        planned = seen.nodes_with(members)
        memory.planned_nodes = frozenset(planned)
    trouble = fleet.find_deaths_or_failures(seen, members)
    if trouble is not None:
        return (yield from interrupt_after_death(memory, trouble, seen))
    if proposal is not None and state.is_newest and _all_train(state, seen, members):
        entry = (state.generation, proposal.plan, proposal.predicted_step_s)
        memory.plans.append(entry)
        sentence = (
            f"Deciding to go on with generation {state.generation} as it is, since all of its"
            f" {len(members)} workers have trained on without a driver"
        )
        yield event("decision", memory.generation, sentence, adopted=list(members))
        return Training(state.generation, seen.now)

    reason = "the driver was started again while not all workers trained"
    sentence = (
        f"Deciding to stop the {len(members)} living workers and to plan anew, since {reason}"
    )
    yield event("decision", memory.generation, sentence)
    change = begin_change(memory, _start(seen, reason), seen)
    yield Interrupt(fleet.survivors(seen, members), memory.generation)
    return Quiescing(change, seen.now + memory.timeouts.quiesce_s, interrupted=True)


def _is_unheard(worker: str, seen: Observation) -> bool:
    """Return True if a living member, or its node's agent, has not reported yet."""
    view = seen.nodes.get(seen.node_of(worker))
    is_known = view is not None and view.may_work
    return worker not in seen.losses and not (is_known and worker in seen.reports)


def _all_train(state: Adopting, seen: Observation, members: Collection[str]) -> bool:
    for report in seen.reports_of(members):
        is_in = report.generation == report.live_generation == state.generation
        if not is_in or report.phase not in (Phase.TRAINING, Phase.FINISHED):
            return False
    return True


def _predict(memory: JobMemory, seen: Observation) -> PlanProposal | None:
    """Return the members' plan with its prediction; None where a node of it is gone."""
    order = next(iter(memory.ledger.orders.values()))
    nodes = seen.nodes_with(order.plan.workers)
    if not nodes <= seen.nodes.keys():
        return None
    living = fleet.fleet_of(seen, nodes, order.generation)
    try:
        return memory.planning.predict(order.plan, living)
    except ConfigError:
        return None
