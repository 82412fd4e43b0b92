"""Reads what running jobs publish, for `autohet status`."""

from __future__ import annotations

from typing import Any

import ray

from autohet.driver.ray import cluster as ray_cluster


def read_status(address: str | None) -> dict[str, dict[str, Any]]:
    """Job name -> status, of every job that has run on this Ray cluster.

    Raises:
        ConfigError: there is no such cluster.
    """
    ray_cluster.connect(address)
    try:
        return ray_cluster.read_statuses()
    finally:
        ray.shutdown()
