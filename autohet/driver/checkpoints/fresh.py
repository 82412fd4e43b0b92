"""Start of a run anew in a storage without a checkpoint (`autohet train --fresh`)."""

import logging
from contextlib import closing

from autohet.driver.checkpoints.spending import SPENDING
from autohet.runtime.job import Job
from planner.errors import ConfigError
from recovery.checkpoint.commit import list_checkpoints
from recovery.checkpoint.journal import begin_fresh
from recovery.checkpoint.lease import has_living_driver
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage

logger = logging.getLogger("autohet")


def begin_fresh_run(job: Job) -> None:
    """Have the next driver begin at step 0, whatever nodes hold of earlier runs.

    Raises:
        ConfigError: the storage holds a checkpoint, a driver of the job is alive, or the storage
        does not answer.
    """
    uri = job.checkpoint_storage
    try:
        with closing(open_storage(uri)) as storage:
            there = list_checkpoints(storage)
            if there:
                raise ConfigError(
                    f"--fresh: {uri} holds step {there[-1].step}; remove what is there, or name"
                    " another checkpoint.storage"
                )
            if has_living_driver(storage):
                raise ConfigError(
                    f"--fresh: a driver of this job was alive in {uri} just now; end it first"
                )
            begin_fresh(storage)
            storage.delete([SPENDING])
    except StorageError as error:
        raise ConfigError(str(error)) from error
    logger.warning("Beginning at step 0 in %s: steps that nodes hold are not used (--fresh)", uri)
