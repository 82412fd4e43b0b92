"""Cluster files as they are written, and what they say of an emulated fleet."""

from pathlib import Path

from planner.errors import ConfigError
from planner.inputs.autoscaling import autoscaling_config
from planner.inputs.cluster_documents import read_cluster_yaml
from planner.inputs.documents import Document, Json


def read_document(path: str | Path) -> Document:
    """Read a cluster file as it is; `planner.inputs.cluster` checks its contents."""
    document = read_cluster_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(
            f"cluster '{path}' is no mapping; it should be a Ray cluster-launcher document"
        )
    return document


def is_emulated(document: Json) -> bool:
    """Return true if a cluster file describes an emulated fleet on one machine."""
    return (document.get("provider") or {}).get("type") == "fake_multinode"


def first_nodes(document: Json) -> dict[str, int]:
    """Return the number of nodes of each type that an emulated fleet starts with."""
    types = autoscaling_config(document).types
    return {name: kind.min_workers for name, kind in types.items() if not kind.is_head}
