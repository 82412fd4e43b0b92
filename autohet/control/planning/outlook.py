"""Expectations of a run about its fleet: time until the next change, and cost of a move.

The time is estimated by node type. Both come from a prior and from what this run has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autohet.control.values.change import Change
from autohet.control.values.observation import Observation

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
        """Count the time that nodes have lived since the last look, and the ends of their lives.

        given_back: nodes whose end the job itself has caused.
        """
        passed_s = 0.0
        if self._seen_at is not None:
            passed_s = max(0.0, seen.now - self._seen_at)
        self._seen_at = seen.now
        for name, kind in self._alive.items():
            if name not in self._warned:
                before_s = self.lived_s.get(kind, 0.0)
                self.lived_s[kind] = before_s + passed_s

        gone = self._alive.keys() - seen.nodes.keys()
        noticed = seen.notices.keys() & self._alive.keys()
        warned = noticed - self._warned
        # A node that had a notice has been counted when that came.
        ended = (gone - self._warned) | warned
        for name in ended - {*given_back}:
            kind = self._alive[name]
            self.ends[kind] += 1

        self._warned = (self._warned | warned) & seen.nodes.keys()
        self._alive = {name: view.node_type.name for name, view in seen.nodes.items()}

    def life_s(self, kind: str, *, spot: bool) -> float:
        """Return the expected life of a node of this type from now on, in seconds."""
        prior_s = SPOT_PRIOR_S if spot else STEADY_PRIOR_S
        lived_s = self.lived_s.get(kind, 0.0)
        return (prior_s + lived_s) / (1 + self.ends[kind])

    def horizon_s(self, seen: Observation, nodes: Collection[str]) -> float:
        """Return the expected seconds until one of these nodes leaves."""
        rates = []
        for name in nodes:
            if name in seen.nodes:
                kind = seen.nodes[name].node_type
                life_s = self.life_s(kind.name, spot=kind.spot)
                rates.append(1 / life_s)

        # Lives are exponential, so that the rates of independent nodes add up.
        rate = sum(rates)
        if not rate:
            return MOST_S
        return min(MOST_S, max(LEAST_S, 1 / rate))


def move_s(changes: Sequence[Change]) -> float:
    """Return the seconds that a move costs in addition to moving its bytes.

    This is the mean of this run's last moves and, once, of the prior.
    """
    moves = [fixed_s(change) for change in changes if change.is_complete_move]
    recent = moves[-REMEMBERED:]
    return (MOVE_PRIOR_S + sum(recent)) / (1 + len(recent))


def fixed_s(change: Change) -> float:
    """Return one change's seconds without its bytes.

    These are stopping, rebuilding groups, and the first step beyond what a step takes anyway.
    """
    parts = change.seconds()
    step_s = change.predicted_step_s or 0.0
    return parts["rebuild"] + max(0.0, parts["first_step"] - step_s)


def gather_s(changes: Sequence[Change], debounce_s: float) -> float:
    """Return the seconds for which arrivals are gathered before one change takes them all.

    That is as long as a change costs, once that is known, since the next node may need another
    change (the break-even of renting and buying).
    """
    moves = [change for change in changes if change.is_complete_move]
    if not moves:
        return debounce_s
    return max(debounce_s, patience_s(moves))


def patience_s(changes: Sequence[Change]) -> float:
    """Return the seconds to wait for something that would otherwise need another change."""
    return min(PATIENCE_S, move_s(changes))
