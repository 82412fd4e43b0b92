"""Facts belong to a node's id, not to its name: a node that takes the name of another inherits
nothing, and a driver that is started again reads no old line as a new one.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Notice
from autohet.driver.loop.run_directories import node_directories, run_id
from autohet.driver.sources.merge import AgentSigns, NoticeMerger
from autohet.driver.sources.protocol import Sign, WatchedNode
from autohet.driver.sources.script_file import ScriptNotices
from autohet.driver.sources.simple import Scripted
from tests.harness.fake_job import fake_job

FIRST, SECOND = WatchedNode("n", "id-1", "i-1"), WatchedNode("n", "id-2", "i-2")


class Memory:
    """Implements `LineMemory`; JSON, as the cluster's."""

    text = "{}"

    def load(self) -> dict[str, Any]:
        return dict(json.loads(self.text))

    def save(self, document: dict[str, Any]) -> None:
        self.text = json.dumps(document)


def wait_for(source: ScriptNotices, node: WatchedNode, done: Callable[[list[Notice]], bool]) -> Any:
    until = time.monotonic() + 20.0
    while not done(found := source.notices([node], time.monotonic())):
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


def add(path: Path, **line: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def never_hit(source: ScriptNotices, node: WatchedNode) -> None:
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert source.notices([node], time.monotonic()) == []
        time.sleep(0.02)


def test_a_line_of_a_script_does_not_hit_the_next_node_of_the_name(tmp_path: Path) -> None:
    path = tmp_path / "notices"
    source = ScriptNotices(str(path), None, 0.02)
    try:
        add(path, node="n", in_s=60)
        wait_for(source, FIRST, bool)
        never_hit(source, SECOND)
        add(path, node="n", in_s=60)
        wait_for(source, SECOND, bool)
    finally:
        source.close()


def test_a_driver_that_is_started_again_counts_nothing_anew(tmp_path: Path) -> None:
    path, memory = tmp_path / "notices", Memory()
    add(path, node="n", in_s=60)
    source = ScriptNotices(str(path), None, 0.02, memory)
    try:
        (first,) = wait_for(source, FIRST, bool)
    finally:
        source.close()
    time.sleep(0.5)
    again = ScriptNotices(str(path), None, 0.02, memory)
    try:
        (later,) = wait_for(again, FIRST, bool)
        assert later.deadline == pytest.approx(first.deadline, abs=0.1)
        never_hit(again, SECOND)
    finally:
        again.close()


def test_an_instance_keeps_its_notice_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "notices"
    source = ScriptNotices(str(path), None, 0.02)
    try:
        add(path, instance="i-1", in_s=60)
        wait_for(source, FIRST, bool)
        wait_for(source, WatchedNode("other", "id-3", "i-1"), bool)
        never_hit(source, SECOND)
    finally:
        source.close()


def test_a_line_repeated_for_a_living_node_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "notices"
    source = ScriptNotices(str(path), None, 0.02)
    try:
        add(path, node="n", in_s=60)
        (first,) = wait_for(source, FIRST, bool)
        time.sleep(0.3)
        add(path, node="n", in_s=60)
        time.sleep(0.3)
        (later,) = source.notices([FIRST], time.monotonic())
        assert later.deadline == pytest.approx(first.deadline, abs=0.1)
    finally:
        source.close()


def test_what_stands_of_a_node_ends_with_it_between_two_looks() -> None:
    board = NoticeMerger([AgentSigns()])
    sign = Sign("EC2", "goes", in_s=60.0)
    board.look([WatchedNode("n", "id-1", signs=(sign,))], 1.0)
    assert board.departures
    board.look([SECOND], 2.0)
    assert board.departures == {}


def test_a_rehearsed_notice_ends_with_its_node() -> None:
    scripted = Scripted()
    scripted.by_node["n"] = Notice("n", "scripted", 0.0, 60.0)
    assert scripted.notices([FIRST], 1.0)
    assert scripted.notices([SECOND], 2.0) == []


def test_a_node_s_end_leaves_the_directories_of_longer_names(tmp_path: Path) -> None:
    job = fake_job(checkpoint={"memory_directory": str(tmp_path), "local_directory": str(tmp_path)})
    for name in ("big-0123abcd", "big-1-0123abcd", "big-10-0123abcd"):
        (tmp_path / run_id(job) / name).mkdir(parents=True)
    assert {Path(path).name for path in node_directories(job, "big")} == {"big-0123abcd"}
    assert {Path(path).name for path in node_directories(job, "big-1")} == {"big-1-0123abcd"}


@pytest.mark.parametrize(
    "text", ["y\n" * 500_000, "".join(f"{number}\n" for number in range(30_000))]
)
def test_what_is_no_notice_is_logged_a_few_times(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`yes` as a command, or numbers without end: each line is logged once, and ten at the most."""
    path = tmp_path / "notices"
    path.write_text(text)
    source = ScriptNotices(str(path), None, 0.02)
    try:
        add(path, node="n", in_s=60)
        wait_for(source, FIRST, bool)
    finally:
        source.close()
    said = [record for record in caplog.records if "script of notices" in record.getMessage()]
    assert 1 <= len(said) <= 11
