"""Directories of a struck job on small file systems of their own, and outages of them.

An outage ends by the process that watches the driver, since the driver may be killed during it.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FILE_SYSTEM_MIB = 64
FILLER = "filler"
MOUNT_TRIES = 100


@dataclass(frozen=True)
class Places:
    """Directories of one job. mounted: storage, memory and disk are file systems of their own."""

    root: Path
    mounted: bool

    @property
    def storage(self) -> Path:
        return self.root / "storage" / "checkpoints"

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def disk(self) -> Path:
        return self.root / "disk"

    @property
    def strikes(self) -> Path:
        """One line for each strike."""
        return self.root / "strikes.jsonl"

    @property
    def _away(self) -> Path:
        return self.storage.with_name("away")

    def outages(self) -> list[Path]:
        """Outages that last, each a file that says until when."""
        return sorted(self.root.glob("*.outage"))

    def begin_outage(self, kind: str, lasts_s: float, *, empty: bool = False) -> bool:
        """Begin an outage of `kind`; False where one of its kind lasts already.

        empty: where the storage is away, an empty directory lies at its place.
        """
        note = self.root / f"{kind}.outage"
        if note.exists():
            return False
        unfinished = note.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(time.monotonic() + lasts_s))
        unfinished.rename(note)
        match kind:
            case "storage_away":
                self.storage.rename(self._away)
                if empty:
                    self.storage.mkdir()
            case "storage_read_only":
                self._remount("ro")
            case "storage_full" | "disk_full" | "memory_full":
                _fill(self._directory_of(kind))
        return True

    def end_outages(self) -> None:
        """End the outages whose time is over."""
        for note in self.outages():
            if time.monotonic() >= json.loads(note.read_text()):
                self._end(note.stem)
                note.unlink()

    def _end(self, kind: str) -> None:
        match kind:
            case "storage_away":
                self._bring_storage_back()
            case "storage_read_only":
                self._remount("rw")
            case "storage_full" | "disk_full" | "memory_full":
                (self._directory_of(kind) / FILLER).unlink(missing_ok=True)

    def _bring_storage_back(self) -> None:
        """The mount is back, and hides what was written to the place below it meanwhile."""
        for _ in range(MOUNT_TRIES):
            shutil.rmtree(self.storage, ignore_errors=True)
            try:
                self._away.rename(self.storage)
                return
            except OSError:  # written to again
                continue
        raise AssertionError(f"{self.storage} is written to all the time")

    def _directory_of(self, kind: str) -> Path:
        place = kind.removesuffix("_full")
        return {"storage": self.storage.parent, "disk": self.disk, "memory": self.memory}[place]

    def _remount(self, how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(self.storage.parent)]
        subprocess.run(command, capture_output=True, check=True, timeout=10)


@contextmanager
def make_places(root: Path) -> Iterator[Places]:
    """Directories of one job; file systems of their own where this process may mount them."""
    mounted = []
    for name in ("storage", "memory", "disk"):
        path = root / name
        path.mkdir(parents=True)
        if os.geteuid() == 0 and _mount(path):
            mounted.append(path)
    places = Places(root, len(mounted) == 3)
    places.storage.mkdir()
    try:
        yield places
    finally:
        for path in mounted:
            subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def _mount(path: Path) -> bool:
    options = f"size={FILE_SYSTEM_MIB}m"
    command = ["mount", "-t", "tmpfs", "-o", options, "autohet-chaos", str(path)]
    return subprocess.run(command, capture_output=True, timeout=10).returncode == 0


def _fill(directory: Path) -> None:
    """Write until no byte is free."""
    with suppress(OSError), (directory / FILLER).open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    with suppress(OSError), (directory / FILLER).open("ab", buffering=0) as file:
        while file.write(bytes(512)):
            pass


def flip_bit(path: Path, offset: int) -> None:
    """Flip one bit of the byte at `offset`, if the file has one there."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)
        if byte:
            os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), offset)
