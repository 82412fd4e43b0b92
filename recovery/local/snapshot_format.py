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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from recovery.errors import SnapshotError
from recovery.state.layout import ShardId, TensorSpec

MAGIC = b"AHSNAP03"
SUFFIX = ".snapshot"
_FILE_NAME = re.compile(r"\.g(\d+)\.\d+" + re.escape(SUFFIX) + "$")
PREFIX = struct.Struct("<8sQQIIQQQI")
RECORD = struct.Struct("<QqqII")
RECORD_OFFSET = 256
HEADER_OFFSET = 4096
_ALIGNMENT = 64
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
        payload_offset = _aligned(checksums_offset + 8 * len(shards), mmap.PAGESIZE)
        extents: dict[ShardId, Extent] = {}
        position = payload_offset
        for shard in shards:
            num_bytes = tensors[shard.tensor].unit_bytes(shard.unit)
            extents[shard] = Extent(position, num_bytes)
            position += _aligned(num_bytes, _ALIGNMENT)
        used = {shard.tensor: tensors[shard.tensor] for shard in shards}
        return FileMap(
            worker,
            used,
            extents,
            checksums_offset,
            payload_offset,
            max(position, payload_offset + 1),
        )

    def prefix_and_header(self) -> tuple[bytes, bytes]:
        header = _encode_header(self.worker, self.tensors, tuple(self.extents))
        fields = (MAGIC, HEADER_OFFSET, len(header), zlib.crc32(header), len(self.extents))
        places = (self.checksums_offset, self.payload_offset, self.file_bytes)
        prefix = PREFIX.pack(*fields, *places, 0)
        return prefix[:-4] + struct.pack("<I", zlib.crc32(prefix[:-4])), header


def generation_of(path: Path) -> int | None:
    """Return the generation in which a worker made one of its own files.

    None if the name is another file's.
    """
    match = _FILE_NAME.search(path.name)
    return None if match is None else int(match[1])


def encode_commit(commit: Commit, checksums: bytes) -> bytes:
    body = RECORD.pack(commit.sequence, commit.step, commit.generation, zlib.crc32(checksums), 0)
    return body[:-4] + struct.pack("<I", zlib.crc32(body[:-4]))


def _encode_header(
    worker: str, tensors: Mapping[str, TensorSpec], shards: Sequence[ShardId]
) -> bytes:
    used = {shard.tensor: tensors[shard.tensor] for shard in shards}
    document = {
        "worker": worker,
        "tensors": [spec.to_document() for spec in used.values()],
        "shards": list(shards),
    }
    return msgspec.msgpack.encode(document)


def read_map(path: Path, read: Callable[[int, int], bytes], num_bytes: int) -> FileMap:
    """Read the map of a snapshot file of `num_bytes`; raise SnapshotError if it is invalid.

    `read(offset, num_bytes)` returns the file's bytes.
    """
    prefix = read(0, PREFIX.size)
    magic, at, length, header_crc, num_shards, checksums_offset, payload_offset, file_bytes, crc = (
        PREFIX.unpack(prefix)
    )
    if magic != MAGIC:
        raise SnapshotError(
            str(path), f"is no snapshot of this version (it starts with {magic!r}, not {MAGIC!r})"
        )
    if zlib.crc32(prefix[:-4]) != crc:
        raise SnapshotError(str(path), "the prefix is damaged")
    if num_bytes < file_bytes:
        raise SnapshotError(str(path), f"is truncated: {num_bytes} of {file_bytes} bytes")
    if length > MAX_HEADER_BYTES or at != HEADER_OFFSET or at + length > checksums_offset:
        raise SnapshotError(str(path), f"a header of {length} bytes at {at} is no snapshot's")
    if checksums_offset + 8 * num_shards > payload_offset or payload_offset > file_bytes:
        raise SnapshotError(str(path), "its parts overlap")
    header = read(at, length)
    if zlib.crc32(header) != header_crc:
        raise SnapshotError(str(path), "the header is damaged")
    try:
        file_map = _decode_header(header)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        why = f"the header holds no snapshot's map ({type(error).__name__}: {str(error)[:200]})"
        raise SnapshotError(str(path), why) from None
    shards = file_map.extents
    places = (len(shards), file_map.checksums_offset, file_map.payload_offset, file_map.file_bytes)
    if places != (num_shards, checksums_offset, payload_offset, file_bytes):
        raise SnapshotError(str(path), "its parts do not lie where its header says")
    return file_map


def _decode_header(header: bytes) -> FileMap:
    """Decode the header.

    Raises LookupError, TypeError, ValueError, ArithmeticError or RecursionError.
    """
    document: dict[str, Any] = msgspec.msgpack.decode(header)
    tensors = {spec["name"]: TensorSpec.from_document(spec) for spec in document["tensors"]}
    shards = [ShardId(str(tensor), int(unit)) for tensor, unit in document["shards"]]
    return FileMap.of(str(document["worker"]), tensors, shards)


def _aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
