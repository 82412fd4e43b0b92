"""Number format in which each GPU type computes a job.

A T4, a V100 and older GPUs only emulate bf16; they compute in fp16 if the job allows it
(`parallelism.compute_formats`).
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Fleet, NodeType
from planner.plans.formats import can_compute, check_formats
from planner.plans.plan import ComputeFormat, Plan

logger = logging.getLogger("autohet")


def format_of(job: Job, gpu_type: str) -> str | None:
    """Return the format in which a GPU type computes the job; None: the job allows it none.

    Emulated GPUs and workers on CPUs compute the job's precision, unless the job names another
    format for the type. So does a GPU type that the catalogue lacks; its worker checks it.
    """
    named = _named(job).get(canonical_gpu_type(gpu_type))
    if named is not None:
        return named
    precision = job.training.precision
    if job.computes_on_cpu or can_compute(gpu_type, precision):
        return precision
    return "fp16" if _may_differ(job) else None


def _may_differ(job: Job) -> bool:
    """Return True if GPU types may compute in another format than the job's precision.

    Programs of parallelism.spmd have one format for all.
    """
    return job.parallelism.compute_formats != "off" and not job.parallelism.spmd


def other_formats(job: Job, gpu_types: Iterable[str]) -> dict[str, ComputeFormat]:
    """Return formats by GPU type, for those of the types that compute in another than the job's."""
    found: dict[str, ComputeFormat] = {}
    precision = job.training.precision
    named = _named(job)
    for each in gpu_types:
        gpu_type = canonical_gpu_type(each)
        if gpu_type in named:
            if named[gpu_type] != precision:
                found[gpu_type] = named[gpu_type]
        elif precision != "fp16" and format_of(job, gpu_type) == "fp16":
            found[gpu_type] = "fp16"
    return found


def _named(job: Job) -> dict[str, ComputeFormat]:
    named = job.parallelism.named_formats
    return {canonical_gpu_type(gpu_type): compute for gpu_type, compute in named.items()}


def computes(job: Job, gpu_type: str) -> bool:
    """Return True if this GPU type has a format in which it may compute the job."""
    return format_of(job, gpu_type) is not None


def check_plan_formats(job: Job, plan: Plan, fleet: Fleet) -> None:
    """Raise ConfigError if a stage's workers have no units for the format that it computes in."""
    if not job.computes_on_cpu:
        check_formats(plan, fleet, job.training.precision)


def check_computes(job: Job, gpu_type: str) -> None:
    """Raise ConfigError if `computes` is False."""
    if not computes(job, gpu_type):
        raise ConfigError(
            f"training.precision is {job.training.precision}, which a {gpu_type} cannot compute;"
            f" {_remedy(job)}"
        )


def _remedy(job: Job) -> str:
    if job.parallelism.spmd:
        return "set training.precision to fp32, or leave parallelism.spmd out"
    return "set training.precision to fp32, or parallelism.compute_formats to auto"


def without_incapable_nodes(cluster: Cluster, job: Job, *, one_format: bool = False) -> Cluster:
    """Remove node types whose GPUs have no format in which they may compute the job.

    Log which they are, and which GPU types compute in another format than the job's. one_format:
    all GPUs compute in the job's precision, whatever the job says of formats.

    Raises:
        ConfigError: no other type is left, or the job asks for nodes of one of them.
    """
    if one_format:
        job = replace(job, parallelism=replace(job.parallelism, compute_formats="off"))
    _warn_of_unused_names(cluster, job)
    able: list[NodeType] = []
    unable: list[NodeType] = []
    for kind in cluster.node_types:
        if computes(job, kind.gpu_type):
            able.append(kind)
        else:
            unable.append(kind)
    if unable:
        precision = job.training.precision
        why = f"training.precision is {precision}, which {_listed(unable)} cannot compute"
        requested = job.elastic.request_nodes or {}
        is_requested = any(kind.name in requested for kind in unable)
        if not able or is_requested:
            raise ConfigError(f"{why}; {_remedy(job)}, or name node types that can")
        logger.warning("Left out of cluster '%s': %s", cluster.name, why)

    others = other_formats(job, [kind.gpu_type for kind in able])
    for compute in dict.fromkeys(others.values()):
        kinds = [kind for kind in able if others.get(kind.gpu_type) == compute]
        logger.info("Computing in %s on %s", compute, _listed(kinds))
    if not unable:
        return cluster
    return replace(cluster, node_types=tuple(able))


def _listed(kinds: Iterable[NodeType]) -> str:
    return ", ".join(f"{kind.name} ({kind.gpu_type})" for kind in kinds)


def _warn_of_unused_names(cluster: Cluster, job: Job) -> None:
    types = {canonical_gpu_type(kind.gpu_type) for kind in cluster.node_types}
    for name in job.parallelism.named_formats:
        if canonical_gpu_type(name) not in types:
            logger.warning(
                "Without effect: parallelism.compute_formats names %s, which is no GPU type of"
                " cluster '%s'",
                name,
                cluster.name,
            )
