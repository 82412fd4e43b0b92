"""Uploads to an S3 bucket: by one request, or in parallel parts."""

import contextlib
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recovery.errors import Cancelled
from recovery.storage.errors import ObjectMissing, StorageError, UploadGone
from recovery.storage.own_names import is_own_name
from recovery.storage.payload import Payload
from recovery.storage.s3_connection import S3Connection, date_of
from recovery.storage.s3_transfer import checksum_of

MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
T = TypeVar("T")


def put_whole(
    connection: S3Connection, name: str, payload: Payload, condition: dict[str, str]
) -> None:
    """Put the object by one request.

    Conditional puts always go this way: some stores honour the condition here, and ignore it
    when a multipart upload is completed.
    """
    body = bytes(payload.read(0, payload.size))
    connection.take_bandwidth(len(body))
    checksum = checksum_of(body)

    def send(client: Any) -> Any:
        sums = {}
        if connection.client.sends_checksums:
            sums["ChecksumCRC32C"] = checksum
        return client.put_object(**connection.target(name), Body=body, **sums, **condition)

    connection.call(name, send)


@dataclass(frozen=True)
class MultipartUploads:
    """Uploads in parts over one connection."""

    connection: S3Connection
    unfinished: set[str] = field(default_factory=set)
    """Ids of the uploads that were begun here and are not completed."""

    def takes(self, payload: Payload) -> bool:
        """Return True if the payload is too large for one request."""
        return payload.size > max(self.connection.options.part_bytes, MIN_PART_BYTES)

    def _part_bytes(self, payload: Payload) -> int:
        needed_bytes = _quotient_up(payload.size, MAX_PARTS)
        return max(self.connection.options.part_bytes, MIN_PART_BYTES, needed_bytes)

    def checksum_of(self, payload: Payload) -> str:
        """Return the CRC-32C that S3 records with this object.

        Of an object in parts it is the checksum of the parts' checksums, and their number (AWS,
        "Checking object integrity", composite checksums).
        """
        if not self.takes(payload):
            return checksum_of(memoryview(payload.read(0, payload.size)))
        part_bytes = self._part_bytes(payload)
        parts = []
        for offset in range(0, payload.size, part_bytes):
            length = min(part_bytes, payload.size - offset)
            part = memoryview(payload.read(offset, length))
            parts.append(b64decode(checksum_of(part)))
        return f"{checksum_of(b''.join(parts))}-{len(parts)}"

    def put(self, name: str, payload: Payload) -> None:
        """Put the object, not visible until all parts are there.

        At most `concurrency` parts are in memory and in flight.
        """
        connection = self.connection
        part_bytes = self._part_bytes(payload)
        num_parts = _quotient_up(payload.size, part_bytes)

        target = connection.target(name)
        opened = connection.call(name, lambda client: self._open(client, target))
        upload_id = opened["UploadId"]
        self.unfinished.add(upload_id)

        def send(number: int) -> dict[str, Any]:
            offset = (number - 1) * part_bytes
            length = min(part_bytes, payload.size - offset)
            body = memoryview(payload.read(offset, length))
            connection.take_bandwidth(len(body))
            part = {**target, "UploadId": upload_id, "PartNumber": number}
            if opened["sends_checksums"]:
                part["ChecksumCRC32C"] = checksum_of(body)
            return connection.call(name, lambda client: self._put_part(client, part, body))

        try:
            # S3 numbers parts from 1.
            numbers = range(1, num_parts + 1)
            parts = _in_parallel(send, numbers, connection.options.concurrency)
            done = {**target, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
            self._complete(name, done, payload.size, date_of(opened) or 0.0)
            self.unfinished.discard(upload_id)
        except BaseException:
            with contextlib.suppress(StorageError, Cancelled):
                self._abort(target["Key"], upload_id)
            raise

    def abort_begun_before(self, oldest: float, prefix: str) -> int:
        """Abort own uploads under `prefix` that were begun before `oldest`; return their number.

        `oldest` is a time of the store's clock.
        """
        stale = []
        for upload in self._list(prefix):
            # Others may share the bucket, and a prefix proves nothing.
            is_old = upload["Initiated"].timestamp() < oldest
            if is_old and (upload["UploadId"] in self.unfinished or is_own_name(upload["Key"])):
                stale.append(upload)

        for upload in stale:
            self._abort(upload["Key"], upload["UploadId"])
        return len(stale)

    def _open(self, client: Any, target: dict[str, Any]) -> dict[str, Any]:
        sends_checksums = self.connection.client.sends_checksums
        algorithm = {}
        if sends_checksums:
            algorithm["ChecksumAlgorithm"] = "CRC32C"
        opened = client.create_multipart_upload(**target, **algorithm)
        return {**opened, "sends_checksums": sends_checksums}

    def _put_part(self, client: Any, part: dict[str, Any], body: memoryview) -> dict[str, Any]:
        transfer = self.connection.transfer
        if transfer.usable:
            sent = transfer.put_part(client, part, body)
        else:
            sent = {"ETag": client.upload_part(**part, Body=bytes(body))["ETag"]}
        done: dict[str, Any] = {"PartNumber": part["PartNumber"], **sent}
        # Given back at completion, S3 checks the whole.
        if "ChecksumCRC32C" in part:
            done["ChecksumCRC32C"] = part["ChecksumCRC32C"]
        return done

    def _complete(self, name: str, request: dict[str, Any], size: int, opened_at: float) -> None:
        """Complete a multipart upload, or see that an earlier try has completed it.

        If a reply is lost, some servers (not AWS) answer the next try that there is no such upload.
        The object then exists, with this size and younger than the upload.
        """
        target = self.connection.target(name)
        call = self.connection.call
        try:
            call(name, lambda client: client.complete_multipart_upload(**request))
        except UploadGone as gone:
            try:
                there = call(name, lambda client: client.head_object(**target))
            except ObjectMissing:
                raise gone from None
            if int(there["ContentLength"]) != size or there["LastModified"].timestamp() < opened_at:
                raise

    def _abort(self, key: str, upload_id: str) -> None:
        request = {"Bucket": self.connection.bucket, "Key": key, "UploadId": upload_id}
        with contextlib.suppress(ObjectMissing, UploadGone):
            self.connection.call(key, lambda client: client.abort_multipart_upload(**request))

    def _list(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield the unfinished uploads under a prefix, whoever began them."""
        connection = self.connection
        request = {"Bucket": connection.bucket}
        while True:
            page = connection.page(
                prefix, lambda client, start: client.list_multipart_uploads(**request, Prefix=start)
            )
            for item in page.get("Uploads", ()):
                # Be sure of it, whatever a server makes of the prefix: uploads of others must stay.
                if item["Key"].startswith(connection.prefix + prefix):
                    yield item
            if not page.get("IsTruncated"):
                return
            request["KeyMarker"] = page["NextKeyMarker"]
            # Directory buckets have no such marker.
            if page.get("NextUploadIdMarker"):
                request["UploadIdMarker"] = page["NextUploadIdMarker"]


def _in_parallel(action: Callable[[int], T], numbers: Iterable[int], concurrency: int) -> list[T]:
    """Run the action for all numbers; return the results in order.

    Stops at the first error, which it raises. Threads are joined on return.
    """
    with ThreadPoolExecutor(concurrency, thread_name_prefix="s3-part") as pool:
        futures: list[Future[T]] = [pool.submit(action, number) for number in numbers]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()

        for future in futures:
            if _has_failed(future):
                future.result()
        return [future.result() for future in futures]


def _has_failed(future: Future[T]) -> bool:
    """Return True if the action has raised; a cancelled one has not run."""
    if not future.done() or future.cancelled():
        return False
    return future.exception() is not None


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
