"""A storage in this process's memory: what thousands of damaged checkpoints are tried on."""

import threading
from collections.abc import Iterable, Iterator

from recovery.storage.errors import ObjectExists, ObjectMissing, ObjectTruncated
from recovery.storage.payload import Buffer, Payload, as_payload
from recovery.storage.protocol import ObjectInfo, Storage, StorageOptions

NOW = 1_700_000_000.0


class MemoryStorage:
    """Objects by name, all of the same age."""

    uri = "memory"
    options = StorageOptions(concurrency=1)

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, name: str, data: Buffer | Payload, *, if_none_match: bool = False) -> None:
        if if_none_match and name in self.objects:
            raise ObjectExists(name, "exists already")
        payload = as_payload(data)
        self.objects[name] = bytes(payload.read(0, payload.size))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        if name not in self.objects:
            raise ObjectMissing(name, "does not exist")
        data = self.objects[name][start:]
        return data if length is None else data[:length]

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        data = self.get(name, start, len(buffer))
        if len(data) < len(buffer):
            raise ObjectTruncated(name, f"has only {start + len(data)} bytes")
        buffer[:] = data

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        names = sorted(name for name in self.objects if name.startswith(prefix))
        return iter([ObjectInfo(name, len(self.objects[name]), NOW) for name in names])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return 0

    def now(self) -> float:
        return NOW

    def until(self, cancelled: threading.Event) -> Storage:
        return self

    def patient(self, *_: object, **__: object) -> Storage:
        return self

    def close(self) -> None:
        """Nothing is open."""
