"""Silent workers and their witnesses, on a fake clock: frozen ones are found early, slow ones have
all of their time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from autohet.driver.ray.agents.agent_calls import Inventories
from autohet.driver.ray.reports.silence import FreezeDetector, Heard
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.process.stopped import ProcessState

HEARTBEAT_S = 10.0
TICK_S = 0.05
GONE = ProcessState("X", 0, 0)
STILL = {1: ProcessState("T", 70, 5), 2: ProcessState("T", 80, 6)}


@dataclass
class Agents:
    """Implements `AgentCalls`: node a's agent gives `looks` in turn, the last one for ever; None:
    it says nothing.
    """

    looks: list[Mapping[int, ProcessState] | None]
    questions: list[Any] = field(default_factory=list)

    def ask(self, agent: Any, method: str, *arguments: Any) -> int:
        assert (agent, method) == ("agent of a", "process_states")
        self.questions.append(arguments)
        return len(self.questions)

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        look = self.looks[min(len(self.questions), len(self.looks)) - 1]
        return [] if look is None else [(asked.pop(call), look) for call in list(asked)]


def silent_for(
    agents: Agents,
    until_s: float = HEARTBEAT_S,
    talks: frozenset[str] = frozenset(),
    tick: Callable[[float], float] = lambda now: TICK_S,
) -> tuple[float, dict[str, str]] | None:
    """Both of node a's workers say nothing from 0 on, unless they talk: when a verdict comes, and
    which; None within the heartbeat.
    """
    witnesses = FreezeDetector(ElasticSection().timeouts(), agents)
    now = 0.0
    while now < until_s:
        heard = [Heard(w, i, now if w in talks else 0.0) for w, i in (("a/0", 1), ("a/1", 2))]
        heard.append(Heard("b/0", 3, now))
        verdicts = witnesses.frozen(heard, {"a": "agent of a", "b": "agent of b"}, now)
        if verdicts:
            return now, verdicts
        now += tick(now)
    return None


def test_the_default_heartbeat_is_what_it_was() -> None:
    assert ElasticSection().timeouts().heartbeat_s == HEARTBEAT_S


def test_a_stopped_process_is_found_after_two_looks() -> None:
    agents = Agents([STILL])
    found = silent_for(agents, talks=frozenset({"a/0"}))
    assert found is not None
    assert 3.0 < found[0] < 4.0
    assert found[1].keys() == {"a/1"}
    assert "stopped" in found[1]["a/1"]
    assert agents.questions[0] == ([2],), "only silent workers are asked about"
    assert len({*map(str, agents.questions)}) == 1


@dataclass
class SlowAgents(Agents):
    """As on a busy machine: each answer takes `latency_s`."""

    latency_s: float = 0.0
    rounds: int = 0
    due: dict[Any, int] = field(default_factory=dict)

    def ask(self, agent: Any, method: str, *arguments: Any) -> int:
        call = super().ask(agent, method, *arguments)
        self.due[call] = self.rounds + round(self.latency_s / TICK_S)
        return call

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        self.rounds += 1
        ready = [call for call in asked if self.due[call] <= self.rounds]
        return [(asked.pop(call), self.looks[0]) for call in ready]


@pytest.mark.parametrize("latency_s", [0.0, 0.5, 1.0, 1.4])
def test_a_stopped_process_is_found_in_time_where_agents_answer_late(latency_s: float) -> None:
    found = silent_for(SlowAgents([STILL], latency_s=latency_s), talks=frozenset({"a/0"}))
    assert found is not None
    assert 3.0 < found[0] <= 4.5


@pytest.mark.parametrize("state", ["R", "S", "D", "t"])
def test_a_process_that_is_slow_or_held_up_has_the_whole_time(state: str) -> None:
    assert (
        silent_for(Agents([{1: ProcessState(state, 70, 5), 2: ProcessState(state, 80, 6)}])) is None
    )


@pytest.mark.parametrize("looks", [{}, {1: GONE, 2: GONE}])
def test_a_connected_process_that_is_not_there_is_left_to_those_who_know_its_end(
    looks: Mapping[int, ProcessState],
) -> None:
    assert silent_for(Agents([looks])) is None


@pytest.mark.parametrize("state", ["X", "Z", "T", "R", "S", None])
def test_without_its_connection_a_process_that_has_ended_is_lost_at_once(state: str | None) -> None:
    """Wrong: the network's end of a connection is a death, or the end of a process is waited for.

    None: the node has no /proc.
    """
    agents = Agents([{} if state is None else {1: ProcessState(state, 70, 5)}])
    detector = FreezeDetector(ElasticSection().timeouts(), agents)
    both = {"a": "agent of a", "b": "agent of b"}
    heard = [Heard("a/0", 1, 0.0, is_connected=False), Heard("a/1", 2, 0.0), Heard("b/0", 3, 0.0)]
    assert detector.frozen(heard, both, 0.0) == {}
    assert agents.questions == [([1],)], "only the one whose connection ended is asked about"
    lost = detector.frozen(heard, both, TICK_S)
    assert lost.keys() == ({"a/0"} if state in ("X", "Z") else set())


@pytest.mark.parametrize(
    "other", [ProcessState("T", 71, 5), ProcessState("R", 70, 5)], ids=["ran", "runs"]
)
def test_one_that_was_stopped_for_a_moment_is_not_frozen(other: ProcessState) -> None:
    """Stopped at every second look, with something done in between."""
    looks = [{1: state, 2: ProcessState("S", 1, 6)} for state in [STILL[1], other] * 20]
    assert silent_for(Agents(looks)) is None


def test_a_node_of_which_nothing_answers_is_frozen() -> None:
    found = silent_for(Agents([None]))
    assert found is not None
    assert 5.9 < found[0] < 6.5
    assert found[1].keys() == {"a/0", "a/1"}


def test_an_agent_alone_that_says_nothing_condemns_nobody() -> None:
    assert silent_for(Agents([None]), talks=frozenset({"a/0"})) is None
    assert silent_for(Agents([None]), talks=frozenset({"a/0", "a/1"})) is None


def test_a_driver_that_slept_has_not_waited() -> None:
    """It wakes up to a silence of seven seconds, and gives the answers half a second to come."""
    assert (
        silent_for(Agents([None]), until_s=7.5, tick=lambda now: 7.0 if now == 0.0 else TICK_S)
        is None
    )


def inventories_after_a_death(heartbeat_s: float) -> tuple[float, Mapping[str, Any]]:
    """Node a falls silent at 0, and what agents keep is asked for once its worker counts as dead.
    How long that takes, and what is found.
    """
    timeouts = ElasticSection(heartbeat_timeout_s=heartbeat_s).timeouts()
    calls = Scripted()
    witnesses, inventories = FreezeDetector(timeouts, calls), Inventories(calls, timeouts)
    agents = {"a": "a", "b": "b"}
    now, asked_at = 0.0, None
    while now < 60.0:
        lost = {"a/0"} if asked_at is not None or now > timeouts.heartbeat_s else set()
        heard = [Heard(w, 1, 0.0 if w == "a/0" else now) for w in {"a/0", "b/0"} - lost]
        if asked_at is None and (witnesses.frozen(heard, agents, now) or lost):
            asked_at = now
            inventories.request(agents, now)
        elif asked_at is not None:
            witnesses.frozen(heard, agents, now)
        if (found := inventories.take(now, witnesses.silent_nodes)) is not None:
            assert asked_at is not None
            return now - asked_at, found
        now += TICK_S
    raise AssertionError("no end")


@dataclass
class Scripted:
    """Implements `AgentCalls`: the agents that are `up` answer what they were asked."""

    up: set[str] = field(default_factory=lambda: {"b"})
    asked: int = 0

    def ask(self, agent: Any, method: str, *arguments: Any) -> tuple[int, str, str]:
        self.asked += 1
        return self.asked, agent, method

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        there = [call for call in asked if call[1] in self.up]
        return [
            (asked.pop(call), {} if call[2] == "process_states" else ["kept"]) for call in there
        ]


@pytest.mark.parametrize(
    "heartbeat_s", [HEARTBEAT_S, 2.0], ids=["known by a witness", "known by the heartbeat"]
)
def test_what_a_silent_node_keeps_is_not_waited_for(heartbeat_s: float) -> None:
    took, found = inventories_after_a_death(heartbeat_s)
    assert took < 1.0
    assert found == {"b": ["kept"]}


def test_an_agent_of_dead_workers_that_answers_is_waited_for() -> None:
    timeouts = ElasticSection(heartbeat_timeout_s=3.0).timeouts()
    calls = Scripted(up={"a", "b"})
    witnesses, inventories = FreezeDetector(timeouts, calls), Inventories(calls, timeouts)
    for tick in range(100):
        now = tick * TICK_S
        witnesses.frozen([Heard("a/0", 1, 0.0)] if now < 3.0 else [], {"a": "a"}, now)
    calls.up = set()
    inventories.request({"a": "a"}, now)
    assert inventories.take(now + 1.0, witnesses.silent_nodes) is None, "it answered every look"
    calls.up = {"a"}
    assert inventories.take(now + 1.5, witnesses.silent_nodes) == {"a": ["kept"]}


def test_nobody_is_asked_while_all_talk() -> None:
    agents = Agents([STILL])
    assert silent_for(agents, talks=frozenset({"a/0", "a/1"})) is None
    assert agents.questions == []


def test_a_storage_that_says_nothing_hides_nothing_that_nodes_keep() -> None:
    """The newest checkpoint is read anew meanwhile: it is waited for, but orders are not written
    without what agents hold.
    """
    timeouts = ElasticSection(heartbeat_timeout_s=3.0).timeouts()
    inventories = Inventories(Scripted(up={"a"}), timeouts)
    inventories.request({"a": "a"}, 10.0)
    assert inventories.take(10.1, fresh=False) is None
    assert inventories.take(10.2, fresh=True) == {"a": ["kept"]}
    inventories.request({"a": "a"}, 20.0)
    assert inventories.take(20.1, fresh=False) is None
    before_orders = 20.0 + 0.9 * timeouts.quiesce_s
    assert inventories.take(before_orders, fresh=False) == {"a": ["kept"]}
