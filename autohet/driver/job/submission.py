"""Environment of a job that was submitted with `ray job submit`.

Ray's job supervisor makes it (ray/dashboard/modules/job/job_supervisor.py). This module imports no
Ray, since the parent of a driver, which restarts it, uses it too.
"""

import logging
import os

logger = logging.getLogger("autohet")
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"


def is_submitted() -> bool:
    """Return true if this process belongs to the entrypoint of a Ray job."""
    return JOB_CONFIG in os.environ


def warn_of_no_restart() -> None:
    """Warn that no parent restarts the driver of a submitted job."""
    logger.warning(
        "If this job's driver is killed, by the kernel's out-of-memory killer say, its workers end"
        " after elastic.headless_s, and the job goes on only once it is submitted again: submit"
        " `autohet train --job ...`, which starts a killed driver again by itself"
    )


def warn_of_short_stop() -> None:
    """Warn if `ray job stop` would not wait for a checkpoint."""
    if STOP_WAIT not in os.environ:
        logger.warning(
            "`ray job stop` will kill this job 3 s after it asks for its end, which is too short"
            " for a checkpoint of a real model: submit"
            """ --runtime-env-json '{"env_vars": {"%s": "600"}}'""",
            STOP_WAIT,
        )
