"""One conformance test for every source of notices: see `NoticeSource`."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autohet.driver.sources import script_file as script_module
from autohet.driver.sources import sqs_queue
from autohet.driver.sources.choose import FACTORIES, make_sources
from autohet.driver.sources.ec2_events import parse_events
from autohet.driver.sources.gpu_health import GpuHealth
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.script_file import MAX_BYTES, ScriptNotices, run_bounded
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.sqs_queue import MOST_REMEMBERED, QueueNotices, account_of
from autohet.runtime.job.elastic import NOTICE_SOURCES, ElasticSection
from tests.harness.fake_nvml import FakeNvml, installed
from tests.harness.notice_sources import (
    ACCOUNT,
    MINE,
    OTHER,
    QUEUE_URL,
    SOURCES,
    Case,
    FakeQueue,
    driver_now,
    ec2_event,
    foreign_events,
)


@pytest.fixture(params=sorted(SOURCES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    with SOURCES[request.param](tmp_path) as found:
        yield found


@pytest.fixture
def working(case: Case) -> Case:
    case.works()
    return case


def test_each_source_that_a_job_may_name_has_a_factory_and_a_case() -> None:
    assert set(FACTORIES) == set(NOTICE_SOURCES), "autohet/driver/sources/choose.py"
    assert set(SOURCES) == set(NOTICE_SOURCES), "tests/harness/notice_sources.py"


def test_the_driver_makes_each_source_that_a_case_drives(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that returned None for a configured source would leave it unasked."""
    monkeypatch.setattr(sqs_queue, "sqs_client", lambda url: FakeQueue())
    elastic = ElasticSection(notice_queue=QUEUE_URL, notice_file=str(tmp_path / "none"))
    sources = make_sources(elastic, RayDrains(dict), Scripted())
    try:
        assert type(case.source) in [type(source) for source in sources]
    finally:
        for source in sources:
            source.close()


def test_a_source_whose_first_question_fails_asks_again(case: Case) -> None:
    case.settle()
    assert case.look() == (None, None)
    case.works()
    case.say(100)
    case.wait(lambda departure, _: departure is not None)


def test_a_notice_names_its_end_by_the_drivers_clock(working: Case) -> None:
    working.say(100)
    notice = working.wait(lambda departure, _: departure is not None)
    assert notice is not None
    if working.has_deadline:
        assert notice.deadline is not None
        assert 90 < notice.deadline - driver_now() <= 101
    else:
        assert notice.deadline is None
    assert abs(notice.seen_at - driver_now()) < 20
    assert not notice.risk
    assert notice.source


def test_later_news_stands_in_the_place_of_earlier(working: Case) -> None:
    if not working.has_deadline:
        pytest.skip("names no deadline")
    working.say(100)
    first = working.wait(lambda departure, _: departure is not None)
    assert first is not None
    assert first.deadline is not None
    earlier = first.deadline - 10
    working.say(60)
    if isinstance(
        working.source, QueueNotices
    ):  # its warnings are all two minutes ahead: one that is nearer is older news
        working.settle()
        assert working.look()[0] == first
        return
    second = working.wait(
        lambda departure, _: departure is not None and (departure.deadline or 1e9) < earlier
    )
    assert second is not None
    assert second.seen_at == first.seen_at


def test_garbage_says_nothing_and_ends_nothing(working: Case) -> None:
    if working.offend is None:
        pytest.skip("takes no messages")
    working.offend()
    working.settle()
    assert working.look() == (None, None)
    working.say(100)
    working.wait(lambda departure, _: departure is not None)


def test_a_replay_changes_nothing(working: Case) -> None:
    working.say(100)
    first = working.wait(lambda departure, _: departure is not None)
    if working.repeat is not None:
        working.repeat()
    working.settle()
    assert working.look() == (first, None)


def test_what_is_said_of_others_is_theirs(working: Case) -> None:
    if working.of_others is None:
        pytest.skip("speaks of its own node only")
    working.of_others(50)
    working.settle()
    assert working.look() == (None, None)
    working.say(100)
    notice = working.wait(lambda departure, _: departure is not None)
    assert notice is not None
    assert notice.deadline is not None
    assert notice.deadline - driver_now() > 90


def test_the_next_node_of_a_name_gets_no_notice_of_the_last_one(working: Case) -> None:
    """A source that binds by name would drain the replacement of each node that left."""
    if working.hint is not None:
        working.hint()
        working.wait(lambda _, risk: risk is not None)
    working.say(100)
    working.wait(lambda departure, _: departure is not None)
    working.replace_node()
    assert working.look() == (None, None)
    working.settle()
    assert working.look() == (None, None)


def test_a_hint_is_no_departure_until_one_comes(working: Case) -> None:
    if working.hint is None:
        pytest.skip("gives no hints")
    working.hint()
    working.wait(lambda departure, risk: departure is None and risk is not None and risk.risk)
    working.say(100)
    working.wait(lambda departure, risk: departure is not None and risk is None)


def test_a_source_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    for make in SOURCES.values():
        with make(tmp_path) as case:
            case.works()
    assert threading.active_count() <= before


def test_a_flood_in_the_queue_is_forgotten_oldest_first() -> None:
    fake = FakeQueue()
    fake.works = True
    warning = "EC2 Spot Instance Interruption Warning"
    source = QueueNotices("url", lambda url: fake, 30.0)
    try:
        for index in range(MOST_REMEMBERED + 5):
            body = ec2_event(warning, f"i-{index}", str(index))
            source.remember(*parse_events(body, 0.0, time.time()))
        assert len(source.by_instance) == MOST_REMEMBERED
        assert f"i-{MOST_REMEMBERED + 4}" in source.by_instance
    finally:
        source.close()


def test_a_command_says_what_a_file_says(tmp_path: Path) -> None:
    source = ScriptNotices(None, ["printf", '{"node": "n", "in_s": 50}\\n'], 0.05)
    case = Case(source, say=lambda in_s: None, works=lambda: None)
    try:
        notice = case.wait(lambda departure, _: departure is not None)
        case.settle()
        assert case.look()[0] == notice, "`in_s` counts from when the line was first read"
    finally:
        source.close()


@pytest.mark.parametrize(
    "name", ["n", "ray-id", "10.0.0.7", "node-7.cluster.local", "trainer-0", MINE]
)
def test_a_line_may_name_a_node_by_each_name_of_its_machine(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lines"
    aliases = ("ray-id", "10.0.0.7", "node-7.cluster.local", "trainer-0", "")
    mine = WatchedNode("n", "ray-id", MINE, aliases=aliases)
    other = WatchedNode("m", "other", OTHER, aliases=("other", "10.0.0.8", "", "", ""))
    path.write_text(json.dumps({"node": name, "in_s": 50}) + "\n")
    source = ScriptNotices(str(path), None, 0.05)
    try:
        source.watch.wait_for_first(20.0)
        assert [each.node for each in source.notices([mine, other], 0.0)] == ["n"]
        later = WatchedNode("n", "a later node of these names", "i-0cc", aliases=aliases[1:])
        assert source.notices([later, other], 0.0) == []
    finally:
        source.close()


def test_a_name_that_no_node_has_or_that_several_share_is_logged_with_those_that_exist(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    nodes = [
        WatchedNode("g5-0", "id-0", "i-0", aliases=("id-0", "10.0.0.7", "rack-1")),
        WatchedNode("g5-1", "id-1", None, aliases=("id-1", "10.0.0.7", "rack-1")),
    ]
    path.write_text('{"node": "g5-9", "in_s": 50}\n{"node": "10.0.0.7", "in_s": 50}\n')
    source = ScriptNotices(str(path), None, 0.05)
    try:
        source.watch.wait_for_first(20.0)
        assert source.notices([], 0.0) == []
        assert not caplog.records, "no node is known yet"
        assert source.notices(nodes, 0.0) == source.notices(nodes, 0.0) == []
        words = [record.getMessage() for record in caplog.records]
        assert [word.split()[5] for word in words] == ["'g5-9',", "'10.0.0.7',"]
        assert words[0].endswith(
            "2 nodes: g5-0 = 10.0.0.7 = rack-1 = i-0; g5-1 = 10.0.0.7 = rack-1"
        )
    finally:
        source.close()


def test_a_file_that_is_not_there_yet_is_read_as_often_as_one_that_is(tmp_path: Path) -> None:
    source = ScriptNotices(str(tmp_path / "later"), None, 60.0)
    try:
        source.watch.wait_for_first(20.0)
        assert source.watch.answer == 0, "after a failure it would be asked more seldom"
        assert not source.watch.trouble
    finally:
        source.close()


@pytest.mark.parametrize("number", range(len(foreign_events())))
def test_an_event_of_another_account_or_of_the_future_is_refused(number: int) -> None:
    body = foreign_events()[number]  # made now: what lay ahead at collection may be past
    now, date = time.monotonic(), time.time()
    with pytest.raises(ValueError, match=r"account|future"):
        parse_events(body, now, date, ACCOUNT)


@pytest.mark.parametrize(
    ("url", "account"),
    [
        (QUEUE_URL, ACCOUNT),
        ("http://127.0.0.1:5000/123456789012/autohet-notices", ACCOUNT),
        ("https://sqs.cn-north-1.amazonaws.com.cn/123456789012/q", ACCOUNT),
        ("https://us-east-1.queue.amazonaws.com/123456789012/q", ACCOUNT),
        ("https://vpce-1.sqs.us-east-1.vpce.amazonaws.com/123456789012/q", ACCOUNT),
        ("url", None),
    ],
)
def test_a_queues_url_names_its_account(url: str, account: str | None) -> None:
    assert account_of(url) == account


def test_errors_of_before_condemn_no_card_and_new_ones_do() -> None:
    fake = FakeNvml(2)
    fake.ecc = [7, None]
    with installed(fake):
        health = GpuHealth()
        fake.events += [13, 79, 94]
        assert [sign.text for sign in health.look()] == ["Xid 79, the GPU has fallen off the bus"]
        assert health.num_xids == 2, "those of programs, and corrected ones"
        health._failed.clear()
        fake.ecc[0] = 8
        assert [(sign.text, sign.risk) for sign in health.look()] == [
            ("GPU 0 has uncorrectable ECC errors", False)
        ]
        fake.heat[1] = 92
        assert [sign.text for sign in health.look() if sign.risk] == [
            "GPU 1 is about to shut down for heat"
        ]
        fake.lost.add(0)
        assert "GPU 0 is lost" in [sign.text for sign in health.look()]
        health.close()


def test_a_queue_that_hears_of_a_node_before_its_agent_does() -> None:
    """The event is taken from the queue when nobody knows yet whose it is."""
    fake = FakeQueue()
    fake.works = True
    fake.waiting.append(ec2_event("EC2 Spot Instance Interruption Warning", MINE, "early"))
    source = QueueNotices("url", lambda url: fake, 0.02)
    case = Case(source, say=lambda in_s: None, works=lambda: None)
    try:
        deadline = time.monotonic() + 20
        while not fake.deleted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        case.wait(lambda departure, _: departure is not None)
    finally:
        source.close()


def test_a_command_that_prints_for_ever_is_ended(tmp_path: Path) -> None:
    """Its output is bounded as it is read; what it started goes with it."""
    script = f"echo $$ > {tmp_path}/pid; yes '{{}}'"
    assert len(run_bounded(["bash", "-c", script])) == MAX_BYTES
    process = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.killpg(process, 0)


def test_a_command_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "COMMAND_TIMEOUT_S", 0.5)
    with pytest.raises(subprocess.CalledProcessError):
        run_bounded(["false"])
    with pytest.raises(TimeoutError):
        run_bounded(["sleep", "60"])
    with pytest.raises(TimeoutError):
        run_bounded(["bash", "-c", "sleep 60 & echo started"])
