"""Reads of a stored object: into several pieces of memory, and compared with expected bytes."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from recovery.storage.errors import ObjectMissing, ObjectTruncated
from recovery.storage.payload import Buffer, Payload, as_payload
from recovery.storage.protocol import Storage


@runtime_checkable
class RecordsChecksums(Protocol):
    """Storage that records a checksum with each object, so that nothing is read to compare it."""

    def has_checksum_of(self, name: str, payload: Payload) -> bool:
        """Return True if the checksum that was recorded with the object is that of `payload`.

        False proves nothing: the storage may have recorded another kind of checksum, or none.
        """
        ...


def get_pieces(
    storage: Storage, name: str, start: int, num_bytes: int, pieces: Iterable[memoryview]
) -> None:
    """Fill `pieces`, of `num_bytes` in all, with the object's bytes from `start`: one request.

    A piece is filled before the next is asked for, and the last before their end. They are begun
    anew where the request is tried again.

    Raises as `Storage.get_into`.
    """
    if hasattr(type(storage), "get_pieces"):
        storage.get_pieces(name, start, num_bytes, pieces)  # type: ignore[attr-defined]
        return
    whole = memoryview(bytearray(num_bytes))
    storage.get_into(name, start, whole)
    for piece in pieces:
        piece[:] = whole[: len(piece)]
        whole = whole[len(piece) :]


def holds(storage: Storage, name: str, data: Buffer | Payload) -> bool:
    """Return True if the object is there with exactly these bytes.

    A recorded checksum is compared; if that does not prove it, the object is read.

    Raises:
        StorageError: the storage failed.
    """
    payload = as_payload(data)
    if storage.size(name) != payload.size:
        return False
    if isinstance(storage, RecordsChecksums) and storage.has_checksum_of(name, payload):
        return True

    stride = storage.options.part_bytes
    buffer = bytearray(min(stride, payload.size))
    for offset in range(0, payload.size, stride):
        length = min(stride, payload.size - offset)
        piece = memoryview(buffer)[:length]
        try:
            storage.get_into(name, offset, piece)
        except (ObjectMissing, ObjectTruncated):
            return False
        # As bytes, since memoryviews compare element by element.
        if bytes(piece) != bytes(payload.read(offset, length)):
            return False
    return True
