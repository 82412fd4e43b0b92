"""What crosses between the driver and the processes it directs: frozen, picklable, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from planner.plan import Plan
from recovery.peers.replication_targets import ReplicationTarget
from recovery.state.ancestry import NOTHING_KNOWN, Ancestry
from recovery.state.holdings import Source
from recovery.state.layout import Layout, ShardId


class Phase(StrEnum):
    """What a worker is doing, as it reports it."""

    IDLE = "idle"  # process is up, part of no generation
    BUILDING = "building"  # making the generation's groups
    RESTORING = "restoring"  # filling its state
    TRAINING = "training"
    STOPPED = "stopped"  # stood still after a whole step, as asked; keeps its state
    HALTED = "halted"  # woken out of a step or a restore by a peer's loss; keeps its state
    RELEASED = "released"  # has served its state to the others and is not part of the plan
    FAILED = "failed"  # an error that is not a peer's loss: `error` says which
    FINISHED = "finished"  # ran the last step


TOLD_ONCE = ("steps", "receipts", "transfers", "evaluations")
"""Fields of a `WorkerReport` that say what has come since the last one."""
QUIET = frozenset(
    {Phase.IDLE, Phase.STOPPED, Phase.HALTED, Phase.RELEASED, Phase.FAILED, Phase.FINISHED}
)


@dataclass(frozen=True)
class AgentEndpoint:
    """Where a node's agent serves the snapshots that it keeps.

    `token` is a secret: it is neither shown nor recorded.
    """

    node: str
    host: str
    port: int
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class DataState:
    """How far a node's data is prepared, in bytes of its sources; `digest` and `num_rows` once it
    is there (SHA-256 of all tokens); `error`: why it cannot be used, ever.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    digest: str | None = None
    num_rows: int = 0
    error: str | None = None
    evaluation_digest: str | None = None
    """SHA-256 of the evaluation rows' tokens, where the job evaluates."""
    summary: str = ""
    """What was read of the sources and what was left out, in a line."""

    @property
    def ready(self) -> bool:
        return self.digest is not None and self.error is None


@dataclass(frozen=True)
class WorkerPlace:
    """Facts that a worker's process is started with and that never change."""

    worker: str
    node: str
    gpu_type: str
    memory_directory: str
    disk_directory: str


@dataclass(frozen=True)
class GenerationOrder:
    """One worker's orders for one generation: groups to build, state to fill, steps to run.

    `transfers` is the whole transfer schedule (None on a first start, when the state is drawn from
    the seed or read from the pretrained weights): every participant finds its own part in it, as
    receiver and as live source. `replication_targets` is what this worker's agent copies to other
    nodes in every round; `replicates` whether anybody has any, and so whether there are rounds,
    which are `replicate_every_steps` apart at the least. `ancestry` knows this generation and those
    before it: what a worker has kept counts only if it is of this line.
    """

    generation: int
    plan: Plan
    layout: Layout
    start_step: int
    end_step: int
    store_host: str
    store_port: int
    participants: tuple[str, ...]
    transfers: Any | None
    agents: Mapping[str, AgentEndpoint]
    checkpoint_shards: frozenset[ShardId]
    pace: Any | None = None
    replication_targets: tuple[ReplicationTarget, ...] = ()
    replicates: bool = False
    replicate_every_steps: int = 1
    replicate_bytes_per_s: float | None = None
    ancestry: Ancestry = NOTHING_KNOWN
    is_evaluated: bool = False
    """Whether the loss of `start_step` on the evaluation rows is known."""
    step_timeout_s: float | None = None
    """What a collective, a send, a receive may take under this plan; None: as the job says."""
    store_secret: bytes = field(default=b"", repr=False)
    """Secret of the generation, by which the store at `store_host` takes this worker; empty: the
    store is torch's own, without authentication.
    """
    is_claimed: bool = False
    """Whether the journal in durable storage has this generation's entry. Where the entry is not
    found later, another file system lies in the storage's place.
    """


@dataclass(frozen=True)
class Parted:
    """A shard whose holders were not bit-equal any more when `step` was to be committed,
    `checked_every` steps after the last look: `workers` have been given the bits of `owner`.
    `layer`: a number, or which of the ends.
    """

    step: int
    tensor: str
    unit: int
    layer: int | str
    workers: tuple[str, ...]
    owner: str
    checked_every: int

    def __str__(self) -> str:
        workers = ", ".join(self.workers)
        since = (
            f"within the last {self.checked_every} steps"
            if self.checked_every > 1
            else "in the step before"
        )
        return (
            f"{self.tensor}[{self.unit}] of layer {self.layer} parted before step {self.step},"
            f" {since}: {workers} did not hold the bits of {self.owner}, and have them now"
        )


class SkipReason(StrEnum):
    """Why a committed step changed no weights."""

    NOT_FINITE = "not_finite"
    GRADIENT_NORM = "gradient_norm"
    REQUESTED = "requested"


@dataclass(frozen=True)
class Skipped:
    """A committed step that changed no weights, as one worker saw it. `parameters` and `gradients`
    are names of this worker's tensors that hold a value that is not finite, at most 16 of each.
    """

    reason: SkipReason
    detail: str = ""
    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    loss_not_finite: bool = False


@dataclass(frozen=True)
class StepRecord:
    """One committed step as one worker saw it; loss and norm are the whole batch's, seconds its
    own. `ended_at` is on that process's monotonic clock: only its differences mean something.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    generation: int
    ended_at: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    parted: tuple[Parted, ...] = ()
    skipped: Skipped | None = None
    relative_work: float = 1.0
    """Work of this worker's microbatches by that of average rows (`length_work`)."""
    peak_memory_bytes: int | None = None
    """The most that tensors took of the device so far; None on a CPU."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean cross entropy of the evaluation rows after `step` updates, as one worker saw it; the
    same at all. `tokens` counts targets; `seconds` are this worker's.
    """

    step: int
    loss: float
    tokens: int
    sequences: int
    seconds: float
    generation: int


@dataclass(frozen=True)
class RestoreRecord:
    """How one worker's state was filled in one generation."""

    bytes_by_tier: Mapping[str, int]
    groups_s: float
    restore_s: float
    bad: tuple[tuple[Source, ShardId], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of nodes that were so late that another source overtook them, or would have,
    had they not been live workers.
    """


@dataclass(frozen=True)
class Broken:
    """What is left of a restore that `generation` broke off: shards of `step` that are here and
    whole, and copies that proved bad.
    """

    step: int
    generation: int
    arrived: frozenset[ShardId] = frozenset()
    bad: tuple[tuple[Source, ShardId], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    """As `RestoreRecord.slow`."""


@dataclass(frozen=True)
class UploadRetried:
    """Among a worker's receipts: why a try of its upload failed. It is tried again."""

    reason: str


@dataclass(frozen=True)
class Transfer:
    """A copy of training state that has come to its end: one worker's part of `step`, or what a
    node's agent has handed over. `tier`: where it went (`disk`: the node's own, `peer`: other
    nodes, `s3`: durable storage). `ended_ago_s`: before the report that tells of it.
    """

    tier: str
    source: str
    generation: int
    step: int
    num_bytes: int
    seconds: float
    ended_ago_s: float = 0.0


@dataclass(frozen=True)
class RollForward:
    """What came of the order to apply the prepared `step` of `generation` with another survivor's
    vote; `error`: why it is not applied. The step counts only where the same report says that the
    state is whole and one step further.
    """

    generation: int
    step: int
    error: str | None = None


@dataclass(frozen=True)
class WorkerReport:
    """What one worker says of itself.

    `step` counts the committed updates in its live state, which belongs to the layout of
    `live_generation` (None: no state yet); `prepared_step` is the step whose gradients are
    synchronised and wait for the vote's result; `vote` is the result of the newest vote that this
    worker saw and the step it was of. Where the live state is not `whole`, an update has begun in
    it and not ended: it is of no step, and nobody may plan on it. `rolled` is the outcome of the
    last roll-forward that was asked for. `snapshot_step` is the newest snapshot that this
    generation has committed at this worker; `replicated_step` the last one that every node has,
    with copies of what one node alone holds; `broken` is there after a restore that did not come to
    its end. `unfit`: what failed will fail each time (a missing device or file, a wrong option):
    `error` says what to mend. What is in `TOLD_ONCE` is told once.
    """

    worker: str
    process_id: int
    generation: int
    phase: Phase
    step: int
    live_generation: int | None
    prepared_step: int | None = None
    vote: tuple[int, Any] | None = None
    steps: tuple[StepRecord, ...] = ()
    restore: RestoreRecord | None = None
    receipts: tuple[Any, ...] = ()
    snapshot_step: int | None = None
    replicated_step: int | None = None
    broken: Broken | None = None
    error: str | None = None
    unfit: bool = False
    first_step_at: float | None = None
    whole: bool = True
    rolled: RollForward | None = None
    transfers: tuple[Transfer, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()

    def is_news_after(self, before: WorkerReport | None) -> bool:
        """Whether the driver, which knows the report `before`, is to know this one. Which step is
        prepared matters once the worker stands, which is another phase.
        """
        if before is None or any(getattr(self, part) for part in TOLD_ONCE):
            return True
        prepared = before.prepared_step if self.phase is Phase.TRAINING else self.prepared_step
        return replace(self, prepared_step=prepared) != before.without_news()

    def without_news(self) -> WorkerReport:
        """The report once it is heard."""
        nothing: dict[str, Any] = dict.fromkeys(TOLD_ONCE, ())
        return replace(self, **nothing)
