"""A recorded run, decided anew: the controller of its job, without Ray, storage or a search."""

from __future__ import annotations

from pathlib import Path

from autohet.driver.control.orders import OrderBook
from autohet.driver.control.planning import make_planning
from autohet.driver.control.replay import AnsweredPlanning, Replayed, controller_at_start, load_header, replay
from autohet.driver.emulate.pacing import paces_of
from autohet.runtime.job import Job
from autohet.runtime.models import load_config


def replay_run(path: Path, *, paced: bool | None = None) -> Replayed:
    """What comes of the observations recorded at `path`. paced: whether workers were slowed to their types' speeds; None: as the
    job's emulation says, like in every run of the product.

    Raises:
        ConfigError: the file is no such record, or the model or profile that the job names is not here any more.
    """
    header = load_header(path)
    job: Job = header["job"]
    planning = AnsweredPlanning(make_planning(job))
    pace = paces_of if (job.emulation is not None if paced is None else paced) else None
    orders = OrderBook(job, load_config(job.model), pace, header["driver"])
    return replay(controller_at_start(header, planning, orders), planning, path)
