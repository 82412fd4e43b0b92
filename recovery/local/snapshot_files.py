"""Files of a snapshot writer: which one takes the next step, and which steps stay."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from recovery.errors import SnapshotError
from recovery.local.snapshot_buffer import SnapshotBuffer
from recovery.local.snapshot_file import SnapshotFileWriter

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2
MAX_BUFFERS = 5
"""Two steps may be held and one leased beside those two."""


class SnapshotFiles:
    """Files that take the steps of one writer in turn, the newest and the one before at least.

    Any thread may ask for steps, hold and release them. All else is done by the writer's thread,
    which fills the files; it closes them in `end`, except those of leased steps, which the last
    release closes. The files are made by `make`, in the writer's thread or before it starts.

    new_file: makes the file of a slot. local_units: of the worker's own tensors. lock: reentrant;
    the writer's, so that a step and the job that takes it change at once.
    """

    def __init__(
        self,
        new_file: Callable[[int], SnapshotFileWriter],
        local_units: Mapping[str, tuple[int, ...]],
        lock: threading.Condition,
    ) -> None:
        self._new_file = new_file
        self._local_units = local_units
        self._lock = lock
        self.buffers: list[SnapshotBuffer] = []
        """Files made so far, which only the writer's thread changes."""
        self._held: frozenset[int] = frozenset()
        self._leases: Counter[int] = Counter()
        self._ended = False
        self.num_commits = 0

    # any thread
    # ------------------------------------------------------------------------------

    @property
    def are_made(self) -> bool:
        """True if the files were made; from then on a failure costs one snapshot only."""
        return bool(self.buffers)

    @property
    def newest(self) -> int | None:
        """The newest step that is committed and there."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are committed and there."""
        with self._lock:
            return tuple(buffer.step for buffer in self.buffers if buffer.step is not None)

    def has(self, step: int) -> bool:
        """Return True if the snapshot of `step` is committed and still there."""
        return self.find(step) is not None

    def find(self, step: int) -> SnapshotBuffer | None:
        """Return the file in which `step` is committed; None: in none."""
        with self._lock:
            for buffer in self.buffers:
                if buffer.step == step:
                    return buffer
            return None

    def hold(self, steps: Collection[int]) -> None:
        """Pin the snapshots of `steps` (at most two) and unpin all others."""
        with self._lock:
            self._held = frozenset(steps)

    def add_lease(self, step: int) -> None:
        """Pin the snapshot of `step`, as well, until `end_lease`."""
        with self._lock:
            self._leases[step] += 1

    def end_lease(self, step: int) -> None:
        with self._lock:
            self._leases[step] -= 1
            if self._ended:
                self._close_unleased()

    # the writer's thread
    # ------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the files.

        Raises:
            SnapshotError: no room for them; there are none then.
        """
        made: list[SnapshotBuffer] = []
        try:
            for slot in range(NUM_BUFFERS):
                made.append(self._new_buffer(slot))
        except SnapshotError:
            for buffer in made:
                buffer.close()
                buffer.file.path.unlink(missing_ok=True)
            raise
        self.buffers = made

    def populate(self, until: Callable[[], bool]) -> None:
        """Map the pages of the files in advance, until there is something else to do."""
        for buffer in list(self.buffers):
            buffer.file.populate(until)

    def free_for(self, step: int) -> SnapshotBuffer | None:
        """Return the file for the next step: never the newest, nor one whose step is pinned.

        If all are, one more is made. If there is no room for it, the step is skipped (None): pinned
        snapshots are worth more.
        """
        with self._lock:
            held = self._held | {step for step, leases in self._leases.items() if leases}

        newest = max(self.buffers, key=lambda buffer: buffer.sequence)
        free = []
        for buffer in self.buffers:
            is_empty = buffer.step is None
            is_unneeded = buffer is not newest and buffer.step not in held
            if is_empty or is_unneeded:
                free.append(buffer)
        if free:
            return min(free, key=lambda buffer: buffer.sequence)

        if len(self.buffers) >= MAX_BUFFERS:
            return None
        try:
            another = self._new_buffer(len(self.buffers))
        except SnapshotError as error:
            logger.warning("no snapshot of step %d while older ones are held: %s", step, error)
            return None
        self.buffers.append(another)
        return another

    def begin(self, buffer: SnapshotBuffer) -> None:
        """Make a file invalid, which is to take another step."""
        buffer.file.begin()
        with self._lock:
            buffer.step = None

    def commit(self, buffer: SnapshotBuffer, step: int) -> None:
        """Note that a file was committed with `step`."""
        self.num_commits += 1
        with self._lock:
            buffer.step = step
            buffer.sequence = self.num_commits

    def end(self) -> None:
        """Close the files that are not leased; nobody writes to any of them any more."""
        with self._lock:
            self._ended = True
            self._close_unleased()

    def _new_buffer(self, slot: int) -> SnapshotBuffer:
        return SnapshotBuffer(self._new_file(slot), self._local_units)

    def _close_unleased(self) -> None:
        for buffer in self.buffers:
            if not self._leases[buffer.step or 0]:
                buffer.close()
