"""SIMULATED baselines along the same trace: trainers that restart whenever their fleet changes.

They restart from durable storage, as people run them. Each pays the same stated `Costs` as AutoHet
for the work that both do. Each also has facts that it would not know: the best checkpoint interval
for the departures that will come (Young 1974, Daly 2006: sqrt(2 x cost x mean time between
departures)), and the best type or number in hindsight.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from autohet.simulate.costs import Costs
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.setups import Setup
from autohet.simulate.spot_trace import TraceEvent
from autohet.simulate.trained_span import TrainedSpan
from planner.inputs.fleet import Node, NodeType

Choose = Callable[[Sequence[Node]], Setup | None]
RECONSIDER = "reconsider"
RANK_BY_KIND = {"death": 0, "notice": 1, "arrival": 2}
"""Order of a trace's events at one moment. To reconsider the fleet comes after all of them."""
RECONSIDER_RANK = 9
GATHER_S = 2.0
"""Seconds within which arrivals are handled together."""


@dataclass(frozen=True)
class RestartPolicy:
    """Policy of a restarting trainer.

    on_notice: true if a notice makes it write a checkpoint and leave. every_steps: steps between
    checkpoints, None: Young and Daly's best. horizon_s: the trainer restarts onto a larger fleet if
    that earns more within these seconds.
    """

    on_notice: bool
    every_steps: int | None
    horizon_s: float


@dataclass
class RestartingTrainer:
    """Restarting trainer along one trace; call `run` once, then read what it did."""

    choose: Choose
    habits: RestartPolicy
    costs: Costs
    kinds: dict[str, NodeType]
    mean_time_between_departures_s: float
    prices: PriceHistory | None = None
    """Prices that the trainer sees when it chooses; None: the types' own."""
    spans: list[TrainedSpan] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    steps_lost: int = 0
    waited_s: float = 0.0
    _alive: dict[str, Node] = field(default_factory=dict)
    _leaving: dict[str, float] = field(default_factory=dict)
    _setup: Setup | None = None
    _idle_since: float | None = 0.0
    _committed: int = 0

    def run(self, trace: Sequence[TraceEvent], end_s: float) -> None:
        queue = list(_moments(trace, self.costs))
        heapq.heapify(queue)
        while queue and queue[0][0] < end_s:
            at, _, kind, node, node_type, gone_s = heapq.heappop(queue)
            again = self._take(at, kind, node, node_type, gone_s)
            if again is not None:
                heapq.heappush(queue, (again, RECONSIDER_RANK, RECONSIDER, "", "", math.inf))
        self._advance(end_s)
        if self._idle_since is not None:
            self.waited_s += end_s - self._idle_since

    # what happens
    # ------------------------------------------------------------------------------

    def _take(self, at: float, kind: str, node: str, node_type: str, gone_s: float) -> float | None:
        """Handle one event; return the time at which to reconsider the fleet, if any."""
        self._advance(at)
        used = self._setup is not None and node in self._setup.nodes
        if kind == RECONSIDER:
            return self._consider(at)

        if kind == "arrival":
            self._alive[node] = Node(node, self.kinds[node_type])
            return at + GATHER_S

        if kind == "notice":
            self._leaving[node] = gone_s
            if used and self.habits.on_notice:
                left_at = self._checkpoint(at, gone_s)
                if left_at is not None:
                    self._restart(left_at, "notice", [node], 0)
        elif kind == "death":
            self._alive.pop(node, None)
            self._leaving.pop(node, None)
            if used:
                lost = self._go_back()
                self._restart(at + self.costs.detect_s, "death", [node], lost)
        return None

    def _consider(self, at: float) -> float | None:
        """Restart onto a larger fleet if it earns more within the horizon."""
        if self._setup is None:
            cause = "arrival" if self.spans else "start"
            self._restart(at, cause, [], 0)
            return None

        # It is restarting already: look again once it trains.
        begin_s = self.spans[-1].begin_s
        if at < begin_s:
            return begin_s + 1e-3

        better = self.choose(self._usable(at))
        if better is None or better.nodes == self._setup.nodes:
            return None
        move_s = self._setup.snapshot_s + self._setup.upload_s + self._restart_s(better)
        _, step_s = self.checkpoint_interval(self._setup)
        _, better_step_s = self.checkpoint_interval(better)
        steps_if_moved = (self.habits.horizon_s - move_s) / better_step_s
        # A gain below 1% is no reason to restart.
        if steps_if_moved > 1.01 * self.habits.horizon_s / step_s:
            left_at = self._checkpoint(at, math.inf)
            if left_at is not None:
                new_nodes = sorted(better.nodes - self._setup.nodes)
                self._restart(left_at, "arrival", new_nodes, 0)
        return None

    def _usable(self, at: float) -> list[Node]:
        kinds = self.kinds if self.prices is None else self.prices.at(self.kinds, at)
        staying = sorted(self._alive.keys() - self._leaving)
        return [Node(name, kinds[self._alive[name].node_type.name]) for name in staying]

    # what it does
    # ------------------------------------------------------------------------------

    def checkpoint_interval(self, setup: Setup) -> tuple[int, float]:
        """Return steps between checkpoints, and the mean step time with these checkpoints."""

        def mean_step_s(every: int) -> float:
            step_s = self.costs.disturbed_step_s(
                setup.step_s,
                setup.sync_s,
                setup.network_bytes_per_s,
                setup.upload_s,
                every,
            )
            # It makes no snapshot after each step, but one for each checkpoint.
            without = setup.step_s * self.costs.snapshot_overhead
            return step_s - without + setup.snapshot_s / every

        if self.habits.every_steps is not None:
            return self.habits.every_steps, mean_step_s(self.habits.every_steps)

        # One upload ends before the next begins.
        least = max(1, math.ceil(setup.upload_s / setup.step_s))
        # What a checkpoint costs: the time by which it lengthens the steps until the next one.
        cost_s = least * (mean_step_s(least) - setup.step_s)
        interval_s = math.sqrt(2 * cost_s * self.mean_time_between_departures_s)
        every = max(least, round(interval_s / setup.step_s))
        return every, mean_step_s(every)

    def _restart_s(self, setup: Setup) -> float:
        # The first start of all has no state to read.
        restore_s = setup.restore_s if self._committed or self.spans else 0.0
        return self.costs.restart_s(len(setup.plan.workers)) + restore_s + setup.searched_s

    def _advance(self, at: float) -> None:
        """Advance to `at`: count steps, and checkpoints that have reached storage."""
        if self._setup is None or not self.spans:
            return
        span = self.spans[-1]
        every, _ = self.checkpoint_interval(self._setup)
        trained_s = at - span.begin_s
        span.num_steps = max(0, int(trained_s / span.step_s))

        # Steps whose checkpoint would have been uploaded by now, had there been one.
        written = int((trained_s - self._setup.upload_s) / span.step_s)
        newest = (span.first_step + written) // every * every
        self._committed = max(self._committed, min(newest, span.first_step + span.num_steps))

    def _checkpoint(self, at: float, gone_s: float) -> float | None:
        """Finish the step, write a checkpoint and stop; return the time at which that is done.

        None if it would not be done before `gone_s`.
        """
        assert self._setup is not None
        span = self.spans[-1]
        if at <= span.begin_s:
            # It still restarts from the newest checkpoint: there is nothing to write.
            return at
        step_ends_at = span.begin_s + (span.num_steps + 1) * span.step_s
        done_at = step_ends_at + self._setup.snapshot_s + self._setup.upload_s
        deadlines = [gone_s]
        deadlines += [self._leaving[name] for name in self._setup.nodes & self._leaving.keys()]
        if done_at > min(deadlines):
            return None
        span.num_steps += 1
        self._committed = span.first_step + span.num_steps
        return done_at

    def _go_back(self) -> int:
        """Go back to the newest checkpoint; return the number of steps lost since then."""
        lost = 0
        for span in self.spans:
            num_committed = self._committed - span.first_step
            kept = max(0, min(span.num_steps, num_committed))
            lost += span.num_steps - kept
            span.num_steps = kept
        return lost

    def _restart(self, at: float, cause: str, nodes: Collection[str], lost: int) -> None:
        before = self._setup
        setup = self.choose(self._usable(at))
        self._setup = setup
        self.steps_lost += lost
        if before is not None:
            self._idle_since = at
        if setup is None:
            return
        if self._idle_since is not None:
            self.waited_s += max(0.0, at - self._idle_since)
            self._idle_since = None

        _, step_s = self.checkpoint_interval(setup)
        begin_s = at + self._restart_s(setup)
        generation = len(self.spans) + 1
        first_step = self._committed
        num_gpus = len(setup.plan.workers)
        self.spans.append(TrainedSpan(generation, first_step, begin_s, step_s, num_gpus))
        if cause != "start":
            restart = _Restart(cause, nodes, before, setup, lost, first_step)
            self.changes.append(restart.to_document(begin_s - at, self.costs, step_s))


@dataclass(frozen=True)
class _Restart:
    """Restart of a trainer without elastic groups."""

    cause: str
    nodes: Collection[str]
    before: Setup | None
    after: Setup
    steps_lost: int
    step: int

    def to_document(self, total_s: float, costs: Costs, step_s: float) -> dict[str, Any]:
        """Return an entry of `reconfigurations`."""
        detect = costs.detect_s if self.cause == "death" else 0.0
        rebuild = total_s - self.after.restore_s - self.after.searched_s - costs.first_step_s
        parts = {
            "detect": detect,
            "replan": self.after.searched_s,
            "rebuild": rebuild,
            "restore": self.after.restore_s,
            "first_step": costs.first_step_s + step_s,
            "total": detect + total_s + step_s,
            "stalled": detect + total_s,
            "redone": 0.0 if self.before is None else self.steps_lost * self.before.step_s,
        }
        return {
            "cause": self.cause,
            "nodes": list(self.nodes),
            "reason": (
                f"{', '.join(self.nodes)}: {self.cause}; all processes restart from durable storage"
            ),
            "step": self.step,
            "plan_before": None if self.before is None else self.before.plan.to_document(),
            "plan_after": self.after.plan.to_document(),
            "predicted_step_s": self.after.step_s,
            "steps_lost": self.steps_lost,
            "bytes_by_tier": {"memory": 0, "disk": 0, "peer": 0, "s3": self.after.restored_bytes},
            "seconds": {name: round(value, 4) for name, value in parts.items()},
            "attempts": 0,
        }


def _moments(
    trace: Sequence[TraceEvent], costs: Costs
) -> list[tuple[float, int, str, str, str, float]]:
    """Return the trace as a trainer sees it.

    A node is there once it has booted, unless a notice or its end came before.
    """
    # Second of the first notice or death of each node.
    ends: dict[str, float] = {}
    for event in trace:
        if event.kind in ("death", "notice"):
            ends.setdefault(event.node, event.time_s)

    ready_s = costs.boot_s + costs.install_s
    found: list[tuple[float, int, str, str, str, float]] = []
    for event in trace:
        at = event.time_s
        if event.kind == "arrival":
            at += ready_s
            if ends.get(event.node, math.inf) <= at:
                continue
        rank = RANK_BY_KIND[event.kind]
        found.append((at, rank, event.kind, event.node, event.node_type, event.gone_s))
    return found


def departures(trace: Sequence[TraceEvent], kinds: Collection[str], end_s: float) -> int:
    """Return the number of nodes of these types that die before `end_s`."""
    number = 0
    for event in trace:
        is_death = event.kind == "death" and event.node_type in kinds
        if is_death and event.time_s < end_s:
            number += 1
    return number


def paid_usd(
    trace: Sequence[TraceEvent], caps: dict[str, float], prices: PriceHistory, end_s: float
) -> float:
    """Return the dollars until `end_s` for living nodes, at most `caps` of each type."""
    moments = []
    for event in trace:
        if event.kind == "arrival":
            moments.append((event.time_s, event.node_type, 1))
        elif event.kind == "death":
            moments.append((event.time_s, event.node_type, -1))
    moments.sort()
    moments.append((end_s, "", 0))

    alive: Counter[str] = Counter()
    total = 0.0
    since = 0.0
    for at, node_type, change in moments:
        until = min(at, end_s)
        amounts = []
        for kind, cap in caps.items():
            if alive[kind]:
                amounts.append(min(alive[kind], cap) * prices.usd(kind, since, until))
        total += sum(amounts)
        since = max(since, until)
        alive[node_type] += change
    return total
