"""Names of a job's directories on its nodes, the same for all runs that resume one another."""

import glob
import hashlib
import json
from pathlib import Path

from autohet.runtime.job import Job
from autohet.runtime.job.identity import decides


def run_id(job: Job) -> str:
    """Return the name of a job's directories on its nodes.

    A resumed run has the same one; another model, storage, or other mathematics have another.
    """
    deciding = {key: value for key, value in job.identity().items() if decides(key)}
    parts = [
        job.name,
        job.model.config,
        job.model.pretrained,
        deciding,
        job.checkpoint_storage,
    ]
    identity = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return f"{job.name}-{digest[:10]}"


def node_directories(job: Job, node: str) -> tuple[str, ...]:
    """Return the directories of an emulated node's host memory and disk, which die with it.

    Directories of a node whose name only begins with this name are not among them
    (`ray_cluster.directory_name`).
    """
    pattern = glob.escape(node) + "-" + "[0-9a-f]" * 8
    found = []
    for root in (job.checkpoint.memory_directory, job.checkpoint.local_directory):
        found += [str(path) for path in Path(root, run_id(job)).glob(pattern)]
    return tuple(found)
