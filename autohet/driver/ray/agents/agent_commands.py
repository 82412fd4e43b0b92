"""Commands to agents: prune snapshots, refuse copies, and hand over what they alone hold."""

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

from autohet.control.values.observation import Age, HeldPart, Prune
from autohet.driver.ray.agents.agent_calls import AgentCalls, Agents, Inventories
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.messages import AgentEndpoint, StateTransfer

logger = logging.getLogger("autohet")


class AgentCommands:
    """Runs the commands that `AgentGc` decides, and collects the answers.

    Owned by the workforce and called from its thread; never waits for an agent. `agents`: by node.
    """

    def __init__(self, timeouts: Timeouts, calls: AgentCalls) -> None:
        self._calls = calls
        self._transfer_s = timeouts.transfer_s
        self._holdings = Inventories(calls, timeouts)
        self._refusals: dict[Any, str] = {}
        self._handovers: dict[Any, str] = {}
        self._handed_over: list[StateTransfer] = []
        self.newest_copies: dict[str, Age | None] = {}
        """Same as `Observation.newest_copies`."""

    def take(self, now: float, silent: Set[str] = frozenset()) -> Mapping[str, Any] | None:
        """Collect the answers so far; return `Observation.holdings`."""
        self.newest_copies |= dict(self._calls.take(self._refusals))
        for node, transfer in self._calls.take(self._handovers):
            logger.info("%s has handed over %d bytes that it alone kept", node, transfer.num_bytes)
            self._handed_over.append(transfer)
        return self._holdings.take(now, silent)

    def take_handed_over(self) -> tuple[StateTransfer, ...]:
        """Return the transfers that agents have completed since the last call."""
        found = tuple(self._handed_over)
        self._handed_over = []
        return found

    @property
    def handing_over(self) -> bool:
        return self._holdings.asked or bool(self._handovers)

    @property
    def waiting(self) -> bool:
        """True if an agent has yet to answer any command but a pruning."""
        return self.handing_over or bool(self._refusals)

    def prune(self, agents: Agents, what: Prune) -> None:
        for agent in agents.values():
            self._calls.ask(agent, "prune", what)

    def refuse_copies(self, node: str, agent: Any) -> None:
        call = self._calls.ask(agent, "refuse_copies")
        self._refusals[call] = node

    def ask_holdings(self, agents: Agents, now: float) -> None:
        self._holdings.request(agents, now)

    def hand_over(
        self,
        agents: Agents,
        parts: Mapping[str, Sequence[HeldPart]],
        to: Sequence[AgentEndpoint],
    ) -> None:
        # What agents hold changes with the handover: the next decision must ask anew.
        self._holdings.drop()
        for node in parts.keys() & agents.keys():
            logger.info("%s hands over what nodes that stay do not keep", node)
            agent = agents[node]
            call = self._calls.ask(agent, "hand_over", parts[node], to, self._transfer_s)
            self._handovers[call] = node

    def forget(self, node: str) -> None:
        """Forget a node that is gone."""
        self.newest_copies.pop(node, None)
