"""File `.metadata`, which makes a checkpoint's prefix loadable by stock PyTorch.

With it the prefix is a torch.distributed.checkpoint. It is derived from the manifest alone, so it
can be written again if it is missing. Source of the format:
torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

import io
import pickle
import sys
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import TensorSpec
from recovery.state.slices import TORCH_DTYPES

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"


def encode_dcp_metadata(manifest: Manifest) -> bytes:
    """Return the pickled `Metadata` that DCP's FileSystemReader opens first.

    Equal manifests give equal bytes, since equal names are one object and stand in order.
    """
    storage_data = {}
    for shard, (file_name, stored) in sorted(manifest.locations.items()):
        spec = manifest.specs[shard.tensor]
        offset = torch.Size(spec.unit_offset(shard.unit))
        index = MetadataIndex(sys.intern(shard.tensor), offset, shard.unit)
        file = sys.intern(file_name)
        storage_data[index] = _StorageInfo(file, stored.item_offset, stored.item_bytes)

    names = [sys.intern(name) for name in sorted(manifest.specs)]
    metadata = Metadata(
        state_dict_metadata={name: _tensor_metadata(manifest.specs[name]) for name in names},
        # Flat: there are no nested dictionaries to rebuild.
        planner_data={name: (name,) for name in names},
        storage_data=storage_data,
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def dcp_metadata_problem(data: bytes, manifest: Manifest) -> str:
    """Compare a stored `.metadata` with what the manifest implies; return the problem, or ""."""
    implied = encode_dcp_metadata(manifest)
    # Another release of PyTorch may have written the same otherwise.
    if data == implied:
        return ""
    try:
        found = _contents(_MetadataUnpickler(io.BytesIO(data)).load())
        expected = _contents(pickle.loads(implied))
        agrees = found == expected
    except Exception as error:  # noqa: BLE001
        return f"is damaged ({type(error).__name__}: {str(error)[:100]})"
    if not agrees:
        return "does not agree with the manifest"
    return ""


def files_of_dcp_metadata(data: bytes) -> frozenset[str]:
    """Return the data files that a stored `.metadata` names; none if it cannot be read."""
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
        return frozenset(str(place.relative_path) for place in found.storage_data.values())
    except Exception:  # noqa: BLE001
        return frozenset()


def _contents(metadata: Metadata) -> tuple[Any, ...]:
    """Return everything that stock PyTorch reads of a `.metadata`.

    A damaged one may lack any of these attributes.
    """
    # A MetadataIndex compares without its `index`, which PyTorch reads.
    places = {(key, key.index): place for key, place in metadata.storage_data.items()}
    return metadata.state_dict_metadata, metadata.planner_data, places


_METADATA_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


class _MetadataUnpickler(pickle._Unpickler):
    """Makes nothing but what belongs into a `Metadata`: bytes from storage are not to be trusted.

    The unpickler in Python: the one in C reserves tens of gigabytes for a memo whose index is
    damaged.
    """

    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012
    del dispatch[pickle.BYTEARRAY8[0]]  # reserves what its damaged length says

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            *((("torch", str(dtype).removeprefix("torch."))) for dtype in TORCH_DTYPES.values()),
            *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"{module}.{name} does not belong into checkpoint metadata"
            )
        return super().find_class(module, name)


def _member(encoding: Any, name: str) -> Any:
    """Replace `getattr`, by which Python 3.11.0 to 3.11.3 pickle members of an enum."""
    if encoding is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            f"getattr of {encoding!r} does not belong into checkpoint metadata"
        )
    return encoding[name]


def _tensor_metadata(spec: TensorSpec) -> TensorStorageMetadata:
    chunks = []
    for unit in range(spec.num_units):
        offset = torch.Size(spec.unit_offset(unit))
        shape = torch.Size(spec.unit_shape(unit))
        chunks.append(ChunkStorageMetadata(offset, shape))
    properties = TensorProperties(dtype=TORCH_DTYPES[spec.dtype])
    return TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)
