"""Messages between the driver and the processes it directs: frozen and picklable data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autohet.runtime.step.loss_scale import FIRST_SCALE, LossScale
from recovery.state.ancestry import NOTHING_KNOWN, Ancestry

if TYPE_CHECKING:
    from autohet.runtime.job.data import EvaluationSection
    from planner.plans.plan import Plan
    from recovery.peers.replication_targets import ReplicationTarget
    from recovery.state.holdings import Source
    from recovery.state.layout import Layout, ShardId


class Phase(StrEnum):
    """State of a worker, as it reports it."""

    IDLE = "idle"  # process is up, part of no generation
    BUILDING = "building"  # making the generation's groups
    RESTORING = "restoring"  # filling its state
    TRAINING = "training"
    STOPPED = "stopped"  # stood still after a whole step, as asked; keeps its state
    HALTED = "halted"  # woken out of a step or a restore by a peer's loss; keeps its state
    RELEASED = "released"  # has served its state to the others and is not part of the plan
    FAILED = "failed"  # an error that is not a peer's loss: `error` says which
    FINISHED = "finished"  # ran the last step


DRAINED_FIELDS = ("steps", "receipts", "transfers", "evaluations")
"""Fields of a `WorkerReport` that hold only the items since the last report."""
STANDING_PHASES = frozenset(
    {Phase.IDLE, Phase.STOPPED, Phase.HALTED, Phase.RELEASED, Phase.FAILED, Phase.FINISHED}
)


EVALUATIONS = "evaluations.json"
"""Object of a job's storage with the losses of its evaluations, by step."""


@dataclass(frozen=True)
class EvaluationProgress:
    """Lowest loss of a run's evaluations so far, and the evaluations since the last improvement.

    As transformers' EarlyStoppingCallback, except that a loss that is NaN is no improvement.
    """

    lowest: float = math.inf
    num_without_improvement: int = 0

    def after(self, loss: float, section: EvaluationSection) -> EvaluationProgress:
        """Return the progress after one more evaluation."""
        if loss < self.lowest - section.early_stopping_threshold:
            return EvaluationProgress(loss)
        lowest = loss if loss < self.lowest else self.lowest
        return EvaluationProgress(lowest, self.num_without_improvement + 1)

    def ends_run(self, section: EvaluationSection) -> bool:
        """Return True if the run ends with this evaluation."""
        patience = section.early_stopping_patience
        return patience is not None and self.num_without_improvement >= patience


NOT_EVALUATED = EvaluationProgress()


@dataclass(frozen=True)
class AgentEndpoint:
    """Address of a node's agent, which serves the snapshots that it keeps.

    `token` is a secret: it is neither shown nor recorded.
    """

    node: str
    host: str
    port: int
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class DataState:
    """Progress of the preparation of a node's data, in bytes of its sources.

    `digest` (SHA-256 of all tokens) and `num_rows` are set once the data is there. `error`: why the
    data can never be used.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    digest: str | None = None
    num_rows: int = 0
    error: str | None = None
    evaluation_digest: str | None = None
    """SHA-256 of the evaluation rows' tokens, if the job evaluates."""
    summary: str = ""
    """Summary, in a line, of the data that was read from the sources and left out."""

    @property
    def ready(self) -> bool:
        return self.digest is not None and self.error is None


@dataclass(frozen=True)
class WorkerPlace:
    """Constants of a worker's process, given at its start."""

    worker: str
    node: str
    gpu_type: str
    memory_directory: str
    disk_directory: str


@dataclass(frozen=True)
class GenerationOrder:
    """Order to one worker for one generation: groups to build, state to fill, steps to run.

    `transfers` is the whole transfer schedule; each participant finds its own part in it, as
    receiver and as live source. It is None on a first start, when the state is drawn from the seed
    or read from the pretrained weights.

    `replication_targets` lists the shards that this worker's agent copies to other nodes in every
    round. `replicates` is True if any worker has targets, that is, if there are rounds; they are at
    least `replicate_every_steps` apart.

    `ancestry` contains this generation and those before it: kept state counts only if it is of this
    line.
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
    """True if the loss of `start_step` on the evaluation rows is known."""
    evaluation_progress: EvaluationProgress = NOT_EVALUATED
    """Progress of the run's evaluations until `start_step`, for early stopping."""
    step_timeout_s: float | None = None
    """Limit in seconds on a collective, a send or a receive under this plan; None: the job's limit.
    """
    store_secret: bytes = field(default=b"", repr=False)
    """Secret of the generation, with which this worker authenticates to the store at `store_host`.

    Empty: the store is torch's own, without authentication.
    """
    is_claimed: bool = False
    """True if the journal in durable storage has this generation's entry.

    If the entry is missing later, another file system is mounted in the storage's place.
    """
    loss_scale: LossScale = FIRST_SCALE
    """Scale of gradients in fp16 stages after the step before `start_step`."""
    gated: bool = False
    """True if no gradient sum of a step starts before all workers are in their last backward pass.

    Workers whose groups run in the order of a stream ignore it.
    """
    kept_plan: Plan | None = None
    """Plan whose passes of `start_step` all workers keep; None: the step is run from its start."""
    follows: int | None = None
    """Generation that this one follows without a stop; None: it begins at once.

    It begins after the vote of step `start_step - 1` if all workers of the other are ready then,
    else never. All participants have prepared it.
    """
    is_prepared: bool = False
    """True if the plan's workers are ordered to prepare it; either order may arrive first."""

    def continues(self, generation: int) -> bool:
        """Return True if the state of `generation` at `start_step` is of this order's history."""
        return self.ancestry.contains(self.generation, generation, self.start_step)


OWN_FIELDS = ("checkpoint_shards", "pace", "replication_targets", "replicate_bytes_per_s")
"""Fields in which the orders of one generation differ."""


def split_orders(
    orders: Mapping[str, GenerationOrder],
) -> tuple[GenerationOrder, dict[str, dict[str, Any]]]:
    """Return what the orders of one generation have in common, and each worker's `OWN_FIELDS`.

    `replace(common, **own)` is the worker's order. The common part has the layout of all workers:
    sent with each order, it would cost the square of their number.
    """
    own = {}
    for worker, order in orders.items():
        own[worker] = {name: getattr(order, name) for name in OWN_FIELDS}
    (first, *_) = orders.values()
    common = replace(
        first,
        checkpoint_shards=frozenset(),
        pace=None,
        replication_targets=(),
        replicate_bytes_per_s=None,
    )
    return common, own


@dataclass(frozen=True)
class PreparationOrder:
    """Order to one worker of a plan: build what its next generation needs beside the state.

    The worker trains on meanwhile. The fields are those of the `GenerationOrder` that follows, if
    nothing comes between. leaving: workers that train now and are not in the plan; they take part
    where the generation is to begin without a stop.
    """

    generation: int
    plan: Plan
    store_host: str
    store_port: int
    step_timeout_s: float | None = None
    store_secret: bytes = field(default=b"", repr=False)
    gated: bool = False
    leaving: tuple[str, ...] = ()

    @property
    def participants(self) -> tuple[str, ...]:
        """Workers that meet for it."""
        return self.plan.workers + self.leaving


WITHDRAWN = "withdrawn"
"""Error of a preparation that nobody uses: a worker has not voted for it, and will not."""


@dataclass(frozen=True)
class Prepared:
    """Outcome of a `PreparationOrder`; error: why there is nothing to use; None: all is ready."""

    generation: int
    error: str | None = None


@dataclass(frozen=True)
class ReplicaMismatch:
    """A shard whose holders were not bit-equal when `step` was to be committed.

    The check before was `checked_every` steps earlier. `workers` have been given the bits of
    `owner`. `layer`: a layer's number, or the name of the embedding or head.
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


class AuditCause(StrEnum):
    """Finding of an audit whose results differ."""

    ARITHMETIC = "arithmetic"  # equal weights and inputs gave other bits
    VALUES = "values"  # unlike devices are further apart than rounding explains
    WEIGHTS = "weights"  # the weights themselves differ, which the replica check repairs
    PRODUCTS = "products"  # a device computed exact products wrongly
    MESSAGES = "messages"  # hidden states or gradients changed between two stages


@dataclass(frozen=True)
class AuditMismatch:
    """Workers whose results of block `layer` differ in the audit of `step`.

    `named`: those that are wrong; empty if that cannot be known.
    """

    step: int
    layer: int
    workers: tuple[str, ...]
    named: tuple[str, ...]
    cause: AuditCause

    def __str__(self) -> str:
        workers = ", ".join(self.workers)
        named = ", ".join(self.named)
        if self.cause is AuditCause.PRODUCTS:
            return f"{named} computed exact products wrongly after step {self.step}"
        if self.cause is AuditCause.WEIGHTS:
            return f"the weights of layer {self.layer} differ among {workers} at step {self.step}"
        if self.cause is AuditCause.MESSAGES:
            return (
                f"messages between {workers} arrived otherwise than they were sent in step"
                f" {self.step}, which was run again"
            )
        wrong = f"{named} is wrong" if named else "no majority tells which is wrong"
        what = "different bits"
        if self.cause is AuditCause.VALUES:
            what = "values further apart than rounding explains"
        return (
            f"{workers} computed layer {self.layer} to {what} in the audit of step {self.step}:"
            f" {wrong}"
        )


@dataclass(frozen=True)
class AuditRecord:
    """Outcome of one audit: workers that were compared with others, and what differed."""

    compared: tuple[str, ...]
    mismatches: tuple[AuditMismatch, ...] = ()

    @property
    def weights_differ(self) -> bool:
        """True if weights have parted that the replica check has not looked at yet."""
        return any(each.cause is AuditCause.WEIGHTS for each in self.mismatches)

    def with_mismatches(self, more: tuple[AuditMismatch, ...]) -> AuditRecord:
        return replace(self, mismatches=(*self.mismatches, *more))


class SkipReason(StrEnum):
    """Reason of a committed step that changed no weights."""

    NOT_FINITE = "not_finite"
    GRADIENT_NORM = "gradient_norm"
    REQUESTED = "requested"


@dataclass(frozen=True)
class Skipped:
    """A committed step that changed no weights, as one worker saw it.

    `parameters` and `gradients` name this worker's tensors that hold a value that is not finite, at
    most 16 of each.
    """

    reason: SkipReason
    detail: str = ""
    parameters: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    loss_not_finite: bool = False


@dataclass(frozen=True)
class Rewards:
    """Rewards of the pairs of a preference job (`runtime.parallel.preference`).

    accuracy: fraction of pairs whose chosen answer has the higher reward. margin: mean difference
    of the rewards.
    """

    accuracy: float
    margin: float


@dataclass(frozen=True)
class StepRecord:
    """A committed step as one worker saw it.

    Loss and norm are the whole batch's; `seconds` are this worker's. `ended_at` is on this
    process's monotonic clock: only its differences mean something.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    generation: int
    ended_at: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    parted: tuple[ReplicaMismatch, ...] = ()
    skipped: Skipped | None = None
    relative_work: float = 1.0
    """Work of this worker's microbatches relative to average rows (`length_work`)."""
    peak_memory_bytes: int | None = None
    """Peak memory of tensors on the device so far, in bytes; None on a CPU."""
    rewards: Rewards | None = None
    loss_scale: LossScale | None = None
    """Scale of gradients in fp16 stages; None if the plan has none."""
    audit: AuditRecord | None = None
    """Audit of the devices' arithmetic; None if none was due."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean loss of the evaluation rows after `step` updates, the same at all workers.

    `tokens` counts targets; `seconds` are this worker's.
    """

    step: int
    loss: float
    tokens: int
    sequences: int
    seconds: float
    generation: int
    rewards: Rewards | None = None


@dataclass(frozen=True)
class RestoreRecord:
    """Restore of one worker's state: bytes by tier, seconds, bad and slow sources."""

    bytes_by_tier: Mapping[str, int]
    groups_s: float
    restore_s: float
    bad: tuple[tuple[Source, ShardId], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of slow sources, by node.

    Another source overtook such a node, or would have, had the node not been a live worker.
    """


@dataclass(frozen=True)
class InterruptedRestore:
    """Remains of a restore that was interrupted in `generation`.

    `arrived`: whole shards of `step` that are in memory. `bad`: copies that proved bad.
    """

    step: int
    generation: int
    arrived: frozenset[ShardId] = frozenset()
    bad: tuple[tuple[Source, ShardId], ...] = ()
    slow: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of slow sources, as in `RestoreRecord.slow`."""


@dataclass(frozen=True)
class UploadRetried:
    """Receipt of a failed upload attempt, with its reason; the upload is retried."""

    reason: str


@dataclass(frozen=True)
class StateTransfer:
    """A finished copy of training state: one worker's part of `step`, or an agent's transfer.

    `tier`: destination (`disk`: the node's own, `peer`: other nodes, `s3`: durable storage).
    `ended_ago_s`: seconds from its end to the report that contains it.
    """

    tier: str
    source: str
    generation: int
    step: int
    num_bytes: int
    seconds: float
    ended_ago_s: float = 0.0


@dataclass(frozen=True)
class RollForwardOutcome:
    """Outcome of an order to apply the prepared `step` with another survivor's vote.

    `error`: why the step is not applied. The step counts only if the same report says that the
    state is whole and one step further.
    """

    generation: int
    step: int
    error: str | None = None


@dataclass(frozen=True)
class WorkerReport:
    """Report of one worker on itself.

    `step` counts the committed updates in its live state, which has the layout of `live_generation`
    (None: no state yet). `whole` is False if an update of the live state has begun and not ended:
    the state is then of no step, and no plan may use it. `prepared_step` is the step whose
    gradients are synchronised and wait for the vote's result. `vote` is the newest vote's step and
    result that this worker saw. `rolled` is the outcome of the last roll-forward that was ordered.

    `snapshot_step` is the newest snapshot that this worker committed in this generation.
    `replicated_step` is the last step that every node has, with copies of shards that one node
    alone holds. `broken` is set after an interrupted restore.

    `memory_shortage` says what snapshots and copies lack in the node's host memory, and what helps.
    The first worker of a node reports it. `compile_fallback` says why code that was to be compiled
    runs uncompiled.

    `unfit`: the failure is permanent (a missing device or file, a wrong option), and `error` says
    what to fix. Fields in `DRAINED_FIELDS` hold the items since the last report.
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
    broken: InterruptedRestore | None = None
    error: str | None = None
    unfit: bool = False
    has_faulty_device: bool = False
    """True if the worker's device was found to compute wrongly."""
    first_step_at: float | None = None
    whole: bool = True
    rolled: RollForwardOutcome | None = None
    transfers: tuple[StateTransfer, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    memory_shortage: str | None = None
    compile_fallback: str | None = None
    prepared: Prepared | None = None
    """Outcome of the newest preparation; None while it is under way, or where none was ordered."""
    kept_step: int | None = None
    """Step whose passes this worker has ended and keeps, although it is not committed."""
    uploading: bool = False
    """True while this worker's part of a checkpoint is on its way to durable storage."""

    def is_news_after(self, before: WorkerReport | None) -> bool:
        """Return True if this report is news to the driver, which has the report `before`.

        A change of the prepared step is news only once the worker has stopped, which is another
        phase.
        """
        if before is None or any(getattr(self, part) for part in DRAINED_FIELDS):
            return True
        prepared = before.prepared_step if self.phase is Phase.TRAINING else self.prepared_step
        return replace(self, prepared_step=prepared) != before.without_news()

    def without_news(self) -> WorkerReport:
        """Return the report without items that the driver has received."""
        nothing: dict[str, Any] = dict.fromkeys(DRAINED_FIELDS, ())
        return replace(self, **nothing)
