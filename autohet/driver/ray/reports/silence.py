"""Detection of ended and frozen workers and nodes, sooner than Ray or the heartbeat's time-out.

If a worker's connection ends, or it is silent for half of `suspicion_s`, the driver asks its node's
agent, a process of its own, about it. Without a connection a death is certain as soon as the agent
sees that the process has ended: Ray may name it much later. Otherwise it is certain after
`suspicion_s`, before the heartbeat's time-out is over, in two cases:

* the agent sees, twice in a row, that the worker's process was stopped and has not run in between;
* the agent does not answer either, nor does any other worker of the node: the node as a whole is
  frozen, or cut off.

Any other silence (an interpreter that is held up, a busy processor, a debugger) has the whole
time-out.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from autohet.driver.ray.agents.agent_calls import AgentCalls, Agents
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.process.stopped import ProcessState
from planner.inputs.fleet import node_of

LOOK_FROM = 0.5
"""Share of `suspicion_s` after which an agent looks at a silent worker.

On a busy machine an agent's answer takes a second, and two answers are needed.
"""
LOOK_PERIOD_S = 0.5
"""Seconds between two looks of an agent at the same processes."""
LONGEST_TICK_S = 0.75
"""Maximum seconds that one round counts for, so that late rounds of half a second count in full.

The rest of a longer round does not count: a driver that itself slept has waited for no one.
"""


@dataclass(frozen=True)
class Heard:
    """Worker that has been heard of, the time of its last sign, and if it has a connection."""

    worker: str
    process_id: int
    heard_at: float
    is_connected: bool = True

    @property
    def node(self) -> str:
        return node_of(self.worker)


class FreezeDetector:
    """Asks agents about silent workers.

    Owned by the workforce and called from its thread; never waits for an agent.
    """

    def __init__(self, timeouts: Timeouts, calls: AgentCalls) -> None:
        self._timeouts = timeouts
        self._calls = calls
        self._awake_s = 0.0
        """Seconds of all rounds so far, each as far as it counts (`LONGEST_TICK_S`)."""
        self._ticked_at: float | None = None
        self._asked: dict[Any, str] = {}
        """Node of each call that has no answer yet."""
        self._asked_at: dict[str, float] = {}
        """`_awake_s` at the last call to each node's agent."""
        self._stopped: dict[str, ProcessState] = {}
        """State of each suspect that its agent saw stopped in its last look."""
        self.silent_nodes: frozenset[str] = frozenset()
        """Nodes that were silent in the last round, for long enough to be sure of it.

        Neither a worker nor the agent of such a node answered.
        """

    @property
    def asked(self) -> bool:
        """True if an agent has yet to answer how a silent worker looks."""
        return bool(self._asked)

    def frozen(self, heard: Iterable[Heard], agents: Agents, now: float) -> dict[str, str]:
        """Run one round; return the workers that are frozen for certain, with the reason.

        `heard`: the workers that are not known to be dead.
        """
        self._tick(now)
        by_node: dict[str, list[Heard]] = {}
        for worker in heard:
            by_node.setdefault(worker.node, []).append(worker)
        suspicion_s = self._timeouts.suspicion_s

        def is_silent(worker: Heard, for_s: float = suspicion_s) -> bool:
            return worker.heard_at < now - for_s

        def is_suspect(worker: Heard) -> bool:
            return not worker.is_connected or is_silent(worker, LOOK_FROM * suspicion_s)

        watched = _select(by_node, agents, is_suspect)
        silent = _select(by_node, agents, is_silent)

        lost = agents.keys() - by_node.keys()
        ended, stopped = self._take_looks(watched, lost)
        certain: set[str] = set()
        for suspects in silent.values():
            certain.update(suspect.worker for suspect in suspects)
        verdicts = ended
        verdicts |= {worker: why for worker, why in stopped.items() if worker in certain}

        self._ask_agents(watched, agents)
        found = set()
        for node in self._asked.values():
            if self._is_silent(node, by_node.get(node, ()), now):
                found.add(node)
        self.silent_nodes = frozenset(found)
        for node in self.silent_nodes & silent.keys():
            for suspect in silent[node]:
                silent_s = now - suspect.heard_at
                verdicts[suspect.worker] = (
                    f"nothing on {node} answers, its agent included: silent for {silent_s:.1f} s"
                )
        return verdicts

    def _ask_agents(self, watched: Mapping[str, list[Heard]], agents: Agents) -> None:
        """Ask the agents of suspects how these look, unless an answer is due or just came."""
        for node, suspects in watched.items():
            is_asked = node in self._asked.values()
            if not is_asked and self._unanswered_s(node) >= LOOK_PERIOD_S:
                process_ids = [suspect.process_id for suspect in suspects]
                call = self._calls.ask(agents[node], "process_states", process_ids)
                self._asked[call] = node
                self._asked_at[node] = self._awake_s

    def _is_silent(self, node: str, workers: Iterable[Heard], now: float) -> bool:
        """Return whether a node's agent, and all of its workers, have been silent for too long."""
        if self._unanswered_s(node) <= self._patience_s:
            return False
        return all(now - w.heard_at > self._timeouts.node_silence_s for w in workers)

    @property
    def _patience_s(self) -> float:
        """Seconds without an answer after which an agent counts as silent."""
        return self._timeouts.node_silence_s - self._timeouts.suspicion_s

    def _tick(self, now: float) -> None:
        if self._ticked_at is not None:
            self._awake_s += min(now - self._ticked_at, LONGEST_TICK_S)
        self._ticked_at = now

    def _unanswered_s(self, node: str) -> float:
        """Return the seconds since the agent was asked last, as far as the driver was awake.

        An agent that was never asked counts as asked LOOK_PERIOD_S ago.
        """
        if node not in self._asked_at:
            return LOOK_PERIOD_S
        return self._awake_s - self._asked_at[node]

    def _take_looks(
        self, watched: Mapping[str, list[Heard]], lost: Set[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Collect the agents' answers: the workers that have ended, and those that are stopped.

        A worker that speaks or runs again is no suspect any more.

        `lost`: nodes whose workers are all known to be dead; their agents' pending answers still
        show if these agents answer.
        """
        self._forget_others(watched, lost)
        ended = {}
        stopped = {}
        for node, looks in self._calls.take(self._asked):
            for suspect in watched.get(node, ()):
                look: ProcessState | None = looks.get(suspect.process_id)
                last_look = self._stopped.pop(suspect.worker, None)
                process = f"its process {suspect.process_id}"
                if look is not None and look.ended and not suspect.is_connected:
                    ended[suspect.worker] = f"{process} has ended, as its node's agent sees"
                if look is None or not look.stopped:
                    continue

                # Equal looks have the same processor time: it has not run in between.
                if look == last_look:
                    stopped[suspect.worker] = f"{process} is stopped, as its node's agent sees"
                self._stopped[suspect.worker] = look
        return ended, stopped

    def _forget_others(self, watched: Mapping[str, list[Heard]], lost: Set[str]) -> None:
        """Forget calls to nodes that are waited for no more, and looks at workers that speak."""
        waited_for = watched.keys() | lost
        self._asked = {call: node for call, node in self._asked.items() if node in waited_for}
        self._asked_at = {node: at for node, at in self._asked_at.items() if node in waited_for}

        stopped = {}
        for suspects in watched.values():
            for suspect in suspects:
                if suspect.worker in self._stopped:
                    stopped[suspect.worker] = self._stopped[suspect.worker]
        self._stopped = stopped


def _select(
    by_node: Mapping[str, list[Heard]], agents: Agents, is_wanted: Callable[[Heard], bool]
) -> dict[str, list[Heard]]:
    """Return the wanted workers by node, for nodes with an agent."""
    found = {}
    for node, workers in by_node.items():
        wanted = list(filter(is_wanted, workers))
        if wanted and node in agents:
            found[node] = wanted
    return found
