"""Choice of the cluster that a job is given to."""

import logging
from typing import Any

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster_file import read_document
from autohet.driver.ray.requests.scaling import read_launch_file
from autohet.driver.ray.this_machine import announcement, local_document
from autohet.runtime.job import Job

logger = logging.getLogger("autohet")


def find_document(job: Job, cluster_path: str | None, address: str | None) -> dict[str, Any] | None:
    """Return the document of the cluster that the job runs on.

    It is the given one, or the one that this head was launched from. If no cluster is named and
    none runs, it is that of this machine alone. None: a cluster runs that has no known document.
    """
    if cluster_path:
        return read_document(cluster_path)
    document = read_launch_file()
    if document is not None:
        return document
    if ray_cluster.is_named(address) or ray_cluster.runs_here():
        return None
    document = local_document(job.training.device)
    logger.info("%s", announcement(document))
    return document
