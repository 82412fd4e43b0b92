"""Machines on which a pod may be, by the node labels that it needs; devices by product names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from planner.errors import ConfigError
from planner.inputs.catalogue import (
    MIB,
    InstanceType,
    all_instance_types,
    canonical_gpu_type,
    find_gpu_type,
    instance_types,
    may_have_gpus,
)

Needed = Mapping[str, tuple[str, ...]]
"""Values that each node label may have."""
Conditions = list[tuple[str, str, tuple[str, ...]]]
"""Conditions on node labels by operators other than In: label, operator and values."""
PART_OF_A_CARD = re.compile(r"-(MIG-\d+g\.\d+gb\S*|SHARED)$", re.IGNORECASE)
"""What NVIDIA's feature discovery appends to a product: a slice of a card, or its time."""
INSTANCE_TYPES = (
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "karpenter.azure.com/sku-name",
)
EC2_NAMES = {
    "V100-16": "V100",
    "V100-32": "V100",
    "A100-40": "A100",
    "A100-80": "A100",
    "H100-80": "H100",
    "RTX-PRO-4500": "RTX PRO 4500",
    "RTX-PRO-6000": "RTX PRO Server 6000",
}
"""EC2's names of GPUs where the catalogue's differ."""

EC2_MIB = {"T4": 16384, "A10G": 22888, "L4": 22888, "L40S": 45776, "H100-80": 81920, "H200": 144384}
"""EC2's memory of GPUs in MiB where the driver's, which the catalogue has, differs."""


def ec2_gpu_name(row: InstanceType) -> str:
    """Return EC2's name of a machine's GPU, which Ray and Karpenter use."""
    return EC2_NAMES.get(row.gpu_type, row.gpu_type)


def _karpenter(label: str) -> tuple[str, str]:
    return f"karpenter.k8s.aws/{label}", f"eks.amazonaws.com/{label}"


def _series(row: InstanceType) -> re.Match[str] | None:
    return re.match(r"([a-z]+)(\d+)", row.name)


def _category(row: InstanceType) -> str:
    match = _series(row)
    return match[1] if match else ""


def _generation(row: InstanceType) -> str:
    match = _series(row)
    return match[2] if match else ""


_OF_EC2: dict[tuple[str, str], Callable[[InstanceType], str]] = {
    _karpenter("instance-family"): lambda row: row.name.partition(".")[0],
    _karpenter("instance-size"): lambda row: row.name.partition(".")[2],
    _karpenter("instance-category"): _category,
    _karpenter("instance-generation"): _generation,
    _karpenter("instance-cpu"): lambda row: str(row.vcpus),
    _karpenter("instance-memory"): lambda row: str(row.host_memory_bytes // MIB),
    _karpenter("instance-gpu-count"): lambda row: str(row.num_gpus),
    _karpenter("instance-gpu-memory"): lambda row: str(
        EC2_MIB.get(row.gpu_type, row.gpu_memory_bytes // MIB)
    ),
    _karpenter("instance-gpu-name"): lambda row: ec2_gpu_name(row).lower().replace(" ", "-"),
}
"""Karpenter's labels of a machine of EC2 (karpenter.sh, "Well-Known Labels"), and EKS's own."""
_COMPARED = {"Gt": operator.gt, "Lt": operator.lt, "Gte": operator.ge, "Lte": operator.le}


def possible_machines(
    needed: Needed,
    conditions: Conditions,
    num_gpus: int,
    requests: Mapping[str, float],
    what: str,
) -> tuple[str, ...]:
    """Return the machines of the catalogue that have these labels and room for the pod.

    Empty if no label says which machine it is. A named machine that the catalogue lacks is returned
    alone.

    Raises:
        ConfigError: labels leave no machine that has room.
    """
    named = next((needed[label] for label in INSTANCE_TYPES if label in needed), None)
    known = all_instance_types()
    for name in named or ():
        if name not in known and may_have_gpus(name):
            return (name,)
    if not num_gpus:
        return named[:1] if named else ()
    rows = [row for row in known.values() if named is None or row.name in named]
    narrowed = _narrow(rows, needed)
    if narrowed is None:
        if named is None:
            return ()
        narrowed = rows
    allowed = [row for row in narrowed if _meets(row, needed, conditions)]
    roomy = [row.name for row in allowed if pods_on(row, num_gpus, requests) >= 1]
    if roomy:
        return tuple(roomy)
    if named is not None and len(named) == 1:
        # what a pod asks for beyond this machine is refused by its figures
        return named
    labels = ", ".join(f"{key}={'|'.join(needed[key])}" for key in needed)
    raise ConfigError(
        f"{what} asks for {num_gpus} GPUs, {requests.get('cpu', 0.0):g} vCPUs and"
        f" {requests.get('memory', 0.0) / 2**30:g} GiB on a node with {labels};"
        " no machine of the catalogue with these labels has room for that"
    )


def _narrow(rows: list[InstanceType], needed: Needed) -> list[InstanceType] | None:
    """Return the machines that have these labels; None if no label is of machines."""
    is_named = False
    for labels, value_of in _OF_EC2.items():
        for label in labels:
            if label in needed:
                is_named = True
                allowed = needed[label]
                rows = [r for r in rows if r.name in instance_types() and value_of(r) in allowed]
    accelerators = needed.get("cloud.google.com/gke-accelerator")
    if accelerators:
        devices = {canonical_gpu_type(device_name(name)) for name in accelerators}
        google = [row for row in rows if re.match(r"[a-z]\w+-\w+-", row.name)]
        of_series = [row for row in google if canonical_gpu_type(row.gpu_type) in devices]
        # T4, V100 and P100 are attached to machines of any size, which the catalogue lacks.
        if of_series:
            is_named = True
            rows = of_series
    counts = needed.get("cloud.google.com/gke-accelerator-count")
    if counts and is_named:
        rows = [row for row in rows if str(row.num_gpus) in counts]
    return rows if is_named else None


def _meets(row: InstanceType, needed: Needed, conditions: Conditions) -> bool:
    """Return True unless an architecture or a condition excludes this machine."""
    # Cards with Grace have arm64 hosts.
    architecture = "arm64" if row.gpu_type.startswith("GB") else "amd64"
    if architecture not in needed.get("kubernetes.io/arch", ("arm64", "amd64")):
        return False
    for key, comparison, values in conditions:
        own = row.name if key in INSTANCE_TYPES else None
        if row.name in instance_types():
            own = next((of(row) for labels, of in _OF_EC2.items() if key in labels), own)
        if own is not None and not _holds(own, comparison, values):
            return False
    return True


def _holds(own: str, comparison: str, values: tuple[str, ...]) -> bool:
    if comparison == "NotIn":
        return own not in values
    compare = _COMPARED.get(comparison)
    if compare is None or not own.isdecimal() or not values[0].isdecimal():
        return True
    return bool(compare(int(own), int(values[0])))


def pods_on(row: InstanceType, num_gpus: int, requests: Mapping[str, float]) -> int:
    """Return how many such pods a machine holds, by GPUs, vCPUs and memory."""
    places = [row.num_gpus / max(num_gpus, requests.get("gpu", 0.0))]
    if row.vcpus and requests.get("cpu"):
        places.append(row.vcpus / requests["cpu"])
    if requests.get("memory"):
        places.append(row.host_memory_bytes / requests["memory"])
    return int(min(places) + 1e-9)


_MAKERS = ("NVIDIA", "TESLA", "GEFORCE", "QUADRO")
"""Words of a product's name that tell no device from another."""


def device_name(product: str) -> str:
    """Return the catalogue's name of a device by a product name.

    Such names are NVIDIA's, GKE's, Karpenter's and AWS's: NVIDIA-A100-SXM4-80GB, nvidia-tesla-t4,
    nvidia-h100-mega-80gb. The name itself is returned if no device is known by a part of it. Slices
    and shared cards (A100-40-MIG-3g.20gb, A10G-SHARED) keep what says so.
    """
    part = PART_OF_A_CARD.search(product)
    if part:
        return device_name(product[: part.start()]) + part[0]
    gib = ""
    plain = []
    for word in re.split(r"[-_ ]", product.upper()):
        is_size = re.fullmatch(r"\d+GB", word) is not None
        if is_size and not gib:
            gib = word.removesuffix("GB")
        is_variant = is_size or re.fullmatch(r"SXM\d?|MEGA|HBM\d\w?", word)
        if word and word not in _MAKERS and not is_variant:
            plain.append(word)

    # the longest known part wins, and of two devices of one name the one with that memory
    for end in range(len(plain), 0, -1):
        name = "-".join(plain[:end])
        candidates = [f"{name}-{gib}", name] if gib else [name]
        for candidate in candidates:
            if find_gpu_type(candidate) is not None:
                return candidate
    return product
