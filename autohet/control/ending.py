"""Ends: deaths of workers, the release of leaving nodes, and the end of the job itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.job_state import Closing, Ended
from autohet.control.ledger.failures import find_causes
from autohet.control.replanning import build_fleet, shortage_reason
from autohet.control.values.actions import Dismiss, RequestStop
from autohet.control.values.effects import Deciding, Effects, event

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values import fleet_event
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Observation

LEFT_OUT_S = 600.0
"""Seconds for which a node is left out of plans after repeated failures.

That is when failures of one cause have ended generation after generation.
"""


def finish(memory: JobMemory, reason: str, *, ok: bool, may_pass: bool = False) -> Deciding[Ended]:
    """End the job in an orderly way. may_pass: True if a restarted driver may do better."""
    yield from _log_rest(memory)
    step = memory.ledger.committed_steps
    share = memory.ledger.goodput()
    yield event("finished", memory.generation, reason=reason, ok=ok, step=step, goodput=share)
    return Ended(ok, reason, may_pass and not ok)


def fail(memory: JobMemory, reason: str, *, may_pass: bool = False) -> Deciding[Ended]:
    """Fail the job. may_pass: True if a restarted driver may do better."""
    yield from _log_rest(memory)
    yield event("failed", memory.generation, f"The job failed: {reason}", reason=reason)
    return Ended(False, reason, may_pass)


def fail_unsaved(memory: JobMemory, reason: str, why: str) -> Deciding[Ended]:
    """Fail the job, whose newest step could not be made durable."""
    sentence = f"{reason}; its newest step is not in durable storage: {why}"
    return (yield from fail(memory, sentence, may_pass=True))


def _log_rest(memory: JobMemory) -> Effects:
    """Log skipped steps and transfers that no event has named yet."""
    yield from memory.ledger.skipped.finish(memory.generation)
    yield from memory.ledger.checkpoints.log_transfers(memory.generation)


def stop_with_checkpoint(
    memory: JobMemory, seen: Observation, reason: str, *, then_wait: str | None = None
) -> Deciding[Closing]:
    """Stop all workers after the current step, and commit it.

    then_wait: reason to wait for more nodes after that; None: the job ends.
    """
    survivors = fleet.survivors(seen, memory.members)
    yield RequestStop(survivors, checkpoint=True)
    limits = memory.timeouts
    deadline = seen.now + limits.step_s + limits.checkpoint_s
    return Closing(reason, ok=False, deadline=deadline, then_wait=then_wait)


def stop_and_wait(
    memory: JobMemory, change: Change, why: str, seen: Observation
) -> Deciding[Closing]:
    """Stop with a checkpoint, and wait until there is a plan again. why: reason for having none."""
    reason = f"{change.reason} and {why}"
    yield event("decision", memory.generation, f"Deciding to stop and wait, since {reason}")
    memory.postponed = change
    return (yield from stop_with_checkpoint(memory, seen, reason, then_wait=why))


def judge_failure(
    memory: JobMemory, broken: Collection[str], seen: Observation
) -> Deciding[tuple[Observation, Ended | None]]:
    """Count one failure of the generation that `broken` took part in.

    A cause that has come too often without a step between costs its nodes their place for a while.
    If no plan exists without them, the job ends once its newest step is durable.

    Returns the observation without the nodes that are left out, and the end if there is one.
    """
    failures = memory.ledger.failures
    causes = find_causes(seen, broken, memory.nodes.joined)
    failures.add(causes)

    limit = memory.job.elastic.max_failures_in_a_row
    repeated = failures.repeated(limit)
    if repeated is None:
        return seen, None
    without = yield from _leave_out(memory, repeated.nodes, repeated.reason, seen)
    if without is not None:
        failures.clear()
        return without, None

    final = failures.repeated(limit, final=True)
    if final is None:
        return seen, None
    return seen, (yield from _give_up(memory, final.reason))


def _leave_out(
    memory: JobMemory, nodes: Collection[str], reason: str, seen: Observation
) -> Deciding[Observation | None]:
    """Leave these nodes out of plans for a while; None if no plan exists without them."""
    without = replace(seen, left_out=seen.left_out | {*nodes})
    usable = fleet.usable_nodes(without)
    if shortage_reason(memory, without, usable):
        return None
    survivors = build_fleet(memory, without, usable)
    answer = memory.planning.ask(survivors, memory.proposal)
    if answer.proposal is None:
        return None

    for name in nodes:
        memory.nodes.left_out_until[name] = seen.now + LEFT_OUT_S
    names = ", ".join(sorted(nodes))
    sentence = f"Deciding to leave out {names} for {LEFT_OUT_S / 60:.0f} minutes, since {reason}"
    yield event("decision", memory.generation, sentence)
    return without


def _give_up(memory: JobMemory, reason: str) -> Deciding[Ended | None]:
    """End the job if its newest step is durable, else return None to make it so first.

    That is done in a generation of its own. If it fails, too, the job ends without it.
    """
    newest = memory.ledger.committed_steps
    safe = memory.ledger.checkpoints.step
    is_durable = newest <= (safe or 0)
    if is_durable:
        first_reason = memory.end.reason or reason
        return (yield from fail(memory, first_reason, may_pass=True))

    if memory.end.reason is None:
        memory.end.reason = reason
        memory.end.may_pass = True
        memory.ledger.failures.clear()
        sentence = f"Deciding to end once step {newest} is in durable storage, since {reason}"
        yield event("decision", memory.generation, sentence)
        return None

    newest_safe = "there is no checkpoint" if safe is None else f"step {safe} is the newest"
    why = f"step {newest} is not in durable storage, where {newest_safe}"
    return (yield from fail(memory, f"{memory.end.reason}; {why}", may_pass=True))


# Deaths of workers, and nodes that leave
# --------------------------------------------------------------------------------------


def forget_gone(memory: JobMemory, nodes: Collection[str], seen: Observation) -> list[str]:
    """Return the announced nodes among `nodes` that are gone, for a death event to name.

    They are forgotten here, so that no departure event names them again.
    """
    announced = memory.nodes.announced
    gone = []
    for name in sorted({*nodes}):
        if name in announced and name not in seen.nodes:
            del announced[name]
            gone.append(name)
    return gone


def log_death(memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation) -> Effects:
    """Log the death of these workers, once for each.

    What may be left of their processes is ended.
    """
    yield event(
        "death",
        memory.generation,
        trouble.reason,
        nodes=list(trouble.nodes),
        workers=list(trouble.workers),
        gone=forget_gone(memory, trouble.nodes, seen),
    )
    lost = [worker for worker in trouble.workers if worker in seen.losses]
    yield Dismiss(tuple(lost))
    # A worker that has only failed lives on: its death is still to be logged when it comes.
    for worker in trouble.workers:
        if is_dead(worker, seen):
            memory.nodes.logged_dead.add(worker)


def is_dead(worker: str, seen: Observation) -> bool:
    """Return True if the worker is lost, or its node is gone."""
    return worker in seen.losses or seen.node_of(worker) not in seen.nodes


def release_leaver(memory: JobMemory, name: str, seen: Observation) -> Effects:
    """Release a leaving node: it goes once nothing on it is needed."""
    memory.nodes.released.add(name)
    yield memory.agent_gc.release(name, seen, memory.timeouts.checkpoint_s)


def find_new_deaths(memory: JobMemory, seen: Observation) -> fleet_event.FleetEvent | None:
    """Return the lost members whose death is not logged yet as one event."""
    known = memory.nodes.logged_dead
    unknown = [worker for worker in memory.members if worker not in known]
    return fleet.find_deaths(seen, unknown)


def log_new_deaths(memory: JobMemory, seen: Observation) -> Effects:
    """Log deaths of members that change nothing just now.

    That is so while all wait, or while a generation without them is being built.
    """
    trouble = find_new_deaths(memory, seen)
    if trouble is not None:
        yield from log_death(memory, trouble, seen)
