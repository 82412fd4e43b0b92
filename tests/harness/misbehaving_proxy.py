"""An HTTP proxy in front of an S3 endpoint that is slow, fails, throttles, hangs up, cuts or alters
bodies, as a test says.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from tests.harness.http_proxy import HttpAnswer, HttpProxy, Request

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request"
    b" rate.</Message></Error>"
)
INTERNAL = (
    b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We encountered an"
    b" error.</Message></Error>"
)
ERRORS = {"500": INTERNAL, "503": SLOW_DOWN}
DATA_SUFFIX = ".distcp"


class MisbehavingProxy(HttpProxy):
    """Passes requests on to `upstream`. `mode` may change at any time:

    "good"; "errors": every third is answered 500; "throttled": every second is answered 503
    SlowDown; "unreachable": the connection is closed; "silent": nothing is answered, "half": of
    data files the first half is, until the mode changes; then the connection is closed.

    The first `damages` bodies of data files come with one bit changed. Bodies that are sent to it
    share `bytes_per_s`, where that is set.
    """

    def __init__(self, upstream: str) -> None:
        self.mode = "good"
        self.damages = 0
        self.bytes_per_s: float | None = None
        self.throttled_bytes = 0
        """Bytes of bodies that came while `bytes_per_s` was set."""
        self.data_reads: list[str] = []
        self.refused = 0
        self.silent = 0
        """Requests that wait for an answer or its other half just now."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._link = threading.Lock()
        self._count = 0
        super().__init__(upstream)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def verdict(self, method: str, path: str) -> str:
        """What happens to a request: "pass", "hang up", "silence", "500", "503", "half" or
        "flip".
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
            if fails == "pass" and is_data and self.damages > 0:
                self.damages -= 1
                fails = "flip"
            self.refused += fails != "pass"
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

    def answer(self, request: Request) -> HttpAnswer | None:
        self.throttle(len(request.body))
        verdict = self.verdict(request.method, request.path)
        if verdict == "silence":
            self.be_silent()
        if verdict in ("hang up", "silence"):
            return None
        if verdict in ERRORS:
            return HttpAnswer(int(verdict), [("Content-Type", "application/xml")], ERRORS[verdict])
        answer = self.forward(request)
        body = answer.body
        length = len(answer.body)
        if verdict == "flip" and body:
            middle = length // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        if verdict == "half":
            return replace(
                answer, body=body[: length // 2], num_bytes=length, afterwards=self.be_silent
            )
        return replace(answer, body=body)


@contextmanager
def proxy_before(endpoint: str) -> Iterator[MisbehavingProxy]:
    proxy = MisbehavingProxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
