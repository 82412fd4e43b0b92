"""Restore of a device's state from a snapshot in its node's host memory, as after a new plan.

It is compared with one bare copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.state.layout import Layout, ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.restore import Access, Restored, RestoreTask, restore
from recovery.transfer.schedule import schedule
from scripts.benchmarks.gpu.part import Machine

ROUNDS = 3


def restored(
    machine: Machine, directory: Path, worker: str, layout: Layout, state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Measure the median seconds of a restore and of a bare copy from pinned memory.

    The bare copy has as many bytes. The figures also say whether each restore gave all of `state`,
    bit for bit, out of host memory.
    """
    writer = SnapshotWriter(directory, worker, layout, 1)
    writer.start(0, state)
    writer.wait()
    writer.close()
    with closing(AgentStore(directory, directory / "disk", "here")) as store:
        found = [_restore(machine, worker, layout, store) for _ in range(ROUNDS)]
    num_bytes = layout.bytes_of(worker)
    is_right = True
    for each in found:
        is_right = is_right and each.bytes_by_tier["memory"] == num_bytes
        for name, tensor in state.items():
            is_right = is_right and torch.equal(each.state[name], tensor)
    return {
        "restored": is_right,
        "restore_s": statistics.median(each.seconds for each in found),
        "bare_copy_s": _bare_copy_s(machine, num_bytes),
    }


def _restore(machine: Machine, worker: str, layout: Layout, store: AgentStore) -> Restored:
    plan = schedule(layout, {worker: "here"}, store.inventory(), 0, LinkRates())
    task = RestoreTask(plan, worker, layout, None, machine.device)
    access = Access(store, {}, _no_storage, 60.0)
    return restore(task, _Alone(), access)


def _bare_copy_s(machine: Machine, num_bytes: int) -> float:
    target = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    data = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=machine.device_type == "cuda")
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(data)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _no_storage(
    uri: str, step: int, shards: Sequence[ShardId], into: object
) -> Iterable[tuple[ShardId, Tensor]]:
    raise AssertionError("the snapshot has all")


class _Alone:
    """A group of one worker, which sends nothing."""

    def send(self, tensor: Tensor, to: str, tag: int) -> Any:
        raise AssertionError("there is nobody else")

    recv = send

    def wait_on_host(self, work: Any) -> None:
        raise AssertionError("there is nobody else")
