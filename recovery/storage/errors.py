"""Errors of durable storage.

Each error names the place, the problem and the remedy, and can be pickled across processes.
"""

from typing import Any

from recovery.errors import RecoveryError


class StorageError(RecoveryError):
    """Durable storage refused or failed.

    `uri` is the object or the storage, `remedy` what a person can do about it.
    """

    def __init__(self, uri: str, reason: str, remedy: str = "") -> None:
        super().__init__(uri, reason, remedy)
        self.uri = uri
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.uri, self.reason, self.remedy)

    def __str__(self) -> str:
        return f"{self.uri}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


class StorageUriError(StorageError, ValueError):
    """The URI names no storage that this package knows."""


class StoragePermissionDenied(StorageError):
    """Raised if the storage denies access to this user, or if no credentials were found."""


class BucketMissing(StorageError):
    """The bucket does not exist."""


class StorageUnsupported(StorageError):
    """The storage does not know this operation, or this header."""


class ObjectMissing(StorageError):
    """The named object does not exist."""


class StorageMisplaced(StorageError):
    """Raised when what was written is gone: something else lies at the storage's place.

    For example another file system, or an empty directory.
    """


class ObjectExists(StorageError):
    """A conditional put found that the object exists already."""


class RequestRefused(StorageError):
    """The storage refused a request for a reason that has no class of its own."""


class UploadGone(StorageError):
    """The storage knows no such upload in parts: it was aborted, or completed."""


class ObjectTruncated(StorageError):
    """Raised if fewer bytes came than the object should have."""


class StorageFull(StorageError):
    """No space left, or a quota is used up."""


class StorageUnreachable(StorageError):
    """No answer, or only server errors, after every attempt."""


class StorageFailing(StorageUnreachable):
    """The storage answers, but with server errors (S3: 500) after every attempt."""


class StorageThrottled(StorageError):
    """The storage asks for fewer requests (S3: 503 SlowDown), after every attempt."""


PASSING = (StorageFailing, StorageThrottled)
"""Errors of a storage that answers, but serves no requests for now."""


class StorageTimeout(StorageError, TimeoutError):
    """A call or a wait went past its deadline."""
