"""Nodes that were requested and have not joined: which are on their way, and which are overdue.

A pod without room, a machine that boots or pulls its image, and a refused launch are three things.
Only a refusal, or a start that takes longer than its patience, is a reason to request other nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autohet.control.values.observation import Observation, StartingNode, StartState

STUCK_S = 180.0
"""Seconds for which an error of a start, such as an image that cannot be pulled, may pass."""
UNSCHEDULABLE_S = 480.0
"""Seconds in which a cluster's own autoscaler brings a machine for a pod without room."""
START_S = 1800.0
"""Seconds for a machine to boot, pull its image and install; Ray itself allows 30 to 60 minutes."""
PATIENCE_S = {
    StartState.REQUESTED: START_S,
    StartState.UNSCHEDULABLE: UNSCHEDULABLE_S,
    StartState.STARTING: START_S,
    StartState.STUCK: STUCK_S,
}
ON_THEIR_WAY = (StartState.REQUESTED, StartState.STARTING)


def is_overdue(node: StartingNode, now: float, patience: float) -> bool:
    """Return True if the node has been in its state for longer than that should take."""
    return now - node.since >= patience * PATIENCE_S[node.state]


def overdue_causes(seen: Observation, patience: float) -> dict[str, str]:
    """Return the types that have an overdue node, each with the reason as a cause in a sentence."""
    causes: dict[str, str] = {}
    for node in _starting(seen):
        if not is_overdue(node, seen.now, patience):
            continue
        minutes = (seen.now - node.since) / 60
        detail = f" ({node.why})" if node.why else ""
        if node.state is StartState.UNSCHEDULABLE:
            cause = f"Kubernetes has had no room for {node.name} for {minutes:.0f} minutes{detail}"
        elif node.state is StartState.STUCK:
            cause = f"{node.name} cannot start{detail}"
        else:
            cause = f"{node.name} has been starting for {minutes:.0f} minutes{detail}"
        causes.setdefault(node.node_type, cause)
    return causes


def on_their_way(seen: Observation, patience: float) -> list[StartingNode]:
    """Return the nodes that are about to join: requested or starting, and not overdue.

    A node that has joined since the autoscaler was polled is not counted twice.
    """
    if seen.launches is None:
        return []
    joined: Counter[str] = Counter()
    for view in seen.nodes.values():
        if view.joined_at > seen.launches.polled_at:
            joined[view.node_type.name] += 1

    found = []
    for node in seen.launches.starting:
        if node.state not in ON_THEIR_WAY or is_overdue(node, seen.now, patience):
            continue
        if joined[node.node_type]:
            joined[node.node_type] -= 1
        else:
            found.append(node)
    return found


def describe_starting(seen: Observation) -> str:
    """Describe the nodes that have not joined yet, by type and state; empty without any."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in _starting(seen):
        counts[node.node_type, node.state.value] += 1
    return ", ".join(f"{number} {kind} {state}" for (kind, state), number in sorted(counts.items()))


def _starting(seen: Observation) -> Iterable[StartingNode]:
    return () if seen.launches is None else seen.launches.starting
