"""Layout of a snapshot file, and the encoding and decoding of its parts.

    offset 0        prefix: magic, version, where the parts are, CRC of the static header
    offset 256      commit record: sequence, step, generation, CRC of the checksums; CRC over
                    itself. Zero while being written.
    4096            static header (msgpack): worker, tensor specs, shard table (tensor, unit)
    ...             checksums: one u64 (see `recovery.state.checksum`) for each shard, in the
                    table's order
    page aligned    payload: each shard's elements, row-major, 64-byte aligned

A crash of the writer leaves the old commit record zeroed or the new one whole, so a torn snapshot
is never read. The record cannot know of bytes that rot later, or of an overwrite during a read;
each shard's checksum detects those.
"""

from __future__ import annotations

import mmap
import re
import struct
import urllib.parse
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from recovery.errors import SnapshotError, SnapshotUncommitted
from recovery.state.layout import Layout, ShardId, TensorSpec

MAGIC = b"AHSNAP03"
SUFFIX = ".snapshot"
_FILE_NAME = re.compile(r"\.g(\d+)\.\d+" + re.escape(SUFFIX) + "$")
PREFIX = struct.Struct("<8sQQIIQQQI")
RECORD = struct.Struct("<QqqII")
RECORD_OFFSET = 256
HEADER_OFFSET = 4096
_ALIGNMENT = 64
CHECKSUM_BYTES = 8
"""Bytes of one shard's checksum in the table."""
MAX_HEADER_BYTES = 256 << 20
"""A worker's table of some million shards."""


@dataclass(frozen=True)
class Commit:
    """State that a file holds; `sequence` rises with every commit to the same file."""

    sequence: int
    step: int
    generation: int


@dataclass(frozen=True)
class Extent:
    """Offset and size of a shard in the file, in bytes."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Offset just past the shard."""
        return self.offset + self.num_bytes


class _Prefix(NamedTuple):
    """Fields of the prefix, in the order of `PREFIX`; `crc` is over all others."""

    magic: bytes
    header_offset: int
    header_bytes: int
    header_crc: int
    num_shards: int
    checksums_offset: int
    payload_offset: int
    file_bytes: int
    crc: int


class _Header(msgspec.Struct, frozen=True):
    """Content of a file, as it is encoded after the prefix."""

    worker: str
    tensors: tuple[TensorSpec, ...]
    shards: tuple[ShardId, ...]


@dataclass(frozen=True)
class FileMap:
    """Static part of a snapshot file: its worker, its shards, and the extent of each."""

    worker: str
    tensors: Mapping[str, TensorSpec]
    extents: Mapping[ShardId, Extent]
    checksums_offset: int
    payload_offset: int
    file_bytes: int

    @staticmethod
    def of(worker: str, tensors: Mapping[str, TensorSpec], shards: Sequence[ShardId]) -> FileMap:
        """Lay `shards` out, in their order, in a new file."""
        header = _encode_header(worker, tensors, shards)
        checksums_offset = HEADER_OFFSET + _aligned(len(header), _ALIGNMENT)
        checksums_end = checksums_offset + CHECKSUM_BYTES * len(shards)
        payload_offset = _aligned(checksums_end, mmap.PAGESIZE)

        extents: dict[ShardId, Extent] = {}
        position = payload_offset
        for shard in shards:
            num_bytes = tensors[shard.tensor].unit_bytes(shard.unit)
            extents[shard] = Extent(position, num_bytes)
            position += _aligned(num_bytes, _ALIGNMENT)

        return FileMap(
            worker=worker,
            tensors=_used(tensors, shards),
            extents=extents,
            checksums_offset=checksums_offset,
            payload_offset=payload_offset,
            file_bytes=max(position, payload_offset + 1),
        )

    def prefix_and_header(self) -> tuple[bytes, bytes]:
        header = _encode_header(self.worker, self.tensors, tuple(self.extents))
        prefix = _Prefix(
            magic=MAGIC,
            header_offset=HEADER_OFFSET,
            header_bytes=len(header),
            header_crc=zlib.crc32(header),
            num_shards=len(self.extents),
            checksums_offset=self.checksums_offset,
            payload_offset=self.payload_offset,
            file_bytes=self.file_bytes,
            crc=0,
        )
        return _with_crc(PREFIX.pack(*prefix)), header


def map_of(worker: str, layout: Layout, shards: frozenset[ShardId]) -> FileMap:
    """Lay out `shards` of a layout, sorted, in a new file."""
    key = ("file map", worker, shards)
    return layout.derive(key, lambda: FileMap.of(worker, layout.tensors, sorted(shards)))


def escaped(worker: str) -> str:
    """Return a worker's name as it stands in the names of its files."""
    return urllib.parse.quote(worker, safe="")


def generation_of(path: Path) -> int | None:
    """Return the generation in which a worker made one of its own files.

    None if the name is another file's.
    """
    match = _FILE_NAME.search(path.name)
    if match is None:
        return None
    return int(match[1])


def encode_commit(commit: Commit, checksums: bytes) -> bytes:
    checksums_crc = zlib.crc32(checksums)
    record = RECORD.pack(commit.sequence, commit.step, commit.generation, checksums_crc, 0)
    return _with_crc(record)


def decode_commit(path: Path, raw: bytes) -> tuple[Commit, int]:
    """Return what a file's commit record says, and the CRC of its checksums.

    Raises:
        SnapshotError: nothing is committed (SnapshotUncommitted), or the record is damaged.
    """
    if raw == bytes(RECORD.size):
        raise SnapshotUncommitted(
            str(path), "nothing is committed in it (its writer was at work or died)"
        )
    if len(raw) < RECORD.size or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        raise SnapshotError(str(path), "the commit record is damaged")
    sequence, step, generation, checksums_crc, _ = RECORD.unpack(raw)
    return Commit(sequence, step, generation), checksums_crc


def _with_crc(data: bytes) -> bytes:
    """Return `data` with its last four bytes replaced by the CRC-32 of all before."""
    body = data[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _used(tensors: Mapping[str, TensorSpec], shards: Sequence[ShardId]) -> dict[str, TensorSpec]:
    """Return the tensors that `shards` are of, in the order of their first shards."""
    return {shard.tensor: tensors[shard.tensor] for shard in shards}


def _encode_header(
    worker: str, tensors: Mapping[str, TensorSpec], shards: Sequence[ShardId]
) -> bytes:
    used = tuple(_used(tensors, shards).values())
    return msgspec.msgpack.encode(_Header(worker, used, tuple(shards)))


def read_map(path: Path, read: Callable[[int, int], bytes], num_bytes: int) -> FileMap:
    """Read the map of a snapshot file of `num_bytes`; raise SnapshotError if it is invalid.

    `read(offset, num_bytes)` returns the file's bytes.
    """
    raw = read(0, PREFIX.size)
    prefix = _Prefix._make(PREFIX.unpack(raw))
    problem = _prefix_problem(raw, prefix, num_bytes)
    if problem:
        raise SnapshotError(str(path), problem)

    header = read(prefix.header_offset, prefix.header_bytes)
    if zlib.crc32(header) != prefix.header_crc:
        raise SnapshotError(str(path), "the header is damaged")
    try:
        document = msgspec.msgpack.decode(header, type=_Header)
        tensors = {spec.name: spec for spec in document.tensors}
        file_map = FileMap.of(document.worker, tensors, document.shards)
    except (LookupError, ValueError, ArithmeticError, RecursionError) as error:
        why = f"the header holds no snapshot's map ({type(error).__name__}: {str(error)[:200]})"
        raise SnapshotError(str(path), why) from None

    agrees = (
        len(file_map.extents) == prefix.num_shards
        and file_map.checksums_offset == prefix.checksums_offset
        and file_map.payload_offset == prefix.payload_offset
        and file_map.file_bytes == prefix.file_bytes
    )
    if not agrees:
        raise SnapshotError(str(path), "its parts do not lie where its header says")
    return file_map


def _prefix_problem(raw: bytes, prefix: _Prefix, num_bytes: int) -> str:
    """Return what is wrong with the prefix of a file of `num_bytes`; empty if nothing is.

    A header is only read where this finds nothing: a damaged size must not reserve memory.
    """
    if prefix.magic != MAGIC:
        return f"is no snapshot of this version (it starts with {prefix.magic!r}, not {MAGIC!r})"
    if zlib.crc32(raw[:-4]) != prefix.crc:
        return "the prefix is damaged"
    if num_bytes < prefix.file_bytes:
        return f"is truncated: {num_bytes} of {prefix.file_bytes} bytes"

    at = prefix.header_offset
    length = prefix.header_bytes
    if length > MAX_HEADER_BYTES or at != HEADER_OFFSET or at + length > prefix.checksums_offset:
        return f"a header of {length} bytes at {at} is no snapshot's"

    checksums_end = prefix.checksums_offset + CHECKSUM_BYTES * prefix.num_shards
    if checksums_end > prefix.payload_offset or prefix.payload_offset > prefix.file_bytes:
        return "its parts overlap"
    return ""


def _aligned(number: int, alignment: int) -> int:
    """Return `number` rounded up to the alignment."""
    return -(-number // alignment) * alignment
