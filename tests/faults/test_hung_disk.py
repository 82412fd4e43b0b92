"""A node's disk that answers nothing for a while holds up no step, and no sign of life."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from autohet.control.values.observation import Observation
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_format import FileMap
from recovery.state.layout import TensorSpec
from tests.faults.conftest import Scene, run_through
from tests.harness.exact_job import LONG
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.mounts import mounted
from tests.harness.struck_run import StruckRun

FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
FROZEN_AT = 6
GOES_ON_UNTIL = 12
"""Steps 8 and 12 are durable."""
HEARTBEAT_S = 4.0
FROZEN_S = HEARTBEAT_S + 1.0


@dataclass
class Disk:
    """A file system of its own.

    While it is frozen whoever writes to it, or waits for what was written, stands in the kernel.
    """

    path: Path
    frozen_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDONLY)

    def freeze(self) -> None:
        self.frozen_at = time.monotonic()
        fcntl.ioctl(self._descriptor, FREEZE, 0)

    def thaw(self) -> None:
        fcntl.ioctl(self._descriptor, THAW, 0)

    def close(self) -> None:
        with suppress(OSError):
            self.thaw()
        os.close(self._descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    image = tmp_path / "image"
    path = tmp_path / "mounted"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(path, "-o", "loop", str(image)):
        found = Disk(path)
        try:
            yield found
        finally:
            found.close()


@pytest.mark.faults
def test_a_disk_that_hangs_for_longer_than_a_heartbeat_costs_nothing(
    long_scene: Scene, tmp_path: Path, memory: Path, disk: Disk
) -> None:
    """Spills are forced to the disk in a thread of their own. One that kept the interpreter
    meanwhile (`mmap.flush` does) would stop the worker's step and its reports, and the driver take
    a healthy fleet for dead.
    """
    events = Interference()

    def was_frozen_long_enough(run: StruckRun, seen: Observation) -> bool:
        has_trained = trains_at(GOES_ON_UNTIL)(run, seen)
        return has_trained and time.monotonic() - disk.frozen_at > FROZEN_S

    events.when(trains_at(FROZEN_AT), lambda run, seen: disk.freeze())
    events.when(was_frozen_long_enough, lambda run, seen: disk.thaw())
    given = {
        "checkpoint": {"local_directory": str(disk.path / "disk")},
        "elastic": {"heartbeat_timeout_s": HEARTBEAT_S},
        "training": LONG,
    }
    result = run_through(long_scene, tmp_path, memory, events, **given)
    assert result.summary["generations"] == 1
    assert set(result.starts.values()) == {1}


@pytest.fixture
def one_thread_at_a_time() -> Iterator[None]:
    """A thread hands the interpreter on only where it waits for something."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.faults
@pytest.mark.usefixtures("one_thread_at_a_time")
def test_other_threads_run_while_a_snapshot_is_forced_to_the_disk(disk: Disk) -> None:
    spec = TensorSpec("w", (8 << 20,), "float32")
    writer = SnapshotFileWriter(
        disk.path / "x.snapshot", FileMap.of("a/0", {"w": spec}, spec.shards)
    )
    torch.frombuffer(writer.buffer, dtype=torch.uint8)[writer.map.payload_offset :].fill_(1)
    under_way = threading.Event()
    others = 0

    def force() -> None:
        under_way.set()
        writer.sync()
        under_way.clear()

    thread = threading.Thread(target=force)
    thread.start()
    while thread.is_alive():
        others += under_way.is_set()
        time.sleep(0)
    writer.close()
    assert others
