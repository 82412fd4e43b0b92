"""What a node keeps for its workers, living or dead: snapshots in host memory and on its own disk, found by
scanning its directories.

The files are written by the workers (see `recovery.snapshot`); the store only reads. A file that is damaged, torn
or gone is skipped.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from recovery.errors import ShardUnavailable, SnapshotError
from recovery.holdings import Holding, Source
from recovery.layout import ShardId
from recovery.snapshot_file import SUFFIX, SnapshotFile

logger = logging.getLogger(__name__)


class AgentStore:
    """Reads one node's snapshots. Any thread may call it; open files are kept mapped until they change."""

    def __init__(self, memory_directory: Path | str, disk_directory: Path | str, node: str) -> None:
        self.node = node
        self._directories = {"memory": Path(memory_directory), "disk": Path(disk_directory)}
        self._files: dict[tuple[str, Path], SnapshotFile] = {}
        self._lock = threading.Lock()
        self.problems: tuple[str, ...] = ()

    def inventory(self) -> list[Holding]:
        """Every committed snapshot of this node, memory before disk; what cannot be read is in `problems`."""
        found: list[Holding] = []
        problems: list[str] = []
        for kind, directory in self._directories.items():
            for path in sorted(directory.glob(f"*{SUFFIX}")):
                try:
                    found.append(self._open(kind, path).holding(kind, self.node))
                except SnapshotError as error:
                    problems.append(str(error))
        self.problems = tuple(problems)
        return found

    def read(self, source: Source, shard: ShardId) -> memoryview:
        """The verified bytes of a shard of `source` (kind "memory" or "disk", its worker's name and step), without
        a copy.

        Raises:
            ShardUnavailable: no committed snapshot of that worker and step is here (any more).
            ShardCorrupt: its bytes are not those that were committed.
        """
        return self.file_of(source, shard).read(shard)

    def file_of(self, source: Source, shard: ShardId) -> SnapshotFile:
        """The open snapshot file that `source` names."""
        for path in sorted(self._directories[source.kind].glob(f"*{SUFFIX}")):
            try:
                file = self._open(source.kind, path)
            except SnapshotError:
                continue
            if (file.map.worker, file.commit.step, file.commit.generation) == (
                source.name,
                source.step,
                source.generation,
            ):
                return file
        raise ShardUnavailable(shard, str(source), "no such snapshot is there (any more)")

    def _open(self, kind: str, path: Path) -> SnapshotFile:
        """The file as it is now, mapped anew only when it was replaced."""
        with self._lock:
            known = self._files.get((kind, path))
            try:
                if (
                    known is not None
                    and known.path.stat().st_size == known.num_bytes
                    and known.identity == identity(path)
                ):
                    current = known.current()
                else:
                    current = SnapshotFile(path)
            except OSError as error:
                raise SnapshotError(str(path), f"is gone: {error}") from error
            self._files[kind, path] = current
            return current

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


def identity(path: Path) -> tuple[int, int]:
    """Device and inode: another file under the same name is another identity."""
    status = path.stat()
    return status.st_dev, status.st_ino
