"""Notices of several sources about one node, and a watch that does not give up."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from autohet.driver.control.observation import Notice
from autohet.driver.ray.agent_actor import NoticeWatch
from autohet.driver.sources.merge import merged
from tests.harness.imds_server import ImdsServer
from tests.harness.local_fleet import until

EC2 = Notice("n", "EC2 instance metadata: terminate", 10.0, 130.0)
DRAIN = Notice("n", "Ray is draining it", 11.0, 90.0)


def test_the_earliest_deadline_counts_and_the_first_sight_stays() -> None:
    assert merged(None, [EC2, DRAIN]) == DRAIN
    assert merged(EC2, [EC2, DRAIN]) == Notice("n", DRAIN.source, 10.0, 90.0)
    assert merged(None, [Notice("n", "no deadline", 5.0), EC2]) == EC2


def test_later_news_updates_earlier_and_noise_does_not() -> None:
    sooner = Notice("n", EC2.source, 20.0, 60.0)
    assert merged(EC2, [sooner]) == Notice("n", EC2.source, 10.0, 60.0)
    later = Notice("n", EC2.source, 20.0, 600.0)
    assert merged(EC2, [later]) == Notice("n", EC2.source, 10.0, 600.0)
    assert merged(EC2, [Notice("n", "Ray is draining it", 20.0, 129.5)]) is EC2
    assert merged(EC2, []) is EC2
    assert merged(None, []) is None
    assert merged(Notice("n", "no deadline", 5.0), [Notice("n", "no deadline", 6.0)]) == Notice("n", "no deadline", 5.0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NoticeWatch, socket.socket]]:
    """A watch whose metadata service is not there yet, and the socket that the service will listen on."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    found = NoticeWatch(0.02)
    yield found, listener
    found.close()


def test_a_service_that_comes_late_is_heard(watch: tuple[NoticeWatch, socket.socket]) -> None:
    notices, listener = watch
    time.sleep(0.2)  # some questions meet a refused connection
    assert notices.instance_type is None
    listener.listen(8)
    with ImdsServer(listener=listener) as server:
        until(lambda: notices.instance_type == "g5.xlarge", "the instance type", 20)
        server.interrupt(time.time() + 100)
        until(lambda: notices.notice is not None, "the notice", 20)


def test_json_that_is_too_deep_ends_no_watch(watch: tuple[NoticeWatch, socket.socket]) -> None:
    notices, listener = watch
    listener.listen(8)
    with ImdsServer(listener=listener) as server:
        server.values["spot/instance-action"] = "[" * 60_000
        until(lambda: len(server.requests) > 10, "questions", 20)
        server.interrupt(time.time() + 100)
        until(lambda: notices.notice is not None, "the notice", 20)
