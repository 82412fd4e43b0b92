"""What `data.source` names: a list of files in one fixed order, each with a mark that changes when
its content may.
"""

import contextlib
import glob
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from autohet.runtime.data.documents import format_of
from autohet.runtime.job import DataSection
from planner.errors import ConfigError

PYTHON_STDLIB = "builtin:python-stdlib"
S3_SCHEME = "s3://"
# Present in some installations and absent from others, or no text that anyone wrote.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"}
)


class SourceFile(NamedTuple):
    """One file: a local path or an s3:// URI, its format, its bytes, and a mark of its version."""

    name: str
    format: str
    size_bytes: int
    mark: str


def list_sources(data: DataSection) -> list[SourceFile]:
    """The files of all sources; ConfigError when one names nothing, or when there is no text in
    any.
    """
    files = [file for source in data.sources for file in _files_of(source, data.format)]
    if not any(file.size_bytes for file in files):
        raise ConfigError(
            f"data.source {', '.join(data.sources)}: all {len(files)} files are empty; add some"
            " text"
        )
    return files


def _files_of(source: str, file_format: str) -> list[SourceFile]:
    if source == PYTHON_STDLIB:
        return _stdlib_files()
    if source.startswith("builtin:"):
        raise ConfigError(
            f"data.source {source!r} is no builtin corpus; the one there is: {PYTHON_STDLIB}"
        )
    if source.startswith(S3_SCHEME):
        found = _s3_objects(source)
    else:
        found = [
            _local_file(path, str(path)) for path in _local_paths(source.removeprefix("file://"))
        ]
    chosen = _with_formats(found, file_format, single=len(found) == 1)
    if not chosen:
        raise ConfigError(
            f"data.source {source!r} holds no text, JSONL or Parquet file (by ending);"
            " set data.format to take all its files as that"
        )
    return chosen


def _with_formats(files: list[SourceFile], file_format: str, single: bool) -> list[SourceFile]:
    """Each file with its format.

    By ending, a file of unknown ending is left out unless it is the only one.
    """
    if file_format != "auto":
        return [file._replace(format=file_format) for file in files]
    formats = [format_of(file.name) or ("text" if single else "") for file in files]
    return [
        file._replace(format=found) for file, found in zip(files, formats, strict=True) if found
    ]


def _local_paths(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        paths = [
            file
            for file in inside
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not paths:
            raise ConfigError(
                f"data.source {source!r} is a directory without files; add data to it"
            )
        return sorted(paths)
    paths = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
    if not paths:
        raise ConfigError(
            f"data.source {source!r} does not exist (no file, directory or glob match); check the"
            " path"
        )
    return sorted(paths)


def _local_file(path: Path, name: str) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the data file {name}: {error}") from error
    return SourceFile(name, "", stat.st_size, f"{stat.st_size}:{stat.st_mtime_ns}")


def _stdlib_files() -> list[SourceFile]:
    """The running Python's own library sources: real text on any machine, the same for equal Python
    versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    version = sys.version.split()[0]
    paths = []
    for directory, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in STDLIB_LEFT_OUT and not name.startswith("config-")
        ]
        chosen = [
            name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
        paths += [Path(directory, name) for name in chosen]
    files = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).parts):
        size = path.stat().st_size
        files.append(SourceFile(str(path), "text", size, f"{version}:{size}"))
    if not files:
        raise ConfigError(
            f"{PYTHON_STDLIB}: this Python has no library sources under {root}; name a text file"
            " instead"
        )
    return files


@contextlib.contextmanager
def local_copy(file: SourceFile, directory: Path) -> Iterator[Path]:
    """A local path with the file's content: itself, or a temporary download of an S3 object into
    `directory`.
    """
    if not file.name.startswith(S3_SCHEME):
        yield Path(file.name)
        return
    suffix = "".join(Path(file.name).suffixes[-2:])
    with tempfile.NamedTemporaryFile(dir=directory, prefix="download-", suffix=suffix) as target:
        bucket, key = _bucket_and_key(file.name)
        with _s3_errors(file.name):
            _s3_client().download_fileobj(bucket, key, target)
        target.flush()
        yield Path(target.name)


def _bucket_and_key(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix(S3_SCHEME).partition("/")
    if not urlparse(uri).netloc:
        raise ConfigError(f"data.source {uri!r} names no bucket; write s3://bucket/prefix")
    return bucket, key


def _s3_objects(source: str) -> list[SourceFile]:
    """The objects under a prefix, or the one object of that very name, in the order of their
    keys.
    """
    bucket, prefix = _bucket_and_key(source)
    found = []
    with _s3_errors(source):
        for page in (
            _s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        ):
            for entry in page.get("Contents", ()):
                if _belongs(entry["Key"], prefix):
                    name = f"{S3_SCHEME}{bucket}/{entry['Key']}"
                    found.append(SourceFile(name, "", entry["Size"], entry["ETag"]))
    if not found:
        raise ConfigError(
            f"data.source {source!r}: no object in bucket {bucket!r} has this prefix; check it"
        )
    exact = [file for file in found if file.name == source]
    return exact or sorted(found)


def _belongs(key: str, prefix: str) -> bool:
    """Whether an object is under the prefix taken as a folder or file name:

    `logs` takes `logs/a`, not `logs-old/a`.
    """
    return not key.endswith("/") and (
        not prefix or prefix.endswith("/") or key == prefix or key.startswith(prefix + "/")
    )


def _s3_client() -> Any:
    """boto3's own client: credentials, region and AWS_ENDPOINT_URL from the environment as
    everywhere.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=10, read_timeout=60, retries={"max_attempts": 5, "mode": "standard"}
    )
    return boto3.client("s3", config=config)


@contextlib.contextmanager
def _s3_errors(uri: str) -> Iterator[None]:
    """boto3's errors as ConfigErrors that say what to do."""
    from botocore.exceptions import BotoCoreError, ClientError

    remedies = {
        "NoSuchBucket": "the bucket does not exist; check its name and the region",
        "NoSuchKey": "the object is gone; the source changed while it was read",
        "AccessDenied": "access denied; the role needs s3:ListBucket and s3:GetObject there",
        "403": "access denied; the role needs s3:ListBucket and s3:GetObject there",
        "404": "the object is gone; the source changed while it was read",
    }
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        raise ConfigError(f"data.source {uri}: {remedies.get(code, str(error))}") from error
    except BotoCoreError as error:
        raise ConfigError(
            f"data.source {uri}: {error}; check credentials, region and AWS_ENDPOINT_URL"
        ) from error
