"""The two S3 requests that carry state, a ranged GET and an uploaded part, without the copies that
boto3 makes of their bytes.

boto3 signs them (presigned URLs) and sends all others. A GET's bytes go from the socket into the
caller's memory, a part's from the caller's memory to the socket, with the CRC-32C that S3 checks.
Measured against boto3 and AWS's CRT client on one server:
`scripts/benchmarks/storage_throughput.py`.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import queue
import select
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import botocore.exceptions as boto
from awscrt.checksums import crc32c
from botocore.utils import get_environ_proxies

from recovery.cancellation import check

EXPIRES_S = 3600
RECEIVE_BYTES = 4 << 20


class DeadlinePassed(TimeoutError):
    """Bytes came, but too slowly; not worth another try."""


class S3Transfer:
    """Owns connections to one endpoint, up to as many as its callers use at once.

    Any thread may call it.
    """

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._idle: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()

    @property
    def usable(self) -> bool:
        """Not behind a proxy: boto3 knows how to speak to one."""
        return not get_environ_proxies(self._client.meta.endpoint_url)

    def get_into(
        self,
        place: dict[str, str],
        start: int,
        memory: memoryview,
        deadline: float,
        cancelled: threading.Event | None,
    ) -> int:
        """Fill `memory` with the object's bytes from `start`; returns how many came before it
        ended.

        Raises:
            ClientError: as boto3. OSError, HTTPException: the connection failed. DeadlinePassed:
            `deadline` (monotonic). Cancelled.
        """
        headers = {"Range": f"bytes={start}-{start + len(memory) - 1}"}
        with self._answer("get_object", place, headers, None) as (connection, answer):
            num_bytes = min(len(memory), int(answer.headers.get("Content-Length", len(memory))))
            memory, got = memory[:num_bytes], 0
            read = _reader(connection, answer)
            while got < num_bytes and (count := read(memory[got:])):
                got += count
                check(cancelled, place["Key"])
                if time.monotonic() > deadline:
                    raise DeadlinePassed(f"{got} of {num_bytes} bytes came before the deadline")
            if got == num_bytes:
                answer.close()  # it was read to its end, beside it
        return got

    def put_part(self, place: dict[str, Any], body: memoryview) -> dict[str, str]:
        """Upload one part; returns its ETag and checksum, as `complete_multipart_upload` wants
        them. Raises as `get_into`.
        """
        checksum = base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()
        headers = {"x-amz-checksum-crc32c": checksum, "Content-Length": str(len(body))}
        with self._answer("upload_part", {**place, "ChecksumCRC32C": checksum}, headers, body) as (
            _,
            answer,
        ):
            return {"ETag": answer.headers["ETag"], "ChecksumCRC32C": checksum}

    @contextlib.contextmanager
    def _answer(
        self,
        operation: str,
        place: dict[str, Any],
        headers: dict[str, str],
        body: memoryview | None,
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        """The head of the answer to one request.

        The connection is kept for the next if the answer was read to its end.
        """
        url = self._client.generate_presigned_url(operation, Params=place, ExpiresIn=EXPIRES_S)
        parts = urllib.parse.urlsplit(url)
        connection = self._connection(parts)
        try:
            target = f"{parts.path}?{parts.query}"
            connection.request("GET" if body is None else "PUT", target, body, headers)
            answer = connection.getresponse()
            if answer.status not in (200, 206):
                raise _client_error(operation, answer)
            yield connection, answer
            if answer.isclosed() or not answer.read(1):
                self._idle.put(connection)
                connection = None  # type: ignore[assignment]
        finally:
            if connection is not None:
                connection.close()

    def _connection(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self._idle.get_nowait()
                if _is_open(connection):
                    return connection
                connection.close()
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self._timeout_s)

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has not hung up meanwhile: nothing is to be read of a connection that
    waits for its next request.
    """
    if connection.sock is None:
        return False
    readable = select.poll()
    readable.register(connection.sock, select.POLLIN)
    return not readable.poll(0)


def _reader(
    connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
) -> Callable[[memoryview], int]:
    """What fills memory with more of the answer's body: over plain TCP straight from the socket,
    once the little that came with the head, in the answer's buffer, is used up.
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
        memory[:count], buffered = buffered[:count], buffered[count:]
        return count

    return read


def _client_error(operation: str, answer: http.client.HTTPResponse) -> boto.ClientError:
    found = {"Code": str(answer.status), "Message": answer.reason}
    with contextlib.suppress(ElementTree.ParseError):
        for element in ElementTree.fromstring(answer.read(1 << 16)):
            found[element.tag.rpartition("}")[2]] = element.text or ""
    response: Any = {"Error": found, "ResponseMetadata": {"HTTPStatusCode": answer.status}}
    return boto.ClientError(response, operation)
