"""Proof of which objects in a storage belong to this package.

Only proven objects are ever removed: others may share the directory, and a name proves nothing.
"""

import hashlib
import re
import zlib
from collections.abc import Collection

from recovery.checkpoint.dcp import DATA_SUFFIX, METADATA_NAME, files_of_dcp_metadata
from recovery.checkpoint.manifest import MANIFEST_NAME, Manifest
from recovery.storage.errors import ObjectMissing
from recovery.storage.own_names import is_own_name
from recovery.storage.protocol import ObjectInfo, Storage

LEASE_CONTENT = b"autohet lease\n"
TRAILER_BYTES = 64
RECEIPT_SUFFIX = ".receipt"

_DATA_FILE = re.compile(r"^.+-([0-9a-f]{16})" + re.escape(DATA_SUFFIX) + "$")
_LEASE = re.compile(r"^(reader-[0-9a-f]+-\d+|resumed-[0-9a-f]+)\.lease$")


def trailer(step: int, digest: str) -> bytes:
    """Return the last bytes of a data file of `step` whose name has this digest.

    They prove the owner of the file even if no manifest names it.
    """
    text = f"autohet data file, step {step}, {digest}".encode()
    filled = text.ljust(TRAILER_BYTES - 9, b" ")
    assert len(filled) == TRAILER_BYTES - 9, f"step {step} is too long for a trailer"
    return filled + f"{zlib.crc32(filled):08x}\n".encode()


def receipt_digest(data: bytes) -> str:
    """Return the digest in the name of a stored receipt with this content."""
    return hashlib.sha256(data).hexdigest()[:16]


def is_receipt(name: str, data: bytes) -> bool:
    """Return True if an object is a stored receipt of this package, whole."""
    return is_own_name(name) and name.endswith(f"-{receipt_digest(data)}{RECEIPT_SUFFIX}")


def owned(
    storage: Storage, step: int, objects: Collection[ObjectInfo], manifest: Manifest | None = None
) -> list[ObjectInfo]:
    """Return those of `objects` that are proven to belong to this package.

    All `objects` are of the checkpoint of `step`. The proof is the `manifest` that names an object,
    else the object's content, which is read.
    """
    prefix = f"step-{step:08d}/"
    sizes: dict[str, int] = {}
    if manifest is not None:
        sizes = {file.name: file.num_bytes for file in manifest.files}

    # Stock PyTorch may have put a checkpoint of its own beside, whose `.metadata` this is then.
    names = {info.name.removeprefix(prefix) for info in objects}
    is_shared = any(name.endswith(DATA_SUFFIX) and not _DATA_FILE.match(name) for name in names)
    found = []
    for info in objects:
        name = info.name.removeprefix(prefix)
        is_of_manifest = manifest is not None and (
            name == MANIFEST_NAME or (name == METADATA_NAME and not is_shared)
        )
        is_named = is_of_manifest or sizes.get(name) == info.size
        # Only what no manifest names is read.
        if is_named or _is_proven(storage, step, name, info):
            found.append(info)
    return found


def is_own_metadata(data: bytes) -> bool:
    """Return True if a stored `.metadata` names data files of this package, and no others."""
    named = files_of_dcp_metadata(data)
    return bool(named) and all(_DATA_FILE.match(file) for file in named)


def _is_proven(storage: Storage, step: int, name: str, info: ObjectInfo) -> bool:
    try:
        if _LEASE.match(name):
            return info.size == len(LEASE_CONTENT) and storage.get(info.name) == LEASE_CONTENT
        if name == METADATA_NAME:
            return is_own_metadata(storage.get(info.name))
        if name.endswith(RECEIPT_SUFFIX):
            return is_receipt(name, storage.get(info.name))
        data_file = _DATA_FILE.match(name)
        if data_file is None or info.size < TRAILER_BYTES:
            return False
        last = storage.get(info.name, info.size - TRAILER_BYTES, TRAILER_BYTES)
        return last == trailer(step, data_file[1])
    except ObjectMissing:
        return False
