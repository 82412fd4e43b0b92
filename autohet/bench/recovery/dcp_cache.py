"""Baseline of a careful user of stock PyTorch.

It is `torch.distributed.checkpoint` with a cache on each node's disk in front of S3. The checkpoint
is one of DCP's own, one file per tensor (so that a reader fetches no more than it needs). A node's
disk keeps the files of what its workers held. A restart fetches the others from S3 with boto3's
parallel downloads into the same directory, then `dcp.load` reads what each worker needs.
"""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from autohet.bench.recovery.content import known_content
from recovery.state.layout import Layout, ShardId
from recovery.state.slices import empty_local, shard_views

METADATA = ".metadata"
DOWNLOADS = 4  # files at a time; boto3 reads each in up to ten parts at once


def _key(shard: ShardId) -> str:
    return f"{shard.tensor}@{shard.unit}"


def prefix_of(source: str) -> str:
    """Return the prefix of the checkpoint's files in the bucket.

    The checkpoint's directory is below the server's.
    """
    return Path(source).name + "/"


def write_known_shards(layout: Layout, step: int, directory: Path) -> None:
    """Write every shard's known content at `step`, once."""
    shards = frozenset().union(*layout.shards_by_worker.values())
    state = {}
    for shard in shards:
        state[_key(shard)] = known_content(layout.tensors[shard.tensor], shard.unit, step)
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=False, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


def _files(directory: Path) -> dict[str, str]:
    """Map each tensor to its file."""
    metadata: Any = pickle.loads((directory / METADATA).read_bytes())
    return {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}


def fill_cache(source: Path, cache: Path, shards: Collection[ShardId]) -> None:
    """Copy into a node's disk cache the files of what its workers held."""
    cache.mkdir(parents=True, exist_ok=True)
    files = _files(source)
    for shard in shards:
        name = files[_key(shard)]
        shutil.copyfile(source / name, cache / name)


def load(
    uri: str, prefix: str, cache: Path, layout: Layout, worker: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Load the worker's whole state; return it and its bytes by tier. Blocks."""
    import boto3

    shards = layout.shards_by_worker[worker]
    client = boto3.client("s3")
    bucket = uri.removeprefix("s3://").partition("/")[0]

    def fetch(name: str) -> None:
        client.download_file(bucket, prefix + name, str(cache / name))

    fetch(METADATA)
    files = _files(cache)
    tiers = Counter[str]()
    absent = []
    for shard in shards:
        name = files[_key(shard)]
        if (cache / name).exists():
            tiers["disk"] += layout.shard_bytes(shard)
        else:
            tiers["s3"] += layout.shard_bytes(shard)
            absent.append(name)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        list(pool.map(fetch, absent))
    client.close()

    state = {}
    for name, units in layout.units_of(worker).items():
        state[name] = empty_local(layout.tensors[name], units)
    views = shard_views(layout.tensors, shards, state)
    # DCP loads in place
    targets = {_key(shard): view for shard, view in views.items()}
    dcp.load(targets, storage_reader=dcp.FileSystemReader(cache), no_dist=True)
    return state, {tier: tiers[tier] for tier in ("memory", "disk", "peer", "s3")}
