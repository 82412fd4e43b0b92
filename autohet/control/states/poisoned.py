"""Return to an older checkpoint, once, from a restored state whose steps change no weights.

A checkpoint may be intact by its checksums and useless all the same: its moments may be finite and
so large that the first update ruins the weights. Every later step is then skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.job_state import Fallback, Quiescing
from autohet.control.replanning import begin_change
from autohet.control.values import fleet_event
from autohet.control.values.actions import FallBack, RequestStop
from autohet.control.values.effects import Deciding, event

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.job_state import State, Training
    from autohet.control.values.observation import Observation

SKIPPED_STEPS = 5
"""Skipped steps in a row after which a restored state is given up.

They begin within as many steps of the restore: later ones have another cause.
"""


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
