"""Number formats by GPU type, and checks of what names them."""

from collections.abc import Iterable, Mapping

from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type, find_gpu_type
from planner.inputs.fleet import Fleet
from planner.plans.plan import COMPUTE_FORMATS, ComputeFormat, Plan

CPU_FORMATS: list[ComputeFormat] = [each for each in COMPUTE_FORMATS if each != "fp8"]


def can_compute(gpu_type: str, compute: str) -> bool:
    """Return True unless the catalogue says that a GPU type has no units for a format."""
    device = find_gpu_type(gpu_type)
    return device is None or device.computes(compute)


def common_formats(gpu_types: Iterable[str]) -> list[ComputeFormat]:
    """Return the formats that all of some GPU types can compute."""
    types = set(gpu_types)
    found = []
    for compute in COMPUTE_FORMATS:
        if all(can_compute(each, compute) for each in types):
            found.append(compute)
    return found


def shared_format(formats: Mapping[str, str]) -> str:
    """Return the format of a stage on GPU types that have these formats, each on its own.

    It is one that all of the types can compute, by preference bf16.

    Raises:
        ConfigError: none of the formats is common to all types.
    """
    wanted = set(formats.values())
    if len(wanted) == 1:
        return wanted.pop()
    able = common_formats(formats)
    for compute in ("bf16", "fp16", "fp32", "fp8"):
        if compute in wanted and compute in able:
            return compute
    named = ", ".join(f"{compute} on {gpu_type}" for gpu_type, compute in sorted(formats.items()))
    raise ConfigError(
        f"a stage cannot compute in one format on its GPU types ({named}); lay it on one type, or"
        " name a format that all of them have in parallelism.compute_formats"
    )


def check_named_formats(
    named: Mapping[str, ComputeFormat], what: str, *, is_emulated: bool = False
) -> None:
    """Check a mapping of GPU types to formats.

    what: the mapping's name in errors. is_emulated: CPUs compute for the GPUs, whose types may have
    any name; they have no fp8.

    Raises:
        ConfigError: a GPU type is unknown or named twice, or has no units for its format.
    """
    seen = dict[str, str]()
    for name, compute in named.items():
        kind = canonical_gpu_type(name)
        if kind in seen:
            raise ConfigError(
                f"{what} names {seen[kind]} and {name}, which are one GPU type; keep one of them"
            )
        seen[kind] = name
        if find_gpu_type(name) is None and not is_emulated:
            raise ConfigError(
                f"{what} names {name}, which is no GPU type of the catalogue; use a name such as"
                " T4, V100-16, A100-80 or H100-80"
            )
        able = CPU_FORMATS if is_emulated else common_formats([name])
        if compute not in able:
            whose = "the CPU that emulates it" if is_emulated else "that GPU type"
            raise ConfigError(
                f"{what}.{name} is {compute}, for which {whose} has no units; use"
                f" {' or '.join(able)}, or leave it out"
            )


def check_formats(plan: Plan, fleet: Fleet, precision: str | None) -> None:
    """Check that the workers of each stage can compute the stage's format.

    precision: format of stages that name none; None: these are not checked.

    Raises:
        ConfigError: the units for it are missing.
    """
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            types = [fleet.gpu_type(worker) for worker in stage.workers]
            compute = stage.compute or precision
            if not compute:
                continue
            for worker, gpu_type in zip(stage.workers, types, strict=True):
                if can_compute(gpu_type, compute):
                    continue
                able = common_formats(types)
                raise ConfigError(
                    f"stage {index} of pipeline {number} computes {compute}, for which its worker"
                    f" {worker} ({gpu_type}) has no units; set the stage's 'compute' to"
                    f" {' or '.join(able)}"
                )
