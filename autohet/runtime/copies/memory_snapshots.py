"""A worker's snapshots in its node's host memory, within the node's budget."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor

from autohet.runtime.messages import GenerationOrder, WorkerPlace
from planner.inputs.fleet import node_of
from recovery.errors import SnapshotError
from recovery.local.agent_store import write_copies_limit
from recovery.local.memory_budget import Budget, capacity_of, memory_remedy, share_out
from recovery.local.snapshot import SnapshotLease, SnapshotOptions, SnapshotWriter
from recovery.state.layout import ShardId

logger = logging.getLogger("autohet.worker")

TRY_AGAIN_AFTER = 10
"""Skipped snapshots, for lack of host memory, before the worker tries again to make files."""


class MemorySnapshots:
    """Writer of one worker's snapshots, made anew for each generation."""

    def __init__(self, place: WorkerPlace, every_steps: int, timeout_s: float) -> None:
        self.shortage: str | None = None
        """Sentence on too little host memory for snapshots, of a node's first worker."""
        self.writer: SnapshotWriter | None = None
        """None where no snapshots are kept, or not for now."""
        self._place = place
        self._every = every_steps
        self._timeout_s = timeout_s
        self._budget: frozenset[ShardId] = frozenset()
        self._try_again_at: int | None = None
        """Snapshots to skip until the writer is made again; None: it is not to be."""

    def newest(self, generation: int) -> int | None:
        """Return the step of the newest committed snapshot of this generation.

        None until `begin` has made its files.
        """
        writer = self.writer
        return None if writer is None or writer.generation != generation else writer.files.newest

    def lease(self, generation: int, step: int) -> SnapshotLease | None:
        """Return the committed snapshot of this step.

        None unless this worker has one of the last generation that it trained in.
        """
        writer = self.writer
        if writer is None or self.newest(generation) != step:
            return None
        return writer.lease(step)

    def source(
        self, step: int, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | SnapshotLease:
        """Return the source of other copies of the step: the snapshot, else the state.

        With the snapshot, the state itself is read once a step.
        """
        writer = self.writer
        if writer is None or not writer.whole or not writer.takes(step):
            return state
        return writer.lease(step)

    def begin(self, order: GenerationOrder) -> None:
        """Make the files of a generation; the writer of the one before is closed."""
        self._try_again_at = None
        if self._every:
            self._budget = self._share_host_memory(order)
            self.writer = self._make_writer(order)

    def _share_host_memory(self, order: GenerationOrder) -> frozenset[ShardId]:
        """Return the shards that this worker's snapshots may hold.

        The node's first worker logs the budget. If shards are left out, it keeps the shortage,
        which the driver logs.
        """
        self.shortage = None
        place = self._place
        try:
            budget = self._find_budget(order)
            write_copies_limit(place.memory_directory, budget.copies_bytes)
        except OSError as error:
            reason = error.strerror or error
            self.shortage = f"No snapshots are kept in this node's memory: {reason}"
            logger.warning(self.shortage)
            return frozenset()
        if place.worker == min(budget.shards_by_worker):
            if budget.suffices:
                logger.info("%s", budget.sentence)
            else:
                remedy = memory_remedy(place.memory_directory, budget.wanted_bytes)
                self.shortage = f"{budget.sentence}. {remedy}"
                logger.warning(self.shortage)
        return budget.shards_by_worker[place.worker]

    def _find_budget(self, order: GenerationOrder) -> Budget:
        """Raises OSError."""
        place = self._place
        nodes = {worker: node_of(worker) for worker in order.layout.workers}
        node = nodes[place.worker]
        capacity = capacity_of(place.memory_directory, _offloaded_bytes(order, node))
        return share_out(node, order.layout, nodes, capacity, replicates=order.replicates)

    def plan(self, order: GenerationOrder) -> None:
        """Compute ahead what `begin` then finds in the order's layout."""
        if self._every:
            with suppress(OSError):
                self._find_budget(order)

    def _make_writer(self, order: GenerationOrder) -> SnapshotWriter | None:
        """Return the writer of snapshots; None if the node's budget has no shard for it.

        The run then continues with the snapshots of other workers.
        """
        if not self._budget:
            return None
        return SnapshotWriter(
            self._place.memory_directory,
            self._place.worker,
            order.layout,
            order.generation,
            SnapshotOptions(keep_older=order.replicates, in_background=True, only=self._budget),
        )

    def try_again(self, order: GenerationOrder) -> None:
        """Count down the skipped snapshots, and make new files at zero."""
        if self.writer is not None or self._try_again_at is None:
            return
        self._try_again_at -= 1
        if not self._try_again_at:
            self._try_again_at = None
            self.writer = self._make_writer(order)

    def start(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Start the step's snapshot; it is skipped if it fails."""
        self._write(lambda writer: writer.start(step, state, self._timeout_s))

    def wait(self) -> None:
        """Block until the last snapshot is committed; it is skipped if it fails."""
        self._write(lambda writer: writer.wait(self._timeout_s))

    def wait_copied(self) -> None:
        """Block until the last snapshot has read the state; it is skipped if it fails."""
        self._write(lambda writer: writer.wait_copied(self._timeout_s))

    def _write(self, call: Callable[[SnapshotWriter], object]) -> None:
        writer = self.writer
        if writer is None:
            return
        try:
            call(writer)
        except SnapshotError as error:
            self._skip(writer, error)

    def _skip(self, writer: SnapshotWriter, error: SnapshotError) -> None:
        """Continue without a snapshot that cannot be written.

        One failed snapshot is skipped. If files cannot be made or are not finished, snapshots are
        tried again later: files of an older generation are removed in time.
        """
        if writer.files.are_made and not writer.busy:
            logger.warning("a snapshot is left out: %s", error)
            return
        logger.warning(
            "no snapshots in this node's memory for the next %d steps: %s",
            TRY_AGAIN_AFTER * self._every,
            error,
        )
        self.writer = None
        self._try_again_at = TRY_AGAIN_AFTER
        # Without a wait, since it may hang.
        writer.close(0.0)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _offloaded_bytes(order: GenerationOrder, node: str) -> int:
    """Return the bytes of masters and moments that the plan keeps in this node's host memory."""
    if not order.plan.offloads:
        return 0
    mine = [worker for worker in order.plan.workers if node_of(worker) == node]
    return sum(order.layout.bytes_of(worker) for worker in mine)
