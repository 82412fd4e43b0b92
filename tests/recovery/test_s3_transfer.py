"""The data path of S3 beside boto3: connections that servers have closed, errors as boto3 tells
them, proxies.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recovery.storage.errors import StoragePermissionDenied, StorageUnreachable
from recovery.storage.open import open_storage
from recovery.storage.protocol import StorageOptions
from tests.harness.leaks import nothing_left

DATA = bytes(range(256)) * 4096
ONCE = StorageOptions(attempts=1, request_timeout_s=20, part_bytes=5 << 20)


class _Fickle(BaseHTTPRequestHandler):
    """Promises to keep each connection, and hangs up after one answer."""

    protocol_version = "HTTP/1.1"
    status = 206
    keeps = False
    """Whether it keeps its promise."""

    def do_GET(self) -> None:
        if self.path.endswith("/away"):
            self.close_connection = True
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = (
            DATA[first : last + 1]
            if self.status == 206
            else b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        )
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = not self.keeps

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fickle) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        yield server
        server.shutdown()
        thread.join()


def test_a_connection_that_the_server_closed_is_not_used_again(server: ThreadingHTTPServer) -> None:
    """At one attempt a request, a stale connection would be an error."""
    storage = open_storage("s3://bucket", ONCE)
    for start in range(0, 400_000, 100_000):
        memory = bytearray(200_000)
        storage.get_into("object", start, memoryview(memory))
        assert memory == DATA[start : start + 200_000]
        time.sleep(0.1)  # the server's hanging up is on its way
    storage.close()


def test_an_error_is_what_boto3_makes_of_it(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Fickle, "status", 403)
    storage = open_storage("s3://bucket", ONCE)
    with pytest.raises(StoragePermissionDenied, match="AccessDenied: no"):
        storage.get_into("object", 0, memoryview(bytearray(10)))
    storage.close()


def test_an_error_that_is_kept_keeps_no_connection_open(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a log record keeps it.

    Requests before and after it, by boto3, have left a connection that waits for its next one.
    """
    monkeypatch.setattr(_Fickle, "keeps", True)
    with nothing_left(tmp_path), closing(open_storage("s3://bucket", ONCE)) as storage:
        storage.get("object", 0, 10)
        with pytest.raises(StorageUnreachable) as kept:
            storage.get("away", 0, 10)
        storage.get("object", 0, 10)
    assert "no answer" in str(kept.value)


def test_behind_a_proxy_boto3_speaks(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is the same server here: it sees the whole URL, which only a client that knows of
    it sends.
    """
    port = server.server_address[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage.invalid")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    storage = open_storage("s3://bucket", ONCE)
    memory = bytearray(1000)
    storage.get_into("object", 7, memoryview(memory))
    assert memory == DATA[7:1007]
    storage.close()
