"""The `elastic` section: when the fleet changes, who says so, and how long anything may take."""

from dataclasses import dataclass
from typing import Literal

from autohet.runtime.job.sections import require, require_at_least, require_positive

NOTICE_SOURCES = ("ray", "aws", "gpu", "queue", "file", "script")
SHORTEST_STEP_TIMEOUT_S = 60.0
"""A first step compiles, connects and touches memory: what a prediction of steady steps does not
know.
"""
STEP_TIMEOUT_RATIO = 10.0
"""Between a step that is late and one that stands still: predictions err by some tens of percent, a
throttled GPU by a factor of two.
"""


@dataclass(frozen=True, kw_only=True)
class ScriptedEvent:
    """One event of a rehearsal: what would happen to a real fleet, made to happen at a known
    step.
    """

    at_step: int
    """When this step has been committed."""
    event: Literal["notice", "death", "arrival", "freeze"]
    """notice: warned, gone at the deadline; death: killed; freeze: stops answering; arrival: a new
    node.
    """
    node: str | None = None
    """The node (notice, death, freeze), or the name of the new one (arrival, may be left out)."""
    node_type: str | None = None
    """arrival: its type. The others: any node of this type, when `node` is not given."""
    deadline_s: float = 120.0
    """notice: seconds from the notice until the node is gone."""

    def __post_init__(self) -> None:
        require_at_least("elastic.script at_step", self.at_step, 0)
        require_positive("elastic.script deadline_s", self.deadline_s)
        if self.event == "arrival":
            require(
                self.node_type is not None,
                "elastic.script: an arrival needs node_type, the type of the new node",
            )
        else:
            require(
                self.node is not None or self.node_type is not None,
                f"elastic.script: a {self.event} needs node, or node_type for any node of a type",
            )


@dataclass(frozen=True)
class Timeouts:
    """Every deadline of a run, in seconds; all follow from `elastic.step_timeout_s` unless given,
    and where that is not given, the step's from what the plan's step is predicted to take.
    """

    step_s: float
    """A collective, a send, a receive, a whole step."""
    heartbeat_s: float
    """Silence after which a worker counts as dead or frozen."""
    suspicion_s: float
    """Silence after which the node's agent is asked whether the worker's process was stopped; then
    it counts as frozen.
    """
    node_silence_s: float
    """Silence of a node's every worker and of its agent after which the node counts as frozen or
    cut off.
    """
    quiesce_s: float
    """For woken survivors to report where they stand."""
    rendezvous_s: float
    """For a generation's groups to be built."""
    transfer_s: float
    """For a restore to fill the new layout."""
    worker_start_s: float
    """For a worker's process to start and answer."""
    checkpoint_s: float
    """For a durable checkpoint to be uploaded and committed."""

    def __str__(self) -> str:
        return (
            f"a step {self.step_s:.0f} s, silence of a worker {self.heartbeat_s:.1f} s and of a"
            f" node {self.node_silence_s:.1f} s, its start {self.worker_start_s:.0f} s, survivors"
            f" to stand {self.quiesce_s:.0f} s, groups {self.rendezvous_s:.0f} s, a restore"
            f" {self.transfer_s:.0f} s, a checkpoint {self.checkpoint_s:.0f} s"
        )


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """How the run follows its fleet."""

    min_workers: int = 1
    """Fewest workers to train on; below it the run waits and says so."""
    step_timeout_s: float | None = None
    """A step that takes longer has a frozen worker in it; null: 10 times what the plan's step is
    predicted to take, 60 at the least. All other time-outs follow from this one, or from 60.
    """
    patience: float = 1.0
    """Multiplies every time limit of this section, given or derived: 3 on slow or crowded machines.
    """
    heartbeat_timeout_s: float | None = None
    """Silence after which a worker counts as dead; null: a sixth of `step_timeout_s`, or of 60. One
    whose process was stopped, or whose whole node says nothing, is known to be frozen before that
    (autohet/driver/README.md, "Silence").
    """
    quiesce_timeout_s: float | None = None
    """null: step_timeout_s / 2."""
    rendezvous_timeout_s: float | None = None
    """null: step_timeout_s."""
    transfer_timeout_s: float | None = None
    """null: 5 * step_timeout_s."""
    worker_start_timeout_s: float | None = None
    """null: 3 * step_timeout_s."""
    checkpoint_timeout_s: float | None = None
    """null: 10 * step_timeout_s."""
    debounce_s: float | None = None
    """How long further arrivals are waited for before one replan takes them all; null:
    step_timeout_s / 30.
    """
    wait_for_fleet_s: float = 3600.0
    """How long to wait for `min_workers` before giving up (a checkpoint is committed by then)."""
    max_failures_in_a_row: int = 5
    """Failures of one cause, without a committed step between, that are tried again; after more of
    them the nodes that have it are left out, or the run ends with a checkpoint.
    """
    notice_sources: tuple[str, ...] = NOTICE_SOURCES
    """ray: node draining (KubeRay's SIGTERM too); aws: EC2 instance metadata; gpu: NVML; queue:
    `notice_queue`; file: `notice_file` or `notice_command`; script: the events below.
    """
    metadata_poll_s: float = 1.0
    """Between two looks at the instance metadata, the GPUs' health, `notice_file` or
    `notice_command`.
    """
    notice_queue: str | None = None
    """URL of the SQS queue that `scripts/aws/prepare` makes; it is read by this job alone."""
    notice_file: str | None = None
    """A file of JSON lines on the driver's machine: {"node": "g5-0", "in_s": 90}
    (autohet/driver/sources/script_file.py).
    """
    notice_command: tuple[str, ...] = ()
    """A command whose output is read as `notice_file` is."""
    request_nodes: dict[str, int] | None = None
    """Nodes to ask Ray's autoscaler for, by node type of the cluster file; null: what the best plan
    of the largest fleet uses, and `min_workers` at the least; {}: none.
    """
    idle_release_s: float = 300.0
    """A node that no plan has used for this time, while the job trained, is given back."""
    slow_ratio: float = 1.5
    """A worker whose compute takes this times what the plan says, beside its peers, `slow_steps`
    steps in a row (and for as long as arrivals settle), is planned on as the slow one that it is.
    Measured compute also corrects the rates of whole GPU types. 0: neither.
    """
    slow_steps: int = 5
    """See `slow_ratio`."""
    slow_forgiven_s: float = 1800.0
    """A slow node that the plan leaves idle is planned on at its type's speed again after this
    time.
    """
    record_observations: bool = False
    """Write what the driver sees and decides to `observations.jsonl` beside the events, for
    `autohet replay`: 9 kB a second in the demonstration (seven workers).
    """
    script: tuple[ScriptedEvent, ...] = ()
    """Events of a rehearsal, in any order."""

    def __post_init__(self) -> None:
        require_at_least("elastic.min_workers", self.min_workers, 1)
        require_positive("elastic.patience", self.patience)
        require_positive("elastic.idle_release_s", self.idle_release_s)
        require_at_least("elastic.max_failures_in_a_row", self.max_failures_in_a_row, 1)
        require_at_least("elastic.slow_steps", self.slow_steps, 1)
        require_positive("elastic.slow_forgiven_s", self.slow_forgiven_s)
        require_at_least("elastic.debounce_s", self.debounce_s, 0)
        require_at_least("elastic.wait_for_fleet_s", self.wait_for_fleet_s, 0)
        require_positive("elastic.metadata_poll_s", self.metadata_poll_s)
        require(
            self.slow_ratio == 0 or self.slow_ratio > 1,
            f"elastic.slow_ratio is {self.slow_ratio}, but must be more than 1, or 0 for never",
        )
        for name in (
            "step",
            "heartbeat",
            "quiesce",
            "rendezvous",
            "transfer",
            "worker_start",
            "checkpoint",
        ):
            require_positive(f"elastic.{name}_timeout_s", getattr(self, f"{name}_timeout_s"))
        for name, count in (self.request_nodes or {}).items():
            require_at_least(f"elastic.request_nodes {name}", count, 0)
        for source in self.notice_sources:
            require(
                source in NOTICE_SOURCES,
                f"elastic.notice_sources names {source!r}; known: {', '.join(NOTICE_SOURCES)}",
            )

    def timeouts(self, predicted_step_s: float | None = None) -> Timeouts:
        """The deadlines of this run, given or derived; under a plan whose step is predicted to take
        so long.

        Only the step's deadline follows the prediction: heartbeats come from threads that no step
        holds up.
        """
        step = self.step_timeout_s or SHORTEST_STEP_TIMEOUT_S
        heartbeat = self.heartbeat_timeout_s or step / 6
        more = self.patience
        return Timeouts(
            step_s=more
            * (self.step_timeout_s or max(step, STEP_TIMEOUT_RATIO * (predicted_step_s or 0.0))),
            heartbeat_s=more * heartbeat,
            suspicion_s=more * min(3.0, 0.3 * heartbeat),
            node_silence_s=more * max(0.6 * heartbeat, min(heartbeat, 5.0)),
            quiesce_s=more * (self.quiesce_timeout_s or step / 2),
            rendezvous_s=more * (self.rendezvous_timeout_s or step),
            transfer_s=more * (self.transfer_timeout_s or 5 * step),
            worker_start_s=more * (self.worker_start_timeout_s or 3 * step),
            checkpoint_s=more * (self.checkpoint_timeout_s or 10 * step),
        )

    @property
    def arrivals_debounce_s(self) -> float:
        step = self.step_timeout_s or SHORTEST_STEP_TIMEOUT_S
        return self.patience * (step / 30 if self.debounce_s is None else self.debounce_s)

    @property
    def fleet_patience_s(self) -> float:
        """How long the fleet is waited for."""
        return self.patience * self.wait_for_fleet_s
