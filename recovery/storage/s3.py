"""Durable storage in an S3 bucket, or behind any server that speaks its protocol, through boto3.

Parallel multipart uploads and ranged GETs. Every request has a deadline, a bounded number of tries
with exponential backoff and jitter, and an error of ours. boto3's own retries are off, so that one
place decides.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import boto3
from botocore.config import Config

from recovery.cancellation import call_until, check, pause
from recovery.errors import Cancelled
from recovery.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StorageTimeout,
    UploadGone,
)
from recovery.storage.payload import Buffer, Payload, as_payload
from recovery.storage.protocol import BandwidthLimit, ObjectInfo, Storage, StorageOptions
from recovery.storage.s3_errors import S3_FAILURES, release_frames, translate
from recovery.storage.s3_transfer import DeadlinePassed, S3Transfer

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
        self._client = _make_client(options)
        self._transfer = S3Transfer(self._client, min(30.0, options.request_timeout_s))
        self._cancelled: threading.Event | None = None

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        return S3Storage, (self._bucket, self._prefix.rstrip("/"), self._options)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def options(self) -> StorageOptions:
        return self._options

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        payload = as_payload(data)
        condition = {"IfNoneMatch": "*"} if if_none_match else {}
        if payload.size > max(self._options.part_bytes, MIN_PART_BYTES):
            self._put_parts(name, payload, condition)
            return
        body = bytes(payload.read(0, payload.size))
        self._bandwidth.take(len(body), self._cancelled)
        self._call(
            name, lambda: self._client.put_object(**self._object(name), Body=body, **condition)
        )

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = "" if length is None else start + length - 1
        condition = {"Range": f"bytes={start}-{end}"} if start or length is not None else {}

        def fetch() -> bytes:
            return bytes(self._client.get_object(**self._object(name), **condition)["Body"].read())

        data = self._call(name, fetch)
        self._bandwidth.take(len(data), self._cancelled)
        return data

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        self._bandwidth.take(len(buffer), self._cancelled)
        self._call(name, lambda: self._fetch_into(name, start, buffer))

    def size(self, name: str) -> int | None:
        try:
            return int(
                self._call(name, lambda: self._client.head_object(**self._object(name)))[
                    "ContentLength"
                ]
            )
        except ObjectMissing:
            return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._call(prefix, lambda: self._client.list_objects_v2(**request))
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(self._prefix)
                yield ObjectInfo(name, int(item["Size"]), item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, names: Iterable[str]) -> None:
        remaining = iter(names)
        while batch := list(islice(remaining, _DELETE_BATCH)):
            keys = [{"Key": self._prefix + name} for name in batch]
            request = {"Bucket": self._bucket, "Delete": {"Objects": keys, "Quiet": True}}
            answer = self._call(batch[0], partial(self._client.delete_objects, **request))
            for error in answer.get("Errors", ()):
                raise StorageError(
                    f"{self.uri}/{error.get('Key')}", f"not deleted ({error.get('Code')})"
                )

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        oldest = self.now() - older_than_s
        request = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        page = self._call(prefix, lambda: self._client.list_multipart_uploads(**request))
        ours = [
            item for item in page.get("Uploads", ()) if item["Key"].startswith(request["Prefix"])
        ]  # be sure of it
        stale = [item for item in ours if item["Initiated"].timestamp() < oldest]
        for item in stale:
            self._abort(item["Key"], item["UploadId"])
        return len(stale)

    def now(self) -> float:
        answer = self._call(
            "", lambda: self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        )
        return _date_of(answer) or time.time()

    def until(self, cancelled: threading.Event) -> Storage:
        bound = object.__new__(
            S3Storage
        )  # not a copy, which would go through `__reduce__` and open it anew
        vars(bound).update(vars(self), _cancelled=cancelled)
        return bound

    def close(self) -> None:
        self._transfer.close()
        self._client.close()

    def _object(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _put_parts(self, name: str, payload: Payload, condition: dict[str, str]) -> None:
        """Multipart: at most `concurrency` parts in memory and in flight; nothing shows until all
        are there.
        """
        part_bytes = max(self._options.part_bytes, MIN_PART_BYTES, -(-payload.size // MAX_PARTS))
        target = self._object(name)
        algorithm = "CRC32C" if self._transfer.usable else "CRC32"
        opened = self._call(
            name,
            lambda: self._client.create_multipart_upload(**target, ChecksumAlgorithm=algorithm),
        )
        upload_id = opened["UploadId"]

        def send(number: int) -> dict[str, Any]:
            offset = (number - 1) * part_bytes
            body = memoryview(payload.read(offset, min(part_bytes, payload.size - offset)))
            self._bandwidth.take(len(body), self._cancelled)
            part = {**target, "UploadId": upload_id, "PartNumber": number}
            return {"PartNumber": number, **self._call(name, lambda: self._put_part(part, body))}

        try:
            parts = _in_parallel(
                send, range(1, -(-payload.size // part_bytes) + 1), self._options.concurrency
            )
            done = {
                **target,
                "UploadId": upload_id,
                "MultipartUpload": {"Parts": parts},
                **condition,
            }
            self._complete(name, done, payload.size, _date_of(opened) or 0.0)
        except BaseException:
            with contextlib.suppress(StorageError, Cancelled):
                self._abort(target["Key"], upload_id)
            raise

    def _complete(self, name: str, request: dict[str, Any], size: int, opened_at: float) -> None:
        """Where a reply is lost, some servers (AWS is none) say to the next try that there is no
        such upload: the object is there then, of this size and younger than the upload.
        """
        try:
            self._call(name, lambda: self._client.complete_multipart_upload(**request))
        except UploadGone as gone:
            try:
                there = self._call(name, lambda: self._client.head_object(**self._object(name)))
            except ObjectMissing:
                raise gone from None
            if int(there["ContentLength"]) != size or there["LastModified"].timestamp() < opened_at:
                raise
            if "IfNoneMatch" in request:  # whose it is, whoever put it sees from what is in it
                raise ObjectExists(f"{self.uri}/{name}", "exists already") from None

    def _put_part(self, part: dict[str, Any], body: memoryview) -> dict[str, str]:
        if self._transfer.usable:
            return self._transfer.put_part(part, body)
        answer = self._client.upload_part(**part, Body=bytes(body))
        return {"ETag": answer["ETag"], **_checksum_of(answer)}

    def _abort(self, key: str, upload_id: str) -> None:
        request = {"Bucket": self._bucket, "Key": key, "UploadId": upload_id}
        with contextlib.suppress(ObjectMissing):
            self._call(key, lambda: self._client.abort_multipart_upload(**request))

    def _fetch_into(self, name: str, start: int, buffer: memoryview) -> None:
        stop_at = time.monotonic() + self._options.request_timeout_s
        if self._transfer.usable:
            try:
                got = self._transfer.get_into(
                    self._object(name), start, buffer, stop_at, self._cancelled
                )
            except DeadlinePassed as error:
                raise StorageTimeout(f"{self.uri}/{name}", str(error)) from error
            self._require(name, start, got, buffer)
            return
        span = f"bytes={start}-{start + len(buffer) - 1}"
        body = self._client.get_object(**self._object(name), Range=span)["Body"]
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

    def _call(self, name: str, request: Callable[[], T]) -> T:
        """Run one request: tries again what can help, until it works, the tries are used up, or the
        deadline.
        """
        uri = f"{self.uri}/{name}"
        stop_at = time.monotonic() + self._options.request_timeout_s
        backoff_s = self._options.backoff_s
        for attempt in range(1, self._options.attempts + 1):
            try:
                return call_until(self._cancelled, request, uri)
            except (*S3_FAILURES, ObjectTruncated) as error:
                ours, again = translate(uri, error)
                release_frames(error)
            pause_s = backoff_s * random.uniform(0.5, 1.5)
            if (
                not again
                or attempt == self._options.attempts
                or time.monotonic() + pause_s > stop_at
            ):
                # outside of `except`: boto3's error as its cause would hold connections where ours
                # is kept
                raise ours
            pause(self._cancelled, pause_s, uri)
            backoff_s *= 2
        raise AssertionError("the last attempt returns or raises")


def _date_of(answer: dict[str, Any]) -> float | None:
    """By the server's clock, in whole seconds, as its objects' times are."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else None


def _make_client(options: StorageOptions) -> Any:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        max_pool_connections=2 * options.concurrency,
        connect_timeout=min(10.0, options.request_timeout_s),
        read_timeout=min(30.0, options.request_timeout_s),
        retries={"total_max_attempts": 1},
        s3={
            "addressing_style": "path"
            if endpoint
            else "auto",  # other servers rarely have a DNS name for each bucket
            # Bodies carry a CRC-32 that the server checks. Hashing them again with SHA-256 is what
            # boto3 does on plain http alone, and what most of an upload's time went to
            # (scripts/benchmarks/results/LOG.md).
            "payload_signing_enabled": False,
        },
    )
    session = boto3.session.Session()
    return session.client("s3", config=config, region_name=session.region_name or "us-east-1")


def _checksum_of(answer: dict[str, Any]) -> dict[str, str]:
    """The part's checksum that S3 computed: given back at completion, S3 checks the whole."""
    return {key: value for key, value in answer.items() if key == "ChecksumCRC32"}


def _in_parallel(action: Callable[[int], T], numbers: Iterable[int], concurrency: int) -> list[T]:
    """Results in order; stops at the first error, which it raises. Threads are joined on return."""
    with ThreadPoolExecutor(concurrency, thread_name_prefix="s3-part") as pool:
        futures: list[Future[T]] = [pool.submit(action, number) for number in numbers]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        failed = next(
            (f for f in futures if f.done() and not f.cancelled() and f.exception()), None
        )
        return [f.result() for f in ([failed] if failed else futures)]
