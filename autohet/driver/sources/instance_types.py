"""Facts of EC2 instance types that the catalogue lacks, by EC2's `describe_instance_types`.

EC2 is asked only for such types, and only where credentials are. Its answer becomes labels and
resources of the node type, which a file's own replace.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from planner.inputs.catalogue import (
    GpuType,
    find_gpu_type,
    find_instance_type,
    instance_types,
    may_have_gpus,
)
from planner.inputs.cluster_documents import LABEL_PREFIX, instance_type_of
from planner.inputs.documents import Document, Json
from planner.inputs.gpu_names import identify_gpu

logger = logging.getLogger("autohet")
ASSUMED_INTRA_NODE_GBPS = 128.0
"""Rate assumed between the GPUs of a node: PCIe 3.0 with 16 lanes, one direction."""
TIMEOUT_S = 5.0
ClusterDocument = TypeVar("ClusterDocument")
Describe = Callable[[Sequence[str], str | None], Mapping[str, Json]]
"""Asks EC2 for instance types in a region; returns what it says by type, without unknown ones."""


def with_described_types(
    document: ClusterDocument, describe: Describe | None = None
) -> ClusterDocument:
    """Return a cluster document whose unknown EC2 instance types have the facts that EC2 tells.

    A document of another provider, or without such types, is returned as it is. What EC2 does not
    say stays missing, so that the planner names it.
    """
    unknown = _unknown_types(document)
    if not unknown:
        return document
    assert isinstance(document, Mapping)
    region = (document.get("provider") or {}).get("region")
    ask = describe or describe_types
    described = ask(sorted(set(unknown.values())), region)
    completed = copy.deepcopy(document)
    assert isinstance(completed, dict)
    for name, instance_type in unknown.items():
        facts = described.get(instance_type)
        if facts is not None:
            _complete(completed["available_node_types"][name], name, facts)
    return completed


def _unknown_types(document: object) -> dict[str, str]:
    """Return the EC2 instance types that the catalogue lacks, by name of the node type."""
    if not isinstance(document, Mapping):
        return {}
    provider = document.get("provider")
    types = document.get("available_node_types")
    if not isinstance(provider, Mapping) or provider.get("type") != "aws":
        return {}
    if not isinstance(types, Mapping):
        return {}

    found = {}
    for name, entry in types.items():
        # What is malformed is passed over here: the planner's reader names it.
        config = entry.get("node_config") if isinstance(entry, Mapping) else None
        if not isinstance(config, Mapping):
            continue
        instance_type = instance_type_of(config)
        if instance_type is None or find_instance_type(instance_type) is not None:
            continue
        if may_have_gpus(instance_type):
            found[name] = instance_type
    return found


def _complete(entry: Document, name: str, facts: Json) -> None:
    """Add to a node type what EC2 says of its instance type."""
    gpus = (facts.get("GpuInfo") or {}).get("Gpus") or ()
    whole = [gpu for gpu in gpus if gpu.get("Manufacturer") == "NVIDIA" and gpu.get("Count")]
    num_gpus = 0
    labels = {"host-memory-gib": facts["MemoryInfo"]["SizeInMiB"] / 1024}
    words = "no whole NVIDIA GPU, so it is not planned on"
    if len(whole) == 1:
        (gpu,) = whole
        num_gpus = gpu["Count"]
        memory_mib = gpu["MemoryInfo"]["SizeInMiB"]
        memory_gib = memory_mib / 1024
        kind = identify_gpu(gpu["Name"], memory_mib << 20)
        intra_node_gbps = _intra_node_gbps(find_gpu_type(kind))
        cards = facts["NetworkInfo"].get("NetworkCards") or ()
        network_gbps = float(sum(card.get("BaselineBandwidthInGbps") or 0.0 for card in cards))

        labels["gpu-type"] = kind
        labels["gpu-memory-gib"] = memory_gib
        labels["intra-node-gbps"] = intra_node_gbps
        if network_gbps:
            labels["inter-node-gbps"] = network_gbps
        words = (
            f"{num_gpus} {kind} of {memory_gib:g} GiB, network {network_gbps:g} Gbit/s; assumed"
            f" between its GPUs: {intra_node_gbps:g} Gbit/s; its price is not known"
        )

    # What the file says comes last: it replaces what EC2 says.
    resources = {"CPU": facts["VCpuInfo"]["DefaultVCpus"], "GPU": num_gpus}
    entry["resources"] = {**resources, **(entry.get("resources") or {})}
    described = {f"{LABEL_PREFIX}{label}": _as_text(value) for label, value in labels.items()}
    entry["labels"] = {**described, **(entry.get("labels") or {})}
    logger.info(
        "The catalogue lacks %s of node type '%s'; EC2 says: %s; labels replace each figure",
        facts["InstanceType"],
        name,
        words,
    )


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _intra_node_gbps(gpu: GpuType | None) -> float:
    """Return the least rate between GPUs of the catalogue's machines with this GPU."""
    if gpu is None:
        return ASSUMED_INTRA_NODE_GBPS
    rates_gbps = []
    for row in instance_types().values():
        if row.num_gpus > 1 and find_gpu_type(row.gpu_type) == gpu:
            rates_gbps.append(row.intra_node_bytes_per_s * 8 / 1e9)
    return min(rates_gbps, default=ASSUMED_INTRA_NODE_GBPS)


def describe_types(names: Sequence[str], region: str | None) -> dict[str, Json]:
    """Ask EC2 for instance types, each by itself: one that it does not know refuses all.

    Where there are no credentials, nothing is asked. What EC2 refuses is logged.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    session = boto3.Session()
    region = region or session.region_name
    if region is None or session.get_credentials() is None:
        return {}
    patience = Config(
        connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries={"total_max_attempts": 2}
    )
    client = session.client("ec2", region_name=region, config=patience)
    found: dict[str, Json] = {}
    for name in names:
        try:
            answer = client.describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
        except ClientError as error:
            code = error.response["Error"]["Code"]
            logger.warning("EC2 does not describe %s in %s (%s)", name, region, code)
        except BotoCoreError as error:
            logger.warning("EC2 was not reached to describe %s: %s", name, error)
            break
        else:
            found |= {each["InstanceType"]: each for each in answer}
    return found
