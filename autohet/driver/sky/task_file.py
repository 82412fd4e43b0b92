"""SkyPilot task file of a job in one region: its machines, its setup and its commands.

Format: SkyPilot's "SkyPilot YAML" reference. A SkyPilot cluster has equal nodes, so each node type
of the cluster file is one entry of `any_of`, and SkyPilot launches the cheapest that it gets.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.cluster_documents import instance_type_of
from planner.inputs.documents import Document, Json
from planner.inputs.fleet import NodeType

SETUP = "cluster_configs/aws/setup.sh"
"""Script of a checkout that installs it on a node."""
JOB_FOLDER = "~/autohet-jobs"
RAY_TOKEN = "~/.ray/auth_token"
_RUN = """\
export PATH="$HOME/autohet-env/bin:$PATH" RAY_AUTH_MODE=token
ulimit -n 65536
head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
  ray health-check --address "$head:6379" 2> /dev/null \\
    || ray start --head --port=6379 --dashboard-host=127.0.0.1 --disable-usage-stats
  exec autohet train --job {job} --storage {storage} --restarts 3
fi
until ray health-check --address "$head:6379" 2> /dev/null; do sleep 2; done
pgrep -f "raylet.*$head:6379" > /dev/null \\
  || ray start --address="$head:6379" --disable-usage-stats
sleep 5
"""
"""Commands of each node. SkyPilot's own Ray, on another port, is left alone."""


@dataclass(frozen=True)
class Region:
    """Region that may train the job.

    storage: URI of its checkpoints. image: its machine image; empty: SkyPilot's own.
    """

    name: str
    storage: str
    image: str = ""


def require_aws(document: Json, where: str) -> None:
    """Raise ConfigError for a cluster file of another provider."""
    provider = (document.get("provider") or {}).get("type")
    if provider != "aws":
        raise ConfigError(
            f"{where} has provider type {provider!r}; autohet sky writes tasks for aws alone: give"
            " a cluster file of EC2 instance types"
        )


def task_of(
    job: Job,
    job_path: Path,
    document: Json,
    kinds: Sequence[NodeType],
    *,
    region: Region,
    num_nodes: int,
) -> Document:
    """Return the task document: `num_nodes` nodes of one of `kinds` in `region` train the job.

    Its `workdir` is the current directory, a checkout of this project.
    """
    name = f"{JOB_FOLDER}/{job_path.name}"
    file_mounts = {name: str(job_path.resolve()), RAY_TOKEN: RAY_TOKEN}
    for path in _local_inputs(job):
        file_mounts[path] = path
    return {
        "name": f"autohet-{job.name}",
        "num_nodes": num_nodes,
        "workdir": ".",
        "resources": {"any_of": [_resources(document, kind, region) for kind in kinds]},
        "file_mounts": file_mounts,
        "setup": SETUP,
        "run": _RUN.format(job=name, storage=region.storage),
    }


def _resources(document: Json, kind: NodeType, region: Region) -> Document:
    config = document["available_node_types"][kind.name].get("node_config") or {}
    found: Document = {
        "cloud": "aws",
        "region": region.name,
        "instance_type": instance_type_of(config),
        "use_spot": kind.spot,
    }
    sizes = [
        (each.get("Ebs") or {}).get("VolumeSize")
        for each in config.get("BlockDeviceMappings") or ()
    ]
    if sizes and sizes[0]:
        found["disk_size"] = int(sizes[0])
    if region.image:
        found["image_id"] = region.image
    return found


def _local_inputs(job: Job) -> list[str]:
    """Return the absolute paths on this machine that the job reads."""
    names = [job.model.pretrained or ""]
    if job.model.adapter is not None:
        names.append(job.model.adapter.from_ or "")
    if job.data is not None:
        names += job.data.sources
    # Relative paths come with the workdir; other names are those of hubs and buckets.
    return sorted({name for name in names if os.path.isabs(name) and Path(name).exists()})


def require_checkout(directory: Path) -> None:
    """Raise ConfigError unless `directory`, which every node gets, can be installed there."""
    if not (directory / SETUP).is_file():
        raise ConfigError(
            f"{directory} has no {SETUP}, and its content is what each node installs; run autohet"
            " sky in a checkout of this project"
        )


class _BlockDumper(yaml.SafeDumper):
    """Writer of YAML with scripts as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)


def write_task(task: Json, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.dump(dict(task), Dumper=_BlockDumper, sort_keys=False, width=100))
