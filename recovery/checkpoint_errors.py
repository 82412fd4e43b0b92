"""What can be wrong with a durable checkpoint; each error crosses a process and names what to do."""

from __future__ import annotations

from recovery.errors import RecoveryError
from recovery.layout import ShardId


class CheckpointError(RecoveryError):
    """A checkpoint cannot be written, committed or read."""


class CheckpointMissing(CheckpointError, LookupError):
    """No committed checkpoint of this step; `committed` are the steps that there are."""

    def __init__(self, uri: str, step: int | None, committed: tuple[int, ...] = ()) -> None:
        super().__init__(uri, step, committed)
        self.uri = uri
        self.step = step
        self.committed = committed

    def __str__(self) -> str:
        if self.step is None or not self.committed:
            wanted = "checkpoint" if self.step is None else f"checkpoint of step {self.step}"
            return f"{self.uri} holds no committed {wanted}; check the URI, or wait until the first commit"
        steps = ", ".join(map(str, self.committed))
        return f"{self.uri} holds no committed checkpoint of step {self.step}; committed steps: {steps}"


class CheckpointIncomplete(CheckpointError):
    """A commit found shards that nobody wrote, or files that are not there: nothing was committed."""

    def __init__(self, step: int, missing: tuple[str, ...]) -> None:
        super().__init__(step, missing)
        self.step = step
        self.missing = missing

    def __str__(self) -> str:
        shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
        return f"checkpoint of step {self.step} is not committed: {len(self.missing)} pieces are missing ({shown})"


class CheckpointConflict(CheckpointError):
    """The storage already holds a checkpoint that is not ours, or two writers disagree about a shard."""

    def __init__(self, uri: str, step: int, reason: str) -> None:
        super().__init__(uri, step, reason)
        self.uri = uri
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint of step {self.step} in {self.uri}: {self.reason}"


class ManifestInvalid(CheckpointError, ValueError):
    """A manifest is damaged, from a later version, or has keys that it must not have."""

    def __init__(self, uri: str, reason: str) -> None:
        super().__init__(uri, reason)
        self.uri = uri
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.uri} is not a valid manifest: {self.reason}"


class CheckpointCorrupt(CheckpointError):
    """Stored bytes of a shard are not what the manifest says, also after reading them again."""

    def __init__(self, uri: str, shard: ShardId, reason: str) -> None:
        super().__init__(uri, shard, reason)
        self.uri = uri
        self.shard = shard
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.uri}: shard {self.shard} is corrupt: {self.reason}; use an older checkpoint"


class UploadFailed(CheckpointError):
    """A background upload ended with an error that is no RecoveryError."""
