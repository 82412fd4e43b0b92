"""boto3's failures as ours: which are worth another try, and what each means to a person."""

from __future__ import annotations

import http.client
import traceback

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from recovery.storage.errors import (
    BucketMissing,
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StorageFull,
    StoragePermissionDenied,
    StorageThrottled,
    StorageUnreachable,
    UploadGone,
)

S3_FAILURES = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
"""Everything that a call through boto3 raises for reasons outside of this program."""

_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "429",
}
_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "AccountProblem",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "Forbidden",
    "401",
    "403",
}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientCapacity", "507"}
_AGAIN = {
    "RequestTimeout",
    "ConditionalRequestConflict",
    "OperationAborted",
    "BadDigest",
    "IncompleteBody",
}


def translate(uri: str, error: Exception) -> tuple[StorageError, bool]:
    """Our error for boto3's, and whether trying again can help."""
    if isinstance(error, boto.ClientError):
        return _from_response(uri, error)
    if isinstance(error, StorageError):
        return error, isinstance(error, ObjectTruncated)
    if isinstance(
        error,
        boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError,
    ):
        remedy = (
            "give the node an instance role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        return StoragePermissionDenied(uri, "no usable AWS credentials were found", remedy), False
    if isinstance(error, boto.ParamValidationError | boto.NoRegionError | boto.InvalidRegionError):
        return StorageError(uri, _one_line(error), "check the bucket's name and AWS_REGION"), False
    remedy = "check the network, the endpoint (AWS_ENDPOINT_URL) and the region"
    return StorageUnreachable(uri, f"no answer ({_one_line(error)})", remedy), True


def release_frames(error: BaseException) -> None:
    """Drop the local variables of the finished calls that `error` and its causes came through.
    urllib3 keeps its error in one of them, a cycle that would hold a pool's connections open until
    the collector comes by.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _from_response(uri: str, error: boto.ClientError) -> tuple[StorageError, bool]:
    detail = error.response.get("Error", {})
    code = str(detail.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    told = f"{code}: {detail.get('Message', '')}".strip(": ")
    if code == "NoSuchBucket":
        return (
            BucketMissing(
                uri, "the bucket does not exist", "create it, or correct checkpoint.storage"
            ),
            False,
        )
    if code in _DENIED or status in (401, 403):
        remedy = (
            "allow s3:GetObject, PutObject, DeleteObject, ListBucket and AbortMultipartUpload on it"
            " for this role"
        )
        return StoragePermissionDenied(uri, f"permission denied ({told})", remedy), False
    if status == 412 or code == "PreconditionFailed":
        return ObjectExists(uri, "exists already"), False
    if code == "NoSuchUpload":
        return (
            UploadGone(uri, "the multipart upload was aborted by someone else", "upload again"),
            False,
        )
    if status == 404:
        return ObjectMissing(uri, "does not exist"), False
    if status == 416:
        return ObjectTruncated(uri, "ends before the range that was asked for"), False
    if code in _FULL or status == 507:
        return StorageFull(uri, f"no space left ({told})", "free space or raise the quota"), False
    if code in _THROTTLED or status in (429, 503):
        remedy = "lower the number of concurrent requests, or spread jobs over several prefixes"
        return StorageThrottled(uri, f"throttled ({told})", remedy), True
    if status >= 500 or code in _AGAIN:
        return StorageUnreachable(uri, f"server error {status} ({told})", "try again later"), True
    return StorageError(uri, f"refused ({told or status})"), False


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
