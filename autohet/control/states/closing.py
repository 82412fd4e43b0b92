"""States Closing and Saving: the newest step is committed before the job ends or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.ending import fail, fail_unsaved, finish
from autohet.control.job_state import Closing, Saving, State, Waiting
from autohet.control.states.quiescing import interrupt_after_death
from autohet.control.values.effects import Deciding, event
from autohet.runtime.messages import STANDING_PHASES

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation


def step(state: Closing, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """End, or wait, once the step at which all members stand is in durable storage."""
    members = memory.members
    trouble = fleet.find_deaths_or_failures(seen, members)
    if trouble is not None:
        # survivors make the last step durable in a generation of their own
        return (yield from interrupt_after_death(memory, trouble, seen))

    reports = seen.reports_of(members)
    standing = [report for report in reports if report.phase in STANDING_PHASES]
    if state.step is None and len(standing) == len(members):
        state.step = standing[0].step
    is_durable = state.step is not None and seen.checkpoint.step == state.step
    if is_durable and state.then_wait:
        return Waiting(state.then_wait, seen.now, memory.postponed)
    if is_durable:
        may_pass = memory.end.may_pass
        return (yield from finish(memory, state.reason, ok=state.ok, may_pass=may_pass))

    error, is_retried = _find_error(state.step, memory, seen)
    # A fleet that is too small waits for more nodes while the storage is tried again.
    is_given_up = error and (not is_retried or state.then_wait)
    if seen.now <= state.deadline and not is_given_up:
        return state

    cause = error or "the checkpoint was not finished in time"
    why = f"step {state.step} is not in durable storage: {cause}"
    if state.then_wait:
        sentence = f"Deciding to wait although {why}, since {state.then_wait}"
        yield event("decision", memory.generation, sentence)
        return Waiting(state.then_wait, seen.now, memory.postponed)

    # A user who has stopped the job does not want it started again.
    has_failed_ticks = memory.end.failed_ticks is not None
    asked_to_stop = seen.stop_reason is not None and not has_failed_ticks
    reason = f"{state.reason}; {why}"
    return (yield from finish(memory, reason, ok=False, may_pass=not asked_to_stop))


def _find_error(step: int | None, memory: JobMemory, seen: Observation) -> tuple[str | None, bool]:
    """Return the reason why the last step is not durable, and True if that is retried."""
    if step is None:
        return None, False
    age = (memory.generation, step)
    # The driver's part of the checkpoint: the commit.
    found = seen.checkpoint
    if (found.error_generation, found.error_step) == age:
        return found.error, found.is_retried

    # A worker's part: what is not tried again comes first.
    checkpoints = memory.ledger.checkpoints
    if age in checkpoints.errors:
        return checkpoints.errors[age], False
    failing = checkpoints.failing
    if failing is not None and failing.age == age:
        return failing.reason, failing.is_retried
    return None, False


def save(state: Saving, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """End the job once all members stand after the same step and that step is committed."""
    reports = seen.reports_of(memory.members)
    if not reports or len(reports) < len(memory.members):
        return (yield from fail_unsaved(memory, state.reason, "not all workers are there"))

    step = reports[0].step
    standing = [report for report in reports if report.phase in STANDING_PHASES]
    at_step = [report for report in standing if report.step == step]
    if len(at_step) == len(reports):
        found = seen.checkpoint
        if found.step == step:
            return (yield from fail(memory, state.reason, may_pass=True))
        is_final = found.error_step == step and not found.is_retried
        if found.error and is_final:
            return (yield from fail_unsaved(memory, state.reason, found.error))

    if seen.now > state.deadline:
        return (yield from fail_unsaved(memory, state.reason, "it was not finished in time"))
    return state
