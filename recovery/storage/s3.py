"""Durable storage in an S3 bucket, or behind any server that speaks its protocol, through boto3.

`s3_connection` sends and retries requests, `s3_download` reads ranges, `s3_upload` writes whole
objects and parts.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from recovery.cancellation import either
from recovery.storage import s3_download
from recovery.storage.claims import CLAIMS, put_by_claim
from recovery.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StoragePermissionDenied,
    StorageUnsupported,
)
from recovery.storage.payload import Buffer, Payload, as_payload
from recovery.storage.protocol import ObjectInfo, Storage, StorageOptions
from recovery.storage.retry import Patience
from recovery.storage.s3_client import ClientFacts
from recovery.storage.s3_connection import S3Connection, date_of
from recovery.storage.s3_errors import denied_deletion
from recovery.storage.s3_upload import MultipartUploads, put_whole

_DELETE_BATCH = 1000


class S3Storage:
    """Objects are `s3://bucket/prefix/name`.

    Threads share one client; pickles as its URI and options.
    """

    def __init__(self, bucket: str, prefix: str, options: StorageOptions) -> None:
        self._connection = S3Connection.open(bucket, prefix, options)
        self._multipart = MultipartUploads(self._connection)

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        connection = self._connection
        prefix = connection.prefix.removesuffix("/")
        return S3Storage, (connection.bucket, prefix, connection.options)

    @property
    def uri(self) -> str:
        return self._connection.uri

    @property
    def options(self) -> StorageOptions:
        return self._connection.options

    @property
    def client(self) -> Any:
        """boto3's client, for requests that the protocol has no word for."""
        return self._connection.client.get()

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        connection = self._connection
        payload = as_payload(data)
        if if_none_match:
            if self.honours_conditions():
                put_whole(connection, name, payload, {"IfNoneMatch": "*"})
            else:
                put_by_claim(self, name, payload)
        elif self._multipart.takes(payload):
            self._multipart.put(name, payload)
        else:
            put_whole(connection, name, payload, {})

    def honours_conditions(self) -> bool:
        """Return True if the store refuses a conditional put to a name that is taken.

        Probed once: some stores answer 501, others overwrite.
        """
        client = self._connection.client
        if client.conditional is None:
            client.conditional = _probe_conditions(self._connection)
        return client.conditional

    def facts(self) -> ClientFacts:
        """Return region and endpoint as the client has them."""
        return self._connection.call("", lambda _: self._connection.client.facts())

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return s3_download.get(self._connection, name, start, length)

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.get_pieces(name, start, len(buffer), [buffer])

    def get_pieces(
        self, name: str, start: int, num_bytes: int, pieces: Iterable[memoryview]
    ) -> None:
        """Fill `pieces` one after the other: see `recovery.storage.contents.get_pieces`."""
        s3_download.download_pieces(self._connection, name, (start, num_bytes), pieces)

    def size(self, name: str) -> int | None:
        target = self._connection.target(name)
        try:
            answer = self._connection.call(name, lambda client: client.head_object(**target))
        except ObjectMissing:
            return None
        except StoragePermissionDenied:
            # The answer to a HEAD has no reason, that to a GET has.
            with contextlib.suppress(ObjectTruncated):
                self.get(name, 0, 1)
            raise
        return int(answer["ContentLength"])

    def has_checksum_of(self, name: str, payload: Payload) -> bool:
        """Return True if S3 recorded the CRC-32C of `payload` with the object."""
        target = self._connection.target(name)
        try:
            answer = self._connection.call(
                name, lambda client: client.head_object(**target, ChecksumMode="ENABLED")
            )
        except StorageError:
            # Some stores do not know the header; with KMS it takes a further right.
            return False
        recorded = answer.get("ChecksumCRC32C")
        return recorded is not None and recorded == self._multipart.checksum_of(payload)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        connection = self._connection
        request: dict[str, Any] = {"Bucket": connection.bucket}
        found = []
        while True:
            page = connection.page(
                prefix, lambda client, start: client.list_objects_v2(**request, Prefix=start)
            )
            for item in page.get("Contents", ()):
                name = item["Key"].removeprefix(connection.prefix)
                if not name.startswith(prefix):
                    continue
                modified_s = item["LastModified"].timestamp()
                found.append(ObjectInfo(name, int(item["Size"]), modified_s))
            if not page.get("IsTruncated"):
                # Directory buckets, and some stores, list in an order of their own.
                found.sort(key=lambda info: info.name)
                yield from found
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, names: Iterable[str]) -> None:
        remaining = iter(names)
        while True:
            batch = list(islice(remaining, _DELETE_BATCH))
            if not batch:
                return
            try:
                _delete_batch(self._connection, batch)
            except StorageUnsupported:
                # Some stores have no DeleteObjects.
                for name in batch:
                    _delete_one(self._connection, name)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._multipart.abort_begun_before(self.now() - older_than_s, prefix)

    def now(self) -> float:
        bucket = self._connection.bucket
        answer = self._connection.call(
            "", lambda client: client.list_objects_v2(Bucket=bucket, MaxKeys=1)
        )
        return date_of(answer) or time.time()

    def until(self, cancelled: threading.Event) -> Storage:
        both = either(self._connection.cancelled, cancelled)
        return _over(self, replace(self._connection, cancelled=both))

    def patient(
        self,
        patience_s: float,
        on_wait: Callable[[StorageError], None] | None = None,
        until: threading.Event | None = None,
    ) -> Storage:
        patience = Patience(patience_s, on_wait, until)
        return _over(self, replace(self._connection, patience=patience))

    def close(self) -> None:
        self._connection.close()


def _over(storage: S3Storage, connection: S3Connection) -> S3Storage:
    """Return the same storage over another connection to the same bucket."""
    # Not by the constructor, which would open a client of its own.
    bound = object.__new__(S3Storage)
    bound._connection = connection
    bound._multipart = replace(storage._multipart, connection=connection)
    return bound


def _probe_conditions(connection: S3Connection) -> bool:
    """Probe whether the store honours conditional puts.

    The probe's object stays: workers may lack the right to delete, and the next probe is one
    request if it is found.
    """
    name = f"{CLAIMS}probe"
    condition = {"IfNoneMatch": "*"}
    try:
        put_whole(connection, name, as_payload(b"1"), condition)
        put_whole(connection, name, as_payload(b"2"), condition)
    except ObjectExists:
        return True
    except StorageUnsupported:
        return False
    return False


def _delete_batch(connection: S3Connection, names: Sequence[str]) -> None:
    keys = [{"Key": connection.prefix + name} for name in names]
    request = {"Bucket": connection.bucket, "Delete": {"Objects": keys, "Quiet": True}}
    answer = connection.call(names[0], lambda client: client.delete_objects(**request))
    for error in answer.get("Errors", ()):
        uri = f"s3://{connection.bucket}/{error.get('Key')}"
        raise denied_deletion(uri, error.get("Code", ""), error.get("Message", ""))


def _delete_one(connection: S3Connection, name: str) -> None:
    target = connection.target(name)
    with contextlib.suppress(ObjectMissing):
        connection.call(name, lambda client: client.delete_object(**target))
