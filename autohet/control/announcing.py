"""Deaths of workers as events, and the release of nodes that leave."""

from __future__ import annotations

from collections.abc import Collection

from autohet.control import fleet
from autohet.control.job_memory import JobMemory
from autohet.control.values import fleet_event
from autohet.control.values.actions import Dismiss
from autohet.control.values.effects import Effects, event
from autohet.control.values.observation import Observation


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
        nodes=list(trouble.nodes),
        workers=list(trouble.workers),
        reason=trouble.reason,
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
