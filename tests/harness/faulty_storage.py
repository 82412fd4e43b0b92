"""A storage that fails where a test says: at the n-th call of a method, for as many calls as
wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

from recovery.storage.protocol import ObjectInfo, Storage, StorageOptions


class FaultyStorage:
    """Passes everything on to `inner`, and counts; `fault(method, action, at, times)` arms one
    fault.

    `action(name, call)` gets the object's name and the real call: it may raise, call, or change
    what comes back.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self.faults: list[tuple[str, Callable[[str, Callable[[], Any]], Any], range, str]] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def fault(
        self,
        method: str,
        action: Callable[[str, Callable[[], Any]], Any],
        at: int = 1,
        times: int = 1,
        suffix: str = "",
    ) -> None:
        """Arm: calls number `at` to `at + times - 1` of `method` on names that end in `suffix` go
        through `action`.
        """
        self.faults.append((method, action, range(at, at + times), suffix))

    def count(self, method: str, suffix: str = "") -> int:
        return sum(called == method and name.endswith(suffix) for called, name in self.calls)

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def options(self) -> StorageOptions:
        return self.inner.options

    def put(self, name: str, data: Any, *, if_none_match: bool = False) -> None:
        self._through("put", name, lambda: self.inner.put(name, data, if_none_match=if_none_match))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        return bytes(self._through("get", name, lambda: self.inner.get(name, start, length)))

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        def call() -> memoryview:
            self.inner.get_into(name, start, buffer)
            return buffer

        self._through("get_into", name, call)

    def size(self, name: str) -> int | None:
        return self._through("size", name, lambda: self.inner.size(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._through("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._through("delete", name, lambda name=name: self.inner.delete([name]))

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self.inner.abort_uploads(prefix, older_than_s)

    def now(self) -> float:
        return self.inner.now()

    def until(self, cancelled: threading.Event) -> FaultyStorage:
        bound = copy(self)
        bound.inner = self.inner.until(cancelled)
        return bound

    def patient(self, *given: Any, **named: Any) -> FaultyStorage:
        bound = copy(self)
        bound.inner = self.inner.patient(*given, **named)
        return bound

    def close(self) -> None:
        self.inner.close()

    def _through(self, method: str, name: str, call: Callable[[], Any]) -> Any:
        action = self._armed(method, name)
        return action(name, call) if action else call()

    def _armed(self, method: str, name: str) -> Callable[[str, Callable[[], Any]], Any] | None:
        with self._lock:
            self.calls.append((method, name))
            for fault_method, action, numbers, suffix in self.faults:
                if method == fault_method and name.endswith(suffix):
                    key = (method, suffix)
                    self._counts[key] = self._counts.get(key, 0) + 1
                    return action if self._counts[key] in numbers else None
        return None


def raises(error: Exception) -> Callable[[str, Callable[[], Any]], Any]:
    """An action that raises instead of calling."""

    def action(name: str, call: Callable[[], Any]) -> Any:
        raise error

    return action


def flips_a_byte(name: str, call: Callable[[], Any]) -> Any:
    """An action that calls, then flips one bit in the middle of the buffer that came back."""
    buffer = call()
    buffer[len(buffer) // 2] ^= 1
    return buffer
