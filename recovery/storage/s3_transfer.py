"""The two S3 requests that carry state, without boto3's copies of their bytes.

They are a ranged GET and an uploaded part. boto3 does everything but the sending: `before-send`
hands its prepared and signed request to this module, and takes the answer's head back. So endpoint,
addressing style, signature, region, credentials and errors are those of every other request. A
GET's bytes go from the socket into the caller's memory, a part's from the caller's memory to the
socket, with the CRC-32C that S3 checks. Measured against boto3 and AWS's CRT client on one server:
`scripts/benchmarks/recovery/storage_throughput.py`.
"""

import contextlib
import http.client
import io
import queue
import select
import ssl
import threading
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from awscrt.checksums import crc32c
from botocore.awsrequest import AWSResponse
from botocore.httpsession import ProxyConfiguration, create_urllib3_context, get_cert_path
from botocore.utils import get_environ_proxies

from recovery.cancellation import check

RECEIVE_BYTES = 4 << 20
_ERROR_BYTES = 1 << 16
_HOP_HEADERS = {"expect", "transfer-encoding", "connection"}


class DeadlinePassed(TimeoutError):
    """Bytes came, but too slowly; not worth another try."""


class RangeIgnored(Exception):
    """The store answered a ranged GET with the whole object."""


@dataclass
class Target:
    """Destination of one GET's bytes, from `start`; `deadline` is a monotonic time."""

    start: int
    num_bytes: int
    pieces: Iterable[memoryview]
    deadline: float
    cancelled: threading.Event | None
    name: str
    got: int = 0


class _Part(io.RawIOBase):
    """A part's body: readable as botocore wants it, sent as one piece of memory."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._position = 0

    def __len__(self) -> int:
        return len(self.memory)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.memory[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self.memory)}
        self._position = start[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position


class _Body(io.BytesIO):
    """An answer's body as botocore reads it."""

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()


class S3Transfer:
    """Owns connections to a bucket's endpoint, up to as many as its callers use at once.

    Any thread may call it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: dict[tuple[str, str], queue.LifoQueue[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._verify: Any = True
        self._context: ssl.SSLContext | None = None
        self.usable = True
        """True if there is no proxy; requests through a proxy are left to boto3."""

    def attach(self, client: Any, verify: Any) -> None:
        """Send this client's ranged GETs and parts from now on; `verify` is its CA bundle."""
        if verify != self._verify:
            self._verify = verify
            self._context = None
        endpoint = client.meta.endpoint_url
        given = client.meta.config.proxies
        proxies = get_environ_proxies(endpoint) if given is None else given
        self.usable = ProxyConfiguration(proxies).proxy_url_for(endpoint) is None
        client.meta.events.register("before-send.s3.GetObject", self._send_get)
        client.meta.events.register("before-send.s3.UploadPart", self._send_part)

    def get_into(self, client: Any, place: dict[str, str], target: Target) -> int:
        """Fill the target with the object's bytes; return how many came before its end.

        Raises:
            ClientError: as boto3. OSError, HTTPException: the connection failed. DeadlinePassed,
            Cancelled.
        """
        self._local.target = target
        last = target.start + target.num_bytes - 1
        try:
            client.get_object(**place, Range=f"bytes={target.start}-{last}")
        finally:
            self._local.target = None
        return target.got

    def put_part(self, client: Any, place: dict[str, Any], body: memoryview) -> dict[str, str]:
        """Upload one part; return its ETag, as `complete_multipart_upload` needs it.

        Raises as `get_into`.
        """
        answer = client.upload_part(**place, Body=_Part(body))
        return {"ETag": answer["ETag"]}

    def _send_get(self, request: Any, **_: Any) -> AWSResponse | None:
        target: Target | None = getattr(self._local, "target", None)
        if target is None:
            return None
        with self._answer(request, None) as (connection, answer):
            if answer.status in (200, 206):
                _receive(connection, answer, target)
                return _success(request, answer)
            return _refusal(request, answer)

    def _send_part(self, request: Any, **_: Any) -> AWSResponse | None:
        if not isinstance(request.body, _Part):
            return None
        with self._answer(request, request.body.memory) as (_connection, answer):
            if answer.status == 200:
                return _success(request, answer)
            return _refusal(request, answer)

    @contextlib.contextmanager
    def _answer(
        self, request: Any, body: memoryview | None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        """Send one prepared request; yields the head of its answer.

        The connection is kept for the next if the answer was read to its end.
        """
        parts = urllib.parse.urlsplit(request.url)
        connection = self._connection(parts)
        keep = False
        try:
            target = parts.path or "/"
            if parts.query:
                target += f"?{parts.query}"
            connection.request(request.method, target, body, _headers(request))
            answer = connection.getresponse()
            yield connection, answer
            keep = answer.isclosed() or not answer.read(1)
        finally:
            if keep:
                self._idle_of(parts).put(connection)
            else:
                connection.close()

    def _idle_of(
        self, parts: urllib.parse.SplitResult
    ) -> queue.LifoQueue[http.client.HTTPConnection]:
        with self._lock:
            return self._idle.setdefault((parts.scheme, parts.netloc), queue.LifoQueue())

    def _connection(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        idle = self._idle_of(parts)
        with contextlib.suppress(queue.Empty):
            while True:
                connection = idle.get_nowait()
                if _is_open(connection):
                    return connection
                connection.close()

        assert parts.hostname is not None
        host = parts.hostname
        port = parts.port
        if parts.scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls())

    def _tls(self) -> ssl.SSLContext:
        """Return a TLS context with the same trust as botocore's own connections."""
        with self._lock:
            if self._context is None:
                context = create_urllib3_context()
                context.load_verify_locations(get_cert_path(self._verify))
                context.check_hostname = True
                context.verify_mode = ssl.CERT_REQUIRED
                self._context = context
            return self._context

    def close(self) -> None:
        with self._lock:
            pools = list(self._idle.values())
            self._idle.clear()
        for pool in pools:
            with contextlib.suppress(queue.Empty):
                while True:
                    pool.get_nowait().close()


def checksum_of(body: bytes | memoryview) -> str:
    """Return the CRC-32C of a body as S3's header `x-amz-checksum-crc32c` has it."""
    return b64encode(crc32c(body).to_bytes(4, "big")).decode()


def _headers(request: Any) -> dict[str, str]:
    """Return the headers that botocore has signed, as text."""
    headers = {}
    for name, value in request.headers.items():
        if name.lower() in _HOP_HEADERS:
            continue
        if isinstance(value, bytes):
            value = value.decode()
        headers[name] = str(value)
    return headers


def _receive(
    connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, target: Target
) -> None:
    """Read the answer's body into the target's memory.

    Raises:
        RangeIgnored, DeadlinePassed, Cancelled.
    """
    ranged = answer.status == 206 or "Content-Range" in answer.headers
    if target.start and not ranged:
        raise RangeIgnored

    target.num_bytes = min(
        target.num_bytes, int(answer.headers.get("Content-Length", target.num_bytes))
    )
    target.got = fill(target, _reader(connection, answer))
    if target.got == target.num_bytes:
        # It was read to its end from the socket, which the answer does not know.
        answer.close()


def fill(target: Target, read: Callable[[memoryview], int]) -> int:
    """Fill the target by `read`, which returns 0 at the end; return the number of bytes.

    Raises:
        DeadlinePassed, Cancelled.
    """
    got = 0
    for piece in target.pieces:
        left = piece[: target.num_bytes - got]
        while left:
            count = read(left)
            if not count:
                return got
            got += count
            left = left[count:]
            check(target.cancelled, target.name)
            if time.monotonic() > target.deadline:
                reason = f"{got} of {target.num_bytes} bytes came before the deadline"
                raise DeadlinePassed(reason)
    return got


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Return True if the server has not closed the connection meanwhile.

    A connection that waits for its next request has nothing to read unless it was closed.
    """
    if connection.sock is None:
        return False
    readable = select.poll()
    readable.register(connection.sock, select.POLLIN)
    return not readable.poll(0)


def _reader(
    connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
) -> Callable[[memoryview], int]:
    """Return a function that fills memory with more of the answer's body.

    Over plain TCP it reads straight from the socket, once the bytes that came with the head, in the
    answer's buffer, are used up.
    """
    plain = connection.sock
    if plain is None or isinstance(plain, ssl.SSLSocket) or answer.chunked:
        return answer.readinto
    buffered = memoryview(answer.fp.peek())

    def read(memory: memoryview) -> int:
        nonlocal buffered
        if not buffered:
            return plain.recv_into(memory, min(len(memory), RECEIVE_BYTES))
        count = min(len(buffered), len(memory))
        memory[:count] = buffered[:count]
        buffered = buffered[count:]
        return count

    return read


def _success(request: Any, answer: http.client.HTTPResponse) -> AWSResponse:
    """Return the answer with only the ETag header: parsing all takes as long as signing."""
    headers: Any = {"ETag": answer.headers.get("ETag", "")}
    return AWSResponse(request.url, answer.status, headers, _Body())


def _refusal(request: Any, answer: http.client.HTTPResponse) -> AWSResponse:
    headers: Any = answer.headers
    return AWSResponse(request.url, answer.status, headers, _Body(answer.read(_ERROR_BYTES)))
