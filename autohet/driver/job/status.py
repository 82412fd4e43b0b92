"""Reading of the statuses that running jobs publish, for `autohet status`."""

import time

import ray

from autohet.driver.ray import cluster as ray_cluster
from planner.inputs.documents import Document, Json

SILENT_S = 10.0
"""Seconds without a new status after which a job counts as silent.

A driver publishes every second; a tick that waits for Ray or the planner may take some.
"""


RENEWED_S = 4.0
"""Seconds in which a driver that lives publishes a new status."""


def with_liveness(status: Json, now: float, is_renewed: bool | None = None) -> Document:
    """Return the status with `age_s` and `liveness`.

    `age_s`: seconds since the driver published it (None: unknown). `liveness`: ended, alive or
    silent. is_renewed: the driver has published it a moment ago, or nothing since another one; None
    leaves that to the clocks.
    """
    age_s = None
    is_recent = False
    published_at = status.get("published_at")
    if published_at is not None:
        # Not below 0: the driver's clock may be ahead of this machine's.
        age_s = 0.0 if is_renewed else round(max(0.0, now - published_at), 3)
        is_recent = abs(now - published_at) <= SILENT_S if is_renewed is None else is_renewed

    liveness = "alive" if is_recent else "silent"
    if status["state"] == "ended":
        liveness = "ended"
    return {**status, "age_s": age_s, "liveness": liveness}


def read_status(address: str | None) -> dict[str, Document]:
    """Return the status, by name, of every job that has run on this Ray cluster.

    Each has its age and liveness. Of jobs that look silent, whose drivers' clocks may differ from
    this one, the status is read again after RENEWED_S.

    Raises:
        ConfigError: there is no such cluster.
    """
    ray_cluster.connect(address, private=True)
    try:
        now = time.time()
        statuses = ray_cluster.read_statuses()
        found = {name: with_liveness(status, now) for name, status in statuses.items()}
        silent = {name for name, status in found.items() if status["liveness"] == "silent"}
        if silent:
            time.sleep(RENEWED_S)
            for name, status in ray_cluster.read_statuses().items():
                if name in silent:
                    is_renewed = status["published_at"] != statuses[name].get("published_at")
                    found[name] = with_liveness(status, now, is_renewed)
        return found
    finally:
        ray.shutdown()
