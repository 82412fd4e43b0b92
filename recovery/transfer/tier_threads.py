"""Threads of one restore's reads: a pool for each tier, and fetches cut to keep them busy."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from recovery.state.layout import Layout, ShardId
from recovery.transfer.schedule import Fetch

THREADS_BY_TIER = {"memory": 2, "disk": 2, "peer": 4, "s3": 4}
MEMORY_THREADS_TO_DEVICE = 6
"""Threads from the node's memory to a device: each copies a few GB/s, a GPU takes 50 GB/s."""


class TierThreads:
    """Thread pools by tier, each made at its first use. `close` joins them."""

    def __init__(self, *, to_device: bool) -> None:
        self._to_device = to_device
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def submit(self, tier: str, work: Callable[[], None]) -> Future[None]:
        return self._pool(tier).submit(work)

    def _pool(self, tier: str) -> ThreadPoolExecutor:
        with self._lock:
            pool = self._pools.get(tier)
            if pool is None:
                num_threads = THREADS_BY_TIER.get(tier, 4)
                if tier == "memory" and self._to_device:
                    num_threads = MEMORY_THREADS_TO_DEVICE
                pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"restore-{tier}")
                self._pools[tier] = self._stack.enter_context(pool)
            return pool

    def close(self) -> None:
        self._stack.close()


def split_fetch(fetch: Fetch, layout: Layout, limit_bytes: int) -> list[Fetch]:
    """Return the fetch in parts that end once they have `limit_bytes`."""
    parts: list[Fetch] = []
    shards: list[ShardId] = []
    size = 0
    for shard in fetch.shards:
        shards.append(shard)
        size += layout.shard_bytes(shard)
        if size >= limit_bytes:
            parts.append(replace(fetch, shards=tuple(shards)))
            shards = []
            size = 0
    if shards:
        parts.append(replace(fetch, shards=tuple(shards)))
    return parts
