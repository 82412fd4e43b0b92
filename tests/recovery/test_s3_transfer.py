"""The data path of S3 beside boto3: connections that servers have closed, errors as boto3 tells them, proxies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from recovery.storage.errors import StoragePermissionDenied
from recovery.storage.open import open_storage
from recovery.storage.protocol import StorageOptions

DATA = bytes(range(256)) * 4096
ONCE = StorageOptions(attempts=1, request_timeout_s=20, part_bytes=5 << 20)


class _Fickle(BaseHTTPRequestHandler):
    """Promises to keep each connection, and hangs up after one answer."""

    protocol_version = "HTTP/1.1"
    status = 206

    def do_GET(self) -> None:
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
        self.close_connection = True

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


def test_an_error_is_what_boto3_makes_of_it(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Fickle, "status", 403)
    storage = open_storage("s3://bucket", ONCE)
    with pytest.raises(StoragePermissionDenied, match="AccessDenied: no"):
        storage.get_into("object", 0, memoryview(bytearray(10)))
    storage.close()


def test_behind_a_proxy_boto3_speaks(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is the same server here: it sees the whole URL, which only a client that knows of it sends."""
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
