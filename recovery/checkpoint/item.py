"""Encoding of one shard as an item of a PyTorch distributed checkpoint.

An item is the bytes that `torch.load` reads: an envelope around the raw elements. It is what
`torch.save(tensor)` makes: an uncompressed zip archive of the pickled tensor header and one record
with the raw elements (caffe2/serialize/inline_container.cc in PyTorch; APPNOTE.TXT of PKWARE for
the zip). Writing the envelope ourselves gives three things that `torch.save` cannot: the elements
are never copied, each size is known beforehand, and the offset of the raw elements is known, so
that our own reader fetches and checks exactly those. The record of the elements has no CRC-32, as
`torch.save` leaves it out after `torch.serialization.set_crc32_options(False)`: `torch.load` checks
none, and the manifest has a checksum of the same bytes.
"""

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

ALIGNMENT = 64
"""Alignment in bytes of the raw elements in an item, and of an item in its file (as torch.save's).
"""
NO_CRC32 = 0
_ROOT = "archive"
_LIMIT_32 = 0xFFFFFFFF
_STORAGE_TYPES: dict[str, type] = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "int16": torch.ShortStorage,
    "int8": torch.CharStorage,
    "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage,
}


@dataclass(frozen=True)
class Envelope:
    """Bytes before and after the raw elements of one item."""

    prefix: bytes
    suffix: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes around the elements."""
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class _Record:
    name: str
    size: int
    crc32: int
    position: int
    extra: bytes = b""

    @property
    def needs_zip64(self) -> bool:
        return self.size >= _LIMIT_32

    def local_header(self) -> bytes:
        size = _LIMIT_32 if self.needs_zip64 else self.size
        name = self.name.encode()
        fields = (
            20 + 25 * self.needs_zip64,
            0,
            0,
            0,
            0x21,
            self.crc32,
            size,
            size,
            len(name),
            len(self.extra),
        )
        return struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name + self.extra

    def directory_entry(self) -> bytes:
        size = _LIMIT_32 if self.needs_zip64 else self.size
        name = self.name.encode()
        extra = _zip64_extra(self.size) if self.needs_zip64 else b""
        version = 20 + 25 * self.needs_zip64
        fields = (
            version,
            version,
            0,
            0,
            0,
            0x21,
            self.crc32,
            size,
            size,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
            self.position,
        )
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + name + extra


def envelope(dtype: str, shape: tuple[int, ...], num_bytes: int, crc32: int = NO_CRC32) -> Envelope:
    """Return the envelope of a contiguous tensor with `num_bytes` of raw elements.

    `crc32` is zlib's, of the raw elements, which autohet 0.1.0 recorded.
    """
    contents = {
        "data.pkl": tensor_header(dtype, shape),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }
    records = []
    prefix = b""
    for name, content in contents.items():
        record = _Record(
            name=f"{_ROOT}/{name}",
            size=len(content),
            crc32=zlib.crc32(content),
            position=len(prefix),
        )
        records.append(record)
        prefix += record.local_header() + content

    data = _aligned_record(f"{_ROOT}/data/0", num_bytes, crc32, len(prefix))
    records.append(data)
    prefix += data.local_header()
    suffix = _directory(records, start=len(prefix) + num_bytes)
    return Envelope(prefix, suffix)


def _aligned_record(name: str, size: int, crc32: int, position: int) -> _Record:
    """Return the record of the raw elements, which start at a multiple of ALIGNMENT.

    The record's header is padded for that.
    """
    extra = b""
    if size >= _LIMIT_32:
        extra = _zip64_extra(size)
    unpadded = position + 30 + len(name) + len(extra) + 4
    padding = -unpadded % ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding)
    extra += bytes(padding)
    return _Record(name, size, crc32, position, extra)


def _zip64_extra(size: int) -> bytes:
    return struct.pack("<2H2Q", 1, 16, size, size)


def _directory(records: list[_Record], start: int) -> bytes:
    """Return the archive's central directory, which begins at `start`, and its end records."""
    entries = b"".join(record.directory_entry() for record in records)
    count = len(records)
    size = len(entries)
    end = b""
    if start >= _LIMIT_32:
        end += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    offset = min(start, _LIMIT_32)
    end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, 0)
    return entries + end


@lru_cache(maxsize=1024)
def tensor_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle that `torch.save` writes for a contiguous tensor.

    It says how to rebuild the tensor from storage record "0".
    """
    buffer = io.BytesIO()
    _HeaderPickler(buffer, protocol=2).dump(_TensorStandIn(_StorageReference(dtype, shape)))
    return buffer.getvalue()


class _StorageReference:
    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape


class _TensorStandIn:
    """Pickles as a tensor does, without one."""

    def __init__(self, storage: _StorageReference) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.storage.shape
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
        return torch._utils._rebuild_tensor_v2, (
            self.storage,
            0,
            shape,
            tuple(strides),
            False,
            OrderedDict(),
        )


class _HeaderPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, _StorageReference):
            return None
        numel = 1
        for size in obj.shape:
            numel *= size
        return "storage", _STORAGE_TYPES[obj.dtype], "0", "cpu", numel
