"""Errors of training state and its recovery.

Each error can be pickled across processes and says what to do.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any


class RecoveryError(Exception):
    """Base of everything that this package raises about state, its copies and its transport.

    A subclass is a dataclass of what it says, or takes one message; either way it survives a
    pickle.
    """

    def __post_init__(self) -> None:
        super().__init__(*self._said())

    def __reduce__(self) -> str | tuple[Any, ...]:
        if not is_dataclass(self):
            return super().__reduce__()
        # Not by `args`: those of an OSError are its own affair.
        return (type(self), self._said())

    def _said(self) -> tuple[Any, ...]:
        if not is_dataclass(self):
            return ()
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(eq=False, repr=False)
class ShardUnavailable(RecoveryError):
    """A source does not hold the shard that it was asked for (any more)."""

    shard: Any
    source: str
    reason: str

    def __str__(self) -> str:
        return f"shard {self.shard} is not available at {self.source}: {self.reason}"


@dataclass(eq=False, repr=False)
class ShardCorrupt(RecoveryError):
    """A source gave bytes whose length or checksum is not the recorded one; they are never used."""

    shard: Any
    source: str
    reason: str

    def __str__(self) -> str:
        return f"shard {self.shard} from {self.source} is corrupt: {self.reason}"


@dataclass(eq=False, repr=False)
class PeerTimeout(RecoveryError, TimeoutError):
    """A peer did not answer before the deadline."""

    peer: str
    doing: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.peer} did not answer within {self.timeout_s:.3g} s while {self.doing}"


@dataclass(eq=False, repr=False)
class PeerUnreachable(RecoveryError, ConnectionError):
    """Raised if a peer refuses or closes the connection, or speaks another protocol version."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"cannot reach {self.peer}: {self.reason}"


@dataclass(eq=False, repr=False)
class PeerRefused(RecoveryError, PermissionError):
    """A peer rejected the token or the request."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer} refused: {self.reason}"


@dataclass(eq=False, repr=False)
class Cancelled(RecoveryError):
    """Raised if the caller has cancelled the work. It says nothing against the source."""

    what: str

    def __str__(self) -> str:
        return f"cancelled: {self.what}"


@dataclass(eq=False, repr=False)
class SnapshotError(RecoveryError):
    """A snapshot could not be written or is unreadable; names the file and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"snapshot {self.path}: {self.reason}"


class SnapshotUncommitted(SnapshotError):
    """Raised if a file has no commit: its writer is still at work, or died. This is not damage."""


@dataclass(eq=False, repr=False)
class RestoreError(RecoveryError):
    """A worker could not get back all its shards: every source of at least one of them failed.

    `bad` are the (source, shard) pairs that failed: what the next schedule has to exclude.
    """

    worker: str
    failures: tuple[str, ...]
    bad: tuple[Any, ...] = ()

    def __str__(self) -> str:
        shown = "; ".join(self.failures[:5])
        more = f" (and {len(self.failures) - 5} more)" if len(self.failures) > 5 else ""
        return f"{self.worker} cannot restore its state: {shown}{more}"


@dataclass(eq=False, repr=False)
class NotRestorable(RecoveryError):
    """Raised if no step has a holder for every shard.

    It names the shards that are missing at the newest candidate step.
    """

    step: int | None
    missing: tuple[Any, ...]

    def __str__(self) -> str:
        if self.step is None:
            return (
                "no holder of any step is known: neither live state nor a snapshot nor a checkpoint"
            )
        shown = ", ".join(str(shard) for shard in self.missing[:3])
        num_missing = len(self.missing)
        return (
            f"no step is whole: at step {self.step}, the best one, {num_missing} shards have no"
            f" holder ({shown})"
        )
