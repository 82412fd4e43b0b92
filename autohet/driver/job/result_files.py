"""File system through which Ray's result reads a job's storage."""

from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.fs

from recovery.storage.address import S3Address, parse_address
from recovery.storage.errors import StorageUnsupported
from recovery.storage.protocol import Storage


def filesystem_of(storage: Storage) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system that holds `storage`, and the storage's path in it.

    pyarrow would read `?` and `#` of an S3 URI as a query and a fragment, and sign for a region of
    its own choice: it is given bucket, region and endpoint as the storage's client has them.

    Raises:
        StorageError: the bucket does not answer.
        StorageUnsupported: Ray has no file system for this kind of storage.
    """
    address = parse_address(storage.uri)
    if address.local_path is not None:
        path = Path(address.local_path).absolute().as_posix()
        return pyarrow.fs.LocalFileSystem(), path

    # Only here, since boto3 takes 0.3 s to import.
    from recovery.storage.s3 import S3Storage

    if not isinstance(storage, S3Storage) or not isinstance(address, S3Address):
        raise StorageUnsupported(
            storage.uri,
            "is no directory and no bucket, so Ray cannot read its checkpoints",
            "read them with autohet checkpoint export",
        )
    facts = storage.facts()
    endpoint = urlsplit(facts.endpoint)
    is_aws = (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    filesystem = pyarrow.fs.S3FileSystem(
        region=facts.region or facts.signing_region,
        scheme=endpoint.scheme,
        endpoint_override=None if is_aws else endpoint.netloc,
    )
    path = address.bucket
    if address.prefix:
        path += f"/{address.prefix}"
    return filesystem, path
