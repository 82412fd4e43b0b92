"""Pure transition of one job: from an observation to the next state and its effects.

What is decided in every state is here: failed ticks, workers that cannot take part, events on
nodes. The rest is the step of the present state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autohet.control import fleet
from autohet.control.checkpoint_pace import pace_checkpoints
from autohet.control.ending import fail, fail_unsaved, forget_gone, is_dead, log_new_deaths
from autohet.control.job_state import (
    Adopting,
    Building,
    Closing,
    Ended,
    Quiescing,
    Saving,
    Sourcing,
    State,
    Training,
    Waiting,
)
from autohet.control.replanning import drop_search
from autohet.control.states import building, closing, quiescing, sourcing, training, waiting
from autohet.control.values.actions import Hire, RequestStop, StartAgents
from autohet.control.values.effects import Deciding, Decision, Effects, Supersede, event
from autohet.control.values.observation import Notice
from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Failures, Observation
    from planner.inputs.fleet import NodeType

AGENT_START_S = 10.0
"""Seconds after which a node is announced even if its agent has not reported its type."""
RETRIES = 3
"""Ticks in a row that may fail before the job is asked to stop with a checkpoint.

After as many again all workers are told to stop, whatever the state is. After as many again the job
is given up.
"""
MOST_FAILURES = 3 * RETRIES
AUDIT = "audit"
"""Source of the notice of a node that is drained since it computes wrongly."""


def decide(memory: JobMemory, seen: Observation) -> Effects:
    """Record an observation in `memory`, move to the next state, and yield the effects.

    They depend on the observation, the memory and the planner's answers alone. No file, network or
    clock is read or written. After an error, what was decided before stays remembered: an
    observation tells its news once.
    """
    seen = _hide_replaced_nodes(memory, seen)
    seen = yield from _apply_failure_policy(memory, seen)
    yield from memory.ledger.record(seen, memory.generation)
    seen = yield from _follow_goal(memory, seen)
    is_faulty = any(report.has_faulty_device for report in seen.reports.values())
    if is_faulty or memory.ledger.audits.wrong or memory.nodes.wrong:
        seen = yield from _answer_corruption(memory, seen)
    if isinstance(memory.state, Saving):
        memory.state = yield from closing.save(memory.state, memory, seen)
        return

    yield from fleet.new_drains(memory.nodes.notices, seen)
    yield from announce(memory, seen)
    yield from _direct_agents(memory, seen)
    given_back = set() if memory.buyer is None else memory.buyer.released
    memory.outlook.look(seen, given_back)
    hire = fleet.workers_to_hire(seen)
    if hire and isinstance(memory.state, Waiting | Training):
        yield Hire(hire)

    before = memory.state
    memory.state = yield from _next_state(memory, seen)
    if memory.state is not before:
        drop_search(before)

    if isinstance(memory.state, Waiting | Sourcing | Building):
        yield from log_new_deaths(memory, seen)
    yield from _announce_departures(memory, seen)
    yield from _buy(memory, seen)
    if isinstance(memory.state, Training):
        yield from _pace_checkpoints(memory, seen)
        yield from _rehearse(memory, memory.state, seen)


def _rehearse(memory: JobMemory, state: Training, seen: Observation) -> Effects:
    """Make the next scripted event happen if it is due, and count arrivals that are answered."""
    script = memory.script
    is_undecided = state.considering or state.preparing or memory.ledger.open_change
    if script.joining and not is_undecided:
        script.answer(memory.planned_nodes | state.declined)
    if script.left:
        ledger = memory.ledger
        yield from script.due(ledger.committed_steps, seen, memory.members, ledger.planned_end)


def _pace_checkpoints(memory: JobMemory, seen: Observation) -> Effects:
    """Request a checkpoint where one is due, or compute again when that is."""
    pace = memory.checkpoint_pace
    is_quiet = seen.now < pace.look_at and pace.generation == memory.generation
    next_step = memory.ledger.committed_steps + 1
    if is_quiet and (pace.steps is None or next_step < pace.requested + pace.steps):
        return
    yield from pace_checkpoints(memory, seen)


def fail_at_once(memory: JobMemory, reason: str) -> Effects:
    """Fail the job, whatever its state."""
    memory.state = yield from fail(memory, reason, may_pass=True)


def _next_state(memory: JobMemory, seen: Observation) -> Deciding[State]:
    ended = yield from _judge_superseded(memory, seen)
    if ended is None:
        ended = yield from _judge_unfit(memory, seen)
    if ended is not None:
        return ended
    return (yield from _step(memory, seen))


def _step(memory: JobMemory, seen: Observation) -> Deciding[State]:
    match memory.state:
        case Waiting() as state:
            return (yield from waiting.step(state, memory, seen))
        case Adopting() as state:
            return (yield from waiting.step_adopting(state, memory, seen))
        case Quiescing() as state:
            return (yield from quiescing.step(state, memory, seen))
        case Sourcing() as state:
            return (yield from sourcing.step(state, memory, seen))
        case Building() as state:
            return (yield from building.step(state, memory, seen))
        case Training() as state:
            return (yield from training.step(state, memory, seen))
        case Closing() as state:
            return (yield from closing.step(state, memory, seen))
        case Ended() | Saving() as state:
            return state


def _direct_agents(memory: JobMemory, seen: Observation) -> Effects:
    """Start agents on new nodes, and send all agents what to remove and what to hand over."""
    new = [name for name, view in seen.nodes.items() if not view.agent_started]
    if new:
        yield StartAgents(tuple(new))
    yield from memory.agent_gc.decide(seen)


def _buy(memory: JobMemory, seen: Observation) -> Effects:
    """Adapt the request for nodes."""
    if memory.buyer is None:
        return
    is_training = isinstance(memory.state, Training)
    left = None
    if memory.goal is not None:
        left = memory.goal.left(seen.now, memory.steps_left, memory.redo_s)
    actions, said = memory.buyer.decide(seen, memory.members, training=is_training, left=left)
    yield from actions
    for sentence in said:
        yield event("decision", memory.generation, sentence)


def _follow_goal(memory: JobMemory, seen: Observation) -> Deciding[Observation]:
    """Count what is spent of the job's budget, and stop the job before it is passed.

    Returns the observation with the stop that was decided on because of it.
    """
    goal = memory.goal
    if goal is None or isinstance(memory.state, Ended):
        return seen
    wish = None if memory.buyer is None else memory.buyer.wish
    prices = {} if memory.buyer is None else memory.buyer.prices
    goal.count(seen, memory.ledger.committed_steps, wish, prices)
    deadline = goal.terms.deadline_at
    if deadline is not None and seen.now > deadline and not goal.is_late:
        goal.is_late = True
        sentence = (
            "Deciding to go on although the deadline has passed, since"
            f" {memory.steps_left:g} steps are left"
        )
        yield event("decision", memory.generation, sentence)
    if goal.stop_reason is None and goal.lasts_s(memory.closing_s) <= 0.0:
        goal.stop_reason = (
            f"its budget: {goal.spent_usd:.2f} of {goal.terms.budget_usd:.2f} USD are spent, and"
            f" the rest pays for the end, with {memory.steps_left:g} steps left"
        )
    if goal.stop_reason is None or not memory.steps_left:
        return seen
    return replace(seen, stop_reason=seen.stop_reason or goal.stop_reason)


# Failed ticks, and workers that cannot take part
# --------------------------------------------------------------------------------------


def _judge_superseded(memory: JobMemory, seen: Observation) -> Deciding[State | None]:
    """Fail the job if another driver has taken it over.

    Nothing that this driver does counts any more.
    """
    why = seen.checkpoint.superseded
    if why is None or isinstance(memory.state, Ended):
        return None
    return (yield from fail(memory, why))


def _judge_unfit(memory: JobMemory, seen: Observation) -> Deciding[State | None]:
    """Fail the job, or leave nodes out, where workers can never take part.

    A job that has not trained yet fails at once: no retry helps, and the user is there to fix the
    cause. Once the job trains, the worker's node is left out, unless there is no other node.
    """
    if isinstance(memory.state, Ended):
        memory.nodes.unfit = set()
        return None
    unfit = fleet.find_unfit(seen)
    new = unfit.keys() - memory.nodes.unfit
    memory.nodes.unfit = set(unfit)

    fatal = _find_fatal(memory, unfit, seen)
    if fatal:
        worker, why = min(fatal.items())
        name = f"worker {worker} on node {seen.node_of(worker)}"
        if len(fatal) > 1:
            name += f" (and {len(fatal) - 1} more workers)"
        reason = f"{name} cannot take part: {why}"
        return (yield from fail(memory, reason, may_pass=bool(memory.plans)))

    for worker in sorted(new):
        sentence = (
            f"Deciding to leave out node {seen.node_of(worker)}, since its worker {worker}"
            f" cannot take part: {unfit[worker]}"
        )
        yield event("decision", memory.generation, sentence)
    return None


def _find_fatal(memory: JobMemory, unfit: dict[str, str], seen: Observation) -> dict[str, str]:
    """Return the unfit workers for which the job has to fail, and why they are unfit."""
    has_trained = bool(memory.plans)
    alive = {}
    for worker, why in unfit.items():
        # The cause of a faulty device is no mistake of the user's, who has nothing to fix.
        is_faulty = worker in seen.reports and seen.reports[worker].has_faulty_device
        if worker not in seen.losses and not is_faulty:
            alive[worker] = why
    if alive and not has_trained:
        return alive

    nodes = seen.nodes_with(unfit)
    no_other_node = nodes >= seen.nodes.keys()
    if unfit and no_other_node:
        return unfit
    return {}


def _answer_corruption(memory: JobMemory, seen: Observation) -> Deciding[Observation]:
    """Decide on workers that were found to compute wrongly, as `elastic.on_corruption` says.

    Returns the observation with a notice for each node that is drained, as if it were to leave.
    """
    known = memory.nodes
    wrong = dict(memory.ledger.audits.wrong)
    for worker, report in seen.reports.items():
        if report.has_faulty_device:
            wrong.setdefault(worker, report.error or "its device is faulty")
    known.wrong &= wrong.keys()
    for worker in sorted(wrong.keys() - known.wrong):
        known.wrong.add(worker)
        node = node_of(worker)
        answer = memory.job.elastic.on_corruption
        if answer == "drain":
            known.corrupt[node] = Notice(node, AUDIT, seen.now)
            deed = f"drain {node}"
        elif answer == "stop":
            memory.end.reason = f"the arithmetic of {worker} is wrong: {wrong[worker]}"
            deed = "stop with a checkpoint"
        else:
            deed = f"go on with {worker}"
        sentence = f"Deciding to {deed} (elastic.on_corruption), since {wrong[worker]}"
        yield event("decision", memory.generation, sentence, worker=worker)
    drained = {name: notice for name, notice in known.corrupt.items() if name in seen.nodes}
    return replace(seen, notices={**drained, **seen.notices})


class FailureAnswer(StrEnum):
    """Reaction to ticks that fail, worded for a sentence."""

    RETRY = "try again"
    STOP = "stop with a checkpoint"
    SAVE = "tell all workers to stop with a checkpoint, and to do nothing else any more"
    GIVE_UP = "give up"


def answer_failures(in_a_row: int, *, stopping: bool, saving: bool) -> FailureAnswer:
    """Choose the reaction to this number of failed ticks in a row.

    stopping, saving: True if that was decided before because of failures.
    """
    if in_a_row > MOST_FAILURES:
        return FailureAnswer.GIVE_UP
    if in_a_row > 2 * RETRIES and not saving:
        return FailureAnswer.SAVE
    if in_a_row > RETRIES and not stopping:
        return FailureAnswer.STOP
    return FailureAnswer.RETRY


def _apply_failure_policy(memory: JobMemory, seen: Observation) -> Deciding[Observation]:
    """Apply the failure policy to ticks that failed.

    Returns the observation with the stop that was decided on because of them.
    """
    failures = seen.failures
    if failures is not None and not isinstance(memory.state, Ended):
        yield from _answer_failures(memory, failures, seen.now)
    if memory.end.failed_ticks is None:
        return seen
    stop_reason = seen.stop_reason or memory.end.failed_ticks
    return replace(seen, stop_reason=stop_reason)


def _answer_failures(memory: JobMemory, failures: Failures, now: float) -> Effects:
    """Log what is done about failed ticks, and do it."""
    cause = failures.cause
    in_a_row = failures.in_a_row
    answer = answer_failures(
        in_a_row,
        stopping=memory.end.failed_ticks is not None,
        saving=isinstance(memory.state, Saving),
    )
    often = f", {in_a_row} times in a row" if in_a_row > 1 else ""
    sentence = f"Deciding to {answer}, since there was {cause}{often}"
    yield event("decision", memory.generation, sentence)
    if answer is FailureAnswer.STOP:
        memory.end.failed_ticks = cause
        memory.end.may_pass = True
    elif answer is FailureAnswer.SAVE:
        drop_search(memory.state)
        deadline = now + memory.timeouts.step_s + memory.timeouts.checkpoint_s
        memory.state = Saving(cause, deadline)
        # One of the pending actions may be what makes every tick fail: they are dropped.
        yield Supersede(RequestStop(memory.members, checkpoint=True))
    elif answer is FailureAnswer.GIVE_UP:
        memory.state = yield from fail_unsaved(memory, cause, "ticks go on failing")


# Events on nodes, in any state
# --------------------------------------------------------------------------------------


def _hide_replaced_nodes(memory: JobMemory, seen: Observation) -> Observation:
    """Hide, for one observation, each node that has taken over the name of another.

    What is remembered by name ends with the node that it was about. Nodes that are left out stay so
    for their time.
    """
    known = memory.nodes
    replaced = set()
    for name, view in seen.nodes.items():
        if name in known.present and known.joined[name] != view.joined_at:
            replaced.add(name)
    if replaced:
        seen = seen.without_nodes(replaced)

    known.present = frozenset(seen.nodes)
    for name, view in seen.nodes.items():
        known.joined[name] = view.joined_at

    for name, until in list(known.left_out_until.items()):
        if until <= seen.now or name not in seen.nodes:
            del known.left_out_until[name]
    return replace(seen, left_out=frozenset(known.left_out_until))


def announce(memory: JobMemory, seen: Observation) -> Effects:
    """Log each notice and each new node once; forget what is gone."""
    known = memory.nodes
    slowdowns = memory.speeds.slowdowns
    remembered = {*known.announced, *known.notices, *slowdowns}
    gone = remembered - seen.nodes.keys()
    # First of all, since what is forgotten next explains why a node went.
    known_and_gone = known.announced.keys() - seen.nodes.keys()
    yield from _log_idle_deaths(memory, known_and_gone, seen)
    _forget_nodes(memory, gone, seen)
    yield from _announce_notices(memory, seen)
    yield from _announce_risks(memory, seen)
    for name, view in seen.nodes.items():
        is_late = seen.now - view.joined_at > AGENT_START_S
        has_type = view.endpoint is not None or is_late
        if name not in known.announced and has_type:
            yield _announce_arrival(memory, name, view.node_type)
    yield from _announce_prices(memory, seen)


def _forget_nodes(memory: JobMemory, gone: Collection[str], seen: Observation) -> None:
    """Forget what is remembered by the names of these nodes, and of workers that are gone."""
    known = memory.nodes
    known.released.difference_update(gone)
    memory.planned_nodes = memory.planned_nodes.difference(gone)
    for name in gone:
        known.notices.pop(name, None)
        known.corrupt.pop(name, None)
        if memory.ledger.audits.agreed:
            memory.ledger.audits.forget(name)
        memory.speeds.slowdowns.pop(name, None)
    for worker in list(known.logged_dead):
        if not is_dead(worker, seen):
            known.logged_dead.remove(worker)


def _announce_notices(memory: JobMemory, seen: Observation) -> Effects:
    """Log each notice, and again when its deadline changes."""
    for name, notice in seen.notices.items():
        before = memory.nodes.notices.get(name)
        memory.nodes.notices[name] = notice
        if before is not None and notice.deadline == before.deadline:
            continue
        left_s = None
        if notice.deadline is not None:
            left_s = round(notice.deadline - seen.now, 3)
        again: dict[str, Any] = {} if before is None else {"updated": True}
        yield event(
            "notice",
            memory.generation,
            node=name,
            source=notice.source,
            deadline_s=left_s,
            **again,
        )


def _announce_prices(memory: JobMemory, seen: Observation) -> Effects:
    """Log changed spot prices, which are known later than the node and move.

    A node that was announced before its agent had reported is announced again if the agent reports
    another type.
    """
    for name, view in seen.nodes.items():
        known = memory.nodes.announced.get(name)
        kind = view.node_type
        if known is None or known == kind:
            continue
        with_price = replace(known, usd_per_hour=kind.usd_per_hour)
        if with_price != kind:
            yield _announce_arrival(memory, name, kind, updated=True)
        elif known.usd_per_hour != kind.usd_per_hour:
            memory.nodes.announced[name] = kind
            price = kind.usd_per_hour
            yield event("price", memory.generation, node=name, usd_per_hour=price)


def _announce_arrival(
    memory: JobMemory, name: str, kind: NodeType, *, updated: bool = False
) -> Decision:
    memory.nodes.announced[name] = kind
    again: dict[str, Any] = {"updated": True} if updated else {}
    return event(
        "arrival",
        memory.generation,
        node=name,
        node_type=kind.name,
        gpu_type=kind.gpu_type,
        num_gpus=kind.num_gpus,
        usd_per_hour=kind.usd_per_hour,
        zone=kind.zone,
        spot=kind.spot,
        **again,
    )


def _announce_risks(memory: JobMemory, seen: Observation) -> Effects:
    """Log each new risk.

    A node at risk goes on training. Its shards are copied to nodes that are not at risk, from the
    next generation on.
    """
    memory.nodes.risks &= seen.risks.keys()
    new = seen.risks.keys() - memory.nodes.risks
    for name in sorted(new):
        memory.nodes.risks.add(name)
        source = seen.risks[name].source
        sentence = (
            f"Deciding to go on with {name} and to copy what it holds elsewhere, since it is at"
            f" risk ({source})"
        )
        yield event("risk", memory.generation, sentence, node=name, source=source)


def _announce_departures(memory: JobMemory, seen: Observation) -> Effects:
    """Log the departure of each announced node that is gone without a death event."""
    announced = memory.nodes.announced
    gone = announced.keys() - seen.nodes.keys()
    for name in sorted(gone):
        del announced[name]
        reason = f"{name} is gone"
        yield event("departure", memory.generation, node=name, reason=reason)


def _log_idle_deaths(memory: JobMemory, gone: Collection[str], seen: Observation) -> Effects:
    """Log deaths of nodes that were not trained on and went without a notice.

    Other events name all other nodes.
    """
    busy = seen.nodes_with(memory.members)
    if isinstance(memory.state, Building):
        busy |= seen.nodes_with(memory.state.participants)
    idle = set(gone) - busy
    explained = memory.nodes.notices.keys() | memory.nodes.released
    for name in sorted(idle - explained):
        reasons = {
            loss.reason for worker, loss in seen.losses.items() if seen.node_of(worker) == name
        }
        reason = f"{name}, which was idle, is gone"
        if reasons:
            reason += f": {'; '.join(sorted(reasons))}"
        yield event(
            "death",
            memory.generation,
            reason,
            nodes=[name],
            workers=[],
            gone=forget_gone(memory, [name], seen),
        )
