"""Stated costs of a simulation, with unit and source.

These are all the numbers that neither the cost model nor a transfer schedule knows; they have no
other home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

SMALL_FLEET_GPUS = 64
"""GPUs up to which a fleet is searched as a whole while its workers wait."""


def cost_field(value: float, unit: str, source: str) -> Any:
    """Return a field with its unit and the source of the number."""
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class PushedCopies:
    """Copies of the state after each step.

    Those to other nodes take `network_share` of the network for `seconds` of a step. A snapshot
    reaches host memory in `snapshot_s`.
    """

    seconds: float = 0.0
    network_share: float = 0.0
    snapshot_s: float = math.inf


@dataclass(frozen=True)
class Costs:
    """Costs that are the same for every policy; a policy pays only for what it does."""

    detect_s: float = cost_field(
        3.0,
        "s",
        "from a node's death until Ray says so: 2.9 s measured with RAY_health_check_* as this"
        " project sets them",
    )
    boot_s: float = cost_field(
        90.0,
        "s",
        "from a running instance to a joined Ray node, on an image with everything installed; an"
        " assumption, not measured",
    )
    install_s: float = cost_field(
        0.0,
        "s",
        "added to the boot where wheels are installed at the start instead of baked into the image",
    )
    process_start_s: float = cost_field(
        20.0,
        "s",
        "a worker's process, imports and CUDA context; 3.7 s measured without a GPU (recovery.json,"
        " process_start_s), the rest assumed",
    )
    data_s: float = cost_field(
        5.0, "s", "a new process opens its dataset and finds its place; an assumption, not measured"
    )
    rebuild_s: float = cost_field(
        0.6,
        "s",
        "stop, groups and orders of processes that stay: 0.43 s measured at a death (demo.json, two"
        " quiet cores), 0.6 to 1.4 s on busy ones (recovery.json, measured_parts)",
    )
    prepared_s: float = cost_field(
        0.5,
        "s",
        "the same of a generation that was prepared while the one before trained: 0.47 to 0.51 s"
        " measured (the demonstration at 8bd615d)",
    )
    cut_over_s: float = cost_field(
        0.25,
        "s",
        "the same of a generation that begins without a stop: 0.14 to 0.25 s measured"
        " (notice_to_step.json)",
    )
    nccl_init_s: float = cost_field(
        0.66,
        "s",
        "one communicator of eight ranks: NVIDIA/nccl-tests issue 273; grows with the logarithm of"
        " the ranks",
    )
    communicators: float = cost_field(
        4.0,
        "groups",
        "that a worker of another trainer is in: pipeline, tensor parallel, gradients, votes; those"
        " of AutoHet's plans are counted",
    )
    first_step_s: float = cost_field(
        2.0,
        "s",
        "the first step of a new process beyond a later one: 3.08 - 1.07 s measured on an H200"
        " (gpu-h200.json); a prepared one has run a microbatch before, and stalls by warm_step_s",
    )
    warm_step_s: float = cost_field(
        0.1,
        "s",
        "the first step of a generation of processes that stay beyond a later one: 0.01 s measured"
        " (the demonstration at 8bd615d), 0 to 0.1 s (notice_to_step.json)",
    )
    search_s: float = cost_field(
        1.0,
        "s",
        "a search of up to 16 GPUs: 0.5 s measured (planner_search.json); doubled for a head node"
        " with other work",
    )
    search_s_by_gpu: float = cost_field(
        0.06,
        "s a GPU",
        "what each further GPU of up to 64 adds: 2 to 4 s measured at 64 (planner_search.json)",
    )
    repair_s: float = cost_field(
        0.3,
        "s",
        "the best repair on more than 64 GPUs, while workers wait: 0.24 s measured"
        " (planner_search.json)",
    )
    whole_search_s: float = cost_field(
        10.0, "s", "the whole search of more than 64 GPUs, while training goes on: its time limit"
    )
    s3_bytes_per_s: float = cost_field(
        1e9,
        "B/s",
        "a node's way to durable storage: 0.5 to 0.7 GB/s measured on one core"
        " (storage_throughput.json)",
    )
    s3_put_usd: float = cost_field(
        5e-6,
        "$ a request",
        "PUT, COPY, POST of S3 Standard (Amazon S3 pricing, us-east-1); data within the region is"
        " free",
    )
    s3_get_usd: float = cost_field(
        4e-7, "$ a request", "GET of S3 Standard (Amazon S3 pricing, us-east-1)"
    )
    snapshot_bytes_per_s: float = cost_field(
        10e9,
        "B/s",
        "from a GPU to host memory, while training stands: a PCIe 4.0 x16 slot pinned, less than"
        " half used",
    )
    snapshot_overhead: float = cost_field(
        0.015,
        "share",
        "of a step with a snapshot after it: 0.6 to 2.1% measured (snapshot_overhead.json)",
    )
    snapshot_slowdown: float = cost_field(
        0.04,
        "share",
        "by which steps are slower while a snapshot leaves the GPU, which bounds what one costs:"
        " 0.0235 s of a copy of 0.596 s on an H200 (gpu-h200.json)",
    )

    def nccl_s(self, num_ranks: int, num_groups: float | None = None) -> float:
        """Return the seconds to build the groups of a generation; None: `communicators` groups."""
        # `nccl_init_s` is that of eight ranks, and log2(8) is 3.
        growth = max(1.0, math.log2(max(2, num_ranks)) / 3.0)
        groups = self.communicators if num_groups is None else num_groups
        return groups * self.nccl_init_s * growth

    def search_seconds(self, num_gpus: int, *, waiting: bool) -> float:
        """Return the seconds of one call to the planner; `waiting`: workers wait for the answer."""
        if num_gpus > SMALL_FLEET_GPUS:
            return self.repair_s if waiting else self.whole_search_s
        return self.search_s + self.search_s_by_gpu * max(0, num_gpus - 16)

    def disturbed_step_s(
        self,
        step_s: float,
        sync_s: float,
        network_bytes_per_s: float,
        upload_s: float,
        every_steps: int,
        copies: PushedCopies | None = None,
    ) -> float:
        """Return the mean step time with snapshots, checkpoint uploads and copies to other nodes.

        sync_s: the step's exposed gradient synchronisation. It shares the slowest node's network
        with an upload at `s3_bytes_per_s` (half of the network at the most: flows share fairly) for
        `upload_s` of every `every_steps` steps, and with `copies` to other nodes.
        """
        copies = copies or PushedCopies()
        # A transfer that has the share x of a network leaves 1 - x of it to the gradients, which
        # then take x / (1 - x) longer.
        upload_share = min(0.5, self.s3_bytes_per_s / network_bytes_per_s)
        uploading = min(1.0, upload_s / (every_steps * step_s))
        slower_by_uploads = uploading * upload_share / (1 - upload_share)
        pushing = min(1.0, copies.seconds / step_s)
        slower_by_copies = pushing * copies.network_share / max(1 - copies.network_share, 0.1)
        slower = slower_by_uploads + slower_by_copies
        snapshot_s = min(
            step_s * self.snapshot_overhead, copies.snapshot_s * self.snapshot_slowdown
        )
        return step_s + snapshot_s + sync_s * slower

    def restart_s(self, num_ranks: int) -> float:
        """Return the seconds to restart all processes.

        A trainer without elastic groups pays them in addition to the restore.
        """
        return self.process_start_s + self.data_s + self.nccl_s(num_ranks) + self.first_step_s

    def to_document(self) -> dict[str, dict[str, Any]]:
        """Return value, unit and source of each cost by name."""
        document: dict[str, dict[str, Any]] = {}
        for part in fields(self):
            document[part.name] = {
                "value": getattr(self, part.name),
                "unit": part.metadata["unit"],
                "source": part.metadata["source"],
            }
        return document
