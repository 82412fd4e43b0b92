"""Restore of a careful user of stock PyTorch, between network namespaces; needs root.

    python -m scripts.benchmarks.recovery.dcp_cache [SCENARIO] [STATE_MB]   prints one JSON document

It is `torch.distributed.checkpoint` with a cache on each node's disk in front of S3. The checkpoint
is one of DCP's own, one file per tensor (so that a reader fetches no more than it needs). A node's
disk keeps the files of what its workers held. A restart fetches the others from S3 with boto3's
parallel downloads into the same directory, then `dcp.load` reads what each worker needs.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from autohet.bench.recovery.cases import CHECKPOINT_STEP, SCENARIOS, config_of_size
from autohet.bench.recovery.content import known_content, matches
from autohet.bench.recovery.native import native_network
from autohet.bench.recovery.real import NUM_PROCESSES
from autohet.bench.recovery.surroundings import TIMEOUT_S, Task
from autohet.bench.recovery.trial import Trial
from autohet.driver.loop.stop_signals import unwind_on_sigterm
from autohet.emulate.namespaces import enter_namespace
from recovery.state.layout import Layout, ShardId
from recovery.state.slices import empty_local, shard_views
from recovery.transfer.links import LinkRates

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


def _restore(
    worker: str, task: Task, namespace: str, source: Path, start: Any, results: Any
) -> None:
    """Restore one worker in a process of its own; put its seconds, bytes by tier and verdict."""
    enter_namespace(namespace)
    cache = task.node_directory(task.node_by_worker[worker], "dcp")
    kept = task.before.shards_by_worker[worker] if worker in task.givers else frozenset()
    fill_cache(source, cache, kept)
    start.wait(TIMEOUT_S)
    began = time.monotonic()
    state, by_tier = load(task.storage, prefix_of(str(source)), cache, task.after, worker)
    seconds = time.monotonic() - began
    results.put((seconds, by_tier, matches(task.after, worker, state, CHECKPOINT_STEP)))


def main() -> None:
    scenario = SCENARIOS[sys.argv[1] if len(sys.argv) > 1 else "b"]
    config = config_of_size(1e6 * float(sys.argv[2] if len(sys.argv) > 2 else 64))
    links = LinkRates(network_bytes_per_s=25e9 / 8, s3_bytes_per_s=1e9)
    context = multiprocessing.get_context("spawn")
    with (
        unwind_on_sigterm(),
        tempfile.TemporaryDirectory(prefix="autohet-bench-") as directory,
        native_network(NUM_PROCESSES, links) as (network, uri),
    ):
        # Its schedule is not used: DCP reads what the restarting workers of this policy read.
        task = Trial(scenario, "restart_local", config, links, uri, directory).task
        source = Path(network.durable, f"dcp-{scenario.name}")
        write_known_shards(task.before, CHECKPOINT_STEP, source)
        workers = task.after.workers
        start = context.Barrier(len(workers))
        results = context.Queue()
        with network.wire(task) as wiring:
            for worker in workers:
                namespace = wiring.namespaces[task.node_by_worker[worker]]
                arguments = (worker, task, namespace, source, start, results)
                context.Process(target=_restore, args=arguments, daemon=True).start()
            found = [results.get(timeout=TIMEOUT_S) for _ in workers]
    tiers = Counter[str]()
    for _, by_tier, _ in found:
        tiers.update(by_tier)
    document = {
        "scenario": scenario.name,
        "state_bytes": task.before.num_bytes,
        "restore_s": max(seconds for seconds, _, _ in found),
        "bytes_by_tier": dict(tiers),
        "verified": all(verified for _, _, verified in found),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
