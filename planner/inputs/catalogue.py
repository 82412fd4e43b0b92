"""Catalogue of GPU types and EC2 instance types.

The data are in data/*.csv; the first lines of each file name sources and dates.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
MIB = 2**20
PRICE_REGION = "us-east-1"
PRICES_AS_OF = f"on demand, Linux, {PRICE_REGION}, 2026-01-19"
"""Terms and date of the prices in data/ec2_gpu_instances.csv."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """Row of data/ec2_gpu_instances.csv or data/other_gpu_machines.csv.

    Bandwidths are in bytes per second, one direction. usd_per_hour is None if no on-demand price is
    known.

    inter_node_bytes_per_s is the sustained rate of this size, not what it reaches for some minutes:
    a step sends gradients all day.
    """

    name: str
    gpu_type: str
    num_gpus: int
    gpu_memory_bytes: int
    host_memory_bytes: int
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    usd_per_hour: float | None
    vcpus: int | None = None


@dataclass(frozen=True, slots=True)
class GpuType:
    """Row of data/gpu_types.csv: peak rates of a device.

    A rate is None if the device has no such unit. host_link_bytes_per_s: one direction to pinned
    host memory; None if the table has none.
    """

    name: str
    memory_bytes: int
    fp8_flops: float | None
    fp16_flops: float
    bf16_flops: float | None
    tf32_flops: float | None
    fp32_flops: float
    memory_bytes_per_s: float
    host_link_bytes_per_s: float | None

    def computes(self, dtype: str) -> bool:
        """Return True if the device has a unit for products of `dtype`; all have fp32 and fp16."""
        units = {"bf16": self.bf16_flops, "fp8": self.fp8_flops}
        return units.get(dtype, self.fp32_flops) is not None

    def peak_flops(self, dtype: str) -> float:
        """Return the peak rate for matrix products of `dtype` (fp32, tf32, fp16, bf16, fp8).

        It is fp32's where the device has no unit for it.
        """
        rates = {
            "fp8": self.fp8_flops,
            "fp16": self.fp16_flops,
            "bf16": self.bf16_flops,
            "tf32": self.tf32_flops,
        }
        return max(rates.get(dtype) or 0.0, self.fp32_flops)


def read_rows(name: str) -> Iterator[dict[str, str]]:
    """Rows of a bundled table, by column."""
    with (_DATA / name).open(newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


@cache
def instance_types() -> dict[str, InstanceType]:
    """EC2 instance types by name."""
    return _read_instance_types("ec2_gpu_instances.csv")


@cache
def all_instance_types() -> dict[str, InstanceType]:
    """Machine types of EC2, GCP and Azure by name."""
    return {**instance_types(), **_read_instance_types("other_gpu_machines.csv")}


def find_instance_type(name: str) -> InstanceType | None:
    """Return the machine type of that name, or None; EC2's may have SageMaker's `ml.` before it."""
    return all_instance_types().get(name.removeprefix("ml."))


_WITHOUT_GPUS = re.compile(
    r"(a1|c\d|d[23]|f\d|h1|hpc\d|i\d|im\d|is\d|m\d|mac|r\d|t\d|u-|u\d|x\d|z1d|vt\d|trn|inf|dl\d)"
    r"[\w-]*\.[\w-]+|(n\d|e2|c\d|t2|m\d|h\d|z\d|f1)[ad]?-[\w-]+|Standard_[ABDEFGHLM]\w*"
)
"""Machines that have no GPU: EC2's other families (accelerators that are no GPUs among them), GCP's
and Azure's series."""


def may_have_gpus(instance_type: str) -> bool:
    """Return True unless a machine type that the catalogue lacks is known to have no GPU."""
    return _WITHOUT_GPUS.fullmatch(instance_type.removeprefix("ml.")) is None


_PARTS_OF_GPUS = re.compile(r"(g6f|gr6f)\.\w+|Standard_NV(6|12|18)ads_A10_v5")
"""Machines of EC2 and Azure that have a part of a GPU."""


def has_part_of_gpu(instance_type: str) -> bool:
    """Return True for a machine whose GPU is a slice of a card."""
    return _PARTS_OF_GPUS.fullmatch(instance_type.removeprefix("ml.")) is not None


def _read_instance_types(name: str) -> dict[str, InstanceType]:
    return {row["instance_type"]: _parse_row(row) for row in read_rows(name)}


def _scale(text: str, unit: float) -> float | None:
    """Return a number of a table in units of `unit`; None for an empty field."""
    return float(text) * unit if text else None


def _parse_row(row: Mapping[str, str]) -> InstanceType:
    usd_per_hour = row["usd_per_hour"]
    return InstanceType(
        name=row["instance_type"],
        gpu_type=row["gpu_type"],
        num_gpus=int(row["num_gpus"]),
        gpu_memory_bytes=int(row["gpu_memory_mib"]) * MIB,
        host_memory_bytes=int(row["host_memory_mib"]) * MIB,
        intra_node_bytes_per_s=float(row["intra_node_gbps"]) * 1e9 / 8,
        inter_node_bytes_per_s=float(row["inter_node_gbps"]) * 1e9 / 8,
        usd_per_hour=float(usd_per_hour) if usd_per_hour else None,
        vcpus=int(row["vcpus"]) if row["vcpus"] else None,
    )


@cache
def _gpu_types_by_alias() -> dict[str, GpuType]:
    found: dict[str, GpuType] = {}
    for row in read_rows("gpu_types.csv"):
        gpu = GpuType(
            name=row["gpu_type"],
            memory_bytes=int(row["memory_mib"]) * MIB,
            fp8_flops=_scale(row["fp8_tflops"], 1e12),
            fp16_flops=float(row["fp16_tflops"]) * 1e12,
            bf16_flops=_scale(row["bf16_tflops"], 1e12),
            tf32_flops=_scale(row["tf32_tflops"], 1e12),
            fp32_flops=float(row["fp32_tflops"]) * 1e12,
            memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
            host_link_bytes_per_s=_scale(row["host_link_gb_per_s"], 1e9),
        )
        for alias in (gpu.name, *row["aliases"].split("|")):
            if alias:
                found[alias.upper()] = gpu
    return found


def find_gpu_type(name: str) -> GpuType | None:
    """The device of that name or alias (case ignored), or None."""
    return _gpu_types_by_alias().get(name.upper())


def canonical_gpu_type(name: str) -> str:
    """The catalogue's name of a device; a name that it does not know stays as it is."""
    gpu = find_gpu_type(name)
    return gpu.name if gpu else name
