"""SIMULATED machines of a spot trace: they boot, join, get notices and die."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autohet.driver.control.observation import NodeView, Notice
from autohet.driver.simulate.bill import Bill
from autohet.driver.simulate.clock import SimulatedClock
from autohet.driver.simulate.costs import Costs
from autohet.driver.simulate.prices import PriceHistory
from autohet.driver.simulate.spot_trace import TraceEvent
from autohet.runtime.messages import AgentEndpoint
from planner.cluster import Node, NodeType


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
        moments = [self._trace[0].time_s] if self._trace else []
        moments += self._booting.values()
        moments += [died + self._costs.detect_s for died in self.dead.values()]
        return moments

    def notices(self) -> dict[str, Notice]:
        return {name: notice for name, notice in self._notices.items() if name in self.nodes}

    def is_reachable(self, name: str) -> bool:
        return name in self.nodes and name not in self.dead

    def slowest_network(self, names: Collection[str]) -> float:
        """Return the lowest network speed of these nodes, in bytes per second."""
        return min(
            self.nodes[name].node.node_type.inter_node_bytes_per_s
            for name in names
            if name in self.nodes
        )

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
            self.nodes[name] = replace(view, node=replace(view.node, node_type=kind))
        self._prices_change_at = self._prices.next_change_s(now)

    def run_trace(self) -> list[str]:
        """Make the trace's events up to now happen; return the nodes that died."""
        died = []
        while self._trace and self._trace[0].time_s <= self._clock.now:
            event = self._trace.popleft()
            self._clock.note_change()
            if event.kind == "arrival":
                self.bill.machines[event.node] = self._kinds[event.node_type], event.time_s
                boot_s = self._costs.boot_s + self._costs.install_s
                self._booting[event.node] = event.time_s + boot_s
            elif event.kind == "notice":
                self._warn(event)
            elif event.kind == "death" and self._die(event):
                died.append(event.node)
        return died

    def _warn(self, event: TraceEvent) -> None:
        self._booting.pop(event.node, None)  # it goes before it was of use
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
        for name in [name for name, at in self._booting.items() if at <= self._clock.now]:
            joined_at = self._booting.pop(name)
            self._clock.note_change()
            node = Node(name, self._kinds[self.bill.machines[name][0].name])
            self.nodes[name] = NodeView(node, joined_at, AgentEndpoint(name, "simulated", 1, ""))

    def pop_noticed_deaths(self) -> dict[str, float]:
        """Return the second of death of each node that Ray notices by now to be dead."""
        detect_s = self._costs.detect_s
        noticed = [name for name, died in self.dead.items() if died + detect_s <= self._clock.now]
        return {name: self.dead.pop(name) for name in noticed}

    def forget(self, name: str) -> None:
        self._clock.note_change()
        self.nodes.pop(name, None)
        self._notices.pop(name, None)
