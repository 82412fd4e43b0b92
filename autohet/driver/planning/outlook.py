"""Expectations of a run about its fleet: time until the next change, and cost of a move.

The time is estimated by node type. Both come from a prior and from what this run has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autohet.driver.control.observation import Observation
from autohet.driver.history.change import Change

SPOT_PRIOR_S = 1.7 * 3600.0
"""Prior of a spot node's mean life, in seconds, before anything was seen of its type.

Bamboo's traces of EC2 (github.com/uclasystem/bamboo) have 167 ends in 273 node-hours of p3, 74 in
136 of g4dn.
"""
STEADY_PRIOR_S = 30 * 86400.0
"""Prior of an on-demand node's mean life, in seconds: somebody takes it away now and then."""
LEAST_S = 60.0
MOST_S = 3600.0
"""Bounds of the horizon, in seconds.

A gain that needs more than an hour to earn its move is smaller than the error of the prediction.
"""
MOVE_PRIOR_S = 5.0
"""Prior of a move's seconds without its bytes: stop, rebuild groups, take the first step.

It holds until this run has made a move.
"""
REMEMBERED = 8
PATIENCE_S = 60.0


@dataclass
class Outlook:
    """Expected life of nodes by type: a gamma prior of one event in the prior time.

    Events are notices, and ends without one. Nodes that the job itself has given back cause no
    event.
    """

    lived_s: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    _alive: dict[str, str] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _seen_at: float | None = None

    def look(self, seen: Observation, given_back: Collection[str] = ()) -> None:
        passed = 0.0 if self._seen_at is None else max(0.0, seen.now - self._seen_at)
        self._seen_at = seen.now
        for name, kind in self._alive.items():
            if name not in self._warned:
                self.lived_s[kind] = self.lived_s.get(kind, 0.0) + passed
        gone = self._alive.keys() - seen.nodes.keys()
        warned = (seen.notices.keys() & self._alive.keys()) - self._warned
        for name in (gone - self._warned | warned - gone) - {*given_back}:
            self.ends[self._alive[name]] += 1
        self._warned = (self._warned | warned) & seen.nodes.keys()
        self._alive = {name: view.node.node_type.name for name, view in seen.nodes.items()}

    def life_s(self, kind: str, *, spot: bool) -> float:
        """Return the expected life of a node of this type from now on, in seconds."""
        prior = SPOT_PRIOR_S if spot else STEADY_PRIOR_S
        return (prior + self.lived_s.get(kind, 0.0)) / (1 + self.ends[kind])

    def horizon_s(self, seen: Observation, nodes: Collection[str]) -> float:
        """Return the expected seconds until one of these nodes leaves."""
        kinds = [seen.nodes[name].node.node_type for name in nodes if name in seen.nodes]
        rate = sum(1 / self.life_s(kind.name, spot=kind.spot) for kind in kinds)
        return min(MOST_S, max(LEAST_S, 1 / rate)) if rate else MOST_S


def move_s(changes: Sequence[Change]) -> float:
    """Return the seconds that a move costs in addition to moving its bytes.

    This is the mean of this run's last moves and, once, of the prior.
    """
    complete = [change for change in changes if change.first_step_at is not None]
    seconds = [fixed_s(change) for change in complete if change.cause != "start"]
    recent = seconds[-REMEMBERED:]
    return (MOVE_PRIOR_S + sum(recent)) / (1 + len(recent))


def fixed_s(change: Change) -> float:
    """Return one change's seconds without its bytes.

    These are stopping, rebuilding groups, and the first step beyond what a step takes anyway.
    """
    parts = change.seconds()
    return parts["rebuild"] + max(0.0, parts["first_step"] - (change.predicted_step_s or 0.0))


def gather_s(changes: Sequence[Change], debounce_s: float) -> float:
    """Return the seconds for which arrivals are gathered before one change takes them all.

    That is as long as a change costs, once that is known, since the next node may need another
    change (the break-even of renting and buying).
    """
    known = [
        change for change in changes if change.cause != "start" and change.first_step_at is not None
    ]
    return max(debounce_s, patience_s(known)) if known else debounce_s


def patience_s(changes: Sequence[Change]) -> float:
    """Return the seconds to wait for something that would otherwise need another change."""
    return min(PATIENCE_S, move_s(changes))
