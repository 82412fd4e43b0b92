"""Errors of durable checkpoints.

Each error can be pickled across processes and says what to do.
"""

from dataclasses import dataclass

from recovery.errors import RecoveryError
from recovery.release import RELEASE
from recovery.state.layout import ShardId

VERSION = 4
"""Version of the manifests and journal entries that this release writes.

It reads older ones, too: manifests of version 3, whose items had a CRC-32, and those of version 2
and entries without a version, which autohet 0.1.0 wrote.
"""


class CheckpointError(RecoveryError):
    """A checkpoint cannot be written, committed or read."""


@dataclass(eq=False, repr=False)
class CheckpointMissing(CheckpointError, LookupError):
    """No committed checkpoint of this step; `committed` are the steps that there are."""

    uri: str
    step: int | None
    committed: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.step is None or not self.committed:
            wanted = "checkpoint" if self.step is None else f"checkpoint of step {self.step}"
            return (
                f"{self.uri} holds no committed {wanted}; check the URI, or wait until the first"
                " commit"
            )
        steps = ", ".join(map(str, self.committed))
        return (
            f"{self.uri} holds no committed checkpoint of step {self.step}; committed steps:"
            f" {steps}"
        )


@dataclass(eq=False, repr=False)
class CheckpointIncomplete(CheckpointError):
    """Raised if a commit lacks shards or files; nothing was committed.

    No worker wrote the shards, or the files are not there.
    """

    step: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
        return (
            f"checkpoint of step {self.step} is not committed: {len(self.missing)} pieces are"
            f" missing ({shown})"
        )


@dataclass(eq=False, repr=False)
class CheckpointConflict(CheckpointError):
    """Raised if the storage holds another owner's checkpoint, or two writers disagree.

    Writers disagree if they wrote a shard with different content.
    """

    uri: str
    step: int
    reason: str

    def __str__(self) -> str:
        return f"checkpoint of step {self.step} in {self.uri}: {self.reason}"


@dataclass(eq=False, repr=False)
class ManifestInvalid(CheckpointError, ValueError):
    """A manifest is damaged, from a later version, or has keys that it must not have."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"{self.uri} is not a valid manifest: {self.reason}"


@dataclass(eq=False, repr=False)
class LaterRelease(ManifestInvalid):
    """A manifest or journal entry is of a later release, which alone may read or replace it."""

    def __str__(self) -> str:
        return (
            f"{self.uri} {self.reason}; this is autohet {RELEASE}, which reads versions up to"
            f" {VERSION}: use that release"
        )


class ManifestMisplaced(ManifestInvalid):
    """A manifest is intact, but of another step than its directory."""

    def __str__(self) -> str:
        return f"{self.uri} {self.reason}"


class ManifestForeign(ManifestMisplaced):
    """A manifest is intact, but of another run than the storage's journal."""


@dataclass(eq=False, repr=False)
class CheckpointDamaged(CheckpointError):
    """Raised if files of a committed checkpoint are missing or have another size."""

    uri: str
    step: int
    reason: str

    def __str__(self) -> str:
        return (
            f"checkpoint of step {self.step} in {self.uri} is damaged: {self.reason}; use an older"
            " checkpoint"
        )


@dataclass(eq=False, repr=False)
class CheckpointCorrupt(CheckpointError):
    """Raised if a shard's stored bytes are not the manifest's, also after a second read."""

    uri: str
    shard: ShardId
    reason: str

    def __str__(self) -> str:
        return f"{self.uri}: shard {self.shard} is corrupt: {self.reason}; use an older checkpoint"


class UploadFailed(CheckpointError):
    """A background upload ended with an error that is no RecoveryError."""


@dataclass(eq=False, repr=False)
class Superseded(CheckpointError):
    """Raised when another driver has begun a newer generation of this job.

    The steps of this driver are no longer the job's.
    """

    uri: str
    generation: int
    driver: str

    def __str__(self) -> str:
        return (
            f"driver {self.driver} has taken the job over in {self.uri}: generation"
            f" {self.generation} is its"
        )


class Replaced(Superseded):
    """Raised when another driver has claimed a later epoch of this job; `generation`: the epoch."""

    def __str__(self) -> str:
        return f"driver {self.driver} has taken the job over in {self.uri}: epoch {self.generation}"


@dataclass(eq=False, repr=False)
class LeaseHeld(CheckpointError):
    """Raised when another driver of this job is alive."""

    uri: str
    driver: str

    def __str__(self) -> str:
        return (
            f"{self.uri} is in use by driver {self.driver}, which is alive; stop it, or name"
            " another checkpoint.storage"
        )
