"""Replay of a recorded run through its job's controller, without Ray, storage or a search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autohet.driver.control.orders import OrderBook
from autohet.driver.control.planning import make_planning
from autohet.driver.control.replay import (
    AnsweredPlanning,
    Replayed,
    documents_of,
    header_of,
    lives_of,
    memory_at_start,
    replay,
)
from autohet.driver.emulate.pacing import paces_of
from autohet.runtime.job import Job
from autohet.runtime.models import load_config


def replay_run(path: Path, *, paced: bool | None = None) -> Replayed:
    """Replay the observations recorded at `path`, for one driver of the run after the other.

    The replay ends with the first driver that decides otherwise than recorded. paced: true if
    workers were slowed to their types' speeds; None: as the job's emulation says, like in every run
    of the product.

    Raises:
        ConfigError: the file is no such record, or the model or profile that the job names is not
        here any more.
    """
    found = [Replayed(0, 0, 0, None, drivers=0)]
    for life in lives_of(path):
        if found[-1].difference is None:
            found.append(
                found[-1].followed_by(_replay_driver(documents_of(life, path), path, paced))
            )
    return found[-1]


def _replay_driver(documents: Iterator[dict[str, Any]], path: Path, paced: bool | None) -> Replayed:
    first = next(documents, None)
    if first is None:
        return Replayed(0, 0, 0, None)  # it was killed while it wrote that line
    header = header_of(first, path)
    job: Job = header["job"]
    zones = header.get("zones")
    planning = AnsweredPlanning(make_planning(job, zones=zones))
    pace = paces_of if (job.emulation is not None if paced is None else paced) else None
    orders = OrderBook(job, load_config(job.model), pace, header["driver"], zones=zones)
    return replay(memory_at_start(header, planning, orders), planning, documents)
