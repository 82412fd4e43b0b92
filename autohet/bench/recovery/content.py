"""State of known content for the recovery benchmark.

It is a function of each shard's name and of the step, so that any process can check it.
"""

import math
import zlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from recovery.state.checksum import checksum
from recovery.state.layout import Layout, ShardId, TensorSpec
from recovery.state.slices import TORCH_DTYPES, empty_local, shard_views
from recovery.storage.tensor_payload import tensor_bytes

_PATTERN_PERIOD = 8191


def known_content(spec: TensorSpec, unit: int, step: int) -> Tensor:
    """Return the content of a shard at a step.

    It is a function of the shard's name, so that any process can check it.
    """
    shape = spec.unit_shape(unit)
    base = zlib.crc32(f"{spec.name}:{unit}:{step}".encode()) % 65536
    numbers = torch.arange(math.prod(shape), dtype=torch.int32)
    pattern = numbers % _PATTERN_PERIOD + base
    return pattern.to(TORCH_DTYPES[spec.dtype]).view(shape)


def known_state(layout: Layout, worker: str, step: int) -> dict[str, Tensor]:
    """Return a worker's whole local state with known content."""
    state = {
        name: empty_local(layout.tensors[name], units)
        for name, units in layout.units_of(worker).items()
    }

    views = shard_views(layout.tensors, layout.shards_by_worker[worker], state)
    for shard, view in views.items():
        view.copy_(known_content(layout.tensors[shard.tensor], shard.unit, step))
    return state


def matches(layout: Layout, worker: str, state: Mapping[str, Tensor], step: int) -> bool:
    """Return True if every shard that the worker must have is there and right."""
    views = shard_views(layout.tensors, layout.shards_by_worker[worker], state)
    if views.keys() != layout.shards_by_worker[worker]:
        return False
    for shard, view in views.items():
        expected = known_content(layout.tensors[shard.tensor], shard.unit, step)
        if not torch.equal(view, expected):
            return False
    return True


def known_checksums(layout: Layout, worker: str, step: int) -> dict[ShardId, int]:
    """Return the checksums that the worker's snapshot of that step records."""
    return {
        shard: _checksum(layout.tensors[shard.tensor], shard.unit, step)
        for shard in layout.shards_by_worker[worker]
    }


@cache
def _checksum(spec: TensorSpec, unit: int, step: int) -> int:
    return checksum(tensor_bytes(known_content(spec, unit, step)))
