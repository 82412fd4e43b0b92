"""SIMULATED machines of a spot trace: they boot, join, get notices and die."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autohet.control.values.observation import (
    Launches,
    NodeView,
    Notice,
    StartingNode,
    StartState,
)
from autohet.runtime.messages import AgentEndpoint
from autohet.simulate.costs import Costs
from autohet.simulate.dollars.bill import Bill
from autohet.simulate.dollars.prices import PriceHistory, SeenPrices
from autohet.simulate.fleet.clock import SimulatedClock
from autohet.simulate.spot_trace import TraceEvent
from planner.inputs.fleet import Node, NodeType

GIVEN_BACK_S = 120.0
"""Seconds after which a machine that is given back ends, if the driver has not released it."""


class SimulatedMachines:
    """Machines that boot, nodes in use, their notices, and their bill."""

    def __init__(
        self,
        kinds: Mapping[str, NodeType],
        trace: Sequence[TraceEvent],
        prices: PriceHistory,
        costs: Costs,
        clock: SimulatedClock,
    ) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.dead: dict[str, float] = {}
        """Second of the death of each dead node that Ray has not noticed yet."""
        self.bill = Bill(prices)
        self.prices = SeenPrices(kinds, prices)
        self._trace = deque(trace)
        self._costs = costs
        self._clock = clock
        self._booting: dict[str, float] = {}
        self._notices: dict[str, Notice] = {}
        self._offered: dict[str, TraceEvent] = {}
        """Arrivals of machines that may be had and were not requested, by name."""
        self.wanted: Mapping[str, int] | None = None
        """Machines requested by type; None: whatever comes is taken."""
        self._returned: dict[str, float] = {}
        """Second by which each machine that is given back ends at the latest."""

    def due(self) -> list[float]:
        """Return the times at which machines arrive, join, are warned, die and are missed."""
        moments = []
        if self._trace:
            moments.append(self._trace[0].time_s)
        moments += self._booting.values()
        moments += self._returned.values()
        if self.prices.next_s < math.inf:
            moments.append(self.prices.next_s)
        # Ray notices then that a dead node is dead.
        moments += [died_at + self._costs.detect_s for died_at in self.dead.values()]
        return moments

    def launches(self) -> Launches:
        """Return the machines that boot, as an autoscaler reports them."""
        boot_s = self._costs.boot_s + self._costs.install_s
        starting = []
        for name, ready_at in self._booting.items():
            kind, _ = self.bill.machines[name]
            state = StartState.STARTING
            starting.append(StartingNode(name, kind.name, state, ready_at - boot_s))
        return Launches({}, starting=tuple(starting), polled_at=self._clock.now)

    def notices(self) -> dict[str, Notice]:
        return dict(self._notices)

    def is_reachable(self, name: str) -> bool:
        return name in self.nodes and name not in self.dead

    def slowest_network(self, names: Collection[str]) -> float:
        """Return the lowest network speed of these nodes, in bytes per second."""
        speeds = []
        for name in names:
            if name in self.nodes:
                speeds.append(self.nodes[name].node.node_type.inter_node_bytes_per_s)
        return min(speeds)

    def update_prices(self) -> None:
        """Set the prices of living nodes, if the driver sees a change now."""
        if not self.prices.look(self._clock.now):
            return
        self._clock.note_change()
        for name, view in self.nodes.items():
            kind = self.prices.kinds[view.node.node_type.name]
            node = replace(view.node, node_type=kind)
            self.nodes[name] = replace(view, node=node)

    def run_trace(self) -> list[str]:
        """Make the trace's events up to now happen; return the nodes that died."""
        died = []
        while self._trace and self._trace[0].time_s <= self._clock.now:
            event = self._trace.popleft()
            self._clock.note_change()
            if event.kind == "arrival":
                self._offered[event.node] = event
            elif event.kind == "notice":
                # One that is warned while it boots would leave before it is of use: it never joins.
                self._booting.pop(event.node, None)
                self._offered.pop(event.node, None)
                if event.node in self.nodes:
                    now = self._clock.now
                    self._notices[event.node] = Notice(event.node, "trace", now, event.gone_s)
            elif event.kind == "death" and self._die(event):
                died.append(event.node)
        self.start_wanted()
        return died

    def request(self, counts: Mapping[str, int]) -> None:
        """Request this number of machines of each type from now on, as far as they may be had."""
        self.wanted = dict(counts)
        self.start_wanted()

    def start_wanted(self) -> None:
        """Start the machines that are requested and may be had."""
        running = Counter(kind.name for kind, _ in self.bill.machines.values())
        running.subtract(self.bill.machines[name][0].name for name in self._returned)
        for name, event in list(self._offered.items()):
            kind = event.node_type
            if self.wanted is not None:
                if running[kind] >= self.wanted.get(kind, 0):
                    continue
                event = replace(event, time_s=max(event.time_s, self._clock.now))
            del self._offered[name]
            running[kind] += 1
            self._boot(event)

    def shortage(self) -> dict[str, int]:
        """Return the number of machines by type that are requested and cannot be had."""
        missing = Counter(self.wanted or {})
        missing.subtract(kind.name for kind, _ in self.bill.machines.values())
        return {name: number for name, number in missing.items() if number > 0}

    def give_back(self, name: str) -> None:
        """Give a machine back: that shows as its notice, and it ends in `GIVEN_BACK_S` at most."""
        now = self._clock.now
        if name in self.nodes and name not in self._notices and name not in self.dead:
            self._returned[name] = now + GIVEN_BACK_S
            self._notices[name] = Notice(name, "idle", now, None)
            self._clock.note_change()

    def end_returned(self, name: str) -> None:
        """End a machine that was given back: it is paid for until now, and may be had again."""
        if self._returned.pop(name, None) is None:
            return
        now = self._clock.now
        kind, _ = self.bill.machines[name]
        self.bill.pay(name, now)
        self._offered[name] = TraceEvent(now, "arrival", name, kind.name)

    def overdue(self) -> list[str]:
        """Return the machines that were given back and whose time is over."""
        return [name for name, end_s in self._returned.items() if end_s <= self._clock.now]

    def _boot(self, event: TraceEvent) -> None:
        """Start a machine; it is paid for from now on, though it joins only once it has booted."""
        self.bill.machines[event.node] = (self.prices.kinds[event.node_type], event.time_s)
        boot_s = self._costs.boot_s + self._costs.install_s
        self._booting[event.node] = event.time_s + boot_s

    def _die(self, event: TraceEvent) -> bool:
        """End a machine, which Ray notices later; return True if it was a node in use."""
        self._booting.pop(event.node, None)
        self._offered.pop(event.node, None)
        self._returned.pop(event.node, None)
        self.bill.pay(event.node, event.time_s)
        if event.node not in self.nodes:
            return False
        self.dead[event.node] = self._clock.now
        return True

    def join_booted(self) -> None:
        """Take the machines that have booted and installed up to now into use."""
        now = self._clock.now
        booted = [name for name, ready_at in self._booting.items() if ready_at <= now]
        for name in booted:
            joined_at = self._booting.pop(name)
            self._clock.note_change()

            # The bill has the type at the price of the machine's start; take today's.
            started_as, _ = self.bill.machines[name]
            node = Node(name, self.prices.kinds[started_as.name])
            endpoint = AgentEndpoint(name, "simulated", 1, "")
            self.nodes[name] = NodeView(node, joined_at, endpoint)

    def pop_noticed_deaths(self) -> dict[str, float]:
        """Return the second of death of each node that Ray notices by now to be dead."""
        now = self._clock.now
        noticed = [name for name, at in self.dead.items() if at + self._costs.detect_s <= now]
        return {name: self.dead.pop(name) for name in noticed}

    def forget(self, name: str) -> None:
        self._clock.note_change()
        self.nodes.pop(name, None)
        self._notices.pop(name, None)
