"""Agents that have ended by what the network shows, with real sockets."""

import socket
import threading

import pytest

from autohet.driver.ray.agents.agent_calls import AgentReport
from autohet.driver.ray.agents.ended_agents import EndedAgents
from autohet.driver.ray.reports.newest_reports import LatestReport
from autohet.runtime.messages import AgentEndpoint

WAIT_S = 20.0


def answer_of(port: int) -> LatestReport:
    """Of an agent whose connection for reports has ended."""
    report = AgentReport("a", AgentEndpoint("a", "127.0.0.1", port))
    return LatestReport(0.0, 1.0, report, told_at=1.0, broke_off_at=2.0)


@pytest.mark.parametrize("listens", [True, False])
def test_an_agent_has_ended_once_its_machine_refuses_its_port(listens: bool) -> None:
    """Wrong: the end of a connection is a death; or an end is found only as Ray names it."""
    woken = threading.Event()
    agents = EndedAgents(woken.set)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = {"a": answer_of(listener.getsockname()[1])}
        if not listens:
            listener.close()
        assert agents.find(answers) == [], "nothing is waited for"
        if listens:
            listener.settimeout(WAIT_S)
            listener.accept()[0].close()
        else:
            assert woken.wait(WAIT_S)
        assert agents.find(answers) == ([] if listens else ["a"])
        # It has connected again.
        answers["a"].broke_off_at = None
        assert agents.find(answers) == []


def test_an_agent_that_has_not_reported_is_not_looked_for() -> None:
    agents = EndedAgents(lambda: None)
    assert agents.find({"a": LatestReport(0.0, broke_off_at=2.0)}) == []
