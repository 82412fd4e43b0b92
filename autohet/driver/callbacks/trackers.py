"""TensorBoard, Weights & Biases and MLflow as callbacks: loss, speed, fleet and seconds of changes,
by step.

A job names those that it wants in `trackers`; one that is not installed is left off, and the log
says so. Credentials are the tracker's own affair (its environment variables or files): none pass
through here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from autohet.driver.callbacks.living_nodes import LivingNodes
from autohet.driver.callbacks.protocol import Callback
from planner.errors import ConfigError

logger = logging.getLogger("autohet")


OF_STEP = ("loss", "gradient_norm", "learning_rate", "epoch")
"""Numbers of a step's event that trackers are given."""


class Scalars:
    """What of an event is a number by step: pure but for the fleet and the step that it
    remembers.
    """

    def __init__(self) -> None:
        self._step = 0
        self._living = LivingNodes()

    def of(self, event: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """(step, name -> value); no name where the event has no number."""
        kind, changed = event["kind"], self._living.take(event)
        if kind == "step":
            self._step = int(event["step"])
            named = {name: event.get(name) for name in OF_STEP}
            return self._step, _present({**named, **_speed(event)})
        if kind == "evaluation":
            # The state after n updates is that of step n - 1, which has been logged.
            step = max(0, int(event["step"]) - 1)
            return step, _present({"evaluation_loss": event["evaluation_loss"]})
        if kind == "reconfigure":
            seconds = {f"change/{part}_s": value for part, value in event["seconds"].items()}
            tiers = {
                f"change/{tier}_bytes": float(count)
                for tier, count in event["bytes_by_tier"].items()
            }
            return self._step, {**seconds, **tiers, "change/steps_lost": float(event["steps_lost"])}
        return self._step, (
            {"fleet/gpus": float(self._living.gpus_by_type().total())} if changed else {}
        )


def _speed(event: Mapping[str, Any]) -> dict[str, float | None]:
    seconds = event.get("seconds")
    return {"step_s": seconds, "tokens_per_s": event["tokens"] / seconds if seconds else None}


def _present(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


class Tracker(Protocol):
    """What the three have in common."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def end(self) -> None: ...


class TrackerCallback:
    """A `Callback` that hands an event's numbers to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._scalars = Scalars()

    def on_event(self, event: Mapping[str, Any]) -> None:
        step, values = self._scalars.of(event)
        if values:
            self._tracker.log(values, step)

    def close(self) -> None:
        self._tracker.end()


class TensorBoard:
    def __init__(self, job: str, directory: Path) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(directory / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, job: str, directory: Path) -> None:
        self._run = importlib.import_module("wandb").init(
            project="autohet", name=job, dir=str(directory)
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, job: str, directory: Path) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment("autohet")
        self._mlflow.start_run(run_name=job)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(
            {name.replace("/", "."): value for name, value in values.items()}, step=step
        )

    def end(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[str, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def make_callbacks(names: Sequence[str], job: str, directory: Path) -> list[Callback]:
    """The trackers that a job names; their files go below `directory`.

    Raises:
        ConfigError: there is no such tracker.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"trackers names '{unknown[0]}'; there are {', '.join(sorted(TRACKERS))}")
    found: list[Callback] = []
    for name in names:
        try:
            found.append(TrackerCallback(TRACKERS[name](job, directory)))
        except ImportError as error:
            logger.warning(
                "Tracker %s is off, since it is not installed (%s): pip install %s",
                name,
                error,
                name,
            )
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "Tracker %s is off, since it cannot begin: %s: %s",
                name,
                type(error).__name__,
                error,
            )
    return found
