"""Events on nodes and workers: notices, risks, arrivals, prices, departures and deaths."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from autohet.driver.control import policy
from autohet.driver.control.actions import Dismiss
from autohet.driver.control.effects import Decision, Effects, event
from autohet.driver.control.memory import JobMemory
from autohet.driver.control.observation import Observation
from autohet.driver.control.states import Building, Waiting
from planner.cluster import NodeType

AGENT_START_S = 10.0
"""Seconds after which a node is announced even if its agent has not reported its type."""


def hide_replaced_nodes(memory: JobMemory, seen: Observation) -> Observation:
    """Hide, for one observation, each node that has taken over the name of another.

    What is remembered by name ends with the node that it was about. Nodes that are left out stay so
    for their time.
    """
    known = memory.nodes
    replaced = {
        name
        for name in known.present & seen.nodes.keys()
        if known.joined[name] != seen.nodes[name].joined_at
    }
    if replaced:
        seen = seen.without_nodes(replaced)
    known.joined.update({name: view.joined_at for name, view in seen.nodes.items()})
    known.present = frozenset(seen.nodes)
    known.left_out_until = {
        name: until
        for name, until in known.left_out_until.items()
        if name in seen.nodes and until > seen.now
    }
    return replace(seen, left_out=known.left_out)


def announce(memory: JobMemory, seen: Observation) -> Effects:
    """Log each notice and each new node once; forget what is gone."""
    known = memory.nodes
    slowdowns = memory.speeds.slowdowns
    gone = (known.announced.keys() | known.notices.keys() | slowdowns.keys()) - seen.nodes.keys()
    yield from _log_idle_deaths(memory, known.announced.keys() - seen.nodes.keys(), seen)
    known.released -= gone
    known.notices = {name: n for name, n in known.notices.items() if name not in gone}
    memory.speeds.slowdowns = {
        name: factor for name, factor in slowdowns.items() if name not in gone
    }
    memory.planned_nodes -= gone
    known.logged_dead = {
        w for w in known.logged_dead if w in seen.losses or seen.node_of(w) not in seen.nodes
    }
    for name, notice in seen.notices.items():
        before = known.notices.get(name)
        if before is None or notice.deadline != before.deadline:
            left_s = None if notice.deadline is None else round(notice.deadline - seen.now, 3)
            again: dict[str, Any] = {} if before is None else {"updated": True}
            yield event(
                "notice",
                memory.generation,
                node=name,
                source=notice.source,
                deadline_s=left_s,
                **again,
            )
        known.notices[name] = notice
    yield from _announce_risks(memory, seen)
    for name, view in seen.nodes.items():
        introduced = view.endpoint is not None or seen.now - view.joined_at > AGENT_START_S
        if name not in known.announced and introduced:
            yield _announce_arrival(memory, name, view.node.node_type)
    yield from _announce_prices(memory, seen)


def _announce_prices(memory: JobMemory, seen: Observation) -> Effects:
    """Log changed spot prices, which are known later than the node and move.

    A node that was announced before its agent had reported is announced again if the agent reports
    another type.
    """
    for name, view in seen.nodes.items():
        known = memory.nodes.announced.get(name)
        kind = view.node.node_type
        if known is None or known == kind:
            continue
        if replace(known, usd_per_hour=kind.usd_per_hour) != kind:
            yield _announce_arrival(memory, name, kind, updated=True)
        elif known.usd_per_hour != kind.usd_per_hour:
            memory.nodes.announced[name] = kind
            price = kind.usd_per_hour
            yield event("price", memory.generation, node=name, usd_per_hour=price)


def _announce_arrival(
    memory: JobMemory, name: str, kind: NodeType, *, updated: bool = False
) -> Decision:
    memory.nodes.announced[name] = kind
    again: dict[str, Any] = {"updated": True} if updated else {}
    return event(
        "arrival",
        memory.generation,
        node=name,
        node_type=kind.name,
        gpu_type=kind.gpu_type,
        num_gpus=kind.num_gpus,
        usd_per_hour=kind.usd_per_hour,
        zone=kind.zone,
        spot=kind.spot,
        **again,
    )


def _announce_risks(memory: JobMemory, seen: Observation) -> Effects:
    """Log each new risk.

    A node at risk goes on training. Its shards are copied to nodes that are not at risk, from the
    next generation on.
    """
    memory.nodes.risks &= seen.risks.keys()
    for name in sorted(seen.risks.keys() - memory.nodes.risks):
        memory.nodes.risks.add(name)
        source = seen.risks[name].source
        sentence = (
            f"Deciding to go on with {name} and to copy what it holds elsewhere, since it is at"
            f" risk ({source})"
        )
        yield event("risk", memory.generation, sentence, node=name, source=source)


def announce_departures(memory: JobMemory, seen: Observation) -> Effects:
    """Log the departure of each announced node that is gone without a death event."""
    announced = memory.nodes.announced
    for name in sorted(announced.keys() - seen.nodes.keys()):
        del announced[name]
        yield event("departure", memory.generation, node=name, reason=f"{name} is gone")


def _forget_gone(memory: JobMemory, nodes: Collection[str], seen: Observation) -> list[str]:
    """Return the announced nodes among `nodes` that are gone, for a death event to name.

    They are forgotten here, so that no departure event names them again.
    """
    announced = memory.nodes.announced
    gone = sorted(announced.keys() & {*nodes} - seen.nodes.keys())
    for name in gone:
        del announced[name]
    return gone


def log_death(memory: JobMemory, trouble: policy.Trouble, seen: Observation) -> Effects:
    """Log the death of these workers, once for each.

    What may be left of their processes is ended.
    """
    yield event(
        "death",
        memory.generation,
        nodes=list(trouble.nodes),
        workers=list(trouble.workers),
        reason=trouble.reason,
        gone=_forget_gone(memory, trouble.nodes, seen),
    )
    yield Dismiss(tuple(worker for worker in trouble.workers if worker in seen.losses))
    memory.nodes.logged_dead |= {
        w for w in trouble.workers if w in seen.losses or seen.node_of(w) not in seen.nodes
    }


def release_leaver(memory: JobMemory, name: str, seen: Observation) -> Effects:
    """Release a leaving node: it goes once nothing on it is needed."""
    memory.nodes.released.add(name)
    yield memory.upkeep.release(name, seen, memory.timeouts.checkpoint_s)


def _log_idle_deaths(memory: JobMemory, gone: Collection[str], seen: Observation) -> Effects:
    """Log deaths of nodes that were not trained on and went without a notice.

    Other events name all other nodes.
    """
    busy = set(memory.members)
    if isinstance(memory.state, Building):
        busy |= {*memory.state.participants}
    idle = set(gone) - {seen.node_of(worker) for worker in busy}
    for name in sorted(idle - memory.nodes.notices.keys() - memory.nodes.released):
        reasons = sorted(
            {loss.reason for worker, loss in seen.losses.items() if seen.node_of(worker) == name}
        )
        reason = f"{name}, which was idle, is gone{': ' if reasons else ''}{'; '.join(reasons)}"
        yield event(
            "death",
            memory.generation,
            nodes=[name],
            workers=[],
            reason=reason,
            gone=_forget_gone(memory, [name], seen),
        )


def find_new_deaths(memory: JobMemory, seen: Observation) -> policy.Trouble | None:
    """Return the lost members whose death is not logged yet as one event."""
    return policy.find_deaths(
        seen, [worker for worker in memory.members if worker not in memory.nodes.logged_dead]
    )


def log_new_deaths(memory: JobMemory, seen: Observation) -> Effects:
    """Log deaths of members that change nothing just now.

    That is so while all wait, or while a generation without them is being built.
    """
    trouble = find_new_deaths(memory, seen)
    if trouble is not None:
        yield from log_death(memory, trouble, seen)


def announce_wait(
    memory: JobMemory, state: Waiting, seen: Observation, *, late: bool, short: bool
) -> Effects:
    """Log that the job waits, and why.

    After a change this is logged at once. At the start it is logged when workers take longer than
    arrivals do to settle (`elastic.arrivals_debounce_s`). It is logged again when the awaited fleet
    has grown or shrunk.
    """
    settle_s = memory.job.elastic.arrivals_debounce_s
    has_changed = state.reason != state.said and seen.now - state.said_at >= settle_s
    is_new = not state.announced or (short and has_changed)
    is_due = late or state.change is not None or (short and seen.now - state.since >= settle_s)
    if is_new and is_due:
        state.announced = True
        state.said = state.reason
        state.said_at = seen.now
        yield event("decision", memory.generation, f"Deciding to wait, since {state.reason}")
