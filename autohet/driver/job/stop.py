"""Stop of a run from outside: by its driver if one is there, else by the workers themselves."""

import time
from dataclasses import dataclass

import ray

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.run_actors import living_actors, request_stop
from planner.errors import ConfigError

BY = "autohet stop"
LOOK_S = 1.0
NONE = "none (Ctrl-C or SIGTERM stops an `autohet train` that started Ray itself)"


@dataclass(frozen=True)
class StoppedRun:
    """Run that was stopped.

    driven: its driver stopped it. num_left: processes of it that still live.
    """

    job: str
    driven: bool
    num_left: int


def _job_of(run_id: str) -> str:
    """Return the job's name in a run's id, which ends with a digest (`run_directories.run_id`)."""
    return run_id.rpartition("-")[0]


def _said_at(job: str) -> float | None:
    """Return the time at which a driver published the job's status; it does every two seconds."""
    return ray_cluster.read_statuses().get(job, {}).get("published_at")


def stop_run(address: str | None, job: str | None, wait_s: float) -> StoppedRun:
    """Stop the run of `job`, or the only one on the cluster; block until its processes have ended.

    All workers stop after the step in flight and make it durable. Blocks for `wait_s` seconds at
    most.

    Raises:
        ConfigError: there is no such cluster or run, or several runs and no name.
    """
    ray_cluster.connect(address, private=True)
    try:
        runs = {actor.run_id for actor in living_actors()}
        found = sorted(each for each in runs if job in (None, _job_of(each)))
        if len(found) != 1:
            names = ", ".join(sorted({_job_of(each) for each in runs})) or NONE
            wanted = "no job is named" if job is None else f"{len(found)} runs are of job '{job}'"
            raise ConfigError(f"{wanted}; the jobs whose processes live here are: {names}")
        (run_id,) = found
        job = _job_of(run_id)
        said = _said_at(job)
        request_stop(run_id, BY)
        for actor in living_actors(run_id):
            actor.handle.expect_stop.remote()

        until = time.monotonic() + wait_s
        left = living_actors(run_id)
        while left and time.monotonic() < until:
            time.sleep(LOOK_S)
            left = living_actors(run_id)
        return StoppedRun(job, _said_at(job) != said, len(left))
    finally:
        ray.shutdown()
