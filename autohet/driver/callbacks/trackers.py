"""TensorBoard, Weights & Biases and MLflow as callbacks.

They log loss, speed, fleet and seconds of changes by step, and the whole job as their config. A job
names its trackers in `trackers`; one that is not installed is left off, with a warning in the log.
Credentials come from the tracker's own environment variables or files: none pass through here.
"""

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autohet.driver.callbacks.protocol import Callback
from autohet.driver.events.living_nodes import LivingNodes
from autohet.runtime.job import Job, TrackerEntry, TrackerKind
from planner.inputs.documents import Json
from recovery.checkpoint.commit import list_checkpoints
from recovery.storage.errors import ObjectMissing, StorageError
from recovery.storage.open import open_storage

logger = logging.getLogger("autohet")


IDS_NAME = "runs/trackers.json"
"""Object of a job's storage: the trackers' ids of its run, by kind."""
REWARDS = ("reward_accuracy", "reward_margin")
OF_STEP = ("loss", "gradient_norm", "learning_rate", "epoch", *REWARDS)
"""Numbers of a step's event that are sent to trackers."""


class Scalars:
    """Extracts the numbers of an event, by step.

    Pure but for the fleet and the newest step, which it remembers.
    """

    def __init__(self) -> None:
        self._step = 0
        self._living = LivingNodes()

    def of(self, event: Json) -> tuple[int, dict[str, float]]:
        """Return (step, value by name) of an event, without names that have no number."""
        kind = event["kind"]
        has_changed = self._living.take(event)
        if kind == "step":
            self._step = int(event["step"])
            return self._step, _present(_step_values(event))
        if kind == "evaluation":
            # The state after n updates is that of step n - 1, which has been logged.
            num_updates = int(event["step"])
            step = max(0, num_updates - 1)
            values = {"evaluation_loss": event["evaluation_loss"]}
            for name in REWARDS:
                values[f"evaluation_{name}"] = event.get(name)
            return step, _present(values)
        if kind == "reconfigure":
            return self._step, _change_values(event)
        if has_changed:
            num_gpus = self._living.gpus_by_type().total()
            return self._step, {"fleet/gpus": float(num_gpus)}
        return self._step, {}


def _step_values(event: Json) -> dict[str, float | None]:
    values = {name: event.get(name) for name in OF_STEP}
    seconds = event.get("seconds")
    values["step_s"] = seconds
    values["tokens_per_s"] = event["tokens"] / seconds if seconds else None
    return values


def _change_values(event: Json) -> dict[str, float]:
    values: dict[str, float | None] = {
        f"change/{part}_s": seconds for part, seconds in event["seconds"].items()
    }
    for tier, num_bytes in event["bytes_by_tier"].items():
        values[f"change/{tier}_bytes"] = float(num_bytes)
    values["change/steps_lost"] = float(event["steps_lost"])
    values["change/usd_lost"] = event.get("usd_lost")
    values["goodput"] = event.get("goodput")
    return _present(values)


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


class Tracker(Protocol):
    """Interface that the three trackers share.

    `id`: the tracker's own id of the run; None: it has none. `newest_step`: newest step that the
    resumed run has; -1: none, or the tracker itself drops steps that it has.
    """

    @property
    def id(self) -> str | None: ...

    @property
    def newest_step(self) -> int: ...

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def end(self) -> None: ...


class TrackerCallback:
    """Callback that passes an event's numbers to a tracker, with steps in rising order.

    A step that is run again is not logged again.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._scalars = Scalars()
        self._newest = tracker.newest_step
        self._is_resumed = tracker.newest_step >= 0

    def on_event(self, event: Json) -> None:
        """Log the numbers of this event, if it has any."""
        step, values = self._scalars.of(event)
        if self._is_resumed and "loss" in values:
            # The tracker has the steps that this run takes again after its checkpoint.
            if step <= self._newest:
                return
            self._is_resumed = False
        if values and step >= self._newest:
            self._newest = step
            self._tracker.log(values, step)

    def close(self) -> None:
        self._tracker.end()


@dataclass(frozen=True)
class TrackedRun:
    """A run as its tracker is told of it.

    `config`: the whole job. `known_id`: the tracker's id of a run that is resumed; None: the run is
    new.
    """

    entry: TrackerEntry
    job: str
    directory: Path
    config: Json
    known_id: str | None = None

    def choose(self, given: str | None, variables: Sequence[str], otherwise: str) -> str | None:
        """Return the job's value or the default; None if the tracker's environment has one."""
        if given is not None:
            return given
        if any(os.environ.get(name) for name in variables):
            return None
        return otherwise


class TensorBoard:
    id = None
    newest_step = -1

    def __init__(self, run: TrackedRun) -> None:
        # A dependency of Ray Train, whereas torch's writer needs the whole of TensorBoard.
        module = importlib.import_module("tensorboardX")
        self._writer = module.SummaryWriter(str(run.directory / "tensorboard"))
        # TensorBoard shows texts as Markdown.
        config = json.dumps(run.config, indent=1)
        self._writer.add_text("job", f"```json\n{config}\n```", 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    newest_step = -1

    def __init__(self, run: TrackedRun) -> None:
        entry = run.entry
        project = run.choose(entry.project, ("WANDB_PROJECT",), "autohet")
        name = run.choose(entry.name, ("WANDB_NAME",), run.job)
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            group=entry.group,
            tags=list(entry.tags) or None,
            config=dict(run.config),
            dir=str(run.directory),
            id=run.known_id,
            resume="allow",
        )
        self.id: str | None = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = importlib.import_module("mlflow")
        entry = run.entry
        variables = ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
        experiment = run.choose(entry.project, variables, "autohet")
        if experiment is not None:
            self._mlflow.set_experiment(experiment)
        if run.known_id is not None:
            started = self._mlflow.start_run(run_id=run.known_id)
        else:
            tags = dict.fromkeys(entry.tags, "true")
            if entry.group is not None:
                tags["group"] = entry.group
            name = run.choose(entry.name, ("MLFLOW_RUN_ID",), run.job)
            started = self._mlflow.start_run(run_name=name, tags=tags)
            self._mlflow.log_dict(dict(run.config), "job.json")
        self.id: str | None = started.info.run_id
        self.newest_step = -1
        if run.known_id is not None:
            self.newest_step = self._newest_logged_step(run.known_id)

    def _newest_logged_step(self, run_id: str) -> int:
        """Return the newest step whose loss a run has; MLflow would keep a step twice."""
        client = self._mlflow.MlflowClient()
        history = client.get_metric_history(run_id, "loss")
        steps = [int(entry.step) for entry in history]
        return max(steps, default=-1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        metrics = {name.replace("/", "."): value for name, value in values.items()}
        self._mlflow.log_metrics(metrics, step=step)

    def end(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[TrackerKind, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def make_callbacks(
    job: Job, directory: Path, known_ids: Mapping[str, str] | None = None
) -> tuple[list[Callback], dict[str, str]]:
    """Create the trackers that a job names; return them and their ids of the run by kind.

    Their files go below `directory`. known_ids: ids of the run that is resumed.
    """
    known_ids = known_ids or {}
    found: list[Callback] = []
    ids: dict[str, str] = {}
    for entry in job.tracker_entries:
        known_id = known_ids.get(entry.kind)
        run = TrackedRun(
            entry=entry,
            job=job.name,
            directory=directory,
            config=job.to_document(),
            known_id=known_id,
        )
        tracker = _begin(run)
        if tracker is None:
            continue
        found.append(TrackerCallback(tracker))
        if tracker.id is not None:
            ids[entry.kind] = tracker.id
    return found, ids


def _begin(run: TrackedRun) -> Tracker | None:
    """Start a tracker; None if it fails to start, which is logged."""
    kind = run.entry.kind
    try:
        return TRACKERS[kind](run)
    except ImportError as error:
        logger.warning(
            "Tracker %s is off, since it is not installed (%s): pip install %s", kind, error, kind
        )
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "Tracker %s is off, since it cannot begin: %s: %s", kind, type(error).__name__, error
        )
    return None


class TrackerIds:
    """Ids of a job's run in its trackers, kept in the job's storage.

    A run that resumes there resumes in its trackers too. Errors of the storage are logged.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def read(self, *, is_restart: bool) -> dict[str, str]:
        """Return the ids of the resumed run; empty if the run is new.

        A run is resumed if the driver is restarted or there is a checkpoint.
        """
        try:
            with closing(open_storage(self._uri)) as storage:
                if not is_restart and not list_checkpoints(storage):
                    return {}
                document = json.loads(storage.get(IDS_NAME))
                return {str(kind): str(value) for kind, value in document.items()}
        except ObjectMissing:
            return {}
        except (StorageError, ValueError) as error:
            logger.warning("Trackers begin new runs: their ids cannot be read (%s)", error)
            return {}

    def write(self, ids: Mapping[str, str]) -> None:
        try:
            text = json.dumps(dict(ids))
            with closing(open_storage(self._uri)) as storage:
                storage.put(IDS_NAME, text.encode())
        except StorageError as error:
            logger.warning("Trackers will begin new runs after a restart: %s", error)
