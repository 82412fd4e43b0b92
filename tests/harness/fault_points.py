"""Where a worker's process can be struck: real functions wrapped at start-up, so that the process
stops there and says so.

The product has no hook but the trainer's phases, which it has for its own sake.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.harness.waits import HANG_S

PHASES = (
    "gather",
    "forward",
    "backward",
    "gate",
    "gradient_sync",
    "vote",
    "failed_vote",
    "apply",
    "evaluate",
)
FILES = ("snapshot", "upload")
RECONFIGURING = ("rebuild", "restore")
UPDATING = ("mid_update", "failed_update")


@dataclass(frozen=True)
class FaultPoint:
    """A place in one worker's life. Phases and files are of a `step`; rebuild and restore of a
    `generation`.

    forward, backward: the second microbatch. failed_vote: the vote raises. snapshot: state copied,
    not yet committed. upload: about to store a data file. mid_update: a part of the step's update
    is done, the rest is not. failed_update: as this, and there the update fails. rebuild: all have
    met, the first group is being made. evaluate: an evaluation of the state after `step` updates
    begins. restore: about to exchange live state. cut_over: the vote has ended the
    generation before `generation`, and this worker is about to begin that one. unseen_vote: others
    have seen the vote of `step`; this worker never does.
    """

    name: str
    worker: str
    step: int = -1
    generation: int = -1


class Gate:
    """Holds whoever arrives, once, until `open`; `tell` says that somebody has arrived."""

    def __init__(self, point: FaultPoint, tell: Callable[[Any], None]) -> None:
        self._point = point
        self._tell = tell
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._passed = False

    def arrive(self) -> None:
        with self._lock:
            if self._passed:
                return
            self._passed = True
        self._tell(self._point)
        assert self._open.wait(HANG_S), f"nobody opened the gate at {self._point}"

    def open(self) -> None:
        self._open.set()


def install(point: FaultPoint, arrive: Callable[[], None]) -> Callable[[str, int], None] | None:
    """Wrap what `point` names, in this process; for a phase of the trainer, returns the hook to
    give it.
    """
    if point.name in PHASES:
        return _phase_hook(point, arrive)
    wrap = {
        "snapshot": _at_snapshot,
        "upload": _at_upload,
        "rebuild": _at_rebuild,
        "restore": _at_restore,
        "mid_update": _in_update,
        "failed_update": _in_update,
        "cut_over": _at_cut_over,
        "unseen_vote": _at_vote,
    }
    wrap[point.name](point, arrive)
    return None


def _phase_hook(point: FaultPoint, arrive: Callable[[], None]) -> Callable[[str, int], None]:
    due = 2 if point.name in ("forward", "backward") else 1
    at = point.name.removeprefix("failed_")
    count = 0

    def hook(phase: str, step: int) -> None:
        nonlocal count
        if (phase, step) == (at, point.step):
            count += 1
            if count == due:
                arrive()
                if at != point.name:
                    raise MemoryError("no memory for the vote")

    return hook


def _in_update(point: FaultPoint, arrive: Callable[[], None]) -> None:
    """Half of the first flat buffer is of the next step when the point is reached."""
    from autohet.runtime.parallel.buckets import ALIGNMENT
    from autohet.runtime.state import flat_optimizer

    update = flat_optimizer.fused_update
    reached = False

    def late(tensors: Any, gradients: Any, rule: Any) -> None:
        nonlocal reached
        if rule.step != point.step or reached:
            update(tensors, gradients, rule)
            return
        reached = True
        half = gradients[0].numel() // 2 // ALIGNMENT * ALIGNMENT
        update([tuple(tensor[:half] for tensor in tensors[0])], [gradients[0][:half]], rule)
        arrive()
        if point.name == "failed_update":
            raise MemoryError("no memory for the rest of the update")
        rest = tuple(tensor[half:] for tensor in tensors[0])
        update([rest, *tensors[1:]], [gradients[0][half:], *gradients[1:]], rule)

    flat_optimizer.fused_update = late


def _at_snapshot(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from recovery.local.snapshot_file import SnapshotFileWriter

    commit = SnapshotFileWriter.commit

    def late(self: Any, step: int, generation: int) -> None:
        if step == point.step:
            arrive()
        commit(self, step, generation)

    SnapshotFileWriter.commit = late  # type: ignore[method-assign]


def _at_upload(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from recovery.checkpoint import upload as checkpoint_upload

    write = checkpoint_upload.write_views

    def late(part: Any, *arguments: Any, **named: Any) -> Any:
        if part.step >= point.step:  # a checkpoint may have had to wait for the one before
            arrive()
        return write(part, *arguments, **named)

    checkpoint_upload.write_views = late


def _at_rebuild(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from autohet.runtime.groups import generation as groups

    back_end = groups.BACK_ENDS["cpu"]
    begin = groups.GenerationGroups.__init__
    create = back_end.create
    now = -1

    def noting(self: Any, store: Any, generation: int, *arguments: Any) -> None:
        nonlocal now
        now = generation
        begin(self, store, generation, *arguments)

    def late(self: Any, store: Any) -> Any:
        if now == point.generation:
            arrive()
        return create(self, store)

    groups.GenerationGroups.__init__ = noting  # type: ignore[method-assign]
    back_end.create = late  # type: ignore[method-assign]


def _at_cut_over(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from autohet.runtime.worker import Worker

    cut_over = Worker._cut_over

    def late(self: Any, groups: Any) -> None:
        arrive()
        cut_over(self, groups)

    Worker._cut_over = late  # type: ignore[method-assign]


def _at_vote(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from autohet.runtime.groups import PeerLost
    from autohet.runtime.step.step_commit import Trainer
    from autohet.runtime.step.votes import Voter

    cast = Trainer._cast_vote
    count = Voter.count
    now = -1

    def noting(self: Any, *arguments: Any) -> Any:
        nonlocal now
        now = self.step
        return cast(self, *arguments)

    def late(self: Any, mine: Any) -> Any:
        vote = count(self, mine)
        if now == point.step:
            arrive()
            raise PeerLost("a peer died while the vote was read")
        return vote

    Trainer._cast_vote = noting  # type: ignore[method-assign]
    Voter.count = late  # type: ignore[method-assign]


def _at_restore(point: FaultPoint, arrive: Callable[[], None]) -> None:
    from autohet.runtime.state import state_source
    from recovery.transfer import restore

    fill = state_source.StateSource.fill
    run = restore.Exchange.run
    now = -1

    def noting(self: Any, order: Any, *arguments: Any) -> Any:
        nonlocal now
        now = order.generation
        return fill(self, order, *arguments)

    def late(self: Any, messages: Any) -> None:
        if now == point.generation:
            arrive()
        run(self, messages)

    state_source.StateSource.fill = noting  # type: ignore[method-assign]
    restore.Exchange.run = late  # type: ignore[method-assign]
