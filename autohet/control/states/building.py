"""State Building: workers build their groups and restore the state; then the job trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autohet.control import fleet
from autohet.control.ending import log_death
from autohet.control.job_state import Building, Quiescing, State, Training
from autohet.control.values import fleet_event
from autohet.control.values.actions import Interrupt
from autohet.control.values.effects import Deciding, Remark, event
from autohet.runtime.messages import STANDING_PHASES, Phase, RestoreRecord, WorkerReport

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.change import Change
    from autohet.control.values.observation import Observation


def step(state: Building, memory: JobMemory, seen: Observation) -> Deciding[State]:
    """Train once every worker of the plan has the state; stop again after a death."""
    ready = _ready_reports(state, seen)
    if ready is not None:
        return (yield from _begin_training(state, memory, seen, ready))
    trouble = _find_trouble(state, seen)
    if trouble is None:
        return state
    return (yield from _stop_again(state, memory, trouble, seen))


def _ready_reports(state: Building, seen: Observation) -> list[WorkerReport] | None:
    """Return the reports of the plan's workers if all have the state; else None."""
    found = []
    for worker in state.proposal.plan.workers:
        report = seen.reports.get(worker)
        if report is None or not seen.answers(worker):
            return None
        has_begun = report.generation == state.generation
        has_state = report.live_generation == state.generation
        if not has_begun or not has_state:
            return None
        if report.phase in (Phase.BUILDING, Phase.RESTORING):
            return None
        found.append(report)
    return found


def _find_trouble(state: Building, seen: Observation) -> fleet_event.FleetEvent | None:
    """Return a death or failure among the participants; after the deadline, those that are late."""
    trouble = fleet.find_deaths(seen, state.participants)
    if trouble is not None:
        return trouble

    begun = []
    late = []
    for worker in state.participants:
        report = seen.reports.get(worker)
        # An older report is of the generation before, whose end its failure may be.
        has_begun = report is not None and report.generation == state.generation
        if has_begun:
            begun.append(worker)
        if report is None or not has_begun or report.phase not in STANDING_PHASES:
            late.append(worker)
    trouble = fleet.find_failures(seen, begun)
    if trouble is not None or seen.now <= state.deadline:
        return trouble
    why = f"{', '.join(late)} did not get ready in time"
    return fleet_event.FleetEvent(
        cause="death", nodes=(), workers=tuple(late), happened_at=seen.now, reason=why
    )


def _stop_again(
    state: Building, memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation
) -> Deciding[State]:
    yield from log_death(memory, trouble, seen)
    change = state.change
    change.attempts += 1
    change.overtaken(trouble.nodes, trouble.happened_at, seen.now, trouble.reason)
    # Some may have state of the generation before, and some of this one already.
    new = [worker for worker in state.participants if worker not in memory.members]
    memory.members = (*memory.members, *new)
    survivors = fleet.survivors(seen, memory.members)
    yield Interrupt(survivors, memory.generation)
    deadline = seen.now + memory.timeouts.quiesce_s
    return Quiescing(change, deadline, interrupted=True, broken=state.participants)


def _restored(record: RestoreRecord) -> dict[str, Any]:
    """Return one worker's entry in the event `restore`."""
    return {
        "seconds": round(record.restore_s, 4),
        "bytes_by_tier": dict(record.bytes_by_tier),
    }


def _begin_training(
    state: Building, memory: JobMemory, seen: Observation, reports: list[WorkerReport]
) -> Deciding[State]:
    change = state.change
    change.ready_at = seen.now
    restores = {}
    for report in reports:
        if report.restore is not None:
            restores[report.worker] = report.restore
    change.restores = restores

    proposal = state.proposal
    memory.members = proposal.plan.workers
    memory.proposal = proposal
    memory.nodes.logged_dead.clear()
    planned = frozenset(node.name for node in proposal.cost.fleet.nodes)
    memory.planned_nodes = planned & seen.nodes.keys()
    entry = (state.generation, proposal.plan, proposal.predicted_step_s)
    memory.plans.append(entry)
    memory.orders.confirm()
    _note_restore(memory, change)
    yield from memory.ledger.begin_generation(state.generation, change)

    missing = yield from _missing_losses(memory, change)
    restored = {worker: _restored(record) for worker, record in change.restores.items()}
    yield event(
        "restore",
        memory.generation,
        step=change.restore_step,
        bytes_by_tier=change.bytes_by_tier(),
        steps_lost=change.steps_lost,
        **missing,
        workers_restored=restored,
        cause=change.cause,
    )
    return Training(state.generation, seen.now)


def _note_restore(memory: JobMemory, change: Change) -> None:
    """Note a restore that training begins from, which may have brought a poisoned state.

    State that was live until then is none.
    """
    is_start = len(memory.plans) == 1
    if change.restore_step and (is_start or change.bytes_by_tier()["s3"]):
        memory.restored_step = change.restore_step
    if memory.fallback is not None:
        memory.fallback.is_over = True


def _missing_losses(memory: JobMemory, change: Change) -> Deciding[dict[str, Any]]:
    """Return the steps that were run and that no event names, and warn about them once.

    A driver that is killed leaves such steps.
    """
    told = memory.ledger.told.missing(change.restore_step or 0)
    missing = [step for step in told if step not in memory.ledger.records]
    is_first_generation = len(memory.plans) == 1
    if not is_first_generation or not missing:
        return {}
    steps = ", ".join(str(step) for step in missing)
    yield Remark(
        f"Steps without a loss in the events: {steps}. The driver was killed before it told of"
        " them.",
        warning=True,
    )
    return {"steps_without_loss": missing}
