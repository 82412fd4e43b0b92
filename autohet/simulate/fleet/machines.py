"""SIMULATED machines of a spot trace: they boot, join, get notices and die."""

from __future__ import annotations

from collections import deque
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
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.fleet.clock import SimulatedClock
from autohet.simulate.spot_trace import TraceEvent
from planner.inputs.fleet import Node, NodeType


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
        self._kinds = prices.at(kinds, 0.0)
        self._trace = deque(trace)
        self._prices = prices
        self._prices_change_at = prices.next_change_s(0.0)
        self._costs = costs
        self._clock = clock
        self._booting: dict[str, float] = {}
        self._notices: dict[str, Notice] = {}

    def due(self) -> list[float]:
        """Return the times at which machines arrive, join, are warned, die and are missed."""
        moments = []
        if self._trace:
            moments.append(self._trace[0].time_s)
        moments += self._booting.values()
        moments += [self._missed_at(name) for name in self.dead]
        return moments

    def _missed_at(self, name: str) -> float:
        """Return the second at which Ray notices that a dead node is dead."""
        return self.dead[name] + self._costs.detect_s

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
        """Set the current prices of node types, also of living nodes, if any has changed.

        A live driver reads prices every five minutes.
        """
        now = self._clock.now
        if now < self._prices_change_at:
            return
        self._kinds = self._prices.at(self._kinds, now)
        for name, view in self.nodes.items():
            kind = self._kinds[view.node.node_type.name]
            node = replace(view.node, node_type=kind)
            self.nodes[name] = replace(view, node=node)
        self._prices_change_at = self._prices.next_change_s(now)

    def run_trace(self) -> list[str]:
        """Make the trace's events up to now happen; return the nodes that died."""
        died = []
        while self._trace and self._trace[0].time_s <= self._clock.now:
            event = self._trace.popleft()
            self._clock.note_change()
            if event.kind == "arrival":
                self._boot(event)
            elif event.kind == "notice":
                self._warn(event)
            elif event.kind == "death" and self._die(event):
                died.append(event.node)
        return died

    def _boot(self, event: TraceEvent) -> None:
        """Start a machine; it is paid for from now on, though it joins only once it has booted."""
        self.bill.machines[event.node] = (self._kinds[event.node_type], event.time_s)
        boot_s = self._costs.boot_s + self._costs.install_s
        self._booting[event.node] = event.time_s + boot_s

    def _warn(self, event: TraceEvent) -> None:
        # A machine that is warned while it boots would leave before it is of use: it never joins.
        self._booting.pop(event.node, None)
        if event.node in self.nodes:
            now = self._clock.now
            self._notices[event.node] = Notice(event.node, "trace", now, event.gone_s)

    def _die(self, event: TraceEvent) -> bool:
        """End a machine, which Ray notices later; return True if it was a node in use."""
        self._booting.pop(event.node, None)
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
            node = Node(name, self._kinds[started_as.name])
            endpoint = AgentEndpoint(name, "simulated", 1, "")
            self.nodes[name] = NodeView(node, joined_at, endpoint)

    def pop_noticed_deaths(self) -> dict[str, float]:
        """Return the second of death of each node that Ray notices by now to be dead."""
        now = self._clock.now
        noticed = [name for name in self.dead if self._missed_at(name) <= now]
        return {name: self.dead.pop(name) for name in noticed}

    def forget(self, name: str) -> None:
        self._clock.note_change()
        self.nodes.pop(name, None)
        self._notices.pop(name, None)
