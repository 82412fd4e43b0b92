"""A small EC2 instance metadata service (IMDSv2 only): tokens that expire, spot notices, rebalance
recommendations.
"""

import json
import secrets
import socket
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class ImdsServer:
    """Serves on a free local port while entered; what it says is set by the attributes and methods,
    at any time.
    """

    def __init__(
        self,
        instance_id: str = "i-0123456789abcdef0",
        instance_type: str = "g5.xlarge",
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: a socket that listens already, perhaps in another network; None: a free port
        of 127.0.0.1.
        """
        self.values = {
            "instance-id": instance_id,
            "instance-type": instance_type,
            "placement/availability-zone": "us-east-1a",
            "instance-life-cycle": "spot",
        }
        self.status_for_all: int | None = None
        self.clock_ahead_s: float | None = 0.0
        """Of its clock to this machine's; None: its answers have no date."""
        self.answer_headers: dict[str, str] = {}
        self.body = b""
        """Body of the last request that had one."""
        self.requests: list[tuple[str, str, int]] = []
        """(method, path, status) of every request answered, in order."""
        self._listener = listener
        self._tokens: dict[str, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ImdsServer":
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), _handler_of(self), bind_and_activate=self._listener is None
        )
        if self._listener is not None:
            self._server.socket.close()
            self._server.socket = self._listener
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="imds-server"
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def interrupt(self, at_unix_s: float, action: str = "terminate") -> None:
        """From now on the instance has its interruption notice."""
        self.values["spot/instance-action"] = json.dumps(
            {"action": action, "time": _iso(at_unix_s)}
        )

    def recommend_rebalance(self, at_unix_s: float) -> None:
        self.values["events/recommendations/rebalance"] = json.dumps(
            {"noticeTime": _iso(at_unix_s)}
        )

    def expire_tokens(self) -> None:
        """Every token handed out so far is refused with 401 from now on."""
        with self._lock:
            self._tokens.clear()

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        status, text = self._answer(method, path, headers)
        with self._lock:
            self.requests.append((method, path, status))
        return status, text

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self.status_for_all is not None:
            return self.status_for_all, ""
        if path == "/latest/api/token":
            return self._new_token(method, headers)
        if method != "GET":
            return 405, ""
        with self._lock:
            valid = (
                self._tokens.get(headers.get("x-aws-ec2-metadata-token", ""), 0.0)
                > time.monotonic()
            )
        if not valid:
            return 401, ""
        value = self.values.get(path.removeprefix("/latest/meta-data/"))
        return (404, "Not Found") if value is None else (200, value)

    def _new_token(self, method: str, headers: dict[str, str]) -> tuple[int, str]:
        """As the real one:

        PUT with a lifetime of 1 to 21600 s, and not through a proxy (X-Forwarded-For).
        """
        lifetime = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if method != "PUT":
            return 405, ""
        if "x-forwarded-for" in headers:
            return 403, ""
        if not lifetime.isdigit() or not 1 <= int(lifetime) <= 21600:
            return 400, ""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._tokens[token] = time.monotonic() + int(lifetime)
        return 200, token


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _handler_of(server: ImdsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            if self.command == "POST":
                server.body = self.rfile.read(int(headers.get("content-length", 0)))
            status, text = server.answer(self.command, self.path, headers)
            body = text.encode()
            self.send_response_only(status)
            if server.clock_ahead_s is not None:
                self.send_header("Date", self.date_time_string(time.time() + server.clock_ahead_s))
            for name, value in server.answer_headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = _respond

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet: the tests read `requests`."""

    return Handler
