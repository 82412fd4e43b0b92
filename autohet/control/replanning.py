"""Questions of a job to its planner: which fleet, what to expect of it, which plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from autohet.control import fleet
from autohet.control.job_state import Quiescing, State, Training
from autohet.control.planning.outlook import move_s
from autohet.control.values.actions import RequestStop
from autohet.control.values.change import Change
from autohet.control.values.effects import Deciding, Decision, event
from autohet.runtime.messages import PreparationOrder

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values import fleet_event
    from autohet.control.values.observation import Observation
    from planner.inputs.fleet import Fleet


GATED_STEP_S = 2.0
"""Predicted seconds of a step from which on its sums are gated; shorter steps are run again."""


def ask_for_plan(
    memory: JobMemory, seen: Observation, usable: Collection[str], change: Change
) -> tuple[PlanProposal | None, str]:
    """Return the plan for these nodes, or the reason why there is none."""
    shortage = shortage_reason(memory, seen, usable)
    if shortage:
        return None, shortage
    fleet = build_fleet(memory, seen, usable)
    # For the last step before the end any plan will do.
    is_ending = memory.end.reason is not None
    # Nothing is searched while nobody trains, if the next plan can be prepared beside training.
    in_place = memory.prepares and change.cause == "death"
    answer = memory.planning.ask(fleet, memory.proposal, redundant=not is_ending, in_place=in_place)
    change.replan_s += answer.seconds
    return answer.proposal, answer.why_not


def shortage_reason(memory: JobMemory, seen: Observation, usable: Collection[str]) -> str:
    """Return a sentence if these nodes are too few for the job, else an empty string."""
    num_workers = fleet.count_workers(seen, usable)
    least = memory.job.elastic.min_workers
    if num_workers >= least:
        return ""
    return f"only {num_workers} workers are left; the job needs {least}"


def is_gated(memory: JobMemory, proposal: PlanProposal) -> bool:
    """Return True if workers gate the sums of a step, so that a death does not cost all passes."""
    is_long = proposal.predicted_step_s >= GATED_STEP_S
    return memory.keeps_passes and is_long and proposal.plan.spmd is None


def build_fleet(memory: JobMemory, seen: Observation, usable: Collection[str]) -> Fleet:
    """Build the fleet that the planner is asked about.

    Also sets what the planner is to expect of these nodes (horizon and cost of a move), and
    remembers their prices.
    """
    memory.asked_prices = fleet.prices_of(seen, usable)
    horizon_s = _horizon_s(memory, seen, usable)
    cost_s = move_s(memory.ledger.timings)
    memory.planning.expect(horizon_s, cost_s)

    gpu_types = {}
    for name in usable:
        node_type = seen.nodes[name].node_type
        gpu_types[name] = node_type.gpu_type
    factors = node_factors(memory, gpu_types)
    generation = memory.generation + 1
    return fleet.fleet_of(seen, usable, generation, factors)


def node_factors(memory: JobMemory, gpu_types: Mapping[str, str]) -> dict[str, float]:
    """Return each node's compute time as a multiple of its profile's.

    gpu_types: GPU type by node name. Nodes that take as long as the profile says are left out.
    """
    rates = memory.speeds.rate_factors
    slowdowns = memory.speeds.slowdowns
    factors = {}
    for name, gpu_type in gpu_types.items():
        factor = rates.get(gpu_type, 1.0) * slowdowns.get(name, 1.0)
        if factor != 1.0:
            factors[name] = factor
    return factors


def _horizon_s(memory: JobMemory, seen: Observation, usable: Collection[str]) -> float:
    """Return the seconds until the fleet changes again, or the job is done.

    This is an estimate, unless the job sets `parallelism.horizon_s`.
    """
    wished = memory.job.parallelism.horizon_s
    if wished is not None:
        return wished
    horizon_s = memory.outlook.horizon_s(seen, usable)
    last = memory.ledger.last_step
    if last is None or memory.proposal is None:
        return horizon_s
    left_steps = last - memory.ledger.committed_steps
    if memory.script.joining:
        left_steps = max(left_steps, memory.script.steps_left)
    left_s = left_steps * memory.proposal.predicted_step_s
    return max(1.0, min(horizon_s, left_s))


def plan_decision(memory: JobMemory, proposal: PlanProposal, reason: str) -> Decision:
    """Return the event that says which plan was chosen, and why."""
    sentence = f"Deciding to {proposal.headline}, since {reason}"
    return event("decision", memory.generation, sentence, cause=reason)


def begin_change(memory: JobMemory, trouble: fleet_event.FleetEvent, seen: Observation) -> Change:
    """Return a new change that `trouble` has caused."""
    plan_before = None
    if memory.proposal is not None:
        plan_before = memory.proposal.plan
    return Change(
        cause=trouble.cause,
        nodes=trouble.nodes,
        happened_at=trouble.happened_at,
        detected_at=seen.now,
        step_before=memory.ledger.committed_steps,
        plan_before=plan_before,
        reason=trouble.reason,
    )


def unused_generation(memory: JobMemory, seen: Observation, prepared: int | None = None) -> int:
    """Return a number that no generation has had: `prepared`, unless a newer one has been used."""
    newest = max(memory.generation, memory.orders.newest_generation(seen))
    if prepared is not None and prepared > newest:
        return prepared
    return max(newest, memory.reserved) + 1


def preparation_order(
    memory: JobMemory, proposal: PlanProposal, seen: Observation, leaving: tuple[str, ...] = ()
) -> PreparationOrder:
    """Return the order to prepare a generation of this plan, and reserve its number."""
    memory.reserved = unused_generation(memory, seen)
    return PreparationOrder(
        memory.reserved,
        proposal.plan,
        *seen.store,
        memory.timeouts.step_s,
        gated=is_gated(memory, proposal),
        leaving=leaving,
    )


def drop_search(state: State) -> None:
    """Drop the search of a state that is left or given up."""
    if isinstance(state, Training) and state.considering is not None:
        state.considering.search.drop()


def stop_to_move(
    memory: JobMemory,
    change: Change,
    proposal: PlanProposal,
    seen: Observation,
    prepared: int | None = None,
) -> Deciding[State]:
    """Stop all survivors after the current step, to continue under this plan.

    prepared: number of the generation that the plan's workers have prepared; None: none is.
    """
    survivors = fleet.survivors(seen, memory.members)
    yield RequestStop(survivors, checkpoint=False)
    deadline = seen.now + memory.timeouts.step_s
    return Quiescing(change, deadline, interrupted=False, proposal=proposal, prepared=prepared)
