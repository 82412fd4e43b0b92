"""Durable storage in an S3 bucket, or behind any server that speaks its protocol, through boto3.

Parallel multipart uploads and ranged GETs. Every request has a deadline, a bounded number of tries
with exponential backoff and jitter, and an error of ours. boto3's own retries are off, so that one
place decides.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, TypeVar

from recovery.cancellation import call_until, check, either, pause
from recovery.errors import Cancelled
from recovery.storage.claims import CLAIMS, put_by_claim
from recovery.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StorageTimeout,
    StorageUnsupported,
    UploadGone,
)
from recovery.storage.own_names import is_own_name
from recovery.storage.payload import Buffer, Payload, as_payload
from recovery.storage.protocol import BandwidthLimit, ObjectInfo, Storage, StorageOptions
from recovery.storage.retry import Patience, RetrySchedule
from recovery.storage.s3_client import ClientFacts, S3Client
from recovery.storage.s3_errors import (
    S3_FAILURES,
    denied_deletion,
    reads_new_credentials,
    refuses_checksums,
    release_frames,
    translate,
)
from recovery.storage.s3_transfer import DeadlinePassed, S3Transfer, checksum_of

MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
_DELETE_BATCH = 1000
_STREAM_BYTES = 1 << 20
T = TypeVar("T")


class S3Storage:
    """Objects are `s3://bucket/prefix/name`.

    Threads share one client; pickles as its URI and options.
    """

    def __init__(self, bucket: str, prefix: str, options: StorageOptions) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options
        self._bandwidth = BandwidthLimit(options.max_bytes_per_s)
        self._transfer = S3Transfer(min(30.0, options.request_timeout_s))
        self._s3 = S3Client(bucket, options, self._transfer.attach)
        self._cancelled: threading.Event | None = None
        self._patience = Patience()
        self._begun: set[str] = set()
        """Ids of the uploads in parts that were begun here and are not completed."""

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        return S3Storage, (self._bucket, self._prefix.removesuffix("/"), self._options)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".removesuffix("/")

    @property
    def options(self) -> StorageOptions:
        return self._options

    @property
    def client(self) -> Any:
        """boto3's client, for requests that the protocol has no word for."""
        return self._s3.get()

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        payload = as_payload(data)
        if not if_none_match:
            self._put_any(name, payload)
        elif self.honours_conditions():
            self._put_whole(name, payload, {"IfNoneMatch": "*"})
        else:
            put_by_claim(self, name, payload)

    def honours_conditions(self) -> bool:
        """Return True if the store refuses a conditional put to a name that is taken.

        Probed once: some stores answer 501, others overwrite.
        """
        if self._s3.conditional is None:
            self._s3.conditional = self._probe_conditions()
        return self._s3.conditional

    def facts(self) -> ClientFacts:
        """Return region and endpoint as the client has them."""
        return self._call("", lambda _: self._s3.facts())

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = "" if length is None else start + length - 1
        condition = {"Range": f"bytes={start}-{end}"} if start or length is not None else {}

        def fetch(client: Any) -> bytes:
            return bytes(client.get_object(**self._object(name), **condition)["Body"].read())

        data = self._call(name, fetch)
        self._bandwidth.take(len(data), self._cancelled)
        return data

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        self._bandwidth.take(len(buffer), self._cancelled)
        self._call(name, lambda client: self._fetch_into(client, name, start, buffer))

    def size(self, name: str) -> int | None:
        try:
            answer = self._call(name, lambda client: client.head_object(**self._object(name)))
        except ObjectMissing:
            return None
        return int(answer["ContentLength"])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._call(prefix, lambda client: client.list_objects_v2(**request))
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(self._prefix)
                yield ObjectInfo(name, int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, names: Iterable[str]) -> None:
        remaining = iter(names)
        while batch := list(islice(remaining, _DELETE_BATCH)):
            try:
                self._delete_batch(batch)
            except StorageUnsupported:  # stores without DeleteObjects
                for name in batch:
                    self._delete_one(name)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        oldest = self.now() - older_than_s
        stale = [
            item
            for item in self._uploads(prefix)
            if item["Initiated"].timestamp() < oldest and self._is_own(item)
        ]
        for item in stale:
            self._abort(item["Key"], item["UploadId"])
        return len(stale)

    def now(self) -> float:
        answer = self._call(
            "", lambda client: client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        )
        return _date_of(answer) or time.time()

    def until(self, cancelled: threading.Event) -> Storage:
        return self._bound(_cancelled=either(self._cancelled, cancelled))

    def patient(
        self,
        patience_s: float,
        on_wait: Callable[[StorageError], None] | None = None,
        until: threading.Event | None = None,
    ) -> Storage:
        return self._bound(_patience=Patience(patience_s, on_wait, until))

    def close(self) -> None:
        self._transfer.close()
        self._s3.close()

    def _bound(self, **changed: Any) -> S3Storage:
        bound = object.__new__(S3Storage)  # not a copy: `__reduce__` would open it anew
        vars(bound).update(vars(self), **changed)
        return bound

    def _object(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _probe_conditions(self) -> bool:
        """Probe whether the store honours conditional puts.

        The probe's object stays: workers may lack the right to delete, and the next probe is one
        request if it is found.
        """
        name, condition = f"{CLAIMS}probe", {"IfNoneMatch": "*"}
        try:
            self._put_whole(name, as_payload(b"1"), condition)
            self._put_whole(name, as_payload(b"2"), condition)
        except ObjectExists:
            return True
        except StorageUnsupported:
            return False
        return False

    def _put_any(self, name: str, payload: Payload) -> None:
        if payload.size > max(self._options.part_bytes, MIN_PART_BYTES):
            self._put_parts(name, payload)
        else:
            self._put_whole(name, payload, {})

    def _put_whole(self, name: str, payload: Payload, condition: dict[str, str]) -> None:
        """Put the object by one request.

        Conditional puts always go this way: some stores honour the condition here, and ignore it
        when a multipart upload is completed.
        """
        body = bytes(payload.read(0, payload.size))
        self._bandwidth.take(len(body), self._cancelled)
        checksum = checksum_of(body)

        def send(client: Any) -> Any:
            sums = {"ChecksumCRC32C": checksum} if self._s3.sends_checksums else {}
            return client.put_object(**self._object(name), Body=body, **sums, **condition)

        self._call(name, send)

    def _put_parts(self, name: str, payload: Payload) -> None:
        """Put the object by a multipart upload, not visible until all parts are there.

        At most `concurrency` parts are in memory and in flight.
        """
        part_bytes = max(self._options.part_bytes, MIN_PART_BYTES, -(-payload.size // MAX_PARTS))
        target = self._object(name)
        opened = self._call(name, lambda client: self._open_upload(client, target))
        upload_id = opened["UploadId"]
        self._begun.add(upload_id)

        def send(number: int) -> dict[str, Any]:
            offset = (number - 1) * part_bytes
            body = memoryview(payload.read(offset, min(part_bytes, payload.size - offset)))
            self._bandwidth.take(len(body), self._cancelled)
            part = {**target, "UploadId": upload_id, "PartNumber": number}
            if opened["sends_checksums"]:
                part["ChecksumCRC32C"] = checksum_of(body)
            return self._call(name, lambda client: self._put_part(client, part, body))

        try:
            parts = _in_parallel(
                send, range(1, -(-payload.size // part_bytes) + 1), self._options.concurrency
            )
            done = {**target, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
            self._complete(name, done, payload.size, _date_of(opened) or 0.0)
            self._begun.discard(upload_id)
        except BaseException:
            with contextlib.suppress(StorageError, Cancelled):
                self._abort(target["Key"], upload_id)
            raise

    def _open_upload(self, client: Any, target: dict[str, Any]) -> dict[str, Any]:
        sends_checksums = self._s3.sends_checksums
        algorithm = {"ChecksumAlgorithm": "CRC32C"} if sends_checksums else {}
        opened = client.create_multipart_upload(**target, **algorithm)
        return {**opened, "sends_checksums": sends_checksums}

    def _complete(self, name: str, request: dict[str, Any], size: int, opened_at: float) -> None:
        """Complete a multipart upload, or see that an earlier try has completed it.

        If a reply is lost, some servers (not AWS) answer the next try that there is no such upload.
        The object then exists, with this size and younger than the upload.
        """
        try:
            self._call(name, lambda client: client.complete_multipart_upload(**request))
        except UploadGone as gone:
            try:
                there = self._call(name, lambda client: client.head_object(**self._object(name)))
            except ObjectMissing:
                raise gone from None
            if int(there["ContentLength"]) != size or there["LastModified"].timestamp() < opened_at:
                raise

    def _put_part(self, client: Any, part: dict[str, Any], body: memoryview) -> dict[str, Any]:
        if self._transfer.usable:
            sent = self._transfer.put_part(client, part, body)
        else:
            sent = {"ETag": client.upload_part(**part, Body=bytes(body))["ETag"]}
        done: dict[str, Any] = {"PartNumber": part["PartNumber"], **sent}
        # Given back at completion, S3 checks the whole.
        if "ChecksumCRC32C" in part:
            done["ChecksumCRC32C"] = part["ChecksumCRC32C"]
        return done

    def _is_own(self, upload: dict[str, Any]) -> bool:
        """Return True if an unfinished upload was begun here or by another process of this package.

        Others may share the bucket, and a prefix proves nothing.
        """
        return upload["UploadId"] in self._begun or is_own_name(upload["Key"])

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield the unfinished uploads under a prefix."""
        request = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._call(prefix, lambda client: client.list_multipart_uploads(**request))
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(request["Prefix"]):  # be sure of it
                    yield item
            if not page.get("IsTruncated"):
                return
            request["KeyMarker"] = page["NextKeyMarker"]
            request["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _delete_batch(self, names: Sequence[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        request = {"Bucket": self._bucket, "Delete": {"Objects": keys, "Quiet": True}}
        answer = self._call(names[0], lambda client: client.delete_objects(**request))
        for error in answer.get("Errors", ()):
            uri = f"s3://{self._bucket}/{error.get('Key')}"
            raise denied_deletion(uri, error.get("Code", ""), error.get("Message", ""))

    def _delete_one(self, name: str) -> None:
        with contextlib.suppress(ObjectMissing):
            self._call(name, lambda client: client.delete_object(**self._object(name)))

    def _abort(self, key: str, upload_id: str) -> None:
        request = {"Bucket": self._bucket, "Key": key, "UploadId": upload_id}
        with contextlib.suppress(ObjectMissing, UploadGone):
            self._call(key, lambda client: client.abort_multipart_upload(**request))

    def _fetch_into(self, client: Any, name: str, start: int, buffer: memoryview) -> None:
        stop_at = time.monotonic() + self._options.request_timeout_s
        if self._transfer.usable:
            try:
                got = self._transfer.get_into(
                    client, self._object(name), start, buffer, stop_at, self._cancelled
                )
            except DeadlinePassed as error:
                raise StorageTimeout(f"{self.uri}/{name}", str(error)) from error
            self._require(name, start, got, buffer)
            return
        span = f"bytes={start}-{start + len(buffer) - 1}"
        body = client.get_object(**self._object(name), Range=span)["Body"]
        got = 0
        try:
            while got < len(buffer) and (piece := body.read(min(_STREAM_BYTES, len(buffer) - got))):
                buffer[got : got + len(piece)] = piece
                got += len(piece)
                check(self._cancelled, name)
                if time.monotonic() > stop_at:
                    raise StorageTimeout(
                        f"{self.uri}/{name}",
                        f"{got} of {len(buffer)} bytes came before the deadline",
                    )
        finally:
            if got < len(buffer):
                body.close()  # else the connection goes back to the pool
        self._require(name, start, got, buffer)

    def _require(self, name: str, start: int, got: int, buffer: memoryview) -> None:
        if got < len(buffer):
            raise ObjectTruncated(
                f"{self.uri}/{name}", f"{got} bytes came of the {len(buffer)} from {start}"
            )

    def _call(self, name: str, request: Callable[[Any], T]) -> T:
        """Run one request, with retries for errors that a retry can help.

        It ends when it works, when the tries are used up, or at the deadline, each extended as
        `patient` allows. Expired credentials are read again once.
        """
        uri = f"{self.uri}/{name}"
        schedule = RetrySchedule(self._options, self._patience.seconds, time.monotonic())
        renewed = False
        while True:
            generation = self._s3.generation
            try:
                answer = call_until(self._cancelled, lambda: request(self._s3.get()), uri)
                if schedule.is_late:
                    self._patience.note_answer(self.uri, time.monotonic())
                return answer
            except (*S3_FAILURES, ObjectTruncated) as error:
                ours, again = translate(uri, error)
                renews = not renewed and reads_new_credentials(error)
                bare = self._s3.sends_checksums and refuses_checksums(error)
                release_frames(error)
            if renews:
                renewed = True
                self._s3.renew(generation)
                continue
            if bare:
                self._s3.stop_checksums()
                continue
            pause_s = self._next_pause_s(schedule, ours) if again else None
            if pause_s is None:
                # outside of `except`: boto3's error as its cause would hold connections where ours
                # is kept
                raise ours
            if schedule.is_late:
                self._patience.note_wait(ours, time.monotonic())
            pause(self._cancelled, pause_s, uri, self._patience.until)

    def _next_pause_s(self, schedule: RetrySchedule, error: StorageError) -> float | None:
        """Return the seconds to wait before the next try; None: no more tries.

        There is no patience for an object that is cut short: it does not grow in minutes.
        """
        patient = self._patience.seconds > 0.0 and not isinstance(error, ObjectTruncated)
        return schedule.next_pause_s(time.monotonic(), patient=patient)


def _date_of(answer: dict[str, Any]) -> float | None:
    """Return the date of an answer by the server's clock, in whole seconds, as object times are."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else None


def _in_parallel(action: Callable[[int], T], numbers: Iterable[int], concurrency: int) -> list[T]:
    """Run the action for all numbers; return the results in order.

    Stops at the first error, which it raises. Threads are joined on return.
    """
    with ThreadPoolExecutor(concurrency, thread_name_prefix="s3-part") as pool:
        futures: list[Future[T]] = [pool.submit(action, number) for number in numbers]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        failed = next(
            (f for f in futures if f.done() and not f.cancelled() and f.exception()), None
        )
        return [f.result() for f in ([failed] if failed else futures)]
