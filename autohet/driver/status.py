"""Reads what running jobs publish, for `autohet status`."""

from __future__ import annotations

import logging
from typing import Any

import ray

from autohet.driver import ray_cluster
from planner.errors import ConfigError


def read_status(address: str | None) -> dict[str, dict[str, Any]]:
    """Job name -> status, of every job that has run on this Ray cluster.

    Raises:
        ConfigError: there is no such cluster.
    """
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster at {address or 'this machine'}: {error}") from None
    try:
        return ray_cluster.read_statuses()
    finally:
        ray.shutdown()
