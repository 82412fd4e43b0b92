"""SIMULATED manifest of a committed checkpoint, without its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.state.layout import ShardId


@dataclass(frozen=True)
class SimulatedManifest:
    """Manifest of a committed checkpoint in a simulation."""

    step: int
    generation: int
    shards: frozenset[ShardId]
    checksums: Mapping[ShardId, int] = field(default_factory=dict)
