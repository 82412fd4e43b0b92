"""Other users of the GPUs on a job's nodes: Ray counts the GPUs, and these are the names."""

from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray._private.state import state as ray_state

from autohet.driver.ray.cluster import ClusterMemory

WORKER = "WorkerActor"
"""Class of the actors that hold a GPU for AutoHet."""


def publish_name(job: str) -> None:
    """Tell the other drivers of this cluster the name of this driver's job."""
    if ray.is_initialized():
        _name_memory(ray.get_runtime_context().get_job_id()).save({"job": job})


def _name_memory(ray_job: str) -> ClusterMemory:
    return ClusterMemory("driver", ray_job)


def gpu_users(nodes: Collection[str], slow: Collection[str], run_id: str) -> dict[str, str]:
    """Return who else uses GPUs of these nodes (by Ray's id), as a phrase by node.

    run_id: this job's; its actors may be an earlier driver's. slow: nodes on which this job's
    processes should be up by now. If such a node has no free GPU, and no job of AutoHet is on it,
    another program has them.
    """
    own_job = ray.get_runtime_context().get_job_id()
    own: set[str] = set()
    jobs: dict[str, set[str]] = {}
    actors: list[Mapping[str, Any]] = []
    for state in ("ALIVE", "PENDING_CREATION"):
        actors += ray_state.actor_table(None, None, state).values()
    for actor in actors:
        node = actor["Address"]["NodeID"]
        # One that is being created has a process once it has its GPU, and may import for minutes.
        is_worker = actor["ActorClassName"].rpartition(".")[2] == WORKER and actor["Pid"]
        if node not in nodes or not is_worker:
            continue
        if actor["JobID"] == own_job or actor["Name"].startswith(f"{run_id} "):
            own.add(node)
        else:
            jobs.setdefault(node, set()).add(actor["JobID"])

    free: Mapping[str, Mapping[str, float]] = ray_state.available_resources_per_node()
    found = {}
    for node in nodes:
        if node in jobs:
            names = [_name_memory(job).load().get("job", job) for job in sorted(jobs[node])]
            found[node] = " and ".join(f"job '{name}'" for name in names)
        elif node in slow and node not in own and node in free and free[node].get("GPU", 0) < 1:
            found[node] = "another program of this Ray cluster"
    return found
