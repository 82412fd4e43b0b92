"""Generations that are prepared while all train; all stop for them, or cut over.

Cut-over: the workers begin a prepared generation without a stop, at a step that is named ahead.

The orders of the next generation name the step at which it begins, two or more ahead, and the
journal names it before they are sent. The vote of the step before decides: if all workers are ready
then, all begin; else all train on, and the number is never used again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.job_state import (
    Building,
    CutOver,
    Preparing,
    Sourcing,
    State,
    Training,
)
from autohet.control.planning.orders import without_place
from autohet.control.replanning import preparation_order, stop_to_move
from autohet.control.states.sourcing import build, claim, order_terms
from autohet.control.values.actions import Begin, Interrupt, Prepare, Withdraw
from autohet.control.values.effects import Deciding, Effects, event
from autohet.runtime.messages import WITHDRAWN, Prepared
from planner.errors import ConfigError
from recovery.errors import NotRestorable

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.orders import Book
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Observation

LEAD_S = 0.5
"""Seconds for the journal's entry and the orders, beside two steps of which reports may be late."""


MOST_TRIES = 3
"""Preparations of one change whose cut-over comes too late; after that all workers stop for it."""


def is_possible(memory: JobMemory, proposal: PlanProposal) -> bool:
    """Return True if the workers can begin a generation of this plan without a stop.

    Nothing that its orders hold may depend on steps that are not run yet, as scales of gradients
    and the patience of early stopping do.
    """
    before = memory.proposal
    has_programs = proposal.plan.spmd is not None or (before and before.plan.spmd is not None)
    section = memory.job.evaluation
    may_end_early = section is not None and section.early_stopping_patience is not None
    is_scaled = memory.job.training.precision == "fp16"
    return memory.cuts_over and not (has_programs or may_end_early or is_scaled)


def prepare_generation(
    state: Training,
    memory: JobMemory,
    change: Change,
    proposal: PlanProposal,
    seen: Observation,
    latest: float = math.inf,
) -> Effects:
    """Have the plan's workers build its generation while all train on.

    No-op if there is no time for it until `latest`.
    """
    deadline = min(latest, seen.now + memory.timeouts.rendezvous_s)
    if deadline <= seen.now:
        return
    leaving: tuple[str, ...] = ()
    if is_possible(memory, proposal):
        leaving = without_place(proposal.plan, memory.members)
    order = preparation_order(memory, proposal, seen, leaving)
    yield Prepare(dict.fromkeys(order.participants, order))
    state.preparing = Preparing(
        order.generation, change, proposal, order.participants, latest, deadline
    )


def move_once_prepared(
    state: Training, preparing: Preparing, memory: JobMemory, seen: Observation
) -> Deciding[State]:
    """Move once all workers of the plan are prepared, one has failed to, or time is up."""
    proposal = preparing.proposal
    outcomes = [report.prepared for report in seen.reports_of(preparing.participants)]
    known = [each for each in outcomes if each is not None]
    mine = [each for each in known if each.generation == preparing.generation]
    has_failed = any(each.error is not None for each in mine)
    are_ready = len(mine) == len(preparing.participants) and not has_failed
    if not are_ready and not has_failed and seen.now < preparing.deadline:
        return state
    if are_ready and (yield from name_step(preparing, memory, seen)):
        return state
    prepared = preparing.generation if are_ready else None
    return (yield from stop_to_move(memory, preparing.change, proposal, seen, prepared))


def name_step(preparing: Preparing, memory: JobMemory, seen: Observation) -> Deciding[bool]:
    """Name the step of the cut-over, and claim the generation; False: there is no time."""
    if not is_possible(memory, preparing.proposal):
        return False
    assert memory.proposal is not None
    committed = memory.ledger.committed_steps
    measured_s = memory.ledger.measured_step_s(memory.generation)
    step_s = measured_s or memory.proposal.predicted_step_s
    step = committed + 2 + int(LEAD_S / max(step_s, 1e-3))
    # The step after the committed ones is in flight: the cut-over comes no later than this.
    lead_s = (step - committed) * step_s
    limits = memory.job.elastic.timeouts(preparing.proposal.predicted_step_s)
    end = memory.ledger.last_step
    if end is None or step >= end or lead_s >= limits.step_s:
        return False
    if seen.now + lead_s > preparing.latest:
        return False
    book = _write_orders(preparing, step, memory, seen)
    if book is None:
        return False
    sourcing = Sourcing(preparing.change, preparing.proposal, seen.now)
    yield from claim(sourcing, book, memory, seen)
    preparing.cut_over = CutOver(sourcing, book)
    sentence = (
        f"Deciding to begin generation {preparing.generation} at step {step} without a stop, since"
        f" its workers are ready and {preparing.change.reason}"
    )
    yield event("decision", memory.generation, sentence)
    return True


def _write_orders(
    preparing: Preparing, step: int, memory: JobMemory, seen: Observation
) -> Book | None:
    """Return the orders for a state that all members will hold at `step`; None without a plan."""
    plan = preparing.proposal.plan
    ahead = fleet.at_step(seen, memory.members, step)
    if memory.orders.needs_inventories(plan, ahead, memory.members):
        return None
    limits = memory.job.elastic.timeouts(preparing.proposal.predicted_step_s)
    terms = replace(
        order_terms(memory, preparing.proposal),
        step_timeout_s=limits.step_s,
        follows=memory.generation,
    )
    number = preparing.generation
    try:
        book = memory.orders.write(number, preparing.proposal, ahead, memory.members, terms)
    except (ConfigError, NotRestorable):
        return None
    if tuple(book.orders) != preparing.participants or book.start_step != step:
        memory.orders.withdraw(number)
        return None
    return book


def step(preparing: Preparing, memory: JobMemory, seen: Observation) -> Deciding[Building | None]:
    """Send the orders once they are claimed; return the next state once the workers have begun.

    `preparing.cut_over` is None afterwards if they will not begin. A stop, another notice or a
    death makes the workers vote against it, unless they have voted.
    """
    cut_over = preparing.cut_over
    assert cut_over is not None
    book = cut_over.book
    number = preparing.generation
    reports = seen.reports_of(memory.members)
    if any(report.generation == number for report in reports):
        preparing.change.stood_at = seen.now
        return (yield from _adopt(preparing, cut_over, memory, seen))
    why = _find_other_news(preparing, seen)
    if not cut_over.is_sent:
        if why:
            preparing.cut_over = None
        else:
            yield from _send(preparing, cut_over, memory, seen)
        return None
    if why and not cut_over.is_withdrawn:
        cut_over.is_withdrawn = True
        yield Withdraw(fleet.survivors(seen, memory.members), number)
    if any(report.step > book.start_step for report in reports):
        why = why or f"not all of its workers had their orders before step {book.start_step}"
    elif not any(report.prepared == Prepared(number, WITHDRAWN) for report in reports):
        return None
    preparing.cut_over = None
    newcomers = [worker for worker in book.orders if worker not in memory.members]
    yield Interrupt(fleet.survivors(seen, newcomers), number)
    sentence = f"Deciding not to begin generation {number}, since {why or preparing.change.reason}"
    yield event("decision", memory.generation, sentence)
    return None


def _find_other_news(preparing: Preparing, seen: Observation) -> str:
    """Return the reason not to begin a generation whose step is named; empty if there is none."""
    if seen.stop_reason:
        return f"the job is to stop ({seen.stop_reason})"
    for worker in preparing.proposal.plan.workers:
        node = seen.node_of(worker)
        if node in seen.notices:
            return f"{node} has got a notice"
        if not seen.answers(worker):
            return f"{worker} is lost"
    return ""


def _send(preparing: Preparing, cut_over: CutOver, memory: JobMemory, seen: Observation) -> Effects:
    """Send the orders once the journal has the generation's entry; give up if that is late."""
    number = preparing.generation
    checkpoint = seen.checkpoint
    is_claimed = checkpoint.claimed >= number and checkpoint.unclaimed != number
    is_late = memory.ledger.committed_steps >= cut_over.book.start_step
    are_there = all(seen.answers(worker) for worker in cut_over.book.orders)
    if is_claimed and are_there and not is_late:
        orders = {}
        for worker, order in cut_over.book.orders.items():
            orders[worker] = replace(order, is_claimed=True)
        cut_over.book = replace(cut_over.book, orders=orders)
        cut_over.is_sent = True
        yield Begin(orders)
    elif is_late or not are_there or seen.now >= cut_over.sourcing.claimed_by:
        preparing.cut_over = None


def _adopt(
    preparing: Preparing, cut_over: CutOver, memory: JobMemory, seen: Observation
) -> Deciding[Building]:
    """Follow the workers into the generation that they have begun."""
    change = preparing.change
    change.plan_after = preparing.proposal.plan
    change.predicted_step_s = preparing.proposal.predicted_step_s
    change.step_before = cut_over.book.start_step
    memory.timeouts = memory.job.elastic.timeouts(change.predicted_step_s)
    return (yield from build(cut_over.sourcing, cut_over.book, memory, seen))


def give_up(preparing: Preparing, memory: JobMemory) -> None:
    """Count all participants as members after a death: any of them may have begun already."""
    new = [worker for worker in preparing.participants if worker not in memory.members]
    memory.members = (*memory.members, *new)
    memory.generation = preparing.generation
