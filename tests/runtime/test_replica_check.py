"""The integers that say in a vote whether replicas have parted, and who is right where they
have.
"""

import random
from functools import partial
from typing import Any

import pytest
import torch

from autohet.runtime.step import replica_check
from autohet.runtime.step.replica_check import Comparison, ReplicaCheck, judge
from recovery.state.layout import Layout, ShardId, TensorSpec
from recovery.state.slices import unit_views


def case(
    seed: int, num_workers: int = 6, num_tensors: int = 9
) -> tuple[Layout, dict[str, dict[str, torch.Tensor]]]:
    """Tensors of four units, each held by workers drawn at random, all with the bits of one whole
    tensor.
    """
    draw = random.Random(seed)
    cuts = {0: (0, 2, 3, 6, 8), 1: (0, 1, 2, 3)}
    names = [f"param/t{index}" for index in range(num_tensors)]
    specs = {
        name: TensorSpec(name, (8, 3), "float32", i % 2, cuts[i % 2])
        for i, name in enumerate(names)
    }
    shards: dict[str, set[ShardId]] = {f"w{i}": set() for i in range(num_workers)}
    for spec in specs.values():
        for shard in spec.shards:
            for worker in draw.sample(sorted(shards), draw.randrange(1, num_workers)):
                shards[worker].add(shard)
    layout = Layout(specs, {worker: frozenset(held) for worker, held in shards.items()})
    whole = {name: torch.randn(spec.shape) for name, spec in specs.items()}
    states = {}
    for worker in layout.workers:
        pieces = {
            n: [whole[n][specs[n].unit_slices(u)] for u in units]
            for n, units in layout.units_of(worker).items()
        }
        states[worker] = {
            n: torch.cat(found, specs[n].split_dim or 0) for n, found in pieces.items()
        }
    return layout, states


def votes(layout: Layout, states: Any, every: int = 1, step: int = 0) -> float:
    layers = {f"t{i}": i for i in range(99)}
    world: Any = None
    return sum(
        ReplicaCheck(partial(Comparison, w, layout, layers), states[w], world, every).contribution(
            step
        )
        for w in layout.workers
    )


@pytest.mark.parametrize("seed", range(20))
def test_equal_replicas_sum_to_zero_and_any_flipped_bit_does_not(seed: int) -> None:
    layout, states = case(seed)
    assert votes(layout, states) == 0.0
    draw = random.Random(seed)
    shared = [shard for shard in sorted(layout.shards) if len(layout.holders(shard)) > 1]
    shard = draw.choice(shared)
    worker = draw.choice(layout.holders(shard))
    units = layout.units_of(worker)[shard.tensor]
    local = states[worker][shard.tensor]
    view = unit_views(layout.tensors[shard.tensor], units, local)[shard.unit]
    flipped = view.contiguous().view(torch.int32) ^ (1 << draw.randrange(31))
    view.copy_(flipped.view(torch.float32))
    assert votes(layout, states) != 0.0
    assert votes(layout, states, every=5, step=7) == 0.0, "no check is due"
    assert votes(layout, states, every=5, step=10) != 0.0
    assert votes(layout, states, every=0) == 0.0


def test_sums_stay_exact_however_many_shards_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: 32 bits of each checksum, whatever their number: partial sums are rounded, and equal
    replicas seem to part.
    """
    layout, states = case(1, num_workers=16, num_tensors=40)
    monkeypatch.setattr(replica_check, "EXACT_BITS", 30)
    monkeypatch.setattr(replica_check, "checksums", lambda pieces: [(1 << 64) - 1] * len(pieces))
    check = [
        ReplicaCheck(partial(Comparison, w, layout), states[w], None, 1)  # type: ignore[arg-type]
        for w in layout.workers
    ]
    parts = [each.contribution(0) for each in check]
    assert sum(parts) == 0.0
    assert max(sum(abs(part) for part in parts), 1) < 2.0**30


def test_most_holders_are_right_and_of_equally_many_the_first() -> None:
    assert judge({"a": 1, "b": 2, "c": 2}) == ("b", ("a",))
    assert judge({"a": 1, "b": 2}) == ("a", ("b",))
    assert judge({"a": 1, "b": 2, "c": 3}) == ("a", ("b", "c"))
    assert judge({"a": 1, "b": 1}) == ("a", ())
