"""State Sourcing: find the training state, write the orders of the next generation, claim it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control.ending import fail
from autohet.control.job_state import Building, Quiescing, Sourcing, State
from autohet.control.planning.agent_gc import any_order
from autohet.control.planning.orders import Book, OrderTerms
from autohet.control.replanning import is_gated, unused_generation
from autohet.control.states.ways_back import judge_start, look_anew
from autohet.control.values.actions import Begin, ClaimGeneration, RequestInventories
from autohet.control.values.effects import Deciding, Effects, Remark, event
from planner.errors import ConfigError
from planner.inputs.zones import known_zones
from recovery.errors import NotRestorable

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Observation

CLAIM_S = 2.0
"""Seconds that a claim may take.

A conditional put takes a storage tens of milliseconds; no recovery waits longer for one that is out
of order.
"""


def adopt(
    change: Change,
    proposal: PlanProposal,
    memory: JobMemory,
    seen: Observation,
    prepared: int | None = None,
) -> Deciding[State]:
    """Take over a plan, now that all workers stand, and look for the state at once.

    prepared: number of the generation that its workers have prepared; None: none is.
    """
    change.plan_after = proposal.plan
    change.predicted_step_s = proposal.predicted_step_s
    step_s = proposal.predicted_step_s
    limits = memory.job.elastic.timeouts(step_s)
    is_first_plan = not memory.plans
    if is_first_plan or limits != memory.timeouts:
        yield Remark(f"Time limits under a predicted step of {step_s:.2f} s: {limits}")
    memory.timeouts = limits
    # In the same tick, since live memory mostly holds all that is needed.
    state = Sourcing(change, proposal, seen.now + limits.quiesce_s, prepared)
    return (yield from step(state, memory, seen))


def step(state: Sourcing, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Claim the generation once the state is found, and begin once it is claimed."""
    plan = state.proposal.plan
    needs_more = memory.orders.needs_inventories(plan, seen, memory.members)
    if needs_more and not state.asked:
        state.asked = True
        yield RequestInventories()
        return state
    # After the deadline the state is looked for in what is known.
    is_unanswered = seen.inventories is None and seen.now < state.deadline
    if needs_more and is_unanswered:
        return state

    participants = plan.workers
    if state.book is not None:
        participants = tuple(state.book.orders)
    if not all(seen.answers(worker) for worker in participants):
        # One died while the state was looked for: the plan counts on it.
        deadline = seen.now + memory.timeouts.quiesce_s
        return Quiescing(state.change, deadline, interrupted=True)
    if state.book is None:
        return (yield from _claim(state, memory, seen))
    return (yield from _begin(state, state.book, memory, seen))


def _claim(state: Sourcing, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Write the orders for the next generation, and claim its number in the journal.

    Both are this driver's once the journal says so.
    """
    orders = memory.orders
    if state.wait is not None:
        ended = yield from look_anew(state, memory, seen)
        if ended is not None:
            return ended
    if memory.ledger.records:
        orders.confirm()  # also where the first generation's readiness was never seen
    generation = unused_generation(memory, seen, state.prepared)
    is_prepared = generation == state.prepared
    terms = replace(order_terms(memory, state.proposal), is_prepared=is_prepared)
    before = any_order(memory.ledger.orders)
    if before is not None and before.gated:
        terms = replace(terms, kept_plan=before.plan)
    fallback = memory.fallback
    if fallback is not None and not fallback.is_over:
        terms = replace(terms, before_step=fallback.step)
    try:
        book, why_lost = _write_orders(state, memory, seen, generation, terms)
    except ConfigError as error:
        return (yield from fail(memory, str(error)))
    if book.schedule is None:
        following = yield from judge_start(state, memory, seen, why_lost)
        if following is not None:
            orders.withdraw(generation)
            return following
    memory.generation = generation
    yield from claim(state, book, memory, seen)
    return state


def order_terms(memory: JobMemory, proposal: PlanProposal) -> OrderTerms:
    """Return the terms of the orders for a plan, as they are whatever the present state is."""
    log = memory.ledger.evaluation_log
    return OrderTerms(
        last_step=memory.ledger.planned_end,
        least_steps=memory.script.least_steps if memory.script.joining else 0,
        step_timeout_s=memory.timeouts.step_s,
        change_s=memory.planning.horizon_s,
        evaluations=log if log.section else None,
        loss_scales=memory.ledger.loss_scales,
        gated=is_gated(memory, proposal),
    )


def claim(state: Sourcing, book: Book, memory: JobMemory, seen: Observation) -> Effects:
    """Claim the generation of these orders in the journal."""
    state.book = book
    state.claimed_by = seen.now + min(CLAIM_S, memory.timeouts.quiesce_s)
    yield ClaimGeneration(book.descent)


def _write_orders(
    state: Sourcing, memory: JobMemory, seen: Observation, generation: int, terms: OrderTerms
) -> tuple[Book, str]:
    """Return the orders, and why no step can be restored; empty if one can, or none was run.

    Raises:
        ConfigError: the plan's layout cannot be made.
    """
    orders = memory.orders
    try:
        return orders.write(generation, state.proposal, seen, memory.members, terms), ""
    except NotRestorable as error:
        anew = replace(terms, from_scratch=True)
        return orders.write(generation, state.proposal, seen, (), anew), str(error)


def _begin(state: Sourcing, book: Book, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Send the orders once the journal names the generation.

    If the storage does not answer in time, they are sent without that.
    """
    generation = memory.generation
    checkpoint = seen.checkpoint
    if checkpoint.claimed < generation and seen.now < state.claimed_by:
        return state
    is_claimed = checkpoint.claimed >= generation and checkpoint.unclaimed != generation
    if not is_claimed:
        why = f"the storage has not answered within {CLAIM_S:.0f} s"
        if checkpoint.unclaimed == generation:
            why = "the storage has refused it for now"
        sentence = (
            f"Deciding to begin generation {generation} without its entry in the journal, since"
            f" {why}: until the entry is there, a restarted driver cannot go on from what nodes"
            " keep in memory"
        )
        yield event("decision", generation, sentence)

    orders = {
        worker: replace(order, is_claimed=is_claimed) for worker, order in book.orders.items()
    }
    # Steps that were committed until all stood count as lost, too, where the restore goes behind.
    change = state.change
    change.step_before = max(change.step_before, memory.ledger.committed_steps)
    following = yield from build(state, replace(book, orders=orders), memory, seen)
    yield Begin(orders)
    return following


def build(state: Sourcing, book: Book, memory: JobMemory, seen: Observation) -> Deciding[Building]:
    """Return the state in which the workers follow these orders; log the plan."""
    generation = book.descent.generation
    change = state.change
    change.restore_step = book.start_step
    change.begun_at = seen.now
    memory.generation = generation
    yield from _log_plan(state, book, memory)
    yield from _log_kept(state, book, memory)
    memory.ledger.orders = book.orders
    ends = [order.end_step for order in book.orders.values()]
    memory.ledger.planned_end = max([memory.ledger.planned_end or 0, *ends])
    memory.agent_gc.begin(book.orders)
    limits = memory.timeouts
    deadline = seen.now + limits.rendezvous_s + limits.transfer_s
    return Building(
        change=change,
        proposal=state.proposal,
        generation=generation,
        participants=tuple(book.orders),
        deadline=deadline,
    )


def _log_kept(state: Sourcing, book: Book, memory: JobMemory) -> Effects:
    """Log the rows of a step whose passes are kept; no-op without any."""
    order = any_order(book.orders)
    if order is None or order.kept_plan is None:
        return
    stages = {pipeline.stages for pipeline in order.plan.pipelines}
    whole = [each for each in order.kept_plan.pipelines if each.stages in stages]
    num_kept = sum(pipeline.num_sequences for pipeline in whole)
    num_rows = order.plan.global_batch_sequences
    state.change.kept_share = num_kept / num_rows
    sentence = (
        f"Deciding to keep the passes of {num_kept} of {num_rows} rows of step {order.start_step},"
        f" since their pipelines are whole, and to run the others again"
    )
    yield event("decision", memory.generation, sentence, kept_rows=num_kept)


def _log_plan(state: Sourcing, book: Book, memory: JobMemory) -> Effects:
    """Log the plan.

    Warnings come first: host memory that its nodes lack, and copies that are spaced or missing.
    """
    proposal = state.proposal
    fleet = proposal.cost.fleet
    lacks = memory.planning.host_memory_lacks(proposal)
    yield from _warn_of_new(lacks, memory.warnings.host_memory)
    memory.warnings.host_memory = lacks

    copies: list[str] = []
    replication = None
    if book.replication is not None:
        copies = book.replication.sentences()
        replication = book.replication.to_document()
    yield from _warn_of_new(copies, memory.warnings.copies)
    memory.warnings.copies = copies

    zones = [node.node_type.zone for node in fleet.nodes]
    transfers = [
        transfer.to_document(proposal.predicted_step_s)
        for transfer in proposal.prediction.transfers
    ]
    yield event(
        "plan",
        memory.generation,
        plan=proposal.plan.to_document(),
        predicted_step_s=proposal.predicted_step_s,
        cause=state.change.cause,
        reason=state.change.reason,
        step=book.start_step,
        idle=list(proposal.idle),
        step_timeout_s=memory.timeouts.step_s,
        usd_per_hour=fleet.usd_per_hour(),
        horizon_s=round(memory.planning.horizon_s, 1),
        move_s=round(memory.planning.move_s, 2),
        zones=list(known_zones(zones)),
        lacks_host_memory=lacks,
        transfers=transfers,
        replication=replication,
    )


def _warn_of_new(warnings: list[str], logged: list[str]) -> Effects:
    """Log these warnings, unless they are the ones that were logged for the plan before."""
    if warnings != logged:
        for warning in warnings:
            yield Remark(warning, warning=True)
