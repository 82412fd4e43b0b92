"""Expectations of a run about its fleet: time until the next change, and cost of a move.

The time is estimated by node type. Both come from a prior and from what this run has seen. From
them follows how long a change waits for further notices, so that one change answers them all: nodes
of a spot pool are reclaimed within seconds of each other, and until its deadline a node trains on,
so that waiting costs nothing but risk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.values.change import Change, Timing
    from autohet.control.values.observation import Notice, Observation
    from autohet.runtime.job.elastic import Timeouts
    from recovery.state.layout import Layout

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
URGENT = 0.25
"""Part of the time until a node leaves that a restore may take and still read from it as usual.

A restore that would take more asks that node only for what no other node has.
"""
PATIENCE_S = 60.0
ON_THEIR_WAY_S = 180.0
"""Seconds for which the first of several arrivals is left idle while others are on their way."""
CHURN_S = 1800.0
MAX_LOST_SHARE = 0.03
"""Share of the last CHURN_S seconds that moves for nodes that come and go may take."""
LEAST_ENDS = 2
"""Ends of a type within CHURN_S seconds by which its nodes come and go."""
MOST_PROBATION_S = 600.0


@dataclass
class Outlook:
    """Expected life of nodes by type: a gamma prior of one event in the prior time.

    Events are notices, and ends without one. Nodes that the job itself has given back cause no
    event.
    """

    lived_s: dict[str, float] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    """Times at which nodes were lost; nodes that go within `PATIENCE_S` are one loss."""
    _lost_at: float = -math.inf
    recent_ends: dict[str, list[float]] = field(default_factory=dict)
    """Times of the ends of each type within the last CHURN_S seconds."""
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
        lost = ended - {*given_back}
        for name in lost:
            kind = self._alive[name]
            self.ends[kind] += 1
            recent = [at for at in self.recent_ends.get(kind, ()) if at >= seen.now - CHURN_S]
            self.recent_ends[kind] = [*recent, seen.now]
        if lost:
            self.losses += seen.now - self._lost_at > PATIENCE_S
            self._lost_at = seen.now

        self._warned = (self._warned | warned) & seen.nodes.keys()
        self._alive = {name: view.node_type.name for name, view in seen.nodes.items()}

    def on_probation(
        self,
        seen: Observation,
        names: Collection[str],
        move_cost_s: float,
        lost_s: float,
        num_used: int,
    ) -> dict[str, float]:
        """Return the nodes for which no move is worth it yet, with the time until which.

        Nodes of its type come and go, it is a replacement, and moving to it and away from it again
        would bring the cost of the last CHURN_S seconds' changes (`lost_s`) above MAX_LOST_SHARE of
        them. It has to live for long enough first. A change that comes anyway uses it at once. None
        are left idle once they would be as many as the `num_used` that train: half of the speed is
        more than the moves cost.
        """
        coming_s = self._num_ends_to_come(seen.now) * move_cost_s
        if lost_s + coming_s + 2 * move_cost_s <= MAX_LOST_SHARE * CHURN_S:
            return {}
        probation_s = min(MOST_PROBATION_S, 2 * move_cost_s / MAX_LOST_SHARE)
        found = {}
        for name in names:
            view = seen.nodes[name]
            ends = self.recent_ends.get(view.node_type.name, ())
            recent = [at for at in ends if at >= seen.now - CHURN_S]
            comes_and_goes = len(recent) >= LEAST_ENDS and recent[0] <= view.joined_at
            until = view.joined_at + probation_s
            if comes_and_goes and seen.now < until:
                found[name] = until
        return found if len(found) < num_used else {}

    def _num_ends_to_come(self, now: float) -> float:
        """Return the ends that complete CHURN_S seconds, at the rate since the first recent one."""
        ends = [at for each in self.recent_ends.values() for at in each if at >= now - CHURN_S]
        passed_s = now - min(ends, default=now)
        if not passed_s:
            return 0.0
        return (len(ends) - 1) / passed_s * (CHURN_S - passed_s)

    def life_s(self, kind: str, *, spot: bool) -> float:
        """Return the expected life of a node of this type from now on, in seconds."""
        prior_s = SPOT_PRIOR_S if spot else STEADY_PRIOR_S
        lived_s = self.lived_s.get(kind, 0.0)
        return (prior_s + lived_s) / (1 + self.ends[kind])

    def horizon_s(self, seen: Observation, nodes: Collection[str]) -> float:
        """Return the expected seconds until one of these nodes leaves, within bounds."""
        rate = self._rate(seen, nodes)
        if not rate:
            return MOST_S
        return min(MOST_S, max(LEAST_S, 1 / rate))

    def fleet_life_s(self, seen: Observation, nodes: Collection[str]) -> float:
        """Return the expected seconds until the next loss among these nodes.

        Nodes that go together are lost once: there are as many more nodes than losses as so far.
        """
        rate = self._rate(seen, nodes)
        nodes_by_loss = (1 + self.ends.total()) / (1 + self.losses)
        return min(nodes_by_loss, len(nodes)) / rate if rate else STEADY_PRIOR_S

    def _rate(self, seen: Observation, nodes: Collection[str]) -> float:
        """Return the rate in 1/s at which these nodes leave."""
        rates = []
        for name in nodes:
            if name in seen.nodes:
                kind = seen.nodes[name].node_type
                life_s = self.life_s(kind.name, spot=kind.spot)
                rates.append(1 / life_s)

        # Lives are exponential, so that the rates of independent nodes add up.
        return sum(rates)


def move_s(timings: Sequence[Timing]) -> float:
    """Return the seconds that a move costs in addition to moving its bytes.

    This is the mean of this run's last moves and, once, of the prior.
    """
    moves = [timing.fixed_s for timing in timings if timing.is_move]
    recent = moves[-REMEMBERED:]
    return (MOVE_PRIOR_S + sum(recent)) / (1 + len(recent))


def gather_s(timings: Sequence[Timing], debounce_s: float) -> float:
    """Return the seconds for which arrivals are gathered before one change takes them all.

    That is as long as a change costs, once that is known, since the next node may need another
    change (the break-even of renting and buying).
    """
    if not any(timing.is_move for timing in timings):
        return debounce_s
    return max(debounce_s, patience_s(timings))


def recent_cost_s(changes: Sequence[Change], now: float) -> tuple[float, float]:
    """Return what the changes of the last CHURN_S seconds cost beside steps: all, and the mean."""
    seconds = []
    for change in reversed(changes):
        if change.detected_at < now - CHURN_S:
            break
        if change.cause != "start":
            seconds.append(change.stalled_s + change.redone_s)
    return sum(seconds), sum(seconds) / max(1, len(seconds))


def gathers_arrivals_until(joined_at: Sequence[float], debounce_s: float, num_coming: int) -> float:
    """Return the time at which arrivals are answered, if no other node comes.

    joined_at: times at which they have joined. num_coming: nodes that are known to be on their way.
    """
    until = max(joined_at) + debounce_s
    if num_coming:
        until = max(until, min(joined_at) + ON_THEIR_WAY_S)
    return until


def patience_s(timings: Sequence[Timing]) -> float:
    """Return the seconds to wait for something that would otherwise need another change."""
    return min(PATIENCE_S, move_s(timings))


def gathers_until(notices: Sequence[Notice], patience_s: float, needs_s: float) -> float:
    """Return the time at which the change begins, if no other node gets a notice.

    That is `patience_s` after the last notice, and at the latest `needs_s` before the first
    deadline. A node without a deadline may be gone at any time: then there is no wait.
    """
    last_seen_at = max(notice.seen_at for notice in notices)
    first_deadline = math.inf
    for notice in notices:
        if notice.deadline is None:
            first_deadline = -math.inf
        else:
            first_deadline = min(first_deadline, notice.deadline)
    latest = first_deadline - needs_s
    return min(last_seen_at + patience_s, latest)


def prepares_until(notices: Sequence[Notice], needs_s: float, now: float) -> float:
    """Return the time until which workers may prepare for a change that these notices cause.

    What is prepared need not be built after it: even a change that should begin at once waits for
    that part of the time left. A node without a deadline may be gone at any time.
    """
    latest = gathers_until(notices, math.inf, needs_s)
    deadlines = [notice.deadline for notice in notices]
    known = [deadline for deadline in deadlines if deadline is not None]
    if len(known) < len(deadlines):
        return latest
    return max(latest, now + URGENT * (min(known) - now))


def needed_s(
    timings: Sequence[Timing],
    limits: Timeouts,
    *,
    search_s: float,
    step_s: float,
    state_s: float,
    upload_s: float | None,
) -> float:
    """Return the seconds before the first deadline at which the change must begin.

    The step under way, a search (of at most `search_s`), groups, the first step and the restore (of
    `state_s` at least) take as long as the longest of this run's last changes. Before there was
    one, the start counts, and before that the time limits. All this is to be over in that part of
    the time left in which a restore still takes whatever leavers hold (`URGENT`). If the next
    notice leaves too few nodes to go on, a checkpoint comes in its place: `upload_s` is this run's
    longest upload; None, where there was none, stands for its time limit.
    """
    moves = [timing for timing in timings if timing.is_move][-REMEMBERED:]
    # The start moves nothing and has no plan before it, but it builds the same groups.
    builds = moves or timings

    rebuild_s = limits.quiesce_s + limits.rendezvous_s
    if builds:
        rebuild_s = max(timing.rebuild_s + timing.first_step_s for timing in builds)
    replan_s = search_s
    if moves:
        replan_s = max(timing.replan_s for timing in moves)
    restore_s = max([state_s, *(timing.restore_s for timing in moves)])
    change_s = step_s + replan_s + rebuild_s + restore_s

    if upload_s is None:
        upload_s = limits.checkpoint_s
    return change_s / URGENT + upload_s


def slowest_move_s(layout: Layout, seen: Observation) -> float:
    """Return the seconds in which every node could send, or receive, all training state on it."""
    bytes_by_node: Counter[str] = Counter()
    for worker in layout.workers:
        bytes_by_node[node_of(worker)] += layout.bytes_of(worker)

    slowest_s = 0.0
    for name, num_bytes in bytes_by_node.items():
        if name in seen.nodes:
            bytes_per_s = seen.nodes[name].node_type.inter_node_bytes_per_s
            slowest_s = max(slowest_s, num_bytes / bytes_per_s)
    return slowest_s
