"""Manifest of a checkpoint: its contents and the location of each shard's bytes.

It is written last, and once. Versioned JSON, strict (an unknown key is an error), with a checksum
over itself.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from recovery.checkpoint.errors import VERSION, LaterRelease, ManifestInvalid
from recovery.documents import DocumentDamaged, decode_json
from recovery.state.layout import ShardId, TensorSpec

MANIFEST_NAME = "manifest.json"
FORMAT = "autohet-checkpoint"

ITEM_OVERHEAD_BYTES = 64 << 10
"""Limit on the bytes that an item has around its elements.

`torch.save` writes a few KB, and readers reserve memory for all of it.
"""

Scalar = int | float | str | bool | None


class StoredShard(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Location and checksum of one shard in a data file.

    `torch.load` reads the item at [item_offset, item_offset + item_bytes). The raw elements, C
    order, little endian, lie at [offset, offset + num_bytes). `checksum` is that of
    `recovery.state.checksum`; `crc32` is zlib's, in manifests of versions 2 and 3 alone.
    """

    tensor: str
    unit: int
    item_offset: int
    item_bytes: int
    offset: int
    num_bytes: int
    crc32: int | None = None
    checksum: int

    @property
    def shard(self) -> ShardId:
        return ShardId(self.tensor, self.unit)

    @property
    def end(self) -> int:
        """Offset just past the raw elements."""
        return self.offset + self.num_bytes

    @property
    def item_end(self) -> int:
        """Offset just past the item."""
        return self.item_offset + self.item_bytes


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data file of a checkpoint: its name there, its size, its shards by ascending offset."""

    name: str
    num_bytes: int
    writer: str
    shards: tuple[StoredShard, ...]


class _ManifestV2(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Manifest of version 2, which records no run."""

    format: str = FORMAT
    version: int = VERSION
    checksum: int = 0
    """CRC-32 of this document with checksum 0."""
    step: int
    generation: int
    job: str
    created_by: str
    created_unix_s: float
    byteorder: str = sys.byteorder
    scalars: dict[str, Scalar]
    """Training state that is no tensor: seed, data position, ..."""
    model_config: dict[str, Any]
    """The Hugging Face config of the model, as its own JSON."""
    num_bytes: int
    """Raw bytes of all shards."""
    tensors: tuple[TensorSpec, ...]
    files: tuple[DataFile, ...]


class Manifest(_ManifestV2, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Description of one committed checkpoint: everything except the bytes themselves.

    `run` and `driver` are those of its generation in the journal; empty where nobody recorded them.
    """

    run: str = ""
    driver: str = ""

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The spec of each tensor, by state name."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def locations(self) -> Mapping[ShardId, tuple[str, StoredShard]]:
        """Data file (its name within the checkpoint) and place of each shard."""
        locations = {}
        for file in self.files:
            for stored in file.shards:
                locations[stored.shard] = (file.name, stored)
        return locations

    @property
    def shards(self) -> frozenset[ShardId]:
        return frozenset(self.locations)

    @property
    def checksums(self) -> dict[ShardId, int]:
        """Checksum (`recovery.state.checksum`) of each shard's raw bytes."""
        return {shard: stored.checksum for shard, (_, stored) in self.locations.items()}


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest, with its checksum filled in."""
    document = _document(manifest)
    return msgspec.json.encode(msgspec.structs.replace(document, checksum=_checksum(manifest)))


def _document(manifest: Manifest) -> _ManifestV2:
    """Return the fields that a manifest of its version has."""
    if manifest.version != 2:
        return manifest
    fields = {name: getattr(manifest, name) for name in _ManifestV2.__struct_fields__}
    return _ManifestV2(**fields)


def _checksum(manifest: Manifest) -> int:
    """Return the CRC-32 of the manifest's document with checksum 0."""
    blank = msgspec.structs.replace(_document(manifest), checksum=0)
    return zlib.crc32(msgspec.json.encode(blank))


def decode_manifest(data: bytes, uri: str) -> Manifest:
    """Read and check a manifest that lies at `uri`.

    Raises:
        ManifestInvalid: no JSON, a later version, unknown or missing keys, a wrong checksum, shards
        that do not fit.
    """
    version = _check_version(data, uri)
    try:
        document = decode_json(data, _ManifestV2 if version == 2 else Manifest)
    except DocumentDamaged as error:
        raise ManifestInvalid(uri, str(error)) from error
    fields = {name: getattr(document, name) for name in document.__struct_fields__}
    manifest = Manifest(**fields)
    expected = _checksum(manifest)
    if manifest.checksum != expected:
        raise ManifestInvalid(
            uri, f"its checksum is {expected:#010x}, not the recorded {manifest.checksum:#010x}"
        )
    _check_places(manifest, uri)
    return manifest


def _check_version(data: bytes, uri: str) -> int:
    """Return the version of a manifest that can be read."""

    class Head(msgspec.Struct):
        format: str = ""
        version: int = 0
        created_by: str = "another release"

    try:
        head = decode_json(data, Head)
    except DocumentDamaged as error:
        raise ManifestInvalid(uri, str(error)) from error
    if head.format != FORMAT:
        raise ManifestInvalid(uri, f"format {head.format!r} is not {FORMAT!r}")
    if head.version > VERSION:
        raise LaterRelease(uri, f"is of version {head.version}, written by {head.created_by}")
    if head.version < 2:
        reason = f"version {head.version} is older than autohet 0.1.0; a commit before it reads it"
        raise ManifestInvalid(uri, reason)
    return head.version


def _check_places(manifest: Manifest, uri: str) -> None:
    """Check that every shard of every tensor is there once, with its size, within its file."""
    if manifest.byteorder != sys.byteorder:
        raise ManifestInvalid(
            uri, f"was written on a {manifest.byteorder}-endian machine, this one is not"
        )

    expected: dict[ShardId, int] = {}
    for spec in manifest.specs.values():
        for shard in spec.shards:
            expected[shard] = spec.unit_bytes(shard.unit)

    for file in manifest.files:
        for stored in file.shards:
            if expected.pop(stored.shard, None) != stored.num_bytes:
                raise ManifestInvalid(
                    uri, f"shard {stored.shard} is unknown, listed twice, or has a wrong size"
                )
            is_in_item = stored.item_offset <= stored.offset <= stored.end <= stored.item_end
            if not is_in_item or not 0 <= stored.item_offset <= stored.item_end <= file.num_bytes:
                raise ManifestInvalid(uri, f"shard {stored.shard} lies outside of {file.name}")
            # A reader of whole items reserves this much: a damaged size must not decide it.
            if stored.item_bytes > stored.num_bytes + ITEM_OVERHEAD_BYTES:
                raise ManifestInvalid(
                    uri, f"the item of shard {stored.shard} has {stored.item_bytes} bytes"
                )

    if expected:
        raise ManifestInvalid(
            uri, f"{len(expected)} shards have no place, {next(iter(expected))} among them"
        )
