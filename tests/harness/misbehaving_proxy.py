"""An HTTP proxy in front of an S3 endpoint that is slow, fails, throttles, hangs up, cuts or alters
bodies, as a test says.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.harness.waits import HANG_S

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request"
    b" rate.</Message></Error>"
)
INTERNAL = (
    b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We encountered an"
    b" error.</Message></Error>"
)
DATA_SUFFIX = ".distcp"
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class MisbehavingProxy:
    """Passes requests on to `upstream`. `mode` may change at any time:

    "good"; "slow": a quarter of a second before each; "errors": every third is answered 500;
    "throttled": every second is answered 503 SlowDown; "unreachable": the connection is closed;
    "truncated" and "flipped": the first `damages` bodies of data files come short, or with one bit
    changed; "silent": nothing is answered, "half": of data files the first half is, until the mode
    changes; then the connection is closed. Bodies that are sent to it share `bytes_per_s`, where
    that is set.
    """

    def __init__(self, upstream: str) -> None:
        self.mode = "good"
        self.damages = 1
        self.bytes_per_s: float | None = None
        self.throttled_bytes = 0
        """Bytes of bodies that came while `bytes_per_s` was set."""
        self.data_reads: list[str] = []
        self.refused = 0
        self.silent = 0
        """Requests that wait for an answer or its other half just now."""
        self._closed = threading.Event()
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self._link = threading.Lock()
        self._count = 0
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()

    def verdict(self, method: str, path: str) -> str:
        """What happens to a request: "pass", "hang up", "silence", "500", "503", "truncate", "half"
        or "flip".
        """
        is_data = method == "GET" and urlsplit(path).path.endswith(DATA_SUFFIX)
        with self._lock:
            self._count += 1
            if is_data:
                self.data_reads.append(path)
            fails = {"unreachable": "hang up", "silent": "silence"}.get(self.mode, "pass")
            fails = "half" if self.mode == "half" and is_data else fails
            fails = "500" if self.mode == "errors" and self._count % 3 == 0 else fails
            fails = "503" if self.mode == "throttled" and self._count % 2 == 0 else fails
            if self.mode in ("truncated", "flipped") and is_data and self.damages > 0:
                self.damages -= 1
                fails = "truncate" if self.mode == "truncated" else "flip"
            self.refused += fails != "pass"
        if self.mode == "slow":
            time.sleep(0.25)
        return fails

    def throttle(self, num_bytes: int) -> None:
        """Take as long as these bytes do, one request after another."""
        if self.bytes_per_s is not None:
            with self._link:
                self.throttled_bytes += num_bytes
                self._closed.wait(num_bytes / self.bytes_per_s)

    def be_silent(self) -> None:
        """Until the mode changes."""
        mode = self.mode
        with self._lock:
            self.silent += 1
        while self.mode == mode and not self._closed.wait(0.02):
            pass
        with self._lock:
            self.silent -= 1

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        assert self._upstream.hostname is not None
        connection = http.client.HTTPConnection(
            self._upstream.hostname, self._upstream.port or 80, timeout=HANG_S
        )
        try:
            connection.request(method, path, body=body or None, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    proxy: MisbehavingProxy
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        if self.headers.get("Expect", "").lower() == "100-continue":
            pass  # http.server has answered it already
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.proxy.throttle(len(body))
        verdict = self.proxy.verdict(self.command, self.path)
        if verdict == "silence":
            self.proxy.be_silent()
        if verdict in ("hang up", "silence"):
            self.close_connection = True
            return
        if verdict in ("500", "503"):
            self._answer(
                int(verdict),
                [("Content-Type", "application/xml")],
                INTERNAL if verdict == "500" else SLOW_DOWN,
            )
            return
        headers = {
            key: value
            for key, value in self.headers.items()
            if key.lower() not in ("connection", "expect")
        }
        status, given, content = self.proxy.forward(self.command, self.path, headers, body)
        length = len(content)
        if verdict == "flip" and content:
            content = (
                content[: length // 2]
                + bytes([content[length // 2] ^ 1])
                + content[length // 2 + 1 :]
            )
        if verdict in ("truncate", "half"):
            content = content[: length // 2]
            self.close_connection = True
        self._answer(status, given, content, length)
        if verdict == "half":
            self.wfile.flush()
            self.proxy.be_silent()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        declared = dict((key.lower(), value) for key, value in headers)
        for key, value in headers:
            if key.lower() not in HOP_HEADERS | {"date", "server"}:
                self.send_header(key, value)
        head = self.command == "HEAD"
        self.send_header(
            "Content-Length",
            declared.get("content-length", "0") if head else str(length or len(content)),
        )
        self.end_headers()
        if not head:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


@contextmanager
def proxy_before(endpoint: str) -> Iterator[MisbehavingProxy]:
    proxy = MisbehavingProxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
