"""Choice of the steps at which durable checkpoints are requested, where the job names no steps.

A checkpoint costs training a little, and averts the loss of the steps since the one before it. For
checkpoints that cost C seconds, and state that is lost every M seconds, the interval of Daly ("A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006, equation 37)
loses least.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autohet.control.planning.agent_gc import any_order
from autohet.control.planning.outlook import slowest_move_s
from autohet.control.values.actions import RequestCheckpoint
from autohet.control.values.effects import Effects, event

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation

MOST_S = 600.0
"""Longest interval of `checkpoint.every: auto`, in seconds of training."""
LEAST_COST_S = 1.0
"""Least cost of a checkpoint, in seconds: its requests, and what retention removes."""
LOOK_AGAIN_S = 10.0
"""Seconds for which an interval is kept before it is computed again."""
NEWS = 1.5
"""Factor by which an interval must have changed to be logged again."""


def optimum_s(cost_s: float, life_s: float) -> float:
    """Return Daly's interval in seconds, for a state that is lost every `life_s` seconds."""
    if cost_s >= 2 * life_s:
        return life_s
    ratio = cost_s / (2 * life_s)
    first_order_s = math.sqrt(2 * cost_s * life_s)
    return first_order_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def pace_checkpoints(memory: JobMemory, seen: Observation) -> Effects:
    """Request a checkpoint if one is due after the step in flight.

    One worker is asked: its vote makes the step durable at all of them. No-op for a job that names
    the steps.
    """
    pace = memory.checkpoint_pace
    is_new_generation = pace.generation != memory.generation
    if seen.now >= pace.look_at or (is_new_generation and pace.look_at < math.inf):
        yield from _compute(memory, seen)
    committed = memory.ledger.committed_steps
    newest = memory.ledger.checkpoints.step or 0
    if is_new_generation:
        # A request, or an upload, that the generation before did not finish is void.
        pace.generation = memory.generation
        pace.requested = newest
    pace.requested = min(max(pace.requested, newest), committed)
    if pace.steps is not None and committed + 1 >= pace.requested + pace.steps:
        pace.requested = committed + 1
        memory.ledger.checkpoints.note_request(committed + 1, seen.now)
        yield RequestCheckpoint(memory.members[0])


def _compute(memory: JobMemory, seen: Observation) -> Effects:
    """Compute the interval from what is measured now."""
    pace = memory.checkpoint_pace
    measured_s = memory.ledger.measured_step_s(memory.generation)
    step_s = measured_s
    if measured_s is None:
        assert memory.proposal is not None
        step_s = memory.proposal.predicted_step_s
    else:
        # Until a step is measured, the prediction holds.
        pace.look_at = seen.now + LOOK_AGAIN_S
    if not step_s:
        return
    wanted_s = memory.job.checkpoint.every_s
    if wanted_s is not None:
        pace.steps = max(1, math.floor(wanted_s / step_s))
        return

    cost_s = max(LEAST_COST_S, _cost_s(memory, seen))
    life_s = memory.outlook.fleet_life_s(seen, seen.nodes_with(memory.members))
    interval_s = optimum_s(cost_s, life_s)
    most = max(1, math.floor(MOST_S / step_s))
    pace.steps = min(most, max(1, round(interval_s / step_s)))
    is_near = pace.logged_steps / NEWS <= pace.steps <= pace.logged_steps * NEWS
    if measured_s is None or is_near:
        return
    pace.logged_steps = pace.steps
    sentence = (
        f"Deciding to make a checkpoint every {pace.steps} steps"
        f" ({pace.steps * step_s / 60:.1f} min), since one costs {cost_s:.1f} s of training and"
        f" the fleet is expected to change within {life_s / 60:.0f} min"
    )
    yield event("decision", memory.generation, sentence)


def _cost_s(memory: JobMemory, seen: Observation) -> float:
    """Return the seconds of training that a checkpoint costs, measured or assumed.

    Before one is measured, it costs as if training stood while the state leaves its nodes.
    """
    measured = memory.ledger.checkpoints.cost_s
    if measured is not None:
        return measured
    order = any_order(memory.ledger.orders)
    return 0.0 if order is None else slowest_move_s(order.layout, seen)
