"""Checks of a job, its storage and its cluster before a cluster is asked for anything."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from autohet.control.ledger.ledger import ToldSteps
from autohet.control.planning.buying import Market, best_counts
from autohet.control.planning.fleet_choice import Terms
from autohet.driver.checkpoints.resumption import FoundCheckpoint, found_checkpoint
from autohet.driver.emulated.rehearsal import check_script
from autohet.driver.job.checks import (
    check_data,
    check_fit,
    check_paces,
    check_shared_storage,
    check_storage_path,
    check_writable,
)
from autohet.driver.job.cluster_choice import find_document
from autohet.driver.job.goals import check_budget, deadline_s
from autohet.driver.job.run_record import steps_told
from autohet.driver.job.supervise import is_restart
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.cluster_file import first_nodes, is_emulated
from autohet.driver.ray.requests.scaling import check_min_workers, check_wish, standing_nodes
from autohet.driver.ray.this_machine import for_this_machine, is_this_machine
from autohet.driver.sources.instance_types import with_described_types
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.registry import describe_trained
from autohet.runtime.step.device import choose_device
from autohet.runtime.step.precision import without_incapable_nodes
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from recovery.checkpoint.commit import list_checkpoints
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")


@dataclass(frozen=True)
class PreparedJob:
    """Facts of a job known before a cluster is asked; see `check_inputs`."""

    job: Job
    document: Mapping[str, Any] | None
    cluster: Cluster | None
    found: FoundCheckpoint | None
    best: dict[str, int] | None


def prepare(
    job: Job, cluster_path: str | None, address: str | None, events_path: Path | None
) -> PreparedJob:
    """Check all that can be checked before anything is started.

    Raises:
        ConfigError: says what to fix.
    """
    job.require_training()
    if events_path is not None:
        check_writable(events_path)
    check_fit(job)
    document = find_document(job, cluster_path, address)
    if document is not None:
        document = with_described_types(document)
        if is_this_machine(document):
            job = for_this_machine(job, document)
    cluster = _cluster_of(job, document)

    emulated = document is not None and is_emulated(document) and address is None
    if emulated:
        # The workers will be processes of this machine: its devices must be able to run them.
        choose_device(job.training.device, job.training.precision)
    if "script" in job.elastic.notice_sources:
        first = first_nodes(document) if document is not None and emulated else None
        check_script(job.elastic.script, cluster, first, job.training.steps or sys.maxsize)

    # With an address the nodes are on other machines, whatever the document says.
    check_shared_storage(job, document if address is None else None, set())
    standing: dict[str, int] = {}
    if cluster is not None and not emulated:
        standing = standing_nodes(cluster, document or {})
    if is_restart():
        require_own_storage(job, steps_told(events_path))
    found, best = check_inputs(job, cluster, here=emulated, standing=standing)
    return PreparedJob(as_continued(job, found), document, cluster, found, best)


def as_continued(job: Job, found: FoundCheckpoint | None) -> Job:
    """Return the job at the run's place in the sample order, with the day that its template prints.

    Raises:
        ConfigError: a new run would begin before the first row.
    """
    offset = job.training.row_offset if found is None else found.row_offset
    if found is None and offset < 0:
        raise ConfigError(
            f"training.row_offset is {offset}, but a new run begins at row 0 or later; leave it out"
        )
    job = replace(job, training=replace(job.training, row_offset=offset))
    data = job.data
    if data is None or data.kind == "text" or data.template_date is not None:
        return job
    day = date.today().isoformat()
    if found is not None and found.template_date is not None:
        day = found.template_date
    return replace(job, data=replace(data, template_date=day))


def _cluster_of(job: Job, document: Mapping[str, Any] | None) -> Cluster | None:
    """Return the cluster of a document, without nodes that cannot compute the job's precision."""
    if document is None:
        return None
    cluster = cluster_from_document(document)
    for note in cluster.notes:
        logger.warning("Without effect: %s", note)
    check_wish(cluster, job.elastic.request_nodes or {})
    return without_incapable_nodes(cluster, job)


def check_inputs(
    job: Job,
    cluster: Cluster | None,
    *,
    here: bool = True,
    standing: Mapping[str, int] | None = None,
) -> tuple[FoundCheckpoint | None, dict[str, int] | None]:
    """Check all of a job that can be checked before a cluster is asked.

    These are the model, the storage, the data (`here`: the nodes are on this machine), and that all
    of `cluster`, if it is known, has a plan for the job. Returns the checkpoint that the job
    resumes from, and the nodes of that plan by type. The price of `standing` nodes counts within
    the job's bound. If the checkpoint is of the job's last step, or an earlier driver of the run
    was killed, nothing more is checked.

    Raises:
        ConfigError: says what to fix.
    """
    config = load_config(job.model, job.training)
    found = check_storage(job, config)
    if is_restart() or (found is not None and found.ended):
        # In a restart workers may train without a driver: what was checked is not checked again.
        return found, None
    check_data(job, int(config.vocab_size), here=here)
    if job.model.adapter is not None:
        logger.info("The adapter trains %s", describe_trained(config))
    planning = make_planning(job, zones=None if cluster is None else cluster.zones)
    planning.read_fixed_plan()
    if cluster is None:
        return found, None

    check_paces(job, cluster)
    check_min_workers(job, cluster)
    deadline_s(job, time.time(), None if found is None else 0.0)
    check_budget(job, cluster, None)
    if job.elastic.budget_usd is not None and found is None:
        market = Market(cluster, standing or {}, {})
        offers = Terms.of(job, market).offers(planning.fleet_speeds(cluster, []))
        check_budget(job, cluster, min(offers, key=lambda each: each.usd_a_step, default=None))
        if offers:
            return found, {}  # with a goal the buyer chooses the nodes by the same step times
    best = best_counts(planning, cluster, standing or {})
    return found, {} if job.elastic.has_goal else best


@contextmanager
def _storage_of(job: Job) -> Iterator[Storage]:
    """Open the job's storage for the block; a storage's error becomes a ConfigError."""
    try:
        with closing(open_storage(job.checkpoint_storage)) as storage:
            yield storage
    except StorageError as error:
        raise ConfigError(str(error)) from error


def check_storage(job: Job, config: PreTrainedConfig) -> FoundCheckpoint | None:
    """Return the checkpoint to resume from, if any.

    The storage must be able to take another checkpoint, unless that one was the last.

    Raises:
        ConfigError: it cannot be read or written, or holds something else.
    """
    with _storage_of(job) as storage:
        found = found_checkpoint(job, config, storage)
        if found is None or not found.ended:
            check_storage_path(storage)
        return found


def require_own_storage(job: Job, told: ToldSteps) -> None:
    """Check, before anything is written, that a restarted driver finds the storage of its run.

    `told`: steps and checkpoints of which the run's events tell. Without this check an empty
    directory below a file system that is not mounted would be the storage of a new run.

    Raises:
        ConfigError: no checkpoint is there, though one was committed; or nothing at all, though a
        step was run.
    """
    if told.checkpoint_step is None and not told.steps:
        return
    with _storage_of(job) as storage:
        if told.checkpoint_step is not None:
            lacks = not list_checkpoints(storage)
            done = f"committed step {told.checkpoint_step} there, and no checkpoint is there now"
        else:
            # One entry is enough: a storage may hold many.
            lacks = next(iter(storage.list()), None) is None
            done = f"run {told.until} steps with this storage, which is empty"
    if not lacks:
        return
    raise ConfigError(
        f"{job.checkpoint_storage}: this run has {done}: check that the file system is mounted, or"
        " start the job anew"
    )
