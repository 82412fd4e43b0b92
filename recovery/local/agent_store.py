"""Store of a node's snapshots in host memory and on disk, and of copies that peers pushed here.

The store keeps them for the node's workers, living or dead, and finds them by scanning its
directories. Workers write their files themselves (see `recovery.local.snapshot`); the store reads
them, takes in pushed copies and removes old ones. A file that is damaged, torn or gone is skipped
and reported.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from recovery.cancellation import in_thread
from recovery.errors import ShardCorrupt, ShardUnavailable, SnapshotError, SnapshotUncommitted
from recovery.local.private_files import make_private_directory, read_note, write_note
from recovery.local.snapshot_file import SnapshotFile, SnapshotFileWriter, has_writer
from recovery.local.snapshot_format import SUFFIX, Extent, FileMap, escaped, generation_of
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId

logger = logging.getLogger(__name__)

COPIES_LIMIT = "copies.limit"
PUSHED = ".pushed"
"""Part of the names of copies from peers."""
NUM_EARLIER_COPIES = 2
"""Number of earlier copies in which a pushed shard's bytes are looked for."""
_STEM = re.compile(r"\.s(\d+)\.g(\d+)" + re.escape(PUSHED))


class AgentStore:
    """Snapshots of one node. Any thread may call it; files are kept mapped while they exist.

    Copies that peers push take at most `max_copy_bytes` of host memory (half of its file system if
    None); the rest goes to the disk.
    """

    def __init__(
        self,
        memory_directory: Path | str,
        disk_directory: Path | str,
        node: str,
        *,
        max_copy_bytes: int | None = None,
    ) -> None:
        self.node = node
        self._max_copy_bytes = max_copy_bytes
        self._directories = {"memory": Path(memory_directory), "disk": Path(disk_directory)}
        self._files: dict[tuple[str, Path], SnapshotFile] = {}
        self.resolved: dict[Source, list[SnapshotFile]] = {}
        """Files found for each source; forgotten once they are gone."""
        self._lock = threading.Lock()
        self._opening = {kind: threading.Lock() for kind in self._directories}
        """Locks held while files of a kind are opened: a hung disk does not block host memory."""
        self._pushes = 0
        self._incoming_bytes = 0
        self._looking: Future[tuple[list[Holding], list[str]]] | None = None
        """Scan of the disk in flight, shared by all callers: a hung disk blocks only one thread."""
        self._newest_taken: tuple[int, int] | None = None
        self._copies_on_disk = False
        self._refusing = False
        self.problems: tuple[str, ...] = ()

    # reading

    def inventory(self, disk_within_s: float | None = None) -> list[Holding]:
        """Return every committed snapshot of this node, memory before disk.

        Files that cannot be read are listed in `problems`. A disk that does not answer within
        `disk_within_s` seconds is skipped; what is in host memory is still returned.
        """
        found, problems = self._held("memory")
        with self._lock:
            if self._looking is None:
                self._looking = in_thread(lambda: self._held("disk"), f"the disk of {self.node}")
            looking = self._looking

        try:
            on_disk, wrong = looking.result(disk_within_s)
        except TimeoutError:
            on_disk = []
            wrong = [f"the disk of {self.node} does not answer: what it keeps is not known"]
            logger.warning("%s", wrong[0])
        else:
            with self._lock:
                # Another caller may have begun the next scan already.
                if self._looking is looking:
                    self._looking = None
        self.problems = (*problems, *wrong)
        return found + on_disk

    def _held(self, kind: str) -> tuple[list[Holding], list[str]]:
        problems: list[str] = []
        holdings = [file.holding(kind, self.node) for _, file in self._scan(problems, kind)]
        return holdings, problems

    def read(self, source: Source, shard: ShardId, expected: int | None = None) -> memoryview:
        """Return the verified bytes of a shard of `source`, without a copy.

        `source` has kind "memory" or "disk", its worker's name and step. `expected`: see
        `SnapshotFile.read`.

        Raises:
            ShardUnavailable: no committed snapshot of that worker and step is here (any more).
            ShardCorrupt: its bytes are not those that were committed.
        """
        return self.file_of(source, shard).read(shard, expected)

    def file_of(self, source: Source, shard: ShardId) -> SnapshotFile:
        """Return the open snapshot file of `source` that holds `shard`.

        Raises ShardUnavailable as `read` does.
        """
        with self._lock:
            known = self.resolved.get(source, [])
        for file in known:
            if shard in file.map.extents and _is_there(file):
                return file
        scanned = self._scan([], source.kind)
        files = [file for kind, file in scanned if file.source(kind, self.node) == source]
        with self._lock:
            self.resolved[source] = files
        for file in files:
            if shard in file.map.extents:
                return file
        raise ShardUnavailable(shard, str(source), "no such snapshot is there (any more)")

    def _scan(self, problems: list[str], *kinds: str) -> Iterator[tuple[str, SnapshotFile]]:
        """Yield every committed file as it is now, by kind (all, or these).

        Files that are gone are unmapped.
        """
        for kind, directory in self._directories.items():
            if kinds and kind not in kinds:
                continue
            present = sorted(directory.glob(f"*{SUFFIX}"))
            self._forget_absent(kind, set(present))
            for path in present:
                try:
                    yield kind, self._open(kind, path)
                except SnapshotUncommitted:
                    # Its writer is at work on it, or has died: there is nothing to report.
                    continue
                except SnapshotError as error:
                    problems.append(str(error))

    def _open(self, kind: str, path: Path) -> SnapshotFile:
        """Return the file as it is now; map it again only if it was replaced."""
        with self._opening[kind]:
            known = self._files.get((kind, path))
            if known is not None and _is_there(known):
                current = known.current()
            else:
                current = SnapshotFile(path)
            with self._lock:
                self._files[kind, path] = current
            return current

    def _forget_absent(self, kind: str, present: set[Path]) -> None:
        # A removed file's memory is only freed once nobody maps it.
        with self._lock:
            for key in list(self._files):
                known_kind, path = key
                if known_kind == kind and path not in present:
                    del self._files[key]

            # Not those of an earlier step in the same file.
            there = {id(file) for file in self._files.values()}
            for source, files in list(self.resolved.items()):
                are_there = there.issuperset(map(id, files))
                if not files or not are_there:
                    del self.resolved[source]

    # keeping

    def accept(self, step: int, generation: int, file_map: FileMap) -> SnapshotFileWriter:
        """Make a file for shards that a peer pushes here.

        It is in host memory if there is room, else on the disk. The caller fills `buffer` at
        `map.extents`, then calls `commit` and `close`.

        Raises:
            SnapshotError: room in neither, or the node is about to leave.
        """
        with self._lock:
            if self._refusing:
                raise SnapshotError(self.node, "is about to leave and takes no more copies")
            self._newest_taken = max(self._newest_taken or (0, 0), (generation, step))
            self._pushes += 1
            # The counter: a second push of the same step is another file.
            number = f"{os.getpid()}-{self._pushes}"

        name = f"{_stem(file_map.worker, step, generation)}{PUSHED}{number}{SUFFIX}"
        try:
            with self._claimed(file_map.file_bytes):
                return SnapshotFileWriter(self._directories["memory"] / name, file_map)
        except SnapshotError as error:
            logger.warning("a pushed copy goes to the disk: %s", error)
            self._copies_on_disk = True
            return SnapshotFileWriter(self._directories["disk"] / name, file_map)

    def fill_unchanged(
        self, file_map: FileMap, checksums: Sequence[int], buffer: memoryview
    ) -> list[bool]:
        """Fill `buffer` with the shards that an earlier copy of this worker has with equal bytes.

        `checksums` are those of the new copy, in the map's order. Returns for each shard if it was
        filled: its checksum is the earlier copy's, and the bytes were checked on the way.
        """
        earlier = self._newest_copies(file_map.worker)
        filled = []
        for placed, expected in zip(file_map.extents.items(), checksums, strict=True):
            filled.append(any(_fill_equal(file, placed, expected, buffer) for file in earlier))
        return filled

    def _newest_copies(self, worker: str) -> list[SnapshotFile]:
        """Return the newest committed copies of a worker in host memory, the newest first.

        These are the complete round's and, if a round was given up, that one's.
        """
        pattern = f"{escaped(worker)}.s*{PUSHED}*{SUFFIX}"
        paths = self._directories["memory"].glob(pattern)
        found: list[SnapshotFile] = []
        for path in sorted(paths, key=_age_in_name, reverse=True):
            try:
                found.append(self._open("memory", path))
            except SnapshotError:
                # It is being received, or was removed.
                continue
            if len(found) == NUM_EARLIER_COPIES:
                break
        return found

    @contextmanager
    def _claimed(self, num_bytes: int) -> Iterator[None]:
        """Count a file of `num_bytes` against the host-memory quota while it is being made.

        Other pushes cannot see the file until it has its name.

        Raises:
            SnapshotError: the file would take host memory that workers may need.
        """
        with self._lock:
            self._check_quota(num_bytes)
            self._incoming_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._incoming_bytes -= num_bytes

    def _check_quota(self, num_bytes: int) -> None:
        memory = self._directories["memory"]
        try:
            make_private_directory(memory)
            system = os.statvfs(memory)
            taken = sum(_size(path) for path in memory.glob(f"*{PUSHED}*{SUFFIX}"))
        except OSError as error:
            raise SnapshotError(str(memory), f"cannot be used: {error}") from error

        limit = self._max_copy_bytes
        if limit is None:
            limit = system.f_blocks * system.f_frsize // 2
        limit = min(limit, read_copies_limit(memory, limit))

        taken += self._incoming_bytes
        if taken + num_bytes > limit:
            raise SnapshotError(
                str(memory),
                f"holds {taken} bytes of copies; with {num_bytes} more it would pass {limit}",
            )

    def drop_copies(self, worker: str, before: tuple[int, int]) -> int:
        """Remove pushed copies of `worker`'s state older than `before`; return how many.

        `before` is a (generation, step).
        """
        removed = 0
        kinds: tuple[str, ...] = ("memory",)
        if self._copies_on_disk:
            # Only then: a disk that hangs would hold up the push.
            kinds = ("memory", "disk")
        for _, file in list(self._scan([], *kinds)):
            if file.map.worker == worker and _is_pushed(file) and _age(file) < before:
                file.path.unlink(missing_ok=True)
                removed += 1
        self._scan_once(*kinds)
        return removed

    def refuse_copies(self) -> tuple[int, int] | None:
        """Refuse copies from now on.

        Returns the (generation, step) of the newest copy that was taken or is still coming in.
        """
        with self._lock:
            self._refusing = True
            taken = self._newest_taken

        ages = [_age(file) for _, file in self._scan([]) if _is_pushed(file)]
        if taken is not None:
            ages.append(taken)
        return max(ages, default=None)

    def prune(
        self,
        memory_before: tuple[int, int],
        disk_before: int,
        living: frozenset[str] = frozenset(),
        generation: int | None = None,
    ) -> int:
        """Remove old copies and snapshots; return how many files.

        In host memory those older than (generation, step) `memory_before` are removed, on the disk
        those of steps before `disk_before`. The files that `living` workers write in turn in
        `generation` (None: in any) stay. Files of earlier generations that hold no commit, and that
        no process has open for writing, are removed, too.

        The caller knows newer state that is whole: of every shard in memory, and in durable storage
        for the disk.
        """
        removed = 0
        if generation is not None:
            removed = self._remove_uncommitted(generation)

        for kind, file in list(self._scan([])):
            written_in = generation_of(file.path)
            present = generation is None or written_in is None or written_in >= generation
            owned = file.map.worker in living and not _is_pushed(file) and present
            if kind == "memory":
                old = _age(file) < memory_before
            else:
                old = file.commit.step < disk_before

            if old and not owned:
                file.path.unlink(missing_ok=True)
                removed += 1
        self._scan_once()
        return removed

    def _remove_uncommitted(self, generation: int) -> int:
        """Remove workers' unusable files of generations before this one; return how many."""
        removed = 0
        for directory in self._directories.values():
            for path in directory.glob(f"*{SUFFIX}"):
                written_in = generation_of(path)
                if written_in is None or written_in >= generation:
                    continue
                if not has_writer(path) and not _is_committed(path):
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    def remove_unfinished(self) -> int:
        """Remove pushed copies that were never committed, and temporary files; return how many.

        They were left by an agent that died; files that a living agent is taking in stay. Call it
        before any peer pushes.
        """
        removed = 0
        for directory in self._directories.values():
            copies = list(directory.glob(f"*{PUSHED}*{SUFFIX}"))
            temporary = list(directory.glob(f".*{PUSHED}*.tmp"))
            for path in copies + temporary:
                if not has_writer(path) and (path.suffix == ".tmp" or not _is_committed(path)):
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    def _scan_once(self, *kinds: str) -> None:
        """Scan for the effect alone: files that are gone are unmapped."""
        for _ in self._scan([], *kinds):
            pass

    def close(self) -> None:
        """Release all files; each is unmapped with the last view that is still in use."""
        with self._lock:
            self._files.clear()
            self.resolved.clear()


def write_copies_limit(directory: Path | str, num_bytes: int) -> None:
    """Write the bytes of host memory that workers leave to copies from peers.

    See `recovery.local.memory_budget`.
    """
    write_note(Path(directory, COPIES_LIMIT), str(num_bytes).encode())


def read_copies_limit(directory: Path, default: int) -> int:
    try:
        return int(read_note(directory / COPIES_LIMIT))
    except (OSError, ValueError):
        return default


def _is_there(file: SnapshotFile) -> bool:
    """Return True if the path still names the mapped file, at its full length.

    Reading beyond the end would kill the process.
    """
    try:
        status = file.path.stat()
    except OSError:
        return False
    is_same_file = (status.st_dev, status.st_ino) == file.identity
    return is_same_file and status.st_size == file.num_bytes


def _is_pushed(file: SnapshotFile) -> bool:
    return PUSHED in file.path.name


def _fill_equal(
    file: SnapshotFile, placed: tuple[ShardId, Extent], expected: int, buffer: memoryview
) -> bool:
    """Fill a shard's extent of `buffer` from a file that has it with the expected checksum."""
    shard, extent = placed
    held = file.map.extents.get(shard)
    if held is None or held.num_bytes != extent.num_bytes or file.checksum(shard) != expected:
        return False
    try:
        file.read_into(shard, buffer[extent.offset : extent.end])
    except (ShardUnavailable, ShardCorrupt):
        return False
    return True


def _stem(worker: str, step: int, generation: int) -> str:
    return f"{escaped(worker)}.s{step}.g{generation}"


def _age(file: SnapshotFile) -> tuple[int, int]:
    return file.commit.generation, file.commit.step


def _age_in_name(path: Path) -> tuple[int, int]:
    """Return (generation, step) of a copy's name, as `_stem` writes it."""
    found = _STEM.search(path.name)
    if found is None:
        return (0, 0)
    return (int(found[2]), int(found[1]))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # It was dropped after it was listed.
        return 0


def _is_committed(path: Path) -> bool:
    try:
        SnapshotFile(path).close()
    except SnapshotError:
        return False
    return True
