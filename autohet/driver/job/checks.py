"""Checks of a job's data, and of the job against its Ray cluster, before anything is started."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster_file import is_emulated
from autohet.driver.ray.data_watch import TELL_EVERY_S, describe_preparation
from autohet.runtime.data import prepare_dataset
from autohet.runtime.data.build import survey
from autohet.runtime.job import Job
from autohet.runtime.messages import DataState
from autohet.runtime.models.config import load_config
from autohet.runtime.models.layers.experts import num_experts
from autohet.runtime.models.registry import family_of
from autohet.runtime.spmd.language_model import check_without_dropout
from autohet.runtime.step.precision import check_computes, computes
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from recovery.storage.address import parse_address
from recovery.storage.conformance import check_conformance
from recovery.storage.errors import StorageUriError
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")
DRIVER_READS_BYTES = 64 << 20
"""Largest corpus that the driver reads itself if the nodes are other machines.

Reading that much takes a second or a few. Problems of a larger corpus are reported by its nodes.
"""
AUTOSCALER_TIMEOUT_S = 15.0
"""Seconds to wait for a started autoscaler's first report; it reports to the head every 5 s."""
LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"}
)


def check_gpus(job: Job, timeout_s: float = AUTOSCALER_TIMEOUT_S) -> None:
    """Check that the connected cluster has GPUs that compute the job's precision.

    An autoscaler that may add such GPUs is enough.

    Raises:
        ConfigError: there are none, so the job would wait in vain.
    """
    deadline = time.monotonic() + timeout_s
    while not any(computes(job, node.gpu_type) for node in ray_cluster.living_nodes()):
        if ray_cluster.autoscaler_runs():
            return
        if time.monotonic() >= deadline:
            for node in ray_cluster.living_nodes():
                check_computes(job, node.gpu_type)
            raise ConfigError(
                f"none of the {ray_cluster.count_nodes()} living nodes of the Ray cluster has a"
                " GPU, and no autoscaler runs there that could bring one; start Ray with GPUs on a"
                " node (ray start --address=... --num-gpus=N), or run the job where no cluster"
                " runs: it then starts one on that machine, on its CPU where it has no GPU"
            )
        time.sleep(0.5)


def check_shared_storage(job: Job, document: Mapping[str, Any] | None, addresses: set[str]) -> None:
    """Check that checkpoints of several machines go to a place that all of them see.

    `addresses`: addresses of the machines that are there now.

    Raises:
        ConfigError: checkpoints would be scattered over the machines' own disks, and none could be
        read; or the URI names no place.
    """
    num_machines = len(addresses)
    if document is not None and not is_emulated(document):
        # A cluster file may bring a second machine at any time.
        num_machines = max(num_machines, 2)
    try:
        path = parse_address(job.checkpoint_storage).local_path
    except StorageUriError as error:
        raise ConfigError(f"checkpoint.storage {error}") from None
    if num_machines < 2 or path is None or is_shared(Path(path)):
        return
    given = "is not given" if job.checkpoint.storage is None else f"is '{job.checkpoint.storage}'"
    raise ConfigError(
        f"checkpoint.storage {given}, so each of several machines would write its part to its own"
        " disk; name an s3:// URI, or a directory on a file system that all of them share (autohet"
        " train --storage s3://bucket/prefix)"
    )


def check_storage_path(storage: Storage) -> None:
    """Try every operation that checkpoints need, and log what the storage lacks.

    A refusal is then found before the first step, not at the first checkpoint or restore hours
    later.

    Raises:
        StorageError: checkpoints could not be written, committed or read there.
    """
    report = check_conformance(storage)
    if report.refusal is not None:
        raise report.refusal
    for result in report.results:
        if result.problem is not None:
            remedy = f"; {result.remedy}" if result.remedy else ""
            logger.warning("Storage %s: %s%s", storage.uri, result.problem, remedy)


def is_shared(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return true if other machines may see the file system that holds `path`.

    Every type outside LOCAL_FILE_SYSTEMS counts as shared: NFS, EFS, Lustre, FUSE, ...
    """
    place = path.absolute()
    best = -1
    kind = ""
    for line in mounts.read_text().splitlines():
        point = Path(line.split()[1].encode().decode("unicode_escape"))
        if (place == point or point in place.parents) and len(point.parts) >= best:
            best = len(point.parts)
            kind = line.split()[2]
    return kind not in LOCAL_FILE_SYSTEMS


def check_paces(job: Job, cluster: Cluster) -> None:
    """Check that the job names the speed of each emulated GPU type.

    A speed borrowed from another type would emulate nothing.
    """
    speeds = {} if job.emulation is None else job.emulation.relative_speed_by_gpu_type
    missing = sorted({kind.gpu_type for kind in cluster.node_types} - set(speeds))
    if speeds and missing:
        raise ConfigError(
            f"emulation.relative_speed_by_gpu_type has no {', '.join(missing)}, of which cluster"
            f" '{cluster.name}' has nodes; it has {', '.join(sorted(speeds))}"
        )


def check_writable(events: Path) -> None:
    """Check that events can be written, before a fleet is started for a run without a record.

    Raises:
        ConfigError: events cannot be written there.
    """
    try:
        events.parent.mkdir(parents=True, exist_ok=True)
        with events.open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write events '{events}': {error.strerror}; name another file with --events"
        ) from None


def check_fit(job: Job) -> None:
    """Check the parts of `training` that depend on the model.

    A worker would find out only once it has the model.

    Raises:
        ConfigError: sequences are longer than the model's learned positions, a model has no
        routers, or routers without a bias, for the job's balance of loads, or one with dropout is
        to run as an SPMD program.
    """
    config = load_config(job.model, job.training)
    if job.parallelism.spmd:
        check_without_dropout(config)
    limit = config.max_position_embeddings
    length = job.training.sequence_length
    if family_of(config).position_embedding and length > limit:
        raise ConfigError(
            f"training.sequence_length is {length}, but the model has {limit} learned positions;"
            " shorten the sequences or give model.config more positions"
        )
    _check_router_balance(job.training.router_balance, config)


def _check_router_balance(router_balance: str, config: PreTrainedConfig) -> None:
    if router_balance == "none":
        return
    if num_experts(config) is None:
        raise ConfigError(
            f"training.router_balance is {router_balance}, but model_type"
            f" '{config.model_type}' has no routers; leave it out"
        )
    if router_balance != "bias":
        return
    specs = family_of(config).parameter_specs(config)
    if not any(spec.is_token_count and spec.trainable for spec in specs.values()):
        raise ConfigError(
            "training.router_balance is bias, but this run trains no router with a correction"
            " bias; choose sequence, or train a deepseek_v3 without an adapter"
        )


def check_data(job: Job, vocab_size: int, *, here: bool) -> None:
    """Check the job's data before a cluster is asked, since the user has to fix such problems.

    If the nodes are `here`, on this machine, the dataset is prepared for them. For other nodes the
    driver reads a corpus of at most DRIVER_READS_BYTES, and each node prepares its own dataset.

    Raises:
        ConfigError: the data is missing, cannot be read, or does not suit the model.
    """
    data = job.require_training()
    length = job.training.sequence_length
    if not here and survey(data) > DRIVER_READS_BYTES:
        return
    dataset = prepare_dataset(data, length, progress=_told_at_times())
    dataset.check(vocab_size=vocab_size, global_batch_sequences=job.training.global_batch_sequences)
    held_out = job.evaluation_data
    if held_out is not None:
        dataset = prepare_dataset(held_out, length, progress=_told_at_times())
        dataset.check(vocab_size=vocab_size, global_batch_sequences=1)


def _told_at_times() -> Callable[[int, int], None]:
    started = time.monotonic()
    told_at = started

    def tell(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= TELL_EVERY_S:
            told_at = now
            state = DataState(done_bytes, total_bytes)
            progress = describe_preparation(state, now - started)
            logger.info("Preparing the data: %s", progress)

    return tell
