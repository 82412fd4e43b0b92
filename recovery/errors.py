"""What can go wrong with state, as exceptions that cross processes (each pickles) and name what to do about it."""

from __future__ import annotations

from typing import Any


class RecoveryError(Exception):
    """Base of everything that this package raises about state, its copies and its transport.

    The constructor's arguments are kept as `args`, so that every subclass survives a pickle.
    """


class ShardUnavailable(RecoveryError):
    """A source does not hold the shard that it was asked for (any more)."""

    def __init__(self, shard: Any, source: str, reason: str) -> None:
        super().__init__(shard, source, reason)
        self.shard = shard
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"shard {self.shard} is not available at {self.source}: {self.reason}"


class ShardCorrupt(RecoveryError):
    """A source gave bytes whose length or checksum is not the recorded one; they are never used."""

    def __init__(self, shard: Any, source: str, reason: str) -> None:
        super().__init__(shard, source, reason)
        self.shard = shard
        self.source = source
        self.reason = reason

    def __str__(self) -> str:
        return f"shard {self.shard} from {self.source} is corrupt: {self.reason}"


class PeerTimeout(RecoveryError, TimeoutError):
    """A peer did not answer before the deadline."""

    def __init__(self, peer: str, doing: str, timeout_s: float) -> None:
        super().__init__(peer, doing, timeout_s)
        self.peer = peer
        self.doing = doing
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self.peer} did not answer within {self.timeout_s:.3g} s while {self.doing}"


class PeerUnreachable(RecoveryError, ConnectionError):
    """A peer refused the connection, hung up, or speaks another protocol version."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot reach {self.peer}: {self.reason}"


class PeerRefused(RecoveryError, PermissionError):
    """A peer rejected the token or the request."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.peer} refused: {self.reason}"


class SnapshotError(RecoveryError):
    """A snapshot could not be written or is unreadable; names the file and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"snapshot {self.path}: {self.reason}"


class SnapshotUncommitted(SnapshotError):
    """Nothing is committed in the file: its writer is at work, or died at it. Not damage."""


class RestoreError(RecoveryError):
    """A worker could not get back all its shards: every source of at least one of them failed.

    `bad` are the (source, shard) pairs that failed: what the next schedule has to exclude.
    """

    def __init__(self, worker: str, failures: tuple[str, ...], bad: tuple[Any, ...] = ()) -> None:
        super().__init__(worker, failures, bad)
        self.worker = worker
        self.failures = failures
        self.bad = bad

    def __str__(self) -> str:
        shown = "; ".join(self.failures[:5])
        more = f" (and {len(self.failures) - 5} more)" if len(self.failures) > 5 else ""
        return f"{self.worker} cannot restore its state: {shown}{more}"


class NotRestorable(RecoveryError):
    """No step has a holder for every shard; names the shards that are missing at the newest candidate step."""

    def __init__(self, step: int | None, missing: tuple[Any, ...]) -> None:
        super().__init__(step, missing)
        self.step = step
        self.missing = missing

    def __str__(self) -> str:
        if self.step is None:
            return "no holder of any step is known: neither live state nor a snapshot nor a checkpoint"
        shown = ", ".join(str(shard) for shard in self.missing[:3])
        num_missing = len(self.missing)
        return f"no step is whole: at step {self.step}, the best one, {num_missing} shards have no holder ({shown})"
