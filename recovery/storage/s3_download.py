"""Ranged GETs from an S3 bucket into memory."""

from __future__ import annotations

import time
from typing import Any

from recovery.cancellation import check
from recovery.storage.errors import ObjectTruncated, StorageTimeout
from recovery.storage.s3_connection import S3Connection
from recovery.storage.s3_transfer import DeadlinePassed

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


def get_into(connection: S3Connection, name: str, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the object's bytes from `start`."""
    if not len(buffer):
        return
    connection.take_bandwidth(len(buffer))

    def fetch_whole(client: Any) -> None:
        fetch = _fetch_into if connection.transfer.usable else _stream_into
        got = fetch(connection, client, name, start, buffer)
        if got < len(buffer):
            reason = f"{got} bytes came of the {len(buffer)} from {start}"
            raise ObjectTruncated(f"{connection.uri}/{name}", reason)

    connection.call(name, fetch_whole)


def _fetch_into(
    connection: S3Connection, client: Any, name: str, start: int, buffer: memoryview
) -> int:
    """Receive straight into the buffer; return the number of bytes that came."""
    stop_at = time.monotonic() + connection.options.request_timeout_s
    try:
        return connection.transfer.get_into(
            client, connection.target(name), start, buffer, stop_at, connection.cancelled
        )
    except DeadlinePassed as error:
        raise StorageTimeout(f"{connection.uri}/{name}", str(error)) from error


def _stream_into(
    connection: S3Connection, client: Any, name: str, start: int, buffer: memoryview
) -> int:
    """Copy boto3's stream into the buffer; return the number of bytes that came."""
    stop_at = time.monotonic() + connection.options.request_timeout_s
    span = f"bytes={start}-{start + len(buffer) - 1}"
    body = client.get_object(**connection.target(name), Range=span)["Body"]
    got = 0
    try:
        while got < len(buffer):
            piece = body.read(min(_STREAM_BYTES, len(buffer) - got))
            if not piece:
                break
            buffer[got : got + len(piece)] = piece
            got += len(piece)
            check(connection.cancelled, name)
            if time.monotonic() > stop_at:
                raise StorageTimeout(
                    f"{connection.uri}/{name}",
                    f"{got} of {len(buffer)} bytes came before the deadline",
                )
    finally:
        if got < len(buffer):
            # Else the connection goes back to the pool, with bytes of this answer in it.
            body.close()
    return got
