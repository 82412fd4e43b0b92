"""Durable storage in a directory that every node sees.

It is on NFS, FSx, or the local disk of a one-machine run.
"""

import contextlib
import errno
import os
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from recovery.cancellation import call_until, either
from recovery.storage.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StorageFull,
    StoragePermissionDenied,
    StorageUnsupported,
)
from recovery.storage.payload import Buffer, Payload, as_payload, pieces_of
from recovery.storage.protocol import BandwidthLimit, ObjectInfo, Storage, StorageOptions

TEMPORARY_PREFIX = ".writing-"
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + r"([0-9a-f]{32})-([0-9a-f]{8})$")
_BUFFER_BYTES = 64 << 10
"""Bytes that are gathered before they are written; a larger piece is written as it is."""
T = TypeVar("T")


class DirectoryStorage:
    """Objects are files below `path`.

    A put writes a temporary file, fsyncs it, renames it, fsyncs the directory.
    """

    def __init__(self, path: str, options: StorageOptions) -> None:
        self._root = Path(path).expanduser().absolute()
        self._options = options
        self._bandwidth = BandwidthLimit(options.max_bytes_per_s)
        self._cancelled: threading.Event | None = None

    def __reduce__(self) -> tuple[Callable[[str, StorageOptions], Storage], tuple[Any, ...]]:
        return DirectoryStorage, (str(self._root), self._options)

    @property
    def uri(self) -> str:
        return str(self._root)

    @property
    def options(self) -> StorageOptions:
        return self._options

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        target = self._path(name)
        temporary = target.with_name(temporary_name())

        def write() -> None:
            try:
                pieces = pieces_of(as_payload(data), self._options.part_bytes)
                _write(temporary, pieces, partial(self._bandwidth.take, cancelled=self._cancelled))
                _publish(temporary, target, if_none_match)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

        self._guard(name, write)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        def read() -> bytes:
            with self._path(name).open("rb") as file:
                file.seek(start)
                return file.read(-1 if length is None else length)

        data = self._guard(name, read)
        self._bandwidth.take(len(data), self._cancelled)
        return data

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.get_pieces(name, start, len(buffer), [buffer])

    def get_pieces(
        self, name: str, start: int, num_bytes: int, pieces: Iterable[memoryview]
    ) -> None:
        """Fill `pieces` one after the other: see `recovery.storage.contents.get_pieces`."""
        self._bandwidth.take(num_bytes, self._cancelled)
        got = self._guard(name, lambda: _read_into(self._path(name), start, pieces))
        if got < num_bytes:
            reason = f"has {start + got} bytes, {start + num_bytes} were expected"
            raise ObjectTruncated(f"{self.uri}/{name}", reason)

    def size(self, name: str) -> int | None:
        try:
            return self._guard(name, lambda: self._path(name).stat().st_size)
        except ObjectMissing:
            return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.endswith("/"):
            folder = self._root / prefix
        else:
            folder = self._root / PurePosixPath(prefix).parent

        def walk() -> list[ObjectInfo]:
            return sorted(self._walk(folder, prefix), key=lambda info: info.name)

        found = self._guard(prefix, walk)
        return iter([info for info in found if info.name.startswith(prefix)])

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path(name)
            self._guard(name, lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
            folders.add(path.parent)
        for folder in folders - {self._root}:
            # It may hold other objects.
            with contextlib.suppress(OSError):
                folder.rmdir()

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        oldest = self.now() - older_than_s
        there = self._guard(prefix, lambda: list(self._temporaries(prefix)))
        stale = [path for path in there if _modified_s(path, default=oldest) < oldest]
        for path in stale:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                path.parent.rmdir()
        return len(stale)

    def now(self) -> float:
        """Return the file system's own time, from a file just made.

        A file server's clock may differ from ours.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            probe = self._root / temporary_name()
            probe.touch()
            modified_s = probe.stat().st_mtime
            probe.unlink()
        except OSError:
            return time.time()
        return modified_s

    def until(self, cancelled: threading.Event) -> Storage:
        # Not copy.copy, which would go through `__reduce__` and open it anew.
        bound = object.__new__(DirectoryStorage)
        vars(bound).update(vars(self), _cancelled=either(self._cancelled, cancelled))
        return bound

    def patient(
        self,
        patience_s: float,
        on_wait: Callable[[StorageError], None] | None = None,
        until: threading.Event | None = None,
    ) -> Storage:
        """Return this storage: it needs no patience of ours.

        A file system that fails does so at once, and its client waits by itself if the server is
        away.
        """
        return self

    def close(self) -> None:
        """No-op: nothing stays open between calls."""

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise StorageError(self.uri, f"object name {name!r} leaves the storage")
        return self._root.joinpath(*parts)

    def _walk(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        seen: set[str] = set()
        # A step's directory may be a link to another disk.
        for parent, folders, files in os.walk(folder, onerror=_raise_unless_gone, followlinks=True):
            real = os.path.realpath(parent)
            if real in seen:
                # A link to a directory above.
                folders.clear()
                continue
            seen.add(real)
            # In place, which os.walk goes by. What cannot have such names is not looked into: it
            # may be somebody else's (a file system's lost+found).
            for name in list(folders):
                below = f"{_name_in(self._root, Path(parent, name))}/"
                if not (below.startswith(prefix) or prefix.startswith(below)):
                    folders.remove(name)

            for file in files:
                if file.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(parent, file)
                try:
                    stat = path.stat()
                except OSError as error:
                    # It may have been deleted after it was listed.
                    _raise_unless_gone(error)
                    continue
                yield ObjectInfo(_name_in(self._root, path), stat.st_size, stat.st_mtime)

    def _temporaries(self, prefix: str) -> Iterator[Path]:
        for parent, _, files in os.walk(self._root, onerror=_raise_unless_gone):
            if not _name_in(self._root, Path(parent)).startswith(prefix.rstrip("/")):
                continue
            for file in files:
                if is_temporary(file):
                    yield Path(parent, file)

    def _guard(self, name: str, action: Callable[[], T]) -> T:
        uri = f"{self.uri}/{name}"
        try:
            try:
                return call_until(self._cancelled, action, uri)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                # NFS: the file was replaced or deleted since its name was looked up.
                return call_until(self._cancelled, action, uri)
        except OSError as error:
            raise _storage_error(uri, error) from error


def _name_in(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def temporary_name() -> str:
    """Return a new name for a file that is being written.

    The name carries its own checksum: a file with such a name was written here, although its
    content may be incomplete.
    """
    number = uuid.uuid4().hex
    return f"{TEMPORARY_PREFIX}{number}-{_name_checksum(number)}"


def is_temporary(name: str) -> bool:
    match = _TEMPORARY.match(name)
    return match is not None and match[2] == _name_checksum(match[1])


def _name_checksum(number: str) -> str:
    return f"{zlib.crc32(b'autohet ' + number.encode()):08x}"


def _raise_unless_gone(error: OSError) -> None:
    """Raise the error of a listing unless the directory is gone.

    A directory that cannot be listed is not an empty one.
    """
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        raise error


def _write(temporary: Path, pieces: Iterable[Buffer], take: Callable[[int], None]) -> None:
    """Write the pieces durably, each after `take` of its size."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("xb", buffering=_BUFFER_BYTES) as file:
        for piece in pieces:
            take(len(piece))
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, target: Path, exclusive: bool) -> None:
    """Rename the temporary file atomically; if `exclusive`, only to a free name."""
    if not exclusive:
        os.replace(temporary, target)
    else:
        try:
            # Fails when the name exists, and shows the whole content or nothing.
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            _claim_name(temporary, target)
    # The name itself is durable only once its directory is.
    _fsync_directory(target.parent)


def _claim_name(temporary: Path, target: Path) -> None:
    """Give the temporary file its name on a file system without hard links.

    O_EXCL decides which writer wins; the rename then shows the whole content.
    """
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.replace(temporary, target)
    except OSError:
        target.unlink()
        raise


def _fsync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _read_into(path: Path, start: int, pieces: Iterable[memoryview]) -> int:
    """Read from `start` until all pieces are full or the file ends; return the number of bytes."""
    got = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for piece in pieces:
            left = piece
            while left:
                count = file.readinto(left)
                if not count:
                    return got
                got += count
                left = left[count:]
    return got


def _modified_s(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default


def _storage_error(uri: str, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFull(
            uri, reason.lower(), "free space, lower checkpoint.keep, or use a larger storage"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoragePermissionDenied(
            uri, reason.lower(), "give this user write permission or use another directory"
        )
    if error.errno == errno.EEXIST:
        return ObjectExists(uri, "exists already")
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return ObjectMissing(uri, "does not exist")
    if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
        return StorageUnsupported(
            uri,
            f"{reason.lower()}: this file system cannot rename files",
            "if a bucket is mounted there, name the bucket as s3://bucket/prefix",
        )
    if error.errno == errno.ENOTDIR:
        return StorageError(uri, "part of the path is a file", "use another directory")
    return StorageError(uri, reason)
