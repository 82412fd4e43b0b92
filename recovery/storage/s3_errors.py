"""boto3's failures as ours: which are worth another try, and what each means to a person."""

import http.client
import os
import re
import time
import traceback
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import botocore.exceptions as boto
import botocore.session
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from recovery.storage.errors import (
    BucketMissing,
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    RequestRefused,
    StorageError,
    StorageFailing,
    StorageFull,
    StoragePermissionDenied,
    StorageThrottled,
    StorageUnreachable,
    StorageUnsupported,
    UploadGone,
)
from recovery.storage.s3_transfer import RangeIgnored

S3_FAILURES = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    RangeIgnored,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
"""Exceptions that a call through boto3 raises for reasons outside of this program."""

_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "RequestThrottled",
    "BandwidthLimitExceeded",
    "KMS.ThrottlingException",
    "429",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_NO_REASON = {"400", "401", "403"}
"""Codes of refusals without a body, which botocore makes of the status."""
_FOREIGN_KEYS = {
    "InvalidAccessKeyId": "the storage does not know the access key",
    "InvalidClientTokenId": "the storage does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "InvalidToken": "the session token does not belong to the access key",
}
_OTHER_HOST = re.compile("Hostname mismatch|IP address mismatch|doesn't match")
"""What OpenSSL and urllib3 say of a certificate for another host."""
_SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "401", "403"}
_FULL = {
    "QuotaExceeded",
    "InsufficientStorage",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
    "InsufficientCapacity",
    "507",
}
_ELSEWHERE = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
    "301",
    "307",
}
_VIRTUAL_HOST = {"SecondLevelDomainForbidden", "InvalidPathAccess", "VirtualHostStyleRequired"}
_UNSUPPORTED = {"NotImplemented", "XNotImplemented", "MethodNotAllowed", "501", "405"}
_AGAIN = {
    "RequestTimeout",
    "ConditionalRequestConflict",
    "OperationAborted",
    "BadDigest",
    "IncompleteBody",
}
_ACTIONS = {
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject and s3:ListBucket",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "DeleteObjects": "s3:DeleteObject",
    "DeleteObject": "s3:DeleteObject",
}
"""IAM's name of what each S3 operation needs."""
_NEW_KEYS = "renew them where boto3 finds them on every node; a running job reads them by itself"


def translate(uri: str, error: Exception) -> tuple[StorageError, bool]:
    """Return our error for boto3's, and whether trying again can help."""
    if isinstance(error, boto.ClientError):
        return _from_response(uri, error)
    if isinstance(error, StorageError):
        return error, isinstance(error, ObjectTruncated)
    if isinstance(error, RangeIgnored):
        reason = "the store ignores the Range of a GET and sends the whole object"
        return StorageUnsupported(uri, reason, "use another store"), False
    refused = _from_configuration(uri, error)
    if refused is not None:
        return refused, False
    remedy = "check the network, the endpoint (AWS_ENDPOINT_URL) and the region"
    if isinstance(error, boto.ProxyConnectionError):
        remedy = "check HTTPS_PROXY and HTTP_PROXY, or name the endpoint's host in NO_PROXY"
    return StorageUnreachable(uri, f"no answer ({_one_line(error)})", remedy), True


def reads_new_credentials(error: Exception) -> bool:
    """Return True if the request may succeed with credentials that are read again.

    A long process holds the credentials that it began with. The answer to a HEAD has no body: its
    status is all that it says.
    """
    if not isinstance(error, boto.ClientError):
        return False
    code = _code_of(error.response)
    return code in _EXPIRED | set(_FOREIGN_KEYS) | _NO_REASON


def refuses_checksums(error: Exception) -> bool:
    """Return True if the store refuses the headers of CRC checksums.

    Some versions of Backblaze B2, R2 and others do.
    """
    if not isinstance(error, boto.ClientError) or _status_of(error.response) not in (400, 501):
        return False
    if _code_of(error.response) in ("BadDigest", "InvalidDigest"):
        return False
    message = str(error.response.get("Error", {}).get("Message", "")).lower()
    return "checksum" in message and "match" not in message


def denied_deletion(uri: str, code: str, message: str) -> StorageError:
    """Return the error for one object's refusal in an answer to DeleteObjects."""
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {}}
    if code in _DENIED:
        return _denied(uri, boto.ClientError(response, "DeleteObjects"))
    return StorageError(uri, f"not deleted ({code}: {message})")


def release_frames(error: BaseException) -> None:
    """Drop the local variables of the finished calls that `error` and its causes came through.

    urllib3 keeps its error in one of them, a cycle that would hold a pool's connections open until
    the garbage collector runs.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _from_configuration(uri: str, error: Exception) -> StorageError | None:
    """Return the error for a failure before any answer, which the user's configuration must fix."""
    if isinstance(error, boto.ProfileNotFound):
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or ""
        known = sorted(botocore.session.Session().full_config.get("profiles", {}))
        remedy = "set AWS_PROFILE to a profile of ~/.aws/config, or unset it"
        if known:
            remedy = f"set AWS_PROFILE to one of {', '.join(known)}, or unset it"
        return StoragePermissionDenied(uri, f"this machine has no AWS profile '{profile}'", remedy)
    if isinstance(error, boto.SSOError | boto.TokenRetrievalError | boto.LoginError):
        profile = os.environ.get("AWS_PROFILE", "default")
        kind = "SSO login"
        command = "aws sso login"
        if isinstance(error, boto.LoginError):
            kind = "login"
            command = "aws login"
        reason = f"the {kind} of AWS profile '{profile}' has expired or was never made"
        return StoragePermissionDenied(uri, reason, f"run `{command} --profile {profile}`")
    if isinstance(error, boto.CredentialRetrievalError):
        reason = f"AWS credentials could not be fetched ({_one_line(error)})"
        remedy = "check the profile's credential_process or the node's instance role"
        return StoragePermissionDenied(uri, reason, remedy)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        remedy = (
            "give the node an instance role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        return StoragePermissionDenied(uri, "no usable AWS credentials were found", remedy)
    if isinstance(error, boto.SSLError | OSError):
        told = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in told or _OTHER_HOST.search(told):
            return _untrusted(uri, told)
    if isinstance(error, FileNotFoundError | IsADirectoryError) or _bad_bundle(error):
        bundle = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
        reason = f"the CA bundle {bundle or ''} cannot be read ({_one_line(error)})"
        return StorageError(uri, reason, "let AWS_CA_BUNDLE name a file of certificates")
    if isinstance(
        error,
        boto.ParamValidationError
        | boto.NoRegionError
        | boto.InvalidRegionError
        | boto.UnknownEndpointError
        | boto.EndpointResolutionError,
    ):
        return StorageError(uri, _one_line(error), "check the bucket's name and AWS_REGION")
    if isinstance(error, boto.ConfigParseError | boto.ConfigNotFound | boto.InvalidConfigError):
        remedy = "correct AWS_ENDPOINT_URL or the profile in ~/.aws/config"
        return StorageError(uri, _one_line(error), remedy)
    return None


def _bad_bundle(error: Exception) -> bool:
    told = str(error)
    if isinstance(error, boto.SSLError) and "[Errno" in told:
        return "No such file" in told or "directory" in told or "ermission" in told
    return "X509" in told or "NO_CERTIFICATE_OR_CRL_FOUND" in told


def _untrusted(uri: str, told: str) -> StorageError:
    if _OTHER_HOST.search(told):
        reason = "the TLS certificate of the endpoint is for another host name"
        remedy = "let AWS_ENDPOINT_URL name a host of the certificate; with a wildcard"
        remedy += " certificate, buckets may not have dots in their names"
        return StorageError(uri, reason, remedy)
    reason = "the TLS certificate of the endpoint is not trusted"
    remedy = "let AWS_CA_BUNDLE name the file of the authority that signed it, on every node"
    return StorageError(uri, reason, remedy)


def _from_response(uri: str, error: boto.ClientError) -> tuple[StorageError, bool]:
    code = _code_of(error.response)
    status = _status_of(error.response)
    told = _told(error.response)
    found = _from_state(uri, code, status)
    if found is not None:
        return found, False
    # Before refusals: a quota that is used up is a 403 of some stores (Ceph, versitygw).
    if code in _FULL or status == 507:
        return StorageFull(uri, f"no space left ({told})", "free space or raise the quota"), False
    refused = _from_refusal(uri, error)
    if refused is not None:
        return refused, False
    if code in _THROTTLED or status in (429, 503):
        remedy = "lower the number of concurrent requests, or spread jobs over several prefixes"
        return StorageThrottled(uri, f"throttled ({told})", remedy), True
    if code in _UNSUPPORTED or status in (405, 501):
        reason = f"the store does not support {error.operation_name} as it was asked ({told})"
        return StorageUnsupported(uri, reason, "use another store"), False
    if status >= 500 or code in _AGAIN:
        return StorageFailing(uri, f"server error {status} ({told})", "try again later"), True
    return RequestRefused(uri, f"refused ({told or status})"), False


def _from_state(uri: str, code: str, status: int) -> StorageError | None:
    """Return the error for an answer about what is, or is not, in the bucket."""
    if code == "NoSuchBucket":
        remedy = "create it, or correct its name"
        return BucketMissing(uri, "the bucket does not exist", remedy)
    if status == 412 or code == "PreconditionFailed":
        return ObjectExists(uri, "exists already")
    if code == "NoSuchUpload":
        reason = "the multipart upload was aborted by someone else"
        return UploadGone(uri, reason, "upload again")
    if code == "InvalidObjectState":
        remedy = "restore it from the archive, and exclude the prefix from lifecycle transitions"
        return StorageError(uri, "the object was moved to an archive class", remedy)
    if status == 404 and not code.startswith("KMS."):
        return ObjectMissing(uri, "does not exist")
    if status == 416:
        return ObjectTruncated(uri, "ends before the range that was asked for")
    return None


def _from_refusal(uri: str, error: boto.ClientError) -> StorageError | None:
    """Return the error for an answer about the request's identity, time, form or place."""
    code = _code_of(error.response)
    told = _told(error.response)
    if code in _EXPIRED:
        return StoragePermissionDenied(uri, f"the AWS credentials have expired ({told})", _NEW_KEYS)
    if code in _FOREIGN_KEYS:
        reason = f"{_FOREIGN_KEYS[code]} ({told})"
        remedy = "correct the AWS credentials (AWS_PROFILE, or the AWS_... variables) on every node"
        return StoragePermissionDenied(uri, reason, remedy)
    if code in _SKEWED:
        reason = f"this machine's clock {_skew(error.response)} ({told})"
        return StoragePermissionDenied(uri, reason, "set it by NTP (timedatectl set-ntp true)")
    if code in _ELSEWHERE:
        return _elsewhere(uri, error)
    if code in _VIRTUAL_HOST:
        remedy = "put `s3 =` and below it `  addressing_style = virtual` into the profile in"
        remedy += " ~/.aws/config on every node"
        return StorageError(uri, f"the store wants the bucket in the host name ({told})", remedy)
    if code.startswith("KMS.") or code == "KMSNotConfigured":
        remedy = "enable that key, or change the bucket's default encryption"
        return StorageError(uri, f"the KMS key of the bucket cannot be used ({told})", remedy)
    if code == "400":
        reason = f"refused, and the answer to a HEAD has no reason ({told})"
        return StoragePermissionDenied(uri, reason, _NEW_KEYS)
    if code in _DENIED or _status_of(error.response) in (401, 403):
        return _denied(uri, error)
    return None


def _elsewhere(uri: str, error: boto.ClientError) -> StorageError:
    detail: Mapping[str, Any] = error.response.get("Error", {})
    headers = _headers_of(error.response)
    region = detail.get("Region") or headers.get("x-amz-bucket-region")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    place = f"in region {region}" if region else "in another region"
    remedy = f"set AWS_REGION={region}" if region else "set AWS_REGION to the bucket's region"
    if endpoint:
        remedy += f", and unset AWS_ENDPOINT_URL ({endpoint}) or let it name that region"
    return StorageError(uri, f"the bucket lies {place} ({_told(error.response)})", remedy)


def _denied(uri: str, error: boto.ClientError) -> StorageError:
    told = _told(error.response)
    asked = re.search(r"\b(kms|s3|s3express|sts):[A-Z]\w+", told)
    if "kms:" in told.lower() or "AWS KMS" in told or "KMS key" in told:
        lacking = asked[0] if asked is not None else "kms:GenerateDataKey"
        reason = f"{lacking} on the bucket's KMS key is missing ({told})"
        remedy = "allow kms:GenerateDataKey and kms:Decrypt on that key for this role, in its"
        remedy += " policy and in the key's"
        return StoragePermissionDenied(uri, reason, remedy)
    if "object lock" in told.lower() or "WORM" in told:
        reason = f"the object is locked ({told})"
        remedy = "use a bucket without Object Lock for checkpoints, or checkpoint.keep: all"
        return StoragePermissionDenied(uri, reason, remedy)
    action = asked[0] if asked is not None else _ACTIONS.get(error.operation_name, "the operation")
    remedy = f"allow {action} on it for this role"
    if "explicit deny" in told:
        remedy = f"remove the explicit deny of {action} from the policy that has it"
    return StoragePermissionDenied(uri, f"permission denied ({told})", remedy)


def _skew(response: Any) -> str:
    """Describe how far this machine's clock is from the server's."""
    date = _headers_of(response).get("date")
    if not date:
        return "differs from the storage's"
    ahead_s = round(time.time() - parsedate_to_datetime(date).timestamp())
    return f"is {abs(ahead_s)} s {'ahead of' if ahead_s > 0 else 'behind'} the storage's"


def _code_of(response: Any) -> str:
    return str(response.get("Error", {}).get("Code", ""))


def _status_of(response: Any) -> int:
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _headers_of(response: Any) -> Mapping[str, str]:
    headers: Mapping[str, str] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _told(response: Any) -> str:
    detail = response.get("Error", {})
    return f"{detail.get('Code', '')}: {detail.get('Message', '')}".strip(": ")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
