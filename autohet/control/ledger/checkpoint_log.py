"""Snapshots, checkpoints and transfers of a run: what workers tell of them becomes events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autohet.control.planning.agent_gc import settled_age
from autohet.control.values.actions import CommitCheckpoint
from autohet.control.values.effects import Deciding, Effects, event
from autohet.runtime.messages import GenerationOrder, StateTransfer, UploadRetried
from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.values.observation import Age, CheckpointState, Observation
    from recovery.state.layout import Layout
MOST_COSTS = 5
"""Number of last checkpoints whose cost is averaged."""
MOST_LAYOUTS = 8
"""Number of newest generations of which uploads that outlast them are committed."""


@dataclass(frozen=True)
class FailingCheckpoint:
    """Checkpoint that is not in durable storage, and why."""

    generation: int
    step: int
    reason: str
    is_retried: bool

    @property
    def age(self) -> Age:
        return self.generation, self.step


@dataclass
class _Span:
    """Copies by one source of one step; times are on the controller's clock."""

    began_at: float
    ended_at: float
    num_bytes: int = 0


class EndedTransfers:
    """Spans of finished copies: one for each tier, source and step.

    It is one span, however many workers of a node took part. Owned by the ledger.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str, int, int], _Span] = {}
        self._now = 0.0

    def take(self, seen: Observation) -> None:
        """Add the new transfers of an observation."""
        self._now = seen.now
        for report in seen.reports.values():
            for transfer in report.transfers:
                source = transfer.source
                if transfer.tier == "peer":
                    # A node's agent makes the copies of all its workers.
                    source = node_of(source)
                self._add(transfer, source)
        for transfer in seen.transfers:
            self._add(transfer, transfer.source)

    def _add(self, transfer: StateTransfer, source: str) -> None:
        ended_at = self._now - transfer.ended_ago_s
        began_at = ended_at - transfer.seconds
        key = (transfer.tier, source, transfer.generation, transfer.step)
        new = _Span(began_at, ended_at)
        span = self._spans.setdefault(key, new)
        span.began_at = min(span.began_at, began_at)
        span.ended_at = max(span.ended_at, ended_at)
        span.num_bytes += transfer.num_bytes

    def flush(self) -> list[dict[str, Any]]:
        """Return the spans for an event that is written now, and forget them."""
        documents: list[dict[str, Any]] = []
        for (tier, source, _, step), span in self._spans.items():
            document = {
                "tier": tier,
                "source": source,
                "step": step,
                "bytes": span.num_bytes,
                "seconds": round(span.ended_at - span.began_at, 4),
                "ended_ago_s": round(self._now - span.ended_at, 4),
            }
            documents.append(document)
        self._spans = {}
        return documents


class CheckpointLog:
    """Memory of a run's snapshots and checkpoints. Owned by the ledger.

    every_steps: distance of the steps whose checkpoints are due; None: they are requested.
    """

    def __init__(self, every_steps: int | None) -> None:
        self._every_steps = every_steps
        self.uri: str | None = None
        self.step: int | None = None
        """Step of the newest committed checkpoint, at `uri`."""
        self.errors: dict[Age, str] = {}
        """Reason by (generation, step) why a worker's part is not written and not retried."""
        self.failing: FailingCheckpoint | None = None
        """The newest checkpoint that failed, until a later one is committed."""
        self.upload_s: float | None = None
        """Longest time in seconds until all parts of a due checkpoint were written.

        It counts from the moment at which the step was seen; None before the first such checkpoint.
        """
        self._costs: deque[float] = deque(maxlen=MOST_COSTS)
        self._due_at: dict[int, float] = {}
        """Time at which each step that is due for a checkpoint was seen.

        A step is kept here until all parts of its checkpoint are written.
        """
        self._receipts: dict[Age, dict[str, Any]] = {}
        self._written: dict[int, tuple[Layout, float]] = {}
        """By generation, the layout of what it writes, and its last step that later ones follow."""
        self._complete: set[Age] = set()
        """Checkpoints whose every part is written."""
        self._committed_before = -1
        """Step of the newest checkpoint when this driver took over living workers."""
        self._snapshot: Age = (0, 0)
        self._num_logged = 0
        self._num_damaged = 0
        self._warned: set[tuple[str, str]] = set()
        """Logged sentences on what a node lacks, with its name."""
        self._transfers = EndedTransfers()

    def begin(self, generation: int, layout: Layout, first_step: int) -> None:
        """Begin a generation at `first_step`; what earlier ones wrote beyond it does not count.

        No-op if it has begun.
        """
        if generation in self._written:
            return
        for other, (known, last_step) in self._written.items():
            self._written[other] = (known, min(last_step, first_step))
        self._written[generation] = (layout, math.inf)
        for oldest in sorted(self._written)[:-MOST_LAYOUTS]:
            del self._written[oldest]

    def note_step(self, num_steps: int, now: float) -> None:
        """Note when a step that is due for a checkpoint, or the first one after it, was seen."""
        if self._every_steps is None:
            return
        due = num_steps - num_steps % self._every_steps
        if due == num_steps or due not in self._due_at:
            self._due_at[due] = now

    def note_request(self, step: int, now: float) -> None:
        """Note that a checkpoint of `step`, which is in flight, was requested."""
        self._due_at[step] = now

    @property
    def cost_s(self) -> float | None:
        """Mean seconds by which the last checkpoints lengthened training; None before the first."""
        return sum(self._costs) / len(self._costs) if self._costs else None

    def note_cost(self, cost_s: float) -> None:
        """Note the seconds by which the newest complete checkpoint lengthened training."""
        self._costs.append(cost_s)

    @property
    def newest_complete(self) -> Age | None:
        """Newest checkpoint whose every part is written."""
        return max(self._complete, default=None)

    def awaits_commit(self, found: CheckpointState) -> bool:
        """Return True if a checkpoint whose every part is written may still be committed."""
        if not self._complete:
            return False
        _, step = max(self._complete)
        is_refused = found.error_step == step and not found.is_retried
        return not is_refused and (self.step is None or self.step < step)

    def forget_parts(self) -> None:
        """Forget the parts of checkpoints that the run has gone back behind."""
        self._complete = set()
        self._receipts = {}
        self._due_at = {}

    def inherit(self, receipts: Collection[tuple[str, Any]], committed: int) -> None:
        """Take over the parts that workers wrote under an earlier driver, by worker.

        committed: step of the newest checkpoint; parts of it and of older ones are told again.
        """
        self._committed_before = committed
        for worker, (generation, step, parts) in receipts:
            self._receipts.setdefault((generation, step), {})[worker] = parts

    def record(
        self, seen: Observation, orders: Mapping[str, GenerationOrder], generation: int
    ) -> Effects:
        """Log new snapshots, checkpoints and failures, and the transfers until then."""
        self._transfers.take(seen)
        has_snapshot = yield from self._take_snapshots(seen, orders)
        has_checkpoint = yield from self._take_checkpoints(seen, generation)
        if has_snapshot or has_checkpoint:
            yield from self.log_transfers(generation)
        yield from self._take_checkpoint_errors(seen)
        yield from self._take_warnings(seen, generation)
        yield from self._take_damaged(seen, generation)

    def log_transfers(self, generation: int) -> Effects:
        """Log the transfers that have ended since the last event of this kind.

        Called with each snapshot and checkpoint, and at the run's end.
        """
        transfers = self._transfers.flush()
        if transfers:
            yield event("transfers", generation, transfers=transfers)

    def _take_snapshots(
        self, seen: Observation, orders: Mapping[str, GenerationOrder]
    ) -> Deciding[bool]:
        """Log the newest step that all workers keep in host memory, if it is a new one.

        Copies on other nodes must exist, too, where they are asked for. Returns True if the step is
        new.
        """
        age = settled_age(orders, seen.reports)
        if age is None or age <= self._snapshot:
            return False
        self._snapshot = age
        yield event("snapshot", age[0], step=age[1])
        return True

    def _take_checkpoints(self, seen: Observation, generation: int) -> Deciding[bool]:
        """Log the checkpoints that were committed since the last look.

        Returns True if there are any.
        """
        new = seen.checkpoint.committed[self._num_logged :]
        for step, uri in new:
            self.step = step
            self.uri = uri
            # A later step in storage makes up for the failure.
            if self.failing is not None and step >= self.failing.step:
                self.failing = None
            yield event("checkpoint", generation, step=step, uri=uri)
        self._num_logged += len(new)
        return bool(new)

    def _take_checkpoint_errors(self, seen: Observation) -> Effects:
        """Note a failure of the driver's part of a checkpoint: the commit."""
        found = seen.checkpoint
        generation = found.error_generation
        step = found.error_step
        if found.error and step is not None and generation is not None:
            yield from self._note_failing(generation, step, found.error, retried=found.is_retried)

    def _take_damaged(self, seen: Observation, generation: int) -> Effects:
        """Log each checkpoint that is passed over as damaged, once."""
        damaged = seen.checkpoint.damaged
        for reason in damaged[self._num_damaged :]:
            sentence = f"Deciding to go on from an older checkpoint, since {reason}"
            yield event("decision", generation, sentence)
        self._num_damaged = len(damaged)

    def _take_warnings(self, seen: Observation, generation: int) -> Effects:
        """Log each sentence on what a node lacks once: host memory, or a compiler's room.

        Two workers of a node may report different ones: one may have kept that of a generation in
        which it was the node's first.
        """
        for worker, report in seen.reports.items():
            reasons = {
                "memory_shortage": report.memory_shortage,
                "compile_fallback": report.compile_fallback,
            }
            node = node_of(worker)
            for kind, reason in reasons.items():
                if reason is None or (node, reason) in self._warned:
                    continue
                self._warned.add((node, reason))
                yield event(kind, generation, f"{node}: {reason}", node=node, reason=reason)

    def _note_failing(self, generation: int, step: int, reason: str, *, retried: bool) -> Effects:
        """Log each failed checkpoint once, with the newest step that is safe."""
        found = FailingCheckpoint(
            generation=generation, step=step, reason=reason, is_retried=retried
        )
        known = self.failing
        # A later checkpoint has failed since: an older one is of no interest.
        if known is not None and known.age > found.age:
            return
        self.failing = found
        if known is not None and known.age == found.age:
            return
        if self.step is None:
            safe = "no step of this job is in durable storage"
        else:
            safe = f"step {self.step} is safe ({self.uri})"
        then = "it is tried again" if retried else "it is not tried again"
        yield event(
            "checkpoint_failed",
            generation,
            f"The checkpoint of step {step} failed: {reason}; {safe}; {then}",
            step=step,
            error=reason,
            is_retried=retried,
            safe_step=self.step,
            safe_checkpoint=self.uri,
        )

    def take_receipt(self, worker: str, receipt: Any, now: float) -> Effects:
        """Collect one worker's part of a checkpoint; yield the commit once all parts are in.

        All may be in before the generation is known to be ready: a generation that begins at the
        last step has nothing else to do. An upload may also outlast its generation.
        """
        generation, step, parts = receipt
        age = (generation, step)
        if generation not in self._written or step <= self._committed_before:
            return
        layout, last_step = self._written[generation]
        newest = self.newest_complete
        if step > last_step or (newest is not None and age <= newest):
            return
        if isinstance(parts, UploadRetried):
            reason = f"{worker}: {parts.reason}"
            yield from self._note_failing(generation, step, reason, retried=True)
            return
        if isinstance(parts, str):
            reason = f"{worker}: {parts}"
            self.errors[age] = reason
            yield from self._note_failing(generation, step, reason, retried=False)
            return

        received = self._receipts.setdefault(age, {})
        received[worker] = parts
        if not received.keys() >= set(layout.workers):
            return
        self._complete.add(age)
        if step in self._due_at:
            upload_s = now - self._due_at[step]
            self.upload_s = max(self.upload_s or 0.0, upload_s)
        # What is older is never committed after this one.
        self._due_at = {due: at for due, at in self._due_at.items() if due > step}
        self._receipts = {other: each for other, each in self._receipts.items() if other > age}
        yield CommitCheckpoint(
            step=step, generation=generation, layout=layout, receipts=tuple(received.values())
        )
