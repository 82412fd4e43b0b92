"""Reading of the statuses that running jobs publish, for `autohet status`."""

import time

import ray

from autohet.driver.ray import cluster as ray_cluster
from planner.inputs.documents import Document, Json

SILENT_S = 10.0
"""Seconds without a new status after which a job counts as silent.

A driver publishes every second; a tick that waits for Ray or the planner may take some.
"""


def with_liveness(status: Json, now: float) -> Document:
    """Return the status with `age_s` and `liveness`.

    `age_s`: seconds since the driver published it (None: unknown). `liveness`: ended, alive or
    silent.
    """
    age_s = None
    is_recent = False
    published_at = status.get("published_at")
    if published_at is not None:
        # Not below 0: the driver's clock may be ahead of this machine's.
        age_s = max(0.0, now - published_at)
        is_recent = age_s <= SILENT_S
        age_s = round(age_s, 3)

    liveness = "alive" if is_recent else "silent"
    if status["state"] == "ended":
        liveness = "ended"
    return {**status, "age_s": age_s, "liveness": liveness}


def read_status(address: str | None) -> dict[str, Document]:
    """Return the status, by name, of every job that has run on this Ray cluster.

    Each has its age and liveness.

    Raises:
        ConfigError: there is no such cluster.
    """
    ray_cluster.connect(address, private=True)
    try:
        now = time.time()
        statuses = ray_cluster.read_statuses()
        return {name: with_liveness(status, now) for name, status in statuses.items()}
    finally:
        ray.shutdown()
