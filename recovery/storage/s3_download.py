"""Ranged GETs from an S3 bucket into memory."""

import time
from collections.abc import Iterable
from typing import Any

from recovery.storage.errors import ObjectTruncated, StorageTimeout
from recovery.storage.s3_connection import S3Connection
from recovery.storage.s3_transfer import DeadlinePassed, Target, fill

_STREAM_BYTES = 1 << 20


def get(connection: S3Connection, name: str, start: int, length: int | None) -> bytes:
    """Return `length` bytes of the object from `start`; all of them if `length` is None."""
    if length == 0:
        return b""

    span = {}
    if length is not None:
        span["Range"] = f"bytes={start}-{start + length - 1}"
    elif start:
        span["Range"] = f"bytes={start}-"

    def fetch(client: Any) -> bytes:
        answer = client.get_object(**connection.target(name), **span)
        return bytes(answer["Body"].read())

    data = connection.call(name, fetch)
    connection.take_bandwidth(len(data))
    return data


def download_pieces(
    connection: S3Connection, name: str, span: tuple[int, int], pieces: Iterable[memoryview]
) -> None:
    """Fill `pieces` with the object's bytes of `span`, (start, number of bytes)."""
    start, num_bytes = span
    if not num_bytes:
        return
    connection.take_bandwidth(num_bytes)

    def fetch_whole(client: Any) -> None:
        fetch = _fetch_into if connection.transfer.usable else _stream_into
        got = fetch(connection, client, name, span, pieces)
        if got < num_bytes:
            reason = f"{got} bytes came of the {num_bytes} from {start}"
            raise ObjectTruncated(f"{connection.uri}/{name}", reason)

    connection.call(name, fetch_whole)


def _fetch_into(
    connection: S3Connection,
    client: Any,
    name: str,
    span: tuple[int, int],
    pieces: Iterable[memoryview],
) -> int:
    """Receive straight into the pieces; return the number of bytes that came."""
    stop_at = time.monotonic() + connection.options.request_timeout_s
    place = connection.target(name)
    target = Target(*span, pieces, stop_at, connection.cancelled, place["Key"])
    try:
        return connection.transfer.get_into(client, place, target)
    except DeadlinePassed as error:
        raise StorageTimeout(f"{connection.uri}/{name}", str(error)) from error


def _stream_into(
    connection: S3Connection,
    client: Any,
    name: str,
    span: tuple[int, int],
    pieces: Iterable[memoryview],
) -> int:
    """Copy boto3's stream into the pieces; return the number of bytes that came."""
    stop_at = time.monotonic() + connection.options.request_timeout_s
    start, num_bytes = span
    wanted = f"bytes={start}-{start + num_bytes - 1}"
    body = client.get_object(**connection.target(name), Range=wanted)["Body"]

    def read(memory: memoryview) -> int:
        data = body.read(min(_STREAM_BYTES, len(memory)))
        memory[: len(data)] = data
        return len(data)

    got = 0
    try:
        target = Target(start, num_bytes, pieces, stop_at, connection.cancelled, name)
        got = fill(target, read)
    except DeadlinePassed as error:
        raise StorageTimeout(f"{connection.uri}/{name}", str(error)) from error
    finally:
        if got < num_bytes:
            # Else the connection goes back to the pool, with bytes of this answer in it.
            body.close()
    return got
