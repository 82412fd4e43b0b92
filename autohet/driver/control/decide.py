"""Pure transition of one job: from an observation to the next state and its effects."""

from __future__ import annotations

from autohet.driver.control import (
    building,
    closing,
    policy,
    quiescing,
    sourcing,
    training,
    waiting,
)
from autohet.driver.control.actions import Hire, StartAgents
from autohet.driver.control.announcing import (
    announce,
    announce_departures,
    hide_replaced_nodes,
    log_new_deaths,
)
from autohet.driver.control.effects import Deciding, Effects, event
from autohet.driver.control.ending import apply_failure_policy, fail, judge_superseded, judge_unfit
from autohet.driver.control.memory import JobMemory
from autohet.driver.control.observation import Observation
from autohet.driver.control.states import (
    Building,
    Closing,
    Ended,
    Quiescing,
    Saving,
    Sourcing,
    State,
    Training,
    Waiting,
    drop_search,
)


def decide(memory: JobMemory, seen: Observation) -> Effects:
    """Record an observation in `memory`, move to the next state, and yield the effects.

    They depend on the observation, the memory and the planner's answers alone. No file, network or
    clock is read or written. After an error, what was decided before stays remembered: an
    observation tells its news once.
    """
    seen = hide_replaced_nodes(memory, seen)
    seen = yield from apply_failure_policy(memory, seen)
    yield from memory.ledger.record(seen, memory.generation)
    if isinstance(memory.state, Saving):
        memory.state = yield from closing.save(memory.state, memory, seen)
        return
    yield from policy.new_drains(memory.nodes.notices, seen)
    yield from announce(memory, seen)
    yield from _direct_agents(memory, seen)
    memory.outlook.look(seen, frozenset() if memory.buyer is None else memory.buyer.released)
    if memory.ledger.records:
        memory.orders.confirm()  # also where the first generation's readiness was never seen
    hire = policy.workers_to_hire(seen)
    if hire and isinstance(memory.state, Waiting | Training):
        yield Hire(hire)
    before = memory.state
    memory.state = yield from _next_state(memory, seen)
    if memory.state is not before:
        drop_search(before)
    if isinstance(memory.state, Waiting | Sourcing | Building):
        yield from log_new_deaths(memory, seen)
    yield from announce_departures(memory, seen)
    yield from _buy(memory, seen)
    if isinstance(memory.state, Training) and memory.script.left:
        yield from memory.script.due(memory.ledger.committed_steps, seen, memory.members)


def fail_at_once(memory: JobMemory, reason: str) -> Effects:
    """Fail the job, whatever its state."""
    memory.state = yield from fail(memory, reason, may_pass=True)


def _next_state(memory: JobMemory, seen: Observation) -> Deciding[State]:
    ended = yield from judge_superseded(memory, seen)
    if ended is None:
        ended = yield from judge_unfit(memory, seen)
    if ended is not None:
        return ended
    return (yield from _step(memory, seen))


def _step(memory: JobMemory, seen: Observation) -> Deciding[State]:
    match memory.state:
        case Waiting() as state:
            return (yield from waiting.step(state, memory, seen))
        case Quiescing() as state:
            return (yield from quiescing.step(state, memory, seen))
        case Sourcing() as state:
            return (yield from sourcing.step(state, memory, seen))
        case Building() as state:
            return (yield from building.step(state, memory, seen))
        case Training() as state:
            return (yield from training.step(state, memory, seen))
        case Closing() as state:
            return (yield from closing.step(state, memory, seen))
        case Ended() | Saving() as state:
            return state


def _direct_agents(memory: JobMemory, seen: Observation) -> Effects:
    """Start agents on new nodes, and send all agents what to remove and what to hand over."""
    if new := tuple(name for name, view in seen.nodes.items() if not view.agent_started):
        yield StartAgents(new)
    yield from memory.upkeep.decide(seen)


def _buy(memory: JobMemory, seen: Observation) -> Effects:
    """Adapt the request for nodes."""
    if memory.buyer is None:
        return
    is_training = isinstance(memory.state, Training)
    actions, said = memory.buyer.decide(seen, memory.members, training=is_training)
    yield from actions
    for sentence in said:
        yield event("decision", memory.generation, sentence)
