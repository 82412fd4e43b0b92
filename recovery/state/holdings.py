"""Holdings: the shards that each source has at each step, and the step that can be restored.

Survivors, node agents and checkpoints report their holdings.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from recovery.errors import NotRestorable
from recovery.state.layout import ShardId

SOURCE_KINDS = ("worker", "memory", "disk", "s3")


@dataclass(frozen=True, order=True)
class Source:
    """Place that holds shards of one step.

    `kind` is "worker" (live memory of a worker's process), "memory" or "disk" (a node agent's
    host-memory or disk copy), or "s3" (a committed checkpoint in durable storage, whatever its
    protocol). `node` is its node ("" for s3), `name` the worker whose state it is, or the storage's
    URI. `generation` is the one that wrote it; 0 for a worker that passes on what a restore brings
    it.
    """

    kind: str
    node: str
    name: str
    step: int
    generation: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SOURCE_KINDS:
            raise ValueError(f"source kind {self.kind!r} is not one of {', '.join(SOURCE_KINDS)}")

    def __str__(self) -> str:
        # Durable storage belongs to no node.
        where = f" on {self.node}" if self.node else ""
        return f"{self.kind} of {self.name}{where} at step {self.step}"


@dataclass(frozen=True)
class Holding:
    """Shards that one source holds, with the known checksums of their bytes.

    `checksums` (`recovery.state.checksum`) are known for every snapshot and checkpoint, and for
    live memory once a snapshot of it is committed.
    """

    source: Source
    shards: frozenset[ShardId]
    checksums: Mapping[ShardId, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.source.step


def restorable_step(shards: Collection[ShardId], holdings: Iterable[Holding]) -> int | None:
    """Return the newest step at which every one of `shards` has a holder; None if there is none."""
    needed = frozenset(shards)
    by_step = _held_by_step(holdings)
    for step in sorted(by_step, reverse=True):
        if needed <= by_step[step]:
            return step
    return None


def require_restorable_step(shards: Collection[ShardId], holdings: Iterable[Holding]) -> int:
    """Return `restorable_step`, or raise NotRestorable with the shards that the best step lacks."""
    holdings = list(holdings)
    step = restorable_step(shards, holdings)
    if step is not None:
        return step

    needed = frozenset(shards)
    by_step = _held_by_step(holdings)
    if not by_step:
        raise NotRestorable(None, tuple(sorted(needed)))

    best = max(by_step, key=lambda candidate: (len(needed & by_step[candidate]), candidate))
    missing = needed - by_step[best]
    raise NotRestorable(best, tuple(sorted(missing)))


def _held_by_step(holdings: Iterable[Holding]) -> dict[int, set[ShardId]]:
    held: dict[int, set[ShardId]] = {}
    for holding in holdings:
        held.setdefault(holding.step, set()).update(holding.shards)
    return held
