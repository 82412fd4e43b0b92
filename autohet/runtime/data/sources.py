"""Resolve `data.source` to a list of files in one fixed order.

Each file has a mark that changes whenever its content may have changed.
"""

import contextlib
import glob
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_hexdigest

from autohet.runtime.data.content import (
    RAW_SAMPLE_BYTES,
    Content,
    inspect_content,
    text_format_of,
)
from autohet.runtime.data.hub import HUB_SCHEME, hub_files
from autohet.runtime.data.s3_requests import from_s3, s3_client
from autohet.runtime.data.selection import (
    Candidate,
    LeftOut,
    Selection,
    SourceFile,
    select_of_many,
    select_single,
)
from autohet.runtime.job import DataSection
from autohet.runtime.job.data import SourceEntry
from planner.errors import ConfigError

PYTHON_STDLIB = "builtin:python-stdlib"
S3_SCHEME = "s3://"
S3_SAMPLES_AT_ONCE = 16
# Present in some installations and absent from others, or no text that anyone wrote.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"}
)


def list_sources(data: DataSection) -> list[SourceFile]:
    """Return the files of all sources.

    Raises:
        ConfigError: a source names no file, or no source holds text.
    """
    return select_sources(data).files


def select_sources(data: DataSection) -> Selection:
    """Return the files of all sources in order, and the files left out.

    Raises:
        ConfigError: a source names no file, or no source holds text.
    """
    return joined(select_by_source(data))


def select_by_source(data: DataSection) -> list[Selection]:
    """Return one selection for each source.

    Raises:
        ConfigError: a source names no file, or no source holds text.
    """
    found = [_files_of(entry, data) for entry in data.entries]
    files = joined(found).files
    if not any(file.size_bytes for file in files):
        raise ConfigError(
            f"data.source {', '.join(data.sources)}: all {len(files)} files are empty; add some"
            " text"
        )
    return found


def joined(selections: Iterable[Selection]) -> Selection:
    """Concatenate selections."""
    files: list[SourceFile] = []
    left_out: list[LeftOut] = []
    for each in selections:
        files += each.files
        left_out += each.left_out
    return Selection(files, left_out)


def _files_of(entry: SourceEntry, data: DataSection) -> Selection:
    source = entry.path
    if source.startswith(HUB_SCHEME):
        return Selection(hub_files(entry, data.cache_root), [])
    if source == PYTHON_STDLIB:
        return Selection(_stdlib_files(), [])
    if source.startswith("builtin:"):
        raise ConfigError(
            f"data.source {source!r} is no builtin corpus; the one there is: {PYTHON_STDLIB}"
        )
    field = data.record_field
    if source.startswith(S3_SCHEME):
        found = _s3_candidates(source, field)
        is_named = found[0].file.name == source
        left_out: list[LeftOut] = []
    else:
        listing = _local_paths(source.removeprefix("file://"))
        found = [_local_candidate(path, listing.root, field) for path in sorted(listing.paths)]
        is_named = listing.root is None
        left_out = listing.left_out
    # A file that the source names itself is taken whatever its name.
    if is_named:
        return select_single(found[0], data.format)
    chosen = select_of_many(source, found, data.format)
    return Selection(chosen.files, [*left_out, *chosen.left_out])


class _Listing(NamedTuple):
    """Local files of a source; `root`: the directory that holds them, or None for a single file."""

    paths: list[Path]
    root: Path | None
    left_out: list[LeftOut]


def _local_paths(source: str) -> _Listing:
    path = Path(source).expanduser()
    if path.is_file():
        return _Listing([path], None, [])
    if path.is_dir():
        paths, left_out = _files_below(path)
        if not paths:
            raise ConfigError(
                f"data.source {source!r} is a directory without files; add data to it"
            )
        return _Listing(paths, path, left_out)
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    paths = [match for match in matches if match.is_file()]
    left_out = []
    if not paths:
        # A glob that matches folders alone means the files in them.
        folders = [match for match in matches if match.is_dir()]
        for folder in sorted(folders):
            below, without = _files_below(folder)
            paths += below
            left_out += without
    if not paths:
        raise ConfigError(
            f"data.source {source!r} does not exist (no file, directory or glob match); check the"
            " path"
        )
    root = Path(os.path.commonpath([match.parent for match in matches]))
    return _Listing(sorted(set(paths)), root, left_out)


def _files_below(root: Path) -> tuple[list[Path], list[LeftOut]]:
    """Return the files below a directory, and those left out; follows each folder link once."""
    paths: list[Path] = []
    left_out: list[LeftOut] = []
    entered = {os.path.realpath(root)}
    for directory, folders, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        here = Path(directory).relative_to(root)
        kept = []
        for folder in sorted(folders):
            real = os.path.realpath(os.path.join(directory, folder))
            if folder.startswith("."):
                left_out.append(LeftOut(f"{here / folder}/", "hidden"))
            elif real in entered:
                left_out.append(LeftOut(f"{here / folder}/", "link to a folder read already"))
            else:
                entered.add(real)
                kept.append(folder)
        folders[:] = kept
        for name in names:
            file = Path(directory, name)
            if name.startswith("."):
                left_out.append(LeftOut(str(here / name), "hidden"))
            elif not file.is_file():
                left_out.append(LeftOut(str(here / name), "broken link or no file"))
            else:
                paths.append(file)
    return paths, left_out


def _refuse_folder(error: OSError) -> None:
    raise ConfigError(
        f"cannot list the data folder {error.filename}: {error.strerror}; allow reading it, or name"
        " the others"
    ) from error


def _local_candidate(path: Path, root: Path | None, text_field: str) -> Candidate:
    try:
        stat = path.stat()
        with path.open("rb") as stream:
            raw = stream.read(RAW_SAMPLE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the data file {path}: {error}") from error
    # Copies of other content may have the same size and time, as `cp -p` and `tar` keep it, and
    # the same first bytes. Nothing but the clock sets the time of the last change of status.
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    mark = f"{stat.st_size}:{times}:{xxh3_64_hexdigest(raw)}"
    file = SourceFile(str(path), "", stat.st_size, mark)
    label = path.name if root is None else os.path.relpath(path, root)
    whole = len(raw) == stat.st_size
    content = inspect_content(path.name, raw, text_field=text_field, whole=whole)
    has_field = _has_field(path, content, text_field)
    return Candidate(file, label, content, raw, has_field)


def _has_field(path: Path, content: Content, text_field: str) -> bool:
    """Return False if a local file's first record or its columns lack the text field."""
    if content.record is not None:
        return text_field in content.record
    if content.format == "parquet":
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            return text_field in pq.read_schema(path).names
    return True


def _stdlib_files() -> list[SourceFile]:
    """Return the library sources of the running Python.

    They are real text on any machine, and equal for equal Python versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    version = sys.version.split()[0]
    paths = []
    for directory, folders, names in os.walk(root):
        # In place: `os.walk` enters the folders that are left in the list.
        wanted = [name for name in folders if name not in STDLIB_LEFT_OUT]
        folders[:] = [name for name in wanted if not name.startswith("config-")]
        for name in names:
            # Data about the build of this Python is not the same everywhere.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                paths.append(Path(directory, name))
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
    """Yield a local path with the file's content.

    It is the file itself, or a temporary download of an S3 object into `directory`.
    """
    if not file.name.startswith(S3_SCHEME):
        yield Path(file.name)
        return
    # Two, as in `.jsonl.gz`: the copy's name decides its compression and its format.
    suffix = "".join(Path(file.name).suffixes[-2:])
    with tempfile.NamedTemporaryFile(dir=directory, prefix="download-", suffix=suffix) as target:
        bucket, key = _bucket_and_key(file.name)

        def download() -> None:
            # An attempt that failed may have left a part.
            target.seek(0)
            target.truncate()
            s3_client().download_fileobj(bucket, key, target)

        from_s3(file.name, download)
        target.flush()
        yield Path(target.name)


def _bucket_and_key(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix(S3_SCHEME).partition("/")
    if not urlparse(uri).netloc:
        raise ConfigError(f"data.source {uri!r} names no bucket; write s3://bucket/prefix")
    return bucket, key


def _s3_candidates(source: str, text_field: str) -> list[Candidate]:
    """Return the objects under a prefix in key order, or the one object of that name."""
    bucket, prefix = _bucket_and_key(source)
    client = from_s3(source, s3_client, reached=False)

    def listed() -> list[SourceFile]:
        found = []
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            for entry in page.get("Contents", ()):
                key = entry["Key"]
                if _belongs(key, prefix):
                    name = f"{S3_SCHEME}{bucket}/{key}"
                    found.append(SourceFile(name, "", entry["Size"], entry["ETag"]))
        return found

    files = from_s3(source, listed, reached=False)
    if not files:
        raise ConfigError(
            f"data.source {source!r}: no object in bucket {bucket!r} has this prefix; check it"
        )
    chosen = [file for file in files if file.name == source] or sorted(files)

    def candidate(file: SourceFile) -> Candidate:
        return _s3_candidate(client, file, source, text_field)

    with ThreadPoolExecutor(S3_SAMPLES_AT_ONCE, "data-samples") as pool:
        return list(pool.map(candidate, chosen))


def _s3_candidate(client: Any, file: SourceFile, source: str, text_field: str) -> Candidate:
    """Return an S3 object as a candidate, with its content detected from its first bytes.

    The first bytes are not requested if the object's suffix selects a reader that checks the format
    itself (JSON lines, Parquet).
    """
    label = file.name.removeprefix(source).lstrip("/")
    if not label:
        _, _, label = file.name.rpartition("/")
    suffix = Path(file.name).suffix.lower()
    is_checked_by_reader = suffix in (".jsonl", ".ndjson", ".parquet")
    if is_checked_by_reader or not file.size_bytes:
        return Candidate(file, label, Content(text_format_of(file.name) or "text"))
    bucket, key = _bucket_and_key(file.name)
    last = min(file.size_bytes, RAW_SAMPLE_BYTES) - 1

    def read_first_bytes() -> bytes:
        answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes=0-{last}")
        content: bytes = answer["Body"].read()
        return content

    raw = from_s3(file.name, read_first_bytes)
    whole = len(raw) == file.size_bytes
    content = inspect_content(file.name, raw, text_field=text_field, whole=whole)
    has_field = content.record is None or text_field in content.record
    return Candidate(file, label, content, raw, has_field)


def _belongs(key: str, prefix: str) -> bool:
    """Return True if an object belongs to the prefix, read as the name of a folder or file.

    `logs` takes `logs/a`, not `logs-old/a`.
    """
    # Consoles make an empty object of that name for a folder.
    if key.endswith("/"):
        return False
    if not prefix or prefix.endswith("/"):
        return True
    return key == prefix or key.startswith(prefix + "/")
