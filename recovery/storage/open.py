"""Opening of a storage by its URI."""

import os

from recovery.storage.address import DirectoryAddress, parse_address
from recovery.storage.protocol import Storage, StorageOptions


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """Open the storage at `s3://bucket[/prefix]`, `file:///directory` or a plain directory path.

    Contacts nothing yet. Everything about S3 comes from boto3's standard chain
    (`storage/s3_client`): profile, credentials, endpoint (`AWS_ENDPOINT_URL`), CA bundle,
    addressing style, proxies. The region is the bucket's own.

    Raises:
        StorageUriError: names no storage, or would name another place than it says.
    """
    address = parse_address(uri)
    if isinstance(address, DirectoryAddress):
        from recovery.storage.directory import DirectoryStorage

        # Its reads are copies by this machine's processors: more of them at once only take memory.
        most = min(StorageOptions.concurrency, os.cpu_count() or 1)
        return DirectoryStorage(address.path, options or StorageOptions(concurrency=most))
    from recovery.storage.s3 import S3Storage  # boto3 takes 0.3 s to import: only when S3 is used

    return S3Storage(address.bucket, address.prefix, options or StorageOptions())
