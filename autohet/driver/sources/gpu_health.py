"""Health of a node's GPUs by NVML, through `pynvml` (nvidia-ml-py).

It covers Xid events, uncorrectable ECC errors, throttling and temperature. Sources: NVIDIA "Xid
Errors" (which of them are the hardware's), "NVML API Reference" (event sets, clocks event reasons,
thresholds).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from autohet.driver.sources.protocol import Sign
from autohet.driver.sources.watch import Watch

SOURCE = "GPU health"
XID_OF_HARDWARE = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""Xid errors after which the device computes nothing or nonsense until it is reset.

All other Xid errors are errors of programs, or corrected: the devices are checked after them.
"""
THROTTLED_S = 30.0
"""Seconds of clocks held down by the hardware that are more than a moment's heat."""
MOST_EVENTS = 64
"""Events that one look takes at the most, so that it ends in a storm of events."""


class GpuHealth:
    """Health of one node's GPUs, read by NVML from one thread.

    `library`: the module `pynvml`, or a stand-in for it in a test.

    Raises on construction whatever NVML raises if there is no driver; the watch retries less often.
    """

    def __init__(self, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = library or _pynvml()
        self._clock = clock
        self._nvml.nvmlInit()
        self._handles = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            self._handles.append(self._nvml.nvmlDeviceGetHandleByIndex(index))
        self._events = self._event_set()
        self._ecc = [self._ecc_errors(handle) for handle in self._handles]
        self.num_xids = 0
        """Number of Xid errors so far that are not the hardware's."""
        self._failed: dict[str, None] = {}
        self._held_since: dict[int, float] = {}

    def look(self) -> list[Sign]:
        """Return the signs of trouble now; signs that a device is unfit stay."""
        self._take_events()
        risks: list[str] = []
        for index, handle in enumerate(self._handles):
            try:
                self._check_ecc(index, handle)
                risks += self._strain(index, handle)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
                self._failed[f"GPU {index} is lost"] = None
        failed = [Sign(SOURCE, text) for text in self._failed]
        return failed + [Sign(SOURCE, text, risk=True) for text in risks]

    def _event_set(self) -> Any:
        """Return an event set registered for Xid events; None if no device has them."""
        events = self._nvml.nvmlEventSetCreate()
        registered = 0
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlDeviceRegisterEvents(
                    handle, self._nvml.nvmlEventTypeXidCriticalError, events
                )
                registered += 1
        return events if registered else None

    def _take_events(self) -> None:
        if self._events is None:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                # A time-out: no event is left. Which device is lost, its own answers say.
                lost = self._nvml.NVML_ERROR_GPU_IS_LOST
                if error.value in (self._nvml.NVML_ERROR_TIMEOUT, lost):
                    return
                raise
            xid = int(event.eventData)
            if xid in XID_OF_HARDWARE:
                self._failed[f"Xid {xid}, {XID_OF_HARDWARE[xid]}"] = None
            else:
                self.num_xids += 1

    def _ecc_errors(self, handle: Any) -> int:
        number = self._read(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            self._nvml.NVML_VOLATILE_ECC,
        )
        return int(number or 0)

    def _check_ecc(self, index: int, handle: Any) -> None:
        """Record a device whose ECC errors have increased since this process first looked.

        Earlier errors are those of an earlier program, or were corrected by a reset.
        """
        new = self._ecc_errors(handle) - self._ecc[index]
        if new > 0:
            self._failed[f"GPU {index} has uncorrectable ECC errors"] = None

    def _strain(self, index: int, handle: Any) -> list[str]:
        """Return the risks of one device: clocks held down for long, and too much heat."""
        nvml = self._nvml
        found = []
        reasons = self._read("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            # Drivers before 535 have the function under its older name.
            reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        by_heat = int(reasons) & nvml.nvmlClocksEventReasonHwThermalSlowdown
        by_power = int(reasons) & nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown

        now = self._clock()
        if not by_heat and not by_power:
            self._held_since.pop(index, None)
        elif now - self._held_since.setdefault(index, now) >= THROTTLED_S:
            why = "heat" if by_heat else "its power supply"
            found.append(f"GPU {index} is throttled by {why}")

        heat = self._read("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        limit = self._read(
            "nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
        )
        # One degree before the limit, since at the limit the GPU is gone.
        if heat is not None and limit and heat >= limit - 1:
            found.append(f"GPU {index} is about to shut down for heat")
        return found

    def _read(self, name: str, *arguments: Any) -> Any:
        """Call an NVML function; None if the device lacks it (ECC on a consumer's card)."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()


class GpuWatch:
    """Owns a thread that checks the GPUs every `poll_s`.

    If NVML has no driver, it retries less often.
    """

    def __init__(self, poll_s: float) -> None:
        self._health: GpuHealth | None = None
        self._watch = Watch("NVML", self._look, poll_s)

    def _look(self) -> tuple[Sign, ...]:
        if self._health is None:
            self._health = GpuHealth()
        return tuple(self._health.look())

    @property
    def num_xids(self) -> int:
        return 0 if self._health is None else self._health.num_xids

    def signs(self) -> tuple[Sign, ...]:
        """Return the signs that stand now."""
        return self._watch.answer or ()

    def close(self) -> None:
        self._watch.close()
        if self._health is not None:
            self._health.close()


def _pynvml() -> Any:
    import pynvml

    return pynvml
