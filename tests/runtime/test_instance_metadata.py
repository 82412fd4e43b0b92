"""The IMDSv2 client against a small server of our own (and its behaviour where there is none)."""

import pickle
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from autohet.driver.sources.node_signs import MetadataWatch
from autohet.runtime.process.instance_metadata import InstanceMetadata
from autohet.runtime.process.metadata_server import InstanceNotice, MetadataUnavailable
from planner.errors import ConfigError
from tests.harness.imds_server import ImdsServer

# 2026-03-01T08:22:00Z, from a calendar and not from the code under test
NOTICE_TIME = 1772353320.0


@pytest.fixture
def server() -> Iterator[ImdsServer]:
    with ImdsServer() as running:
        yield running


def test_facts_are_read_with_one_token(server: ImdsServer) -> None:
    metadata = InstanceMetadata(server.endpoint)
    assert metadata.instance_id() == "i-0123456789abcdef0"
    assert metadata.instance_type() == "g5.xlarge"
    assert metadata.availability_zone() == "us-east-1a"
    assert metadata.market_type() == "spot"
    assert [method for method, _, _ in server.requests].count("PUT") == 1


def test_no_notice_is_none(server: ImdsServer) -> None:
    metadata = InstanceMetadata(server.endpoint)
    assert metadata.interruption() is None
    assert metadata.rebalance() is None


def test_interruption_carries_its_deadline(server: ImdsServer) -> None:
    assert datetime.fromtimestamp(NOTICE_TIME, UTC).isoformat() == "2026-03-01T08:22:00+00:00"
    server.interrupt(NOTICE_TIME, "stop")
    notice = InstanceMetadata(server.endpoint).interruption()
    assert notice == InstanceNotice("i-0123456789abcdef0", "interruption", "stop", NOTICE_TIME)
    assert pickle.loads(pickle.dumps(notice)) == notice


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -86400.0, None], ids=str)
def test_what_is_left_is_told_by_the_services_clock(
    server: ImdsServer, ahead_s: float | None
) -> None:
    """This machine's clock may be anything; a date of full seconds leaves one of them open, and it
    is taken as gone.
    """
    server.clock_ahead_s = ahead_s
    server.interrupt(int(time.time()) + 1 + (ahead_s or 0.0) + 120)
    notice = InstanceMetadata(server.endpoint).interruption()
    assert notice is not None
    left_s = notice.seconds_left(time.monotonic())
    assert left_s is not None
    assert 110 < left_s <= 121
    assert notice.seconds_left(time.monotonic() + 130) == 0


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0], ids=str)
def test_an_agent_reports_it_by_the_services_clock(
    server: ImdsServer, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's machine is an hour behind or ahead of the service, which is right."""
    true_time, watch = time.time, None
    server.interrupt(true_time() + 120)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint)
    server.clock_ahead_s = ahead_s  # the server takes its date from the clock that is set next
    monkeypatch.setattr(time, "time", lambda: true_time() - ahead_s)
    try:
        watch = MetadataWatch(0.02)
        deadline = time.monotonic() + 20
        while not watch.signs():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (sign,) = watch.signs()
        assert sign.text == "terminate"
        assert sign.in_s is not None
        assert 90 < sign.in_s <= 121
    finally:
        if watch is not None:
            watch.close()


def test_each_read_of_one_notice_is_equal(server: ImdsServer) -> None:
    metadata = InstanceMetadata(server.endpoint)
    server.recommend_rebalance(NOTICE_TIME - 300)
    advice = metadata.rebalance()
    assert advice is not None
    assert (advice.kind, advice.seconds_left(0.0)) == ("rebalance", None)
    server.interrupt(NOTICE_TIME)
    first = metadata.interruption()
    assert first == metadata.interruption()
    server.interrupt(NOTICE_TIME + 60)
    assert metadata.interruption() != first


def test_refused_token_is_renewed_once(server: ImdsServer) -> None:
    metadata = InstanceMetadata(server.endpoint)
    metadata.instance_type()
    server.expire_tokens()
    assert metadata.instance_type() == "g5.xlarge"
    assert [status for _, _, status in server.requests] == [200, 200, 401, 200, 200]


@pytest.mark.parametrize("status", [401, 403, 500])
def test_service_that_refuses_is_unavailable_not_a_notice(server: ImdsServer, status: int) -> None:
    server.status_for_all = status
    with pytest.raises(MetadataUnavailable, match=str(status)):
        InstanceMetadata(server.endpoint).interruption()


@pytest.mark.parametrize("text", ["no json", "[]", '{"action": "stop", "time": "soon"}'])
def test_nonsense_is_unavailable(server: ImdsServer, text: str) -> None:
    server.values["spot/instance-action"] = text
    with pytest.raises(MetadataUnavailable):
        InstanceMetadata(server.endpoint).interruption()


def test_nobody_there() -> None:
    with socket.socket() as taken:  # bound, not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        metadata = InstanceMetadata(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(MetadataUnavailable, match="no metadata service"):
            metadata.instance_id()


def test_a_service_that_hangs_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        metadata = InstanceMetadata(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(MetadataUnavailable, match=r"timed out|TimeoutError"):
            metadata.instance_id()


def test_endpoint_and_switch_come_from_the_environment(
    server: ImdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.endpoint + "/")
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:1"
    )  # metadata is never asked for through a proxy
    assert InstanceMetadata().instance_type() == "g5.xlarge"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(MetadataUnavailable, match="DISABLED"):
        InstanceMetadata().instance_type()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "ftp://x")
    with pytest.raises(ConfigError, match="ftp://x"):
        InstanceMetadata()


def test_the_error_pickles() -> None:
    error = MetadataUnavailable("gone")
    assert str(pickle.loads(pickle.dumps(error))) == "gone"
