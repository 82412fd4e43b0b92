"""An agent that is told to end: whoever told it does not wait for ever, and a node's host memory is dear."""

from __future__ import annotations

from pathlib import Path

import pytest

from autohet.driver.ray.agent_actor import AgentActor
from tests.harness.fake_job import fake_job


def test_snapshots_are_gone_before_anything_that_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory/run/a", tmp_path / "disk/run/a"
    build = AgentActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    agent = build("a", "127.0.0.1", "token", str(memory), str(disk), (), fake_job(), {})
    for directory in (memory, disk):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "a%2F0.g1.0.snapshot").write_bytes(b"dear")
    there = list[bool]()
    close = agent._data.close

    def slow() -> None:
        there.append(memory.exists() or disk.exists())
        close()

    monkeypatch.setattr(agent._data, "close", slow)
    agent.close(forget_snapshots=True)
    assert there == [False]
    assert not (tmp_path / "memory/run").exists()
