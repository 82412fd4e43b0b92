"""An agent that is told to end: whoever told it does not wait for ever, and a node's host memory is
dear.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from autohet.control.values.observation import Prune
from autohet.driver.ray.agents import agent_actor
from autohet.driver.ray.agents.agent_actor import AgentActor, AgentPlace
from autohet.driver.ray.reports.report_server import ReportServer
from autohet.driver.ray.run_actor import fingerprint
from autohet.runtime.process.epoch_fence import StaleDriver
from autohet.runtime.process.log import ProcessLog
from tests.harness.fake_job import fake_job

WAITED_FOR_S = 5.0
"""An agent is killed then (`RayWorkforce.close`)."""


@pytest.fixture(autouse=True)
def root_logger_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent configures the root logger of its process, which is that of all tests here."""
    monkeypatch.setattr(agent_actor, "log_as", ProcessLog)


def test_snapshots_are_gone_before_anything_that_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory/run/a", tmp_path / "disk/run/a"
    build = AgentActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    agent = build(AgentPlace("a", "127.0.0.1", "token", str(memory), str(disk)), (), fake_job(), {})
    for directory in (memory, disk):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "a%2F0.g1.0.snapshot").write_bytes(b"dear")
    there = list[bool]()
    close = agent.data.close

    def slow() -> None:
        there.append(memory.exists() or disk.exists())
        close()

    monkeypatch.setattr(agent.data, "close", slow)
    agent.close(forget_snapshots=True)
    assert there == [False]
    assert not (tmp_path / "memory/run").exists()


def test_a_push_that_is_stuck_keeps_no_snapshot(tmp_path: Path) -> None:
    """To a peer that is cut off, until its deadline: whoever asked the agent to end kills it
    before.
    """
    memory, disk = tmp_path / "memory/run/a", tmp_path / "disk/run/a"
    build = AgentActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    agent = build(AgentPlace("a", "127.0.0.1", "token", str(memory), str(disk)), (), fake_job(), {})
    memory.mkdir(parents=True, exist_ok=True)
    (memory / "a%2F0.g1.0.snapshot").write_bytes(b"dear")
    asked = list[float | None]()
    agent.replicator.thread.join = asked.append
    agent.close(forget_snapshots=True)
    assert not memory.exists()
    (within,) = asked
    assert within is not None
    assert within < WAITED_FOR_S / 2


def test_a_driver_that_was_replaced_removes_nothing(tmp_path: Path) -> None:
    """It stood still, and wakes: its prune, sent before it knows, comes after the take-over."""
    server = ReportServer("127.0.0.1", 5.0)
    build = AgentActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    memory, disk = str(tmp_path / "memory/run/a"), str(tmp_path / "disk/run/a")
    place = AgentPlace("a", "127.0.0.1", "token", memory, disk)
    first, second = (replace(server.expect("a"), epoch=epoch) for epoch in (2, 3))
    agent = build(place, (), fake_job(), {}, None, first)
    try:
        assert agent.introduce() == (fingerprint(fake_job()), "token")
        assert fingerprint(fake_job(steps=7)) != fingerprint(fake_job())
        prune = Prune((9, 9), 9, frozenset())
        assert agent.command(2, "prune", prune) == 0
        agent.adopt(second)
        for call in (
            lambda: agent.command(2, "prune", prune),
            lambda: agent.command(2, "close", True),
            lambda: agent.adopt(first),
        ):
            with pytest.raises(StaleDriver):
                call()
        assert agent.command(3, "prune", prune) == 0
    finally:
        agent.close(forget_snapshots=True)
        server.close()
