"""An entry of `trackers`: a tracker that follows the run, with its settings."""

from dataclasses import dataclass
from typing import Literal

from autohet.runtime.job.requirements import require

TrackerKind = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class TrackerEntry:
    """A tracker with its project, name, group or tags.

    A key that is left out comes from the tracker's own environment variables (`WANDB_PROJECT`,
    `MLFLOW_EXPERIMENT_NAME`, ...), else from the job.
    """

    kind: TrackerKind
    """`tensorboard`, `wandb` or `mlflow`."""
    project: str | None = None
    """Project of W&B, experiment of MLflow; null: `autohet`."""
    name: str | None = None
    """Name of the run; null: the job's name."""
    group: str | None = None
    """Group of W&B; in MLflow the tag `group`. null: none."""
    tags: tuple[str, ...] = ()
    """Tags of W&B; in MLflow tags with the value `true`."""

    def __post_init__(self) -> None:
        if self.kind != "tensorboard":
            return
        for key in ("project", "name", "group", "tags"):
            value = getattr(self, key)
            require(
                not value,
                f"trackers gives tensorboard the {key} {value!r}, which it does not have; leave it"
                " out",
            )
