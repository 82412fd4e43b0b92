"""Agent actors of a job: one for each of its nodes."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from autohet.control.values.observation import HeldPart, Prune
from autohet.driver.ray.agents.agent_actor import AgentActor, AgentPlace
from autohet.driver.ray.agents.agent_calls import AgentReport
from autohet.driver.ray.environment import forwarded_environment
from autohet.driver.ray.observer import RayObserver
from autohet.driver.ray.run_actors import AGENT, Charge, actor_options
from autohet.driver.ray.tracked_nodes import TrackedNode
from autohet.driver.ray.workers import on_node
from autohet.runtime.messages import AgentEndpoint
from autohet.runtime.process.log import RunRecord

ACKNOWLEDGE_S = 5.0
"""Seconds to wait for a node's acknowledgement of its end."""


class RayNodeAgents:
    """Implements `NodeAgents` over Ray; the observer keeps the handles."""

    def __init__(
        self, observer: RayObserver, charge: Charge, record: RunRecord | None, *, outlives: bool
    ) -> None:
        self._observer = observer
        self._charge = charge
        self._commands = observer.agent_commands
        self._record = record
        self._outlives = outlives
        self._token = secrets.token_hex(16)
        self._adopted: dict[str, Any] = {}
        """Agents by node that outlived an earlier driver, until their nodes are known."""

    def adopt(self, agents: Mapping[str, Any], token: str) -> None:
        """Take over agents, by node, that serve with this token; all new ones serve with it too."""
        self._token = token
        for name, agent in agents.items():
            address = self._observer.agent_reports.expect(name)
            agent.adopt.remote(address)
            self._observer.agent_reports.watch(name, agent.until_end.remote)
            self._adopted[name] = agent

    def start_agents(self, nodes: Sequence[str]) -> None:
        observer = self._observer
        for name in nodes:
            tracked = observer.nodes.get(name)
            if tracked is None or tracked.agent is not None:
                continue
            if not self._charge.is_mine:
                return
            agent = self._adopted.pop(name, None) or self._start(name, tracked)
            tracked.agent = agent
            tracked.view = replace(tracked.view, agent_started=True)

    def _start(self, name: str, tracked: TrackedNode) -> Any:
        observer = self._observer
        job = observer.job
        address = observer.agent_reports.expect(name)
        memory, disk = tracked.snapshot_directories(job.checkpoint)
        place = AgentPlace(name, tracked.ray_node.address, self._token, memory, disk)
        actor_class: Any = AgentActor
        options = actor_options(observer.run_id, AGENT, name, outlives=self._outlives)
        placed = actor_class.options(scheduling_strategy=on_node(tracked), **options)
        agent = placed.remote(
            place,
            job.elastic.notice_sources,
            job,
            forwarded_environment(),
            self._record,
            address,
        )
        observer.agent_reports.watch(name, agent.until_end.remote)
        return agent

    def prune(self, what: Prune) -> None:
        self._commands.prune(self._observer.agents, what)

    def ask_holdings(self) -> None:
        self._commands.ask_holdings(self._observer.agents, self._observer.clock())

    def hand_over(
        self, parts: Mapping[str, Sequence[HeldPart]], to: Sequence[AgentEndpoint]
    ) -> None:
        self._commands.hand_over(self._observer.agents, parts, to)

    def release_node(self, node: str) -> None:
        tracked = self._observer.nodes.get(node)
        if tracked is None or tracked.agent is None:
            return
        if not tracked.released:
            tracked.released = True
            self._commands.refuse_copies(node, tracked.agent)

    def end_agent(self, node: str) -> None:
        """End the node's agent, so that a draining node has no lease left and Ray lets it go."""
        tracked = self._observer.nodes.get(node)
        if tracked is None or tracked.agent is None:
            return
        newest = self._observer.agent_reports.answers.get(node)
        report: AgentReport | None = None if newest is None else newest.value
        if report is not None and any(sign.wants_answer for sign in report.signs):
            target = _acknowledge_and_end
            arguments = (tracked.agent, self._charge)
            threading.Thread(target=target, args=arguments, daemon=True).start()
        else:
            self._charge.kill([tracked.agent])


def _acknowledge_and_end(agent: Any, charge: Charge) -> None:
    """Let the agent tell its cloud that the node has left, and end it, answered or not."""
    with suppress(RayError):
        ray.get(agent.command.remote(charge.epoch, "acknowledge"), timeout=ACKNOWLEDGE_S)
    charge.kill([agent])
