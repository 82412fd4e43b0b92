"""The `elastic` section: sources of notices, reactions to fleet changes, and timeouts."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from autohet.runtime.job.checkpoint import duration_s
from autohet.runtime.job.requirements import require, require_at_least, require_positive
from autohet.runtime.process.google_metadata import PREEMPTION_NOTICE_S
from planner.errors import ConfigError

NOTICE_SOURCES = ("ray", "aws", "gpu", "queue", "file", "script", "google", "azure")
ADDED_SOURCES = ("google", "azure")
"""Sources that jobs of the first release, which list every source, do not list."""
SOURCE_KEYS: dict[str, tuple[str, ...]] = {
    "queue": ("notice_queue",),
    "file": ("notice_file", "notice_command"),
}
"""Keys of `elastic` that configure a source; the source is read if exactly one of them is set."""
SHORTEST_STEP_TIMEOUT_S = 60.0
"""Least derived step timeout: the first step also compiles, connects and touches memory.

The predicted time of a steady step includes none of that.
"""
STEP_TIMEOUT_RATIO = 10.0
"""Derived step timeout over the predicted step time.

It lies between a late step and a frozen one: predictions err by some tens of percent, a throttled
GPU by a factor of two.
"""


@dataclass(frozen=True, kw_only=True)
class ScriptedEvent:
    """A scripted event of a rehearsal: a fleet change that is made to happen at a known step."""

    at_step: int
    """The event happens when this step has been committed."""
    event: Literal["notice", "death", "arrival", "freeze"]
    """Kind of the event.

    notice: the node is warned, and gone at the deadline; death: it is killed; freeze: it stops
    answering; arrival: a new node joins. The run does not end before a plan with it is made or
    declined; such a plan trains for a quarter of the steps that were left at the event, if need be
    beyond `training.steps`.
    """
    node: str | None = None
    """Name of the node (notice, death, freeze) or of the new node (arrival, optional)."""
    node_type: str | None = None
    """Type of the new node (arrival). Other events: any node of this type, if `node` is not given.
    """
    deadline_s: float = 120.0
    """Seconds from the notice until the node is gone (notice alone)."""

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


def time_of(given: str, started: float, name: str) -> float:
    """Return a deadline in seconds since the epoch, of a run that began at `started`.

    given: an ISO 8601 time (UTC if it names no zone), or a duration from the start.

    Raises:
        ConfigError: it is neither, and is called `name` in the message.
    """
    seconds = duration_s(given)
    if seconds is not None:
        return started + seconds
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"{name} is {given!r}; give a time (2026-12-01T08:00:00Z) or a duration from the"
            " start (36h, 1d12h)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of a run, in seconds.

    Each one that is not given is derived from `elastic.step_timeout_s`. If that is not given
    either, the step's deadline is derived from the predicted time of the plan's step.
    """

    step_s: float
    """Limit on a collective, a send, a receive and a whole step."""
    heartbeat_s: float
    """Silence after which a worker counts as dead or frozen."""
    suspicion_s: float
    """Silence of a worker after which the node's agent is asked whether its process was stopped.

    A stopped process counts as frozen.
    """
    node_silence_s: float
    """Silence of a node after which it counts as frozen or cut off.

    A node is silent if its agent and all its workers are.
    """
    quiesce_s: float
    """Limit on the time until woken survivors report their state."""
    rendezvous_s: float
    """Limit on building the process groups of a generation."""
    transfer_s: float
    """Limit on a restore that fills the new layout."""
    worker_start_s: float
    """Limit on a worker's process to start and answer."""
    checkpoint_s: float
    """Limit on a durable checkpoint to be uploaded and committed."""

    def __str__(self) -> str:
        return (
            f"a step {self.step_s:.0f} s, silence of a worker {self.heartbeat_s:.1f} s and of a"
            f" node {self.node_silence_s:.1f} s, its start {self.worker_start_s:.0f} s, survivors"
            f" to stand {self.quiesce_s:.0f} s, groups {self.rendezvous_s:.0f} s, a restore"
            f" {self.transfer_s:.0f} s, a checkpoint {self.checkpoint_s:.0f} s"
        )


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """Reactions of the run to changes of its fleet, and all timeouts."""

    min_workers: int = 1
    """Fewest workers to train on; with fewer the run waits and logs that it does."""
    step_timeout_s: float | None = None
    """Longest time of a step, in seconds; a step that takes longer has a frozen worker in it.

    null: 10 times the predicted time of the plan's step, at least 60 s. All other timeouts derive
    from this value, or from 60 s if it is null.
    """
    patience: float = 1.0
    """Factor on all time limits of this section, given or derived; try 3 on slow machines.

    Crowded machines count as slow.
    """
    heartbeat_timeout_s: float | None = None
    """Seconds of silence after which a worker counts as dead; null: step_timeout_s / 6, or 10 s.

    A worker whose process was stopped, or whose whole node is silent, is found frozen earlier
    (docs/guides/node_leaves.md, "How silence becomes a death").
    """
    quiesce_timeout_s: float | None = None
    """Seconds until interrupted workers must have reported their state.

    null: step_timeout_s / 2, or 30 s.
    """
    rendezvous_timeout_s: float | None = None
    """Seconds until the process groups of a generation must be built.

    null: step_timeout_s, or 60 s.
    """
    transfer_timeout_s: float | None = None
    """Seconds until a restore must have filled the new layout.

    null: 5 * step_timeout_s, or 300 s.
    """
    worker_start_timeout_s: float | None = None
    """Seconds until a worker's process must have started and answered.

    null: 3 * step_timeout_s, or 180 s.
    """
    checkpoint_timeout_s: float | None = None
    """Seconds until a durable checkpoint must be uploaded and committed.

    null: 10 * step_timeout_s, or 600 s.
    """
    debounce_s: float | None = None
    """Seconds to wait for further arrivals, so that one replan covers them all.

    null: step_timeout_s / 30, or 2 s.
    """
    wait_for_fleet_s: float = 3600.0
    """Seconds to wait for `min_workers`, after which the run ends.

    A checkpoint is committed by then.
    """
    headless_s: float = 600.0
    """Seconds for which workers train on without a driver; the next driver takes them over.

    Then they make the newest step durable, and their processes end. A job that is stopped
    (`autohet stop`, SIGTERM, Ctrl-C) is not waited for.
    """
    region_patience_s: float = 1800.0
    """Seconds without training after which `autohet sky` goes on in another region.

    A region starves while none of its nodes train: no capacity, or all nodes were taken.
    """
    restart_from_scratch: bool = True
    """Begin again at step 0 if the training state is lost before a first durable checkpoint.

    The log and the event `from_scratch` count the lost steps. false: the job fails. With a durable
    checkpoint the run goes on from that, whatever this says.
    """
    max_failures_in_a_row: int = 5
    """Number of failures of one cause, without a committed step between them, that are retried.

    After more of them the run goes on without the nodes that fail, or ends with a checkpoint.
    """
    notice_sources: tuple[str, ...] = NOTICE_SOURCES
    """Sources of notices that are read; the default reads all that are configured.

    ray: node draining (KubeRay's SIGTERM too); aws, google, azure: the instance metadata of the
    cloud that answers at the node; gpu: NVML; queue: `notice_queue`; file: `notice_file` or
    `notice_command`; script: the events of `script`.
    """
    metadata_poll_s: float = 0.5
    """Seconds between two polls of a notice source.

    It holds for the instance metadata, the GPUs' health, `notice_file` and `notice_command`.
    """
    preemption_s: float = PREEMPTION_NOTICE_S
    """Seconds from a Google Spot machine's `preempted` to its end, which its metadata do not name.

    Set 120 where machines are created with `--preemption-notice-duration=120s`.
    """
    notice_queue: str | None = None
    """URL of the SQS queue that `scripts/aws/prepare` makes; only this job may read it. null: none.
    """
    notice_file: str | None = None
    """File of JSON lines on the driver's machine: {"node": "g5-0", "in_s": 90}; null: none.

    `node` is a name in the plan, an address, a host name or the name of the cloud's instance.
    See autohet/driver/sources/script_file.py.
    """
    notice_command: tuple[str, ...] = ()
    """Command and arguments; its output is read in place of `notice_file`. Empty: none."""
    request_nodes: dict[str, int] | None = None
    """Nodes to request from Ray's autoscaler, by node type of the cluster file.

    null: those that the best plan of the largest fleet uses, and enough for `min_workers`; {}:
    none.
    """
    deadline: str | None = None
    """Time by which the last step is to be trained: ISO 8601, or a duration from the first start.

    Examples: `2026-12-01T08:00:00Z` (UTC if it names no zone), `36h`, `1d12h`. The run buys the
    cheapest nodes that are in time, and others as the slack shrinks (`autohet quote` says what to
    expect). A run that is late goes on, and says so. null: none.
    """
    budget_usd: float | None = None
    """Most dollars for the nodes of the whole run, restarts included.

    The run ends with a checkpoint before it spends more. Every node type needs a price. null: no
    limit.
    """
    idle_release_s: float = 300.0
    """Seconds of training after which a node that no plan has used is given back."""
    slow_ratio: float = 1.5
    """Factor by which a slow worker's compute time exceeds the plan's, relative to its peers.

    A worker that is slow for `slow_steps` steps in a row, and for the debounce time of arrivals, is
    planned on at its measured speed. Measured compute also corrects the rates of whole GPU types. 0
    turns off both.
    """
    slow_steps: int = 5
    """Steps in a row that a worker must be slow; see `slow_ratio`."""
    slow_forgiven_s: float = 1800.0
    """Seconds that a slow node is left idle before it is planned on at its type's speed again."""
    on_corruption: Literal["drain", "stop", "warn"] = "drain"
    """Answer to a worker whose arithmetic is wrong: two audits name it, or exact products fail.

    drain: its node leaves as after a notice, and nothing is lost. stop: the job ends with a
    checkpoint. warn: the job goes on. See `training.audit_every`.
    """
    record_observations: bool = False
    """Write the driver's observations and decisions to `observations.jsonl` beside the events.

    `autohet replay` reads them. The file grows by 9 kB a second in the demonstration (seven
    workers).
    """
    script: tuple[ScriptedEvent, ...] = ()
    """Scripted events of a rehearsal, in any order."""

    def __post_init__(self) -> None:
        require_at_least("elastic.min_workers", self.min_workers, 1)
        require_positive("elastic.patience", self.patience)
        require_positive("elastic.idle_release_s", self.idle_release_s)
        require_positive("elastic.budget_usd", self.budget_usd)
        if self.deadline is not None:
            time_of(self.deadline, 0.0, "elastic.deadline")
        require(
            not self.has_goal or self.request_nodes is None,
            "elastic.request_nodes names the nodes to buy, but elastic.deadline and budget_usd"
            " choose them; leave one of them out",
        )
        require_at_least("elastic.max_failures_in_a_row", self.max_failures_in_a_row, 1)
        require_at_least("elastic.slow_steps", self.slow_steps, 1)
        require_positive("elastic.slow_forgiven_s", self.slow_forgiven_s)
        require_at_least("elastic.debounce_s", self.debounce_s, 0)
        require_at_least("elastic.wait_for_fleet_s", self.wait_for_fleet_s, 0)
        require_positive("elastic.headless_s", self.headless_s)
        require_positive("elastic.region_patience_s", self.region_patience_s)
        require_positive("elastic.metadata_poll_s", self.metadata_poll_s)
        require_positive("elastic.preemption_s", self.preemption_s)
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
        for source, keys in SOURCE_KEYS.items():
            self._require_effect(source, keys)

    def _require_effect(self, source: str, keys: tuple[str, ...]) -> None:
        """Check that a source that is named alone is configured, and that no key is ignored."""
        given = [f"elastic.{key}" for key in keys if getattr(self, key)]
        require(
            len(given) < 2,
            f"{' and '.join(given)} are both set, but source {source!r} reads only one of them;"
            " remove one",
        )
        named = ", ".join(self.notice_sources)
        require(
            not given or source in self.notice_sources,
            f"{''.join(given)} is set, but elastic.notice_sources is [{named}] without"
            f" {source!r}; add {source!r} to it, or remove {''.join(given)}",
        )
        # A job that lists every source means, as the default does, those that are configured.
        is_all = set(self.notice_sources) >= set(NOTICE_SOURCES) - set(ADDED_SOURCES)
        wanted = " or ".join(f"elastic.{key}" for key in keys)
        require(
            bool(given) or is_all or source not in self.notice_sources,
            f"elastic.notice_sources names {source!r}, which needs {wanted}; set it, or remove"
            f" {source!r} from elastic.notice_sources",
        )

    def timeouts(self, predicted_step_s: float | None = None) -> Timeouts:
        """Return the deadlines of this run, given or derived, in seconds.

        predicted_step_s: predicted seconds of the plan's step. Only the step's deadline depends on
        it: heartbeats come from threads that no step holds up.
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
    def has_goal(self) -> bool:
        """True if the job has a deadline or a budget."""
        return self.deadline is not None or self.budget_usd is not None

    @property
    def arrivals_debounce_s(self) -> float:
        step = self.step_timeout_s or SHORTEST_STEP_TIMEOUT_S
        return self.patience * (step / 30 if self.debounce_s is None else self.debounce_s)

    @property
    def fleet_patience_s(self) -> float:
        """Seconds to wait for the fleet: `wait_for_fleet_s` times `patience`."""
        return self.patience * self.wait_for_fleet_s
