"""What follows from who holds what: restorable steps, lineage, sole holders, diverged replicas."""

import pytest

from recovery.errors import NotRestorable
from recovery.state.holdings import (
    Holding,
    Source,
    require_restorable_step,
    restorable_step,
)
from recovery.state.layout import ShardId

A, B, C = (ShardId(name, 0) for name in "abc")


def held(kind: str, node: str, step: int, *shards: ShardId, **checksums: int) -> Holding:
    return Holding(
        Source(kind, node, f"{node}/0", step),
        frozenset(shards),
        {ShardId(name, 0): crc for name, crc in checksums.items()},
    )


def test_the_newest_step_that_is_whole_across_tiers() -> None:
    holdings = [
        held("worker", "n0", 8, A),
        held("memory", "n1", 8, B),
        held("memory", "n0", 7, A, B),
        held("s3", "", 5, A, B, C),
    ]
    assert restorable_step([A, B], holdings) == 8
    assert restorable_step([A, B, C], holdings) == 5
    assert restorable_step([A, ShardId("z", 0)], holdings) is None
    assert restorable_step([A], []) is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(NotRestorable, match=r"at step 9, .* 1 shards have no holder \(c\[0\]\)"):
        require_restorable_step(
            [A, B, C], [held("worker", "n0", 9, A, B), held("memory", "n0", 8, A)]
        )
    with pytest.raises(NotRestorable, match="no holder of any step"):
        require_restorable_step([A], [])
