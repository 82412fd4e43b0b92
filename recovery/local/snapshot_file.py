"""File that holds one worker's state at one step, in host memory or on disk.

It is written in place, valid only once committed, and read while it is mapped. Its layout is in
`recovery.local.snapshot_format`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recovery.errors import ShardCorrupt, ShardUnavailable, SnapshotError, SnapshotUncommitted
from recovery.local.descriptor import Descriptor
from recovery.local.private_files import create_private, make_private_directory, open_private
from recovery.local.snapshot_format import (
    CHECKSUM_BYTES,
    HEADER_OFFSET,
    RECORD,
    RECORD_OFFSET,
    Commit,
    Extent,
    FileMap,
    decode_commit,
    encode_commit,
    read_map,
)
from recovery.state.checksum import BLOCK_BYTES, RunningChecksum, checksum
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId

MADV_POPULATE_WRITE = 23
POPULATE_BYTES = 64 << 20
CLAIM_BYTES = 256 << 20
_READ_BYTES = 8 * BLOCK_BYTES

_LIBC = ctypes.CDLL(None)

Checksums = npt.NDArray[np.uint64]


class SnapshotFile:
    """A snapshot file mapped for reading. Close it, or use it as a context manager.

    Raises:
        SnapshotError: the file is no snapshot, is truncated, is another user's or a link, its
        header is damaged, or nothing is committed in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(open_private(path), "rb") as file:
                status = os.fstat(file.fileno())
                self.num_bytes = status.st_size
                self.identity = (status.st_dev, status.st_ino)
                if self.num_bytes < HEADER_OFFSET:
                    raise SnapshotError(str(path), f"is truncated: {self.num_bytes} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise SnapshotError(str(path), f"cannot be opened: {error}") from error
        try:
            self.map = read_map(path, self._read, self.num_bytes)
            self._positions = {shard: number for number, shard in enumerate(self.map.extents)}
            self.commit, self._checksums = self._read_commit()
        except BaseException:
            # The caller gets no object that it could close.
            self._map.close()
            raise

    def __enter__(self) -> SnapshotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Views handed out earlier keep it mapped until they are gone."""
        with contextlib.suppress(BufferError):
            self._map.close()

    @property
    def shards(self) -> tuple[ShardId, ...]:
        return tuple(self.map.extents)

    def checksum(self, shard: ShardId) -> int:
        return int(self._checksums[self._positions[shard]])

    def source(self, kind: str, node: str) -> Source:
        """Return this file as a source of shards of `kind` "memory" or "disk" on `node`."""
        return Source(kind, node, self.map.worker, self.commit.step, self.commit.generation)

    def holding(self, kind: str, node: str) -> Holding:
        """Return the shards and checksums of this file, as a source of `kind` on `node`."""
        checksums = dict(zip(self.map.extents, self._checksums.tolist(), strict=True))
        return Holding(self.source(kind, node), frozenset(self.map.extents), checksums)

    def fileno(self) -> int:
        """Return a descriptor of this file, open for reading while this object is referred to.

        That holds even if the file is removed.
        """
        return self._descriptor.number

    def read_into(self, shard: ShardId, memory: memoryview, expected: int | None = None) -> None:
        """Read a shard, as `read` does, into `memory` (the shard's size, writable).

        After an error the memory holds anything. Each piece is checked while it is still in the
        processor's cache.

        Raises:
            ShardUnavailable, ShardCorrupt: as `read`.
        """
        offset = self.extent(shard).offset
        running = RunningChecksum()
        for start in range(0, len(memory), _READ_BYTES):
            piece = memory[start : start + _READ_BYTES]
            try:
                self._descriptor.fill(piece, offset + start)
            except EOFError as error:
                raise ShardCorrupt(shard, str(self.path), "the file ends before it") from error
            running.update(piece)
        self.require(shard, running.value(), expected)

    def read_bytes_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the file's bytes from `offset`, unchecked.

        Other threads run meanwhile.

        Raises OSError, and EOFError where the file ends before.
        """
        self._descriptor.fill(memory, offset)

    def extent(self, shard: ShardId) -> Extent:
        """Return the shard's extent in the file; raise ShardUnavailable if it is not held."""
        extent = self.map.extents.get(shard)
        if extent is None:
            raise ShardUnavailable(shard, str(self.path), "not in this snapshot")
        return extent

    def view(self, shard: ShardId) -> memoryview:
        """Return the shard's bytes, unchecked, without a copy.

        Raises:
            ShardUnavailable: the file does not hold it.
        """
        extent = self.extent(shard)
        return memoryview(self._map)[extent.offset : extent.end]

    def read(self, shard: ShardId, expected: int | None = None) -> memoryview:
        """Return the shard's verified bytes, without a copy.

        They may be overwritten once the writer reuses the file. `expected` is the checksum that the
        reader knows from elsewhere; None: the one recorded here.

        Raises:
            ShardUnavailable: not held, or overwritten by a newer step meanwhile. ShardCorrupt: the
            checksum is not the recorded one.
        """
        view = self.view(shard)
        self.verify(shard, view, expected)
        return view

    def verify(self, shard: ShardId, data: memoryview, expected: int | None = None) -> None:
        """Raise unless `data`, read from this file, is the committed content of `shard`."""
        self.require(shard, checksum(data), expected)

    def require(self, shard: ShardId, found: int, expected: int | None) -> None:
        """Raise unless `found` is the checksum of the committed content of `shard`, as `read`."""
        committed = self.checksum(shard) if expected is None else expected
        if found == committed:
            return

        where = str(self.path)
        if not self.still_committed():
            why = f"step {self.commit.step} was overwritten meanwhile"
            raise ShardUnavailable(shard, where, why)
        raise ShardCorrupt(shard, where, "checksum differs from the one recorded at the commit")

    def current(self) -> SnapshotFile:
        """Return this file as it is now.

        It is this object if nothing was committed since, else another view of the same mapping.

        Raises:
            SnapshotError: nothing is committed in it now.
        """
        newest = copy.copy(self)
        newest.commit, newest._checksums = self._read_commit()
        if newest.commit == self.commit:
            return self
        return newest

    def still_committed(self) -> bool:
        """Return True if the file still holds the commit that was there when it was opened."""
        try:
            commit, _ = self._read_commit()
        except SnapshotError:
            return False
        return commit == self.commit

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        try:
            self._descriptor.fill(memoryview(data), offset)
        except (OSError, EOFError) as error:
            raise SnapshotError(str(self.path), f"cannot be read: {error}") from error
        return bytes(data)

    def _read_commit(self) -> tuple[Commit, Checksums]:
        raw = self._read(RECORD_OFFSET, RECORD.size)
        commit, checksums_crc = decode_commit(self.path, raw)
        table_bytes = CHECKSUM_BYTES * len(self.map.extents)
        checksums = self._read(self.map.checksums_offset, table_bytes)
        if zlib.crc32(checksums) != checksums_crc:
            # Either the table is damaged, or the writer began a step between the two reads.
            if self._read(RECORD_OFFSET, RECORD.size) != raw:
                raise SnapshotUncommitted(str(self.path), "its writer has just begun the next step")
            raise SnapshotError(str(self.path), "the table of checksums is damaged")
        return commit, np.frombuffer(checksums, dtype="<u8")


class SnapshotFileWriter:
    """Snapshot file mapped for writing: `begin`, fill `payload`, `commit`, once for each step.

    The file is created at its full size under a temporary name, so that a full memory file system
    shows here and not as a SIGBUS in the middle of a copy.

    Raises:
        SnapshotError: the file cannot be made (no space, no permission), or `cancelled()` became
        true meanwhile.
    """

    def __init__(
        self, path: Path, file_map: FileMap, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self.path = path
        self.map = file_map
        self._sequence = 0
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self._map, self._descriptor = create_file(temporary, file_map, cancelled)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise SnapshotError(
                str(path), f"cannot make a file of {file_map.file_bytes} bytes: {error}"
            ) from error

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file; shards lie at `map.extents`."""
        return self._map

    def populate(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Map every page now, for writing, while other threads run.

        Mapping page by page at the first copy takes five times as long as the copy. Returns False
        if it was cancelled or the system cannot do it (Linux before 5.14).
        """
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        for start in range(0, len(self._map), POPULATE_BYTES):
            if cancelled():
                return False

            length = min(POPULATE_BYTES, len(self._map) - start)
            # By ctypes, since mmap.madvise would keep the interpreter to itself.
            refused = _LIBC.madvise(
                ctypes.c_void_p(address + start), ctypes.c_size_t(length), MADV_POPULATE_WRITE
            )
            if refused:
                return False
        return True

    def begin(self) -> None:
        """Invalidate the file's content; until `commit` a reader finds nothing in it."""
        self._descriptor.write(bytes(RECORD.size), RECORD_OFFSET)

    def commit(self, step: int, generation: int) -> None:
        """Checksum the payload and commit it as the file's content."""
        whole = memoryview(self._map)
        sums = [checksum(whole[extent.offset : extent.end]) for extent in self.map.extents.values()]
        self.commit_with(step, generation, sums)

    def commit_with(self, step: int, generation: int, checksums: Sequence[int]) -> None:
        """Commit as `commit` does, with the caller's checksums, in the table's order."""
        table = np.asarray(checksums, dtype="<u8").tobytes()
        self._descriptor.write(table, self.map.checksums_offset)
        self._sequence += 1
        # The record last: it makes payload and table the file's content.
        record = encode_commit(Commit(self._sequence, step, generation), table)
        self._descriptor.write(record, RECORD_OFFSET)

    def checksums(self) -> list[int]:
        """Return the checksums of the last commit, in the table's order."""
        table: list[int] = np.frombuffer(
            self._map,
            dtype="<u8",
            count=len(self.map.extents),
            offset=self.map.checksums_offset,
        ).tolist()
        return table

    def sync(self) -> None:
        """Force the content to the device (for files on disk)."""
        os.fsync(self._descriptor.number)

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._map.close()
        self._descriptor.close()


def has_writer(path: Path) -> bool:
    """Return True if some process still has the file open for writing.

    The writer's lock ends with its mapping, or with its process.
    """
    try:
        with open(open_private(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def create_file(
    path: Path, file_map: FileMap, cancelled: Callable[[], bool]
) -> tuple[mmap.mmap, Descriptor]:
    """Create a snapshot file of its full size, locked by this process, and map it."""
    prefix, header = file_map.prefix_and_header()
    make_private_directory(path.parent)
    with open(create_private(path), "w+b") as file:
        # The lock stays with the mapping and the descriptor that are returned: copies of this one.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        # Piece by piece: a large file takes seconds, after which nobody may want it any more.
        for start in range(0, file_map.file_bytes, CLAIM_BYTES):
            if cancelled():
                raise OSError(errno.ECANCELED, "it is not wanted any more")
            length = min(CLAIM_BYTES, file_map.file_bytes - start)
            os.posix_fallocate(file.fileno(), start, length)

        file.write(prefix)
        file.seek(HEADER_OFFSET)
        file.write(header)
        file.flush()
        mapping = mmap.mmap(file.fileno(), file_map.file_bytes)
        return mapping, Descriptor(os.dup(file.fileno()))
