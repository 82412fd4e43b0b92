"""A stand-in for libnvidia-ml.so.1 beneath the real `pynvml`: what its C functions write, by the
pointers that they are given.

It answers as the driver of devices whose counters, clocks, heat and events a test sets: after
NVML's API reference, not after a card.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

SUCCESS = 0
NOT_SUPPORTED = 3
TIMEOUT = 10
GPU_IS_LOST = 15


class FakeNvml:
    """One node's devices.

    `events` are Xids that are told once each; `ecc` counts since the driver was loaded.
    """

    def __init__(self, num_gpus: int = 1) -> None:
        self.num_gpus = num_gpus
        self.events: list[int] = []
        self.ecc: list[int | None] = [0] * num_gpus
        self.reasons = [0] * num_gpus
        self.heat = [40] * num_gpus
        self.lost: set[int] = set()
        self.status = SUCCESS
        """What every call answers unless it is SUCCESS."""
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        answer = getattr(type(self), "on_" + name, None)
        if answer is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls += 1
            values = [getattr(argument, "_obj", argument) for argument in arguments]
            return self.status or int(answer(self, *values) or SUCCESS)

        return call

    def on_nvmlInit_v2(self) -> None: ...

    on_nvmlInitWithFlags = lambda self, flags: None  # noqa: E731

    def on_nvmlShutdown(self) -> None: ...

    def on_nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count.value = self.num_gpus

    def on_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        ctypes.cast(ctypes.pointer(handle), ctypes.POINTER(ctypes.c_size_t))[0] = index.value + 1

    def on_nvmlEventSetCreate(self, events: Any) -> None: ...

    def on_nvmlEventSetFree(self, events: Any) -> None: ...

    def on_nvmlDeviceRegisterEvents(self, handle: Any, types: Any, events: Any) -> None: ...

    def on_nvmlEventSetWait_v2(self, events: Any, data: Any, timeout: Any) -> int:
        if not self.events:
            return GPU_IS_LOST if self.lost else TIMEOUT
        data.eventType, data.eventData = pynvml.nvmlEventTypeXidCriticalError, self.events.pop(0)
        return SUCCESS

    def on_nvmlDeviceGetTotalEccErrors(
        self, handle: Any, kind: Any, counter: Any, count: Any
    ) -> int:
        index = self._index(handle)
        errors = self.ecc[index]
        if index in self.lost:
            return GPU_IS_LOST
        if errors is None:
            return NOT_SUPPORTED
        count.value = errors
        return SUCCESS

    def on_nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, reasons: Any) -> None:
        reasons.value = self.reasons[self._index(handle)]

    def on_nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, heat: Any) -> None:
        heat.value = self.heat[self._index(handle)]

    def on_nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: Any, limit: Any) -> None:
        limit.value = 92

    def _index(self, handle: Any) -> int:
        return int(ctypes.cast(ctypes.pointer(handle), ctypes.POINTER(ctypes.c_size_t))[0]) - 1


@contextmanager
def installed(fake: FakeNvml) -> Iterator[FakeNvml]:
    """`pynvml` calls the fake until the block ends."""
    library = pynvml.nvmlLib
    cache = dict(pynvml._nvmlGetFunctionPointer_cache)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = fake
    try:
        yield fake
    finally:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlGetFunctionPointer_cache.update(cache)
