"""The `checkpoint` section: durable checkpoints, snapshots and copies on other nodes."""

import os
import re
from dataclasses import dataclass
from typing import Literal

from autohet.runtime.job.requirements import require, require_at_least

DEFAULT_NUM_KEPT = 3
"""Checkpoints: the newest, the one before it, which may be in use by a reader, and one more."""
SECONDS_BY_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = re.compile(r"(\d+)(?: *steps?)?")
_PART = re.compile(r"(\d+(?:\.\d+)?) *(seconds?|sec|s|minutes?|min|m|hours?|h|days?|d)(?![a-z]) *")
_DURATION = re.compile(f"(?:{_PART.pattern})+")


def duration_s(text: str) -> float | None:
    """Return the seconds of a duration such as `90s`, `1h30m`; None if the text is none."""
    if not _DURATION.fullmatch(text.strip()):
        return None
    return sum(float(n) * SECONDS_BY_UNIT[unit[0]] for n, unit in _PART.findall(text))


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Durable checkpoints, and the snapshots in host memory and on local disk.

    Most recoveries are served from the snapshots.
    """

    storage: str | None = None
    """Storage of durable checkpoints: `s3://bucket/prefix`, `file://` or a shared directory.

    Every node must see the directory. null: runs/<job name>/checkpoints.
    """
    every: int | str = "auto"
    """Interval of durable checkpoints: steps (`500`), a duration (`10m`, `1h30m`) or `auto`.

    auto: as far apart as costs least (Young and Daly), from the measured cost of a checkpoint and
    step and the expected life of the fleet, and at most 10 minutes of training. One more is made
    when the run ends or is told to stop. A checkpoint waits while the one before is being stored.
    """
    every_steps: int | None = None
    """Steps between durable checkpoints: the same as a number of steps in `every`."""
    keep: int | Literal["all"] | None = None
    """Number of newest committed checkpoints that retention leaves; null: 3.

    `all`: every one; a search for the newest then lists them all.
    """
    keep_best: int | None = None
    """Number of checkpoints with the lowest evaluation loss that are kept beside the newest ones.

    A checkpoint has a loss if its own step was evaluated: one that waits for the one before it is
    then of an evaluated step, too. null: none.
    """
    snapshot_every_steps: int = 1
    """Steps between snapshots to the node's host memory; 0: none."""
    replicate_every_steps: int | None = None
    """Fewest steps between two replication rounds; 0: none.

    A round copies the shards that one node alone holds from its snapshots to another node's host
    memory, and starts only after the previous round. null: 1, or 0 if `snapshot_every_steps` is 0.
    """
    replicate_bandwidth_share: float = 0.25
    """Fraction of a node's network bandwidth that these copies may take, in (0, 1]."""
    replicate_zone: Literal["same", "any", "other"] = "any"
    """Zone of the node that takes a copy.

    same: only the zone of the source node; any: that zone first, another if no node of it can take
    the copy; other: another zone first, so that the loss of a zone does not take the last copy.
    """
    replicate_usd_per_hour: float | None = None
    """Bound on the price of copies to other zones, in dollars an hour.

    Rounds of these copies are as far apart as the bound requires. 0: no such copies. null: 5% of
    the price of the fleet's nodes.
    """
    allow_changes: tuple[str, ...] = ()
    """Keys that decide the mathematics and may differ from the run whose checkpoint is resumed.

    Examples: `training.eps`, `model.pretrained`. A change of any other such key is refused.
    """
    memory_directory: str = f"/dev/shm/autohet-{os.getuid()}"
    """Directory of a node's snapshots in host memory (tmpfs).

    Directories are made for this user alone. The name has the user's id, so that the jobs of
    several users of one machine stay apart.
    """
    local_directory: str = f"/tmp/autohet-{os.getuid()}"
    """Directory to which a node spills snapshots on its own disk."""

    def __post_init__(self) -> None:
        require(
            self.storage != "",
            "checkpoint.storage is empty; give an s3:// URI or a directory, or leave it out",
        )
        require_at_least("checkpoint.every_steps", self.every_steps, 1)
        require(
            self.every_steps is None or self.every == "auto",
            f"checkpoint.every is {self.every} and checkpoint.every_steps {self.every_steps}; give"
            " one of them",
        )
        require(
            self.every == "auto" or (self.fixed_steps or self.every_s or 0) > 0,
            f"checkpoint.every is {self.every!r}; give auto, a number of steps (500) or a duration"
            " (90s, 10m, 1h30m)",
        )
        require_at_least("checkpoint.keep", self.num_kept, 1)
        require_at_least("checkpoint.keep_best", self.keep_best, 1)
        require(
            self.keep_best is None or self.keep != "all",
            f"checkpoint.keep_best is {self.keep_best}, but checkpoint.keep is all, which keeps"
            " every one; leave one out",
        )
        require_at_least("checkpoint.snapshot_every_steps", self.snapshot_every_steps, 0)
        require_at_least("checkpoint.replicate_every_steps", self.replicate_every_steps, 0)
        require(
            self.snapshot_every_steps > 0 or not self.replicate_every_steps,
            f"checkpoint.replicate_every_steps is {self.replicate_every_steps}, but"
            " checkpoint.snapshot_every_steps is 0: copies on other nodes are made from snapshots;"
            " make snapshots (1: after each step), or leave replicate_every_steps out",
        )
        for key in self.allow_changes:
            require(
                key.startswith(("model.", "training.", "data.")),
                f"checkpoint.allow_changes holds {key!r}; name keys of model, training or data,"
                " such as training.eps",
            )
        share = self.replicate_bandwidth_share
        require(
            0 < share <= 1,
            f"checkpoint.replicate_bandwidth_share is {share}, but must be in (0, 1]",
        )
        require(
            self.replicate_zone in ("same", "any", "other"),
            f"checkpoint.replicate_zone is '{self.replicate_zone}'; choose same, any or other",
        )
        require_at_least("checkpoint.replicate_usd_per_hour", self.replicate_usd_per_hour, 0)

    @property
    def fixed_steps(self) -> int | None:
        """Steps between durable checkpoints; None if the job names none."""
        if self.every_steps is not None:
            return self.every_steps
        if isinstance(self.every, int):
            return self.every
        match = _STEPS.fullmatch(self.every.strip())
        return int(match[1]) if match else None

    @property
    def every_s(self) -> float | None:
        """Seconds of training between durable checkpoints; None if the job names none."""
        return None if isinstance(self.every, int) else duration_s(self.every)

    @property
    def num_kept(self) -> int | None:
        """Number of newest checkpoints that are kept; None: all."""
        if self.keep == "all":
            return None
        return DEFAULT_NUM_KEPT if self.keep is None else self.keep

    @property
    def replication_steps(self) -> int:
        """`replicate_every_steps`, given or derived."""
        if self.replicate_every_steps is not None:
            return self.replicate_every_steps
        return min(1, self.snapshot_every_steps)
