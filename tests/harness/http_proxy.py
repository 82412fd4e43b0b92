"""An HTTP proxy in front of an S3 endpoint; a subclass answers requests or passes them on."""

import http.client
import re
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.harness.waits import HANG_S

HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "server"}


@dataclass
class Request:
    """One request as it came, which may be changed before it passes.

    Names of headers are in lower case.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")

    @property
    def credential(self) -> list[str]:
        """Access key, date, region, service and terminator of a V4 signature; [] without one."""
        given = self.query.get("X-Amz-Credential", [""])[0] or self.authorization
        found = re.search(r"(?:Credential=)?([^/ ,]+/\d{8}/[^/]+/s3/aws4_request)", given)
        return found[1].split("/") if found else []

    @property
    def key(self) -> str:
        return urlsplit(self.path).path


@dataclass(frozen=True)
class HttpAnswer:
    """Answer to a request.

    num_bytes: length to announce; None: that of `body`. afterwards: called once the body is sent,
    before the connection is closed.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    num_bytes: int | None = None
    afterwards: Callable[[], None] | None = None


class HttpProxy:
    """Owns the server's thread; `close` joins it."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = urlsplit(upstream)
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(HANG_S)
        self._server.server_close()

    def answer(self, request: Request) -> HttpAnswer | None:
        """Return the answer, or None to close the connection without one."""
        return self.forward(request)

    def forward(self, request: Request) -> HttpAnswer:
        """Return what the server behind the proxy answers."""
        assert self._upstream.hostname is not None
        connection = http.client.HTTPConnection(
            self._upstream.hostname, self._upstream.port or 80, timeout=HANG_S
        )
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        try:
            connection.request(request.method, request.path, request.body or None, headers)
            answer = connection.getresponse()
            return HttpAnswer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    proxy: HttpProxy
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        for name in ("connection", "expect"):  # http.server has answered "100-continue" already
            headers.pop(name, None)
        answer = self.proxy.answer(Request(self.command, self.path, headers, body))
        if answer is None:
            self.close_connection = True
        else:
            self._send(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _send(self, answer: HttpAnswer) -> None:
        given = {name.lower(): value for name, value in answer.headers}
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        if "date" not in given:
            self.send_header("Date", self.date_time_string())
        length = given.get("content-length", "0")
        if self.command != "HEAD":
            length = str(answer.num_bytes or len(answer.body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        if answer.afterwards is not None:
            self.wfile.flush()
            answer.afterwards()
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""
