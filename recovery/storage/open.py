"""From a storage's URI to the object that reads and writes it."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from recovery.storage.errors import StorageUriError
from recovery.storage.protocol import Storage, StorageOptions


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """The storage at `s3://bucket[/prefix]`, `file:///directory` or a plain directory path.
    Contacts nothing yet.

    `AWS_ENDPOINT_URL` (or `AWS_ENDPOINT_URL_S3`) points S3 at any server that speaks its protocol;
    credentials and region come from where boto3 finds them.

    Raises:
        StorageUriError: another scheme, or no bucket.
    """
    options = options or StorageOptions()
    parts = urlsplit(uri) if "://" in uri else None
    if parts is None or parts.scheme == "file":
        return _open_directory(uri, unquote(parts.path) if parts else uri, options)
    if parts.scheme != "s3":
        remedy = "use s3://bucket/prefix, file:///directory or a directory path"
        raise StorageUriError(uri, f"storage scheme {parts.scheme!r} is not known", remedy)
    if not parts.netloc:
        raise StorageUriError(uri, "names no bucket", "write s3://bucket/prefix")
    from recovery.storage.s3 import S3Storage  # boto3 takes 0.3 s to import: only when S3 is used

    return S3Storage(parts.netloc, parts.path.strip("/"), options)


def _open_directory(uri: str, path: str, options: StorageOptions) -> Storage:
    from recovery.storage.directory import DirectoryStorage

    if not path:
        raise StorageUriError(
            uri, "names no directory", "give a directory path or file:///directory"
        )
    return DirectoryStorage(path, options)
