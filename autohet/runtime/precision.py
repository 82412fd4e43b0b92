"""Check of GPU types against a job's precision.

A T4, a V100 and older GPUs only emulate bf16 (`worker.choose_device` refuses it there).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from autohet.runtime.job import Job
from planner.catalogue import find_gpu_type
from planner.cluster import Cluster, Fleet
from planner.errors import ConfigError
from planner.formats import check_formats
from planner.plan import Plan

logger = logging.getLogger("autohet")


def computes(job: Job, gpu_type: str) -> bool:
    """Return True if this GPU type computes the job's precision.

    Emulated GPUs and workers on CPUs do. A GPU type that the catalogue lacks passes; its worker
    checks it.
    """
    known = find_gpu_type(gpu_type)
    return job.computes_on_cpu or known is None or known.computes(job.training.precision)


def check_plan_formats(job: Job, plan: Plan, fleet: Fleet) -> None:
    """Raise ConfigError if a stage's workers have no units for the format that it computes in."""
    if not job.computes_on_cpu:
        check_formats(plan, fleet, job.training.precision)


def check_computes(job: Job, gpu_type: str) -> None:
    """Raise ConfigError if `computes` is False."""
    if not computes(job, gpu_type):
        raise ConfigError(
            f"training.precision is {job.training.precision}, which a {gpu_type} cannot compute;"
            " set training.precision to fp32"
        )


def able_part(cluster: Cluster, job: Job) -> Cluster:
    """Remove node types whose GPUs cannot compute the job's precision, and log which they are.

    Raises:
        ConfigError: no other type is left, or the job asks for nodes of one of them.
    """
    unable = [kind for kind in cluster.node_types if not computes(job, kind.gpu_type)]
    if not unable:
        return cluster
    left = tuple(kind for kind in cluster.node_types if kind not in unable)
    names = ", ".join(f"{kind.name} ({kind.gpu_type})" for kind in unable)
    why = f"training.precision is {job.training.precision}, which {names} cannot compute"
    if not left or any(kind.name in (job.elastic.request_nodes or {}) for kind in unable):
        raise ConfigError(f"{why}; set training.precision to fp32, or name node types that can")
    logger.warning("Left out of cluster '%s': %s", cluster.name, why)
    return replace(cluster, node_types=left)
