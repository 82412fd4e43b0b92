"""Ways back where a run cannot go on from its newest state: step 0, or an older checkpoint.

A state that no checkpoint and no node holds is trained again. An empty storage beside nodes that
hold steps of the job is more likely a file system that is not mounted, and is waited for.

A checkpoint may be intact by its checksums and useless all the same: its moments may be finite and
so large that the first update ruins the weights. Every later step is then skipped. The next older
checkpoint is tried once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.ending import fail, finish
from autohet.control.job_state import Ended, Fallback, Quiescing, Wait
from autohet.control.replanning import begin_change
from autohet.control.values import fleet_event
from autohet.control.values.actions import FallBack, RequestInventories, RequestStop
from autohet.control.values.effects import Deciding, Effects, event

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.job_state import Sourcing, State, Training
    from autohet.control.values.observation import Observation

LOOK_AGAIN_S = 5.0
"""Seconds between two looks for what is waited for, at agents and the storage."""
SKIPPED_STEPS = 5
"""Skipped steps in a row after which a restored state is given up.

They begin within as many steps of the restore: later ones have another cause.
"""


def look_anew(state: Sourcing, memory: JobMemory, seen: Observation) -> Deciding[Ended | None]:
    """End the run if a storage took the place of the empty one that was waited for.

    It then starts again, and takes that storage over as every start does. None: there is none.
    """
    is_waiting = state.wait is not None and state.wait.empty_storage
    if not is_waiting or (_is_blank(seen) and not seen.checkpoint.is_misplaced):
        return None
    reason = f"{memory.job.checkpoint_storage} is not the empty storage of this start any more"
    sentence = f"Deciding to start again from what the storage holds, since {reason}"
    yield event("decision", memory.generation, sentence)
    return Ended(False, reason, may_pass=True, storage_is_back=True)


def judge_start(
    state: Sourcing, memory: JobMemory, seen: Observation, why_lost: str
) -> Deciding[State | None]:
    """Return None if the job may begin at step 0; else the state that follows.

    why_lost: reason why no step can be restored; empty on a first start, where none was looked for.
    """
    if seen.stop_reason:
        reason = f"stopped before a start at step 0 ({seen.stop_reason})"
        return (yield from finish(memory, reason, ok=False))
    if not memory.orders.begun and _is_blank(seen):
        empty = _empty_storage(memory, seen)
        if state.wait is not None:
            # Nodes that have gone since do not make the storage the right one.
            empty = empty or state.wait.empty_storage
        if empty:
            return (yield from _wait_for_storage(state, memory, seen, empty))

    num_steps = _steps_run(memory, seen)
    if not num_steps and not why_lost:
        return None
    why = why_lost or "no node holds it"
    lost = f"the training state is lost: {why}"
    if seen.checkpoint.manifest is not None:
        return (yield from fail(memory, lost))
    if memory.end.reason is not None:
        # The job was to end once its newest step was durable.
        return (yield from fail(memory, f"{memory.end.reason}; {lost}", may_pass=True))
    if not memory.job.elastic.restart_from_scratch:
        reason = f"{lost}; elastic.restart_from_scratch is false"
        return (yield from fail(memory, reason))
    if _may_be_found(state, memory, seen):
        yield from _look_again(state, seen)
        return state

    memory.ledger.checkpoints.forget_parts()
    sentence = (
        f"Deciding to begin again at step 0, since {lost}, and no checkpoint is in durable storage"
        f" yet: {num_steps} steps are lost"
    )
    yield event(
        "from_scratch", memory.generation, sentence, steps_lost=num_steps, cause=state.change.cause
    )
    return None


def _is_blank(seen: Observation) -> bool:
    """Return True if the storage has neither a checkpoint nor a journal."""
    found = seen.checkpoint
    return found.manifest is None and not found.ancestry.entries


def _empty_storage(memory: JobMemory, seen: Observation) -> str:
    """Return a sentence on the empty storage and the nodes that hold steps; empty without any."""
    newest = {}
    for node, inventory in (seen.inventories or {}).items():
        step = max((holding.step for holding in inventory), default=0)
        if step:
            newest[node] = step
    if not newest:
        return ""
    names = ", ".join(sorted(newest)[:3])
    if len(newest) > 3:
        names += f" and {len(newest) - 3} more nodes"
    return (
        f"{memory.job.checkpoint_storage} is empty, but steps of this job are held by {names}, up"
        f" to step {max(newest.values())}: check that its file system is mounted, or begin anew"
        " with `autohet train --fresh`"
    )


def _wait_for_storage(
    state: Sourcing, memory: JobMemory, seen: Observation, empty: str
) -> Deciding[State]:
    if state.wait is None:
        yield event("decision", memory.generation, f"Deciding to wait, since {empty}")
    elif seen.now - state.wait.since > memory.job.elastic.fleet_patience_s:
        return (yield from fail(memory, empty, may_pass=True))
    yield from _look_again(state, seen, empty)
    return state


def _look_again(state: Sourcing, seen: Observation, empty_storage: str = "") -> Effects:
    """Ask agents and the storage again, now and then."""
    wait = state.wait
    if wait is None:
        state.wait = Wait(seen.now, seen.now, empty_storage)
    elif seen.now - wait.asked_at >= LOOK_AGAIN_S:
        wait.asked_at = seen.now
        state.deadline = seen.now + LOOK_AGAIN_S
        yield RequestInventories()


def _steps_run(memory: JobMemory, seen: Observation) -> int:
    """Return the number of steps that this run is known to have trained before this start."""
    found = [memory.ledger.steps_run]
    entries = seen.checkpoint.ancestry.entries
    found += [entry.first_step for entry in entries.values()]
    for inventory in (seen.inventories or {}).values():
        for holding in inventory:
            if holding.source.generation in entries:
                found.append(holding.step)
    return max(found)


def _may_be_found(state: Sourcing, memory: JobMemory, seen: Observation) -> bool:
    """Return True while a checkpoint may still be committed, or an agent may still answer."""
    waited_s = 0.0 if state.wait is None else seen.now - state.wait.since
    if memory.ledger.checkpoints.awaits_commit(seen.checkpoint):
        return waited_s < memory.timeouts.checkpoint_s
    answered = (seen.inventories or {}).keys()
    late = seen.agents().keys() - answered
    return bool(late) and waited_s < memory.timeouts.quiesce_s


# An older checkpoint
# --------------------------------------------------------------------------------------


def give_up_restored(
    state: Training, memory: JobMemory, seen: Observation
) -> Deciding[State | None]:
    """Return the state that leads to an older checkpoint; None: there is no reason, or no more.

    While the storage looks for one, it is the present state.
    """
    if memory.fallback is None:
        step = _suspected_step(memory)
        if step is not None:
            memory.fallback = Fallback(step, seen.now + memory.timeouts.quiesce_s)
            yield FallBack(step, memory.generation)
            return state
    found = memory.fallback
    if found is None or found.is_over:
        return None

    manifest = seen.checkpoint.manifest
    is_answered = seen.checkpoint.fallback == found.step
    if not is_answered and seen.now < found.until:
        return state
    if not is_answered or manifest is None or manifest.step >= found.step:
        found.is_over = True
        return None
    skipped = memory.ledger.skipped
    reason = (
        f"the {skipped.in_a_row} steps since step {skipped.first} changed no weights"
        f" ({skipped.cause}) after step {memory.restored_step} was restored"
    )
    sentence = (
        f"Deciding to go back to the checkpoint of step {manifest.step}, this once, since {reason}"
    )
    yield event("decision", memory.generation, sentence)
    skipped.go_on_from(None)
    trouble = fleet_event.FleetEvent(
        cause="search", nodes=(), workers=(), happened_at=seen.now, reason=reason
    )
    yield RequestStop(fleet.survivors(seen, memory.members), checkpoint=False)
    deadline = seen.now + memory.timeouts.step_s
    return Quiescing(begin_change(memory, trouble, seen), deadline, interrupted=False)


def _suspected_step(memory: JobMemory) -> int | None:
    """Return the step whose restore the newest skipped steps follow; None without any."""
    skipped = memory.ledger.skipped
    limit = min(SKIPPED_STEPS, memory.job.training.max_skipped_steps or SKIPPED_STEPS)
    restored = memory.restored_step
    if restored is None or skipped.first is None or skipped.in_a_row < limit:
        return None
    return restored if skipped.first <= restored + SKIPPED_STEPS else None
