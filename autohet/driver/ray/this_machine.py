"""Ray cluster of this machine alone, for `autohet train` if no cluster runs.

Its workers use the machine's GPUs, or its CPU. It is described by a cluster document, as every
other fleet, so that the planner, the checks and the rehearsals need no special case. Its links do
not matter, since there is no second machine.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from autohet.runtime.job import Job
from autohet.runtime.profiling.gpu_type import device_gpu_type
from planner.errors import ConfigError
from planner.inputs.catalogue import instance_types
from planner.inputs.documents import Document, Json

NODE_TYPE = "this-machine"
CORES_A_WORKER = 4
"""Threads of a CPU worker; fewer, larger workers send less to one another."""
MAX_CPU_WORKERS = 8
PCIE_GBPS = 128.0
"""Gbit/s of a GPU's link to its peers if the catalogue has no instance with it: PCIe 3.0 x16."""
MEMORY_SHARE = 0.5
"""Share of this machine's memory for CPU workers; the rest is for snapshots and the system."""


def local_document(wish: str) -> Document:
    """Return the cluster document of this machine.

    `wish` is the job's `training.device`: cpu, cuda or auto (GPUs if there are some).
    """
    cores = os.cpu_count() or 1
    if wish != "cpu" and torch.cuda.is_available():
        gpu_type = device_gpu_type("cuda")
        count = torch.cuda.device_count()
        devices = [torch.cuda.get_device_properties(index) for index in range(count)]
        memory_bytes = min(device.total_memory for device in devices)
        return launcher_document(gpu_type, count, memory_bytes, cores)

    count = max(1, min(MAX_CPU_WORKERS, cores // CORES_A_WORKER))
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_bytes = int(host_bytes * MEMORY_SHARE) // count
    return launcher_document("CPU", count, memory_bytes, cores)


def launcher_document(gpu_type: str, count: int, memory_bytes: int, cores: int) -> Document:
    """Return a launcher document of one node with `count` workers of `memory_bytes` each."""
    links_gbps = []
    for kind in instance_types().values():
        if kind.gpu_type == gpu_type:
            links_gbps.append(kind.intra_node_bytes_per_s * 8 / 1e9)

    labels = {
        "autohet.io/gpu-type": gpu_type,
        "autohet.io/gpu-memory-gib": f"{memory_bytes / 2**30:.3f}",
        "autohet.io/intra-node-gbps": str(min(links_gbps, default=PCIE_GBPS)),
        "autohet.io/inter-node-gbps": "10",
        "autohet.io/usd-per-hour": "0",
    }
    head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
    node = {
        "resources": {"CPU": cores, "GPU": count},
        "labels": labels,
        "node_config": {},
        "min_workers": 1,
        "max_workers": 1,
    }
    return {
        "cluster_name": NODE_TYPE,
        "max_workers": 1,
        "provider": {"type": "fake_multinode"},
        "available_node_types": {"head": head, NODE_TYPE: node},
        "head_node_type": "head",
    }


def is_this_machine(document: Json) -> bool:
    return bool(document.get("cluster_name") == NODE_TYPE)


@contextmanager
def reserved(devices: Sequence[str], job: str) -> Iterator[None]:
    """Reserve these GPUs of this machine, by their ids, for the length of the block.

    Runs that each have a Ray of their own would otherwise share GPUs unknowingly. The lock of a
    process that is killed ends with it.

    Raises:
        ConfigError: another run has one of them.
    """
    with ExitStack() as stack:
        for device in devices:
            path = Path(tempfile.gettempdir(), f"autohet-gpu-{device}.lock")
            if not path.exists():
                path.touch()
            # Another user's file can be locked, but not written.
            is_own = os.access(path, os.W_OK)
            file = stack.enter_context(path.open("r+" if is_own else "r"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"GPU {device} of this machine is used by {file.read().strip()}; wait for its"
                    " end, or give each run GPUs of its own by CUDA_VISIBLE_DEVICES"
                ) from None
            if is_own:
                file.truncate(0)
                file.write(f"job '{job}' (process {os.getpid()})\n")
                file.flush()
        yield


def gpu_ids(document: Json) -> list[str]:
    """Return the ids of the GPUs that this machine's document is of; empty on its CPU."""
    labels = document["available_node_types"][NODE_TYPE]["labels"]
    if labels["autohet.io/gpu-type"] == "CPU":
        return []
    indices = range(torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(index).uuid) for index in indices]


def threads_of_a_worker(job: Job, emulated: Json | None) -> int:
    """Return the CPU threads of one worker; emulated: document of the fleet emulated here, if any.

    It is one if many workers share this machine's cores and speeds are emulated.
    """
    if job.emulation is not None:
        return 1
    if emulated is not None and is_this_machine(emulated):
        return min(CORES_A_WORKER, os.cpu_count() or 1)
    return CORES_A_WORKER


def for_this_machine(job: Job, document: Json) -> Job:
    """Return the job as it runs on the cluster of this machine.

    CPU workers are GPUs to Ray, which refuses to count more of them than $CUDA_VISIBLE_DEVICES
    names, even if it names none. So the variable is removed, and the job says cpu, so that nothing
    asks CUDA.
    """
    labels = document["available_node_types"][NODE_TYPE]["labels"]
    if labels["autohet.io/gpu-type"] != "CPU":
        return job
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return replace(job, training=replace(job.training, device="cpu"))


def announcement(document: Json) -> str:
    """Describe in one sentence the cluster that is started here."""
    node = document["available_node_types"][NODE_TYPE]
    count = node["resources"]["GPU"]
    gpu_type = node["labels"]["autohet.io/gpu-type"]
    plural = "s" if count > 1 else ""
    where = f"for its {gpu_type} GPU{plural}"
    if gpu_type == "CPU":
        where = "on its CPU"
    return (
        "No Ray cluster runs here, so one is started on this machine:"
        f" {count} worker{plural} {where}"
    )
