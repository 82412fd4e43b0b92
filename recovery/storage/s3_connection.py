"""Requests to one S3 bucket: each has a deadline, a bounded number of tries and an error of ours.

boto3's own retries are off, so that one place decides. Which requests there are is the matter of
`s3`, `s3_download` and `s3_upload`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from recovery.cancellation import call_until, pause
from recovery.storage.errors import (
    ObjectTruncated,
    RequestRefused,
    StorageError,
    StorageUnsupported,
)
from recovery.storage.protocol import BandwidthLimit, StorageOptions
from recovery.storage.retry import Patience, RetrySchedule
from recovery.storage.s3_client import S3Client
from recovery.storage.s3_errors import (
    S3_FAILURES,
    reads_new_credentials,
    refuses_checksums,
    release_frames,
    translate,
)
from recovery.storage.s3_transfer import S3Transfer

T = TypeVar("T")


@dataclass(frozen=True)
class S3Connection:
    """Connection to the objects `s3://bucket/prefix/name`. Threads share it.

    A copy with another `cancelled` or `patience` shares client, sockets and bandwidth.
    """

    bucket: str
    prefix: str
    """Beginning of every key: empty, or it ends with a slash."""
    options: StorageOptions
    client: S3Client
    transfer: S3Transfer
    bandwidth: BandwidthLimit
    cancelled: threading.Event | None
    """Event that ends every request with Cancelled."""
    patience: Patience

    @classmethod
    def open(cls, bucket: str, prefix: str, options: StorageOptions) -> S3Connection:
        """Prepare a connection; the first request makes its client."""
        transfer = S3Transfer(min(30.0, options.request_timeout_s))
        return cls(
            bucket,
            f"{prefix}/" if prefix else "",
            options,
            S3Client(bucket, options, transfer.attach),
            transfer,
            BandwidthLimit(options.max_bytes_per_s),
            cancelled=None,
            patience=Patience(),
        )

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".removesuffix("/")

    def target(self, name: str) -> dict[str, Any]:
        """Return the fields of a request that name the object."""
        return {"Bucket": self.bucket, "Key": self.prefix + name}

    def page(self, name: str, list_page: Callable[[Any, str], dict[str, Any]]) -> dict[str, Any]:
        """Return one page of a list by the prefix `name`; `list_page` gets client and key prefix.

        Directory buckets take no prefix that does not end in a slash: the caller gets the objects
        of the whole folder then, and leaves out what it has not asked for.
        """
        prefix = self.prefix + name
        folder = prefix[: prefix.rfind("/") + 1]
        if not self.client.lists_folders_alone:
            try:
                return self.call(name, lambda client: list_page(client, prefix))
            except (RequestRefused, StorageUnsupported):
                if prefix == folder:
                    raise
                found = self.call(name, lambda client: list_page(client, folder))
                self.client.lists_folders_alone = True
                return found
        return self.call(name, lambda client: list_page(client, folder))

    def take_bandwidth(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        self.bandwidth.take(num_bytes, self.cancelled)

    def call(self, name: str, request: Callable[[Any], T]) -> T:
        """Run one request on boto3's client, with retries for errors that a retry can help.

        It ends when it works, when the tries are used up, or at the deadline, each extended as
        `patience` allows. Expired credentials are read again once.
        """
        uri = f"{self.uri}/{name}"
        schedule = RetrySchedule(self.options, self.patience.seconds, time.monotonic())
        renewed = False
        while True:
            generation = self.client.generation
            try:
                answer = call_until(self.cancelled, lambda: request(self.client.get()), uri)
                if schedule.is_late:
                    self.patience.note_answer(self.uri, time.monotonic())
                return answer
            except (*S3_FAILURES, ObjectTruncated) as error:
                ours, again = translate(uri, error)
                renews = not renewed and reads_new_credentials(error)
                bare = self.client.sends_checksums and refuses_checksums(error)
                release_frames(error)
            if renews:
                renewed = True
                self.client.renew(generation)
                continue
            if bare:
                self.client.stop_checksums()
                continue
            pause_s = self._next_pause_s(schedule, ours) if again else None
            if pause_s is None:
                # outside of `except`: boto3's error as its cause would hold connections where ours
                # is kept
                raise ours
            if schedule.is_late:
                self.patience.note_wait(ours, time.monotonic())
            pause(self.cancelled, pause_s, uri, self.patience.until)

    def _next_pause_s(self, schedule: RetrySchedule, error: StorageError) -> float | None:
        """Return the seconds to wait before the next try; None: no more tries.

        There is no patience for an object that is cut short: it does not grow in minutes.
        """
        patient = self.patience.seconds > 0.0 and not isinstance(error, ObjectTruncated)
        return schedule.next_pause_s(time.monotonic(), patient=patient)

    def close(self) -> None:
        self.transfer.close()
        self.client.close()


def date_of(answer: dict[str, Any]) -> float | None:
    """Return the date of an answer by the server's clock, in whole seconds, as object times are."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date).timestamp() if date else None
