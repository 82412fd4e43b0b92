"""What the agents are asked to do beside serving: to forget, to take no more copies, to hand over what they alone keep."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autohet.driver.control.upkeep import Age, Farewell, Upkeep
from autohet.driver.ray.agent_calls import AgentCalls
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.messages import AgentEndpoint, WorkerReport
from recovery.state.holdings import Holding

logger = logging.getLogger("autohet")


@dataclass
class Inquiry:
    """Every agent's inventory, asked for because these nodes leave while nobody trains, or are at risk."""

    leaving: frozenset[str]
    until: float
    asked: dict[Any, str]
    holdings: list[Holding] = field(default_factory=list)


class AgentErrands:
    """Follows `Upkeep`'s advice. Owned by the workforce and called from its thread; never waits for an agent."""

    def __init__(self, timeouts: Timeouts, calls: AgentCalls) -> None:
        self.upkeep = Upkeep()
        self._calls = calls
        self._timeouts = timeouts
        self._refusals: dict[Any, str] = {}
        self._inquiry: Inquiry | None = None
        self._handed: tuple[int, frozenset[str]] | None = None
        self._handovers: dict[Any, str] = {}
        self._insured: frozenset[str] = frozenset()

    def release(self, node: str, agent: Any, deadline: float | None, now: float) -> None:
        """This node may go once nothing on it is needed; its agent takes no more copies from now on."""
        until = now + self._timeouts.checkpoint_s if deadline is None else deadline
        self.upkeep.leaving[node] = Farewell(self.upkeep.generation, until)
        self._refusals[self._calls.ask(agent, "refuse_copies")] = node

    @property
    def handing_over(self) -> bool:
        return bool(self._inquiry or self._handovers)

    def forget(self, node: str) -> None:
        self.upkeep.leaving.pop(node, None)

    def run(
        self, agents: Mapping[str, Any], endpoints: Mapping[str, AgentEndpoint], leaving: Collection[str],
        reports: Mapping[str, WorkerReport], durable: Age | None, now: float, at_risk: Collection[str] = (),
    ) -> list[str]:  # fmt: skip
        """One round; returns the nodes whose agents may end."""
        prune = self.upkeep.prune(reports, durable)
        if prune is not None:
            for agent in agents.values():
                self._calls.ask(agent, "prune", prune)
        for node, newest in self._calls.take(self._refusals):
            if node in self.upkeep.leaving:
                self.upkeep.leaving[node].newest_copy, self.upkeep.leaving[node].told = newest, True
        here = frozenset(agents)
        self._hand_over(agents, endpoints, frozenset(leaving) & here, frozenset(at_risk) & here, reports, now)
        ended = self.upkeep.unneeded(reports, durable, now)
        for node in ended:
            self.forget(node)
        return ended

    def _hand_over(
        self, agents: Mapping[str, Any], endpoints: Mapping[str, AgentEndpoint], leaving: frozenset[str], at_risk: frozenset[str],
        reports: Mapping[str, WorkerReport], now: float,
    ) -> None:  # fmt: skip
        """While nobody trains, no round and no restore brings away what a leaving node alone keeps: its agent must. What nodes at risk
        alone keep is copied once, when the risk is new, while all train; the next generation's rounds see to it from then on.
        """
        for node, num_bytes in self._calls.take(self._handovers):
            logger.info("%s has handed over %d bytes that it alone kept", node, num_bytes)
        if self._inquiry is not None:
            self._finish(self._inquiry, agents, endpoints, now)
        case = (self.upkeep.generation, leaving)
        stranded = leaving and case != self._handed and self.upkeep.stranded(reports)
        self._insured &= at_risk
        if self._inquiry is None and (stranded or at_risk - self._insured):
            self._handed, self._insured = case if stranded else self._handed, at_risk
            leaving |= at_risk
            asked = {self._calls.ask(agent, "inventory"): node for node, agent in agents.items()}
            self._inquiry = Inquiry(leaving, now + self._timeouts.quiesce_s, asked)

    def _finish(
        self, inquiry: Inquiry, agents: Mapping[str, Any], endpoints: Mapping[str, AgentEndpoint], now: float
    ) -> None:
        for _, holdings in self._calls.take(inquiry.asked):
            inquiry.holdings += holdings
        if inquiry.asked and now < inquiry.until:
            return
        self._inquiry = None
        stay = [endpoint for node, endpoint in sorted(endpoints.items()) if node not in inquiry.leaving]
        for node, parts in self.upkeep.precious(inquiry.holdings, inquiry.leaving).items():
            if node in agents and stay:
                logger.info("%s hands over what nodes that stay do not keep", node)
                call = self._calls.ask(agents[node], "hand_over", parts, stay, self._timeouts.transfer_s)
                self._handovers[call] = node
