"""Trainer that runs the job of `autohet train` behind Ray Train's public types.

These are its configuration and result types.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import ray.train
from ray.train.constants import DEFAULT_STORAGE_PATH
from ray.train.v2.api.config import CheckpointConfig, FailureConfig, RunConfig
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.train.v2.api.result import Result

from autohet.driver.callbacks import Callback
from autohet.driver.callbacks.trackers import REWARDS
from autohet.driver.job.job_run import Outcome
from autohet.driver.job.result_files import filesystem_of
from autohet.driver.job.run import train
from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json
from recovery.checkpoint.commit import list_checkpoints
from recovery.storage.address import DirectoryAddress, parse_address
from recovery.storage.errors import StorageUriError
from recovery.storage.open import open_storage

ANY_NUMBER = 1 << 30
SCORE = "evaluation_loss"
"""Metric by which the best checkpoints are kept."""
GENERATED_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""Name that Ray Train gives a run without a name of its own."""


class ElasticTrainer:
    """Train a job on this process's Ray cluster, or on this machine if no cluster runs.

    `job` is a mapping, the path of a YAML file, or a `Job`. `run_config` overrides the job:

    | `RunConfig` | job |
    |---|---|
    | `storage_path`, `name` | checkpoints, events and logs go to `<storage_path>/<name>` |
    | `failure_config.max_failures` | `elastic.max_failures_in_a_row`; -1: unbounded; 0: the job's |
    | `checkpoint_config.num_to_keep` | `checkpoint.keep`; None: the job's, else all are kept |
    | the same with `checkpoint_score_attribute="evaluation_loss"` | `checkpoint.keep_best` |
    | `logging_config.log_level` | level of the driver's log |

    The same storage path and name resume from the newest checkpoint. Unsupported fields raise an
    error that names them. Every event is passed to each of `callbacks`. `cluster` and `address`
    are the options of `autohet train`.

    Raises:
        ConfigError: A ValueError; the job or `run_config` is wrong.
    """

    def __init__(
        self,
        job: Job | Json | str | Path,
        *,
        run_config: RunConfig | None = None,
        callbacks: Sequence[Callback] = (),
        cluster: str | os.PathLike[str] | None = None,
        address: str | None = None,
    ) -> None:
        self.job = apply_run_config(as_job(job), run_config)
        logging_config = None if run_config is None else run_config.logging_config
        self._log_level = None if logging_config is None else logging_config.log_level
        self._callbacks = tuple(callbacks)
        self._address = address
        self._cluster = None if cluster is None else os.fspath(cluster)

    def fit(self) -> Result:
        """Train to the last step; blocks. Ctrl-C and SIGTERM commit a checkpoint first.

        Raises:
            ConfigError: The job cannot run as written, or there is no cluster.
            ray.train.TrainingFailedError: The run ended before its last step. Another `fit`
                resumes from its checkpoint.
        """
        if self._log_level is not None:
            logging.getLogger("autohet").setLevel(self._log_level)
        history = History()
        folder = Path("runs", self.job.name)
        # `train` refuses an address that cannot be read, with the same error as any other entry.
        with suppress(StorageUriError):
            address = parse_address(self.job.checkpoint_storage)
            if isinstance(address, DirectoryAddress):
                folder = Path(address.path)
        outcome = train(
            self.job,
            cluster_path=self._cluster,
            address=self._address,
            events_path=folder / "events.jsonl",
            show=SILENT,
            callbacks=(history, *self._callbacks),
        )
        result = make_result(self.job, outcome, history.rows())
        if result.error is not None:
            raise result.error
        return result


STEP_FIELDS = ("step", "loss", "gradient_norm", "tokens", "seconds", "generation", "time")
LATER_FIELDS = ("learning_rate", "epoch")
"""Fields that the events of older runs lack."""


def SILENT(*_: object) -> None:
    """Ignore a tick: no-op, since the log and the callbacks report progress."""


class History:
    """Callback that keeps the metrics of each step's last run."""

    def __init__(self) -> None:
        self._rows: dict[int, Document] = {}
        self._evaluations: dict[int, float] = {}

    def on_event(self, event: Json) -> None:
        if event["kind"] == "step":
            row = {name: event[name] for name in STEP_FIELDS}
            for name in LATER_FIELDS:
                row[name] = event.get(name)
            seconds = event["seconds"]
            row["tokens_per_s"] = event["tokens"] / seconds if seconds else None
            for name in REWARDS:
                if name in event:
                    row[name] = event[name]
            self._rows[event["step"]] = row
        elif event["kind"] == "evaluation":
            self._evaluations[event["step"] - 1] = event["evaluation_loss"]

    def close(self) -> None:
        """Close the callback: no-op."""

    def rows(self) -> list[Document]:
        """Return the metrics of each step.

        A step has `evaluation_loss` if the state after it was evaluated.
        """
        rows = []
        for step, row in sorted(self._rows.items()):
            row = dict(row)
            if step in self._evaluations:
                row["evaluation_loss"] = self._evaluations[step]
            rows.append(row)
        return rows


def as_job(job: Job | Json | str | Path) -> Job:
    """Return the job; a `Job` is checked again, since its constructors check no types.

    Raises:
        ConfigError: it is no valid job.
    """
    if isinstance(job, Job):
        return Job.from_document(job.to_document())
    if isinstance(job, Mapping):
        return Job.from_document(job)
    return Job.from_yaml(job)


def apply_run_config(job: Job, config: RunConfig | None) -> Job:
    """Return the job with the settings of `config`.

    Raises:
        ConfigError: `config` sets unsupported fields; the error names them.
    """
    if config is None:
        return job if job.name else replace(job, name="job")
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"run_config is a {type(config).__module__}.{type(config).__name__}; give a"
            " ray.train.RunConfig of Ray Train v2 (RAY_TRAIN_V2_ENABLED must not be 0)"
        )
    # RunConfig fills in all that is left out.
    failure = config.failure_config
    checkpoints = config.checkpoint_config
    assert failure is not None
    assert checkpoints is not None
    assert config.name is not None
    assert config.storage_path is not None
    _refuse(config, failure, checkpoints)

    name = config.name
    if job.name and GENERATED_NAME.fullmatch(config.name):
        # The user gave no name to RunConfig: that of the job counts.
        name = job.name
    job = replace(job, name=name)
    if config.storage_path != DEFAULT_STORAGE_PATH or job.checkpoint.storage is None:
        storage = f"{os.fspath(config.storage_path).rstrip('/')}/{name}"
        job = replace(job, checkpoint=replace(job.checkpoint, storage=storage))

    keep = checkpoints.num_to_keep or job.checkpoint.keep
    best = job.checkpoint.keep_best
    if checkpoints.checkpoint_score_attribute is not None:
        # Ray Train keeps the best ones and the newest.
        keep = job.checkpoint.keep or 1
        best = checkpoints.num_to_keep
    if keep is None and best is None:
        keep = "all"
    job = replace(job, checkpoint=replace(job.checkpoint, keep=keep, keep_best=best))

    if failure.max_failures != 0:
        bound = ANY_NUMBER if failure.max_failures < 0 else failure.max_failures
        job = replace(job, elastic=replace(job.elastic, max_failures_in_a_row=bound))
    return job


_UNSUPPORTED_FAILURE_FIELDS = {
    "controller_failure_limit": (
        "the driver is not started again by itself: run the job once more"
    ),
    "max_preemption_failures": "a preemption is no failure here, however many there are",
    "relax_collectives_on_preemption": (
        "workers that leave hand over their state before, and no collective waits for them"
    ),
    "preemption_grace_s": "the survivors are never torn down",
}


def _refuse(config: RunConfig, failure: FailureConfig, checkpoints: CheckpointConfig) -> None:
    """Raise an error for unsupported fields, which would otherwise be ignored silently."""
    defaults = FailureConfig()
    pairs: dict[str, tuple[Any, Any, str]] = {
        "storage_filesystem": (
            config.storage_filesystem,
            None,
            "name s3://bucket/prefix or a directory in storage_path",
        ),
        "callbacks": (
            config.callbacks,
            [],
            (
                "they would be told of Ray Train's workers, and there are none: give ElasticTrainer"
                " callbacks"
            ),
        ),
        "worker_runtime_env": (
            config.worker_runtime_env,
            {},
            "give the runtime environment to the job (ray job submit, ray.init)",
        ),
    }
    for name, why in _UNSUPPORTED_FAILURE_FIELDS.items():
        field = (getattr(failure, name), getattr(defaults, name), why)
        pairs[f"failure_config.{name}"] = field
    _refuse_scores(checkpoints)
    for name, (given, default, why) in pairs.items():
        if given != default:
            raise ConfigError(
                f"run_config.{name} is {given!r}, which has no meaning for ElasticTrainer: {why};"
                " leave it out"
            )


def _refuse_scores(checkpoints: CheckpointConfig) -> None:
    """Raise an error unless checkpoints are scored by the evaluation loss, lowest first."""
    attribute = checkpoints.checkpoint_score_attribute
    if attribute is None:
        return
    order = checkpoints.checkpoint_score_order
    if (attribute, order) != (SCORE, "min"):
        raise ConfigError(
            f"run_config.checkpoint_config.checkpoint_score_attribute is {attribute!r} with"
            f" checkpoint_score_order {order!r}, which has no meaning for ElasticTrainer:"
            f" checkpoints are scored by {SCORE!r} with order 'min' alone"
        )
    if checkpoints.num_to_keep is None:
        raise ConfigError(
            f"run_config.checkpoint_config.checkpoint_score_attribute is {attribute!r}, but"
            " num_to_keep is None, which keeps every checkpoint; give num_to_keep, or leave the"
            " attribute out"
        )


def make_result(job: Job, outcome: Outcome, rows: Sequence[Json]) -> Result:
    """Return the result of a run whose steps had these metrics.

    Its checkpoints are those that the storage still has.
    """
    # A checkpoint's step is the number of steps before it.
    rows_by_checkpoint = {row["step"] + 1: dict(row) for row in rows}
    storage = open_storage(job.checkpoint_storage)
    try:
        found = list_checkpoints(storage)
        filesystem, path = filesystem_of(storage)
        checkpoints = {}
        for info in found:
            place = path + info.uri.removeprefix(storage.uri)
            checkpoints[info.step] = ray.train.Checkpoint(place, filesystem)
    finally:
        storage.close()

    metrics: Document = {"step": max(checkpoints, default=0) - 1}
    if rows:
        metrics = dict(rows[-1])
    for name in ("steps_lost", "generations"):
        metrics[name] = outcome.summary[name]

    with_metrics = [
        (checkpoint, rows_by_checkpoint.get(step, {}))
        for step, checkpoint in sorted(checkpoints.items())
    ]
    result = Result(
        metrics=metrics,
        checkpoint=checkpoints[max(checkpoints)] if checkpoints else None,
        error=None,
        path=path,
        metrics_dataframe=pandas.DataFrame(rows) if rows else None,
        best_checkpoints=with_metrics,
        _storage_filesystem=filesystem,
    )
    if not outcome.ok:
        error = TrainingFailedError(
            f"{outcome.reason}; fit() again goes on from"
            f" {outcome.summary['checkpoint'] or 'the start'}"
        )
        error.result = result  # type: ignore[attr-defined]
        result.error = error
    return result
