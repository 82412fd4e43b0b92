"""Run of one job from start to end, on a Ray cluster or an emulated fleet."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autohet.control.planning.buying import best_counts
from autohet.control.values.observation import Observation
from autohet.driver.callbacks import Callback, EventDispatch
from autohet.driver.callbacks.ray_metrics import RayMetrics
from autohet.driver.callbacks.trackers import TrackerIds, make_callbacks
from autohet.driver.checkpoints.durable import Durable
from autohet.driver.checkpoints.resumption import summary_of_finished
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.checks import check_gpus, check_shared_storage
from autohet.driver.job.job_run import JobRun, Machines, Outcome
from autohet.driver.job.patience import with_patience
from autohet.driver.job.preparation import PreparedJob, check_storage, prepare
from autohet.driver.job.run_record import RunCopies
from autohet.driver.job.run_storage import make_durable
from autohet.driver.job.submission import is_submitted, warn_of_no_restart
from autohet.driver.job.supervise import is_restart, is_supervised, note_begun
from autohet.driver.loop.controller import Controller, Guard
from autohet.driver.loop.planning import make_planning
from autohet.driver.loop.recorder import Recorder, recorder_beside
from autohet.driver.loop.run_directories import node_directories, run_id
from autohet.driver.loop.stop_signals import ignore_signals, stop_on_signals, unwind_on_sigterm
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster_file import is_emulated
from autohet.driver.ray.requests.scaling import fleet_request, standing_nodes
from autohet.driver.ray.this_machine import gpu_ids, is_this_machine, reserved
from autohet.driver.report.write import leave_report
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json
from recovery.checkpoint.errors import LeaseHeld, Replaced
from recovery.storage.errors import StorageError

logger = logging.getLogger("autohet")
Show = Callable[[Controller, Observation], None]


@dataclass(frozen=True)
class RunFiles:
    """Files that a run writes: its events, their copies in the storage, and its record."""

    events: EventLog
    copies: RunCopies
    recorder: Recorder | None = None


def train(
    job: Job,
    *,
    cluster_path: str | None,
    address: str | None,
    events_path: Path | None,
    show: Show,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Run a job on a Ray cluster, or on the emulated fleet that `cluster_path` describes.

    The cluster is the one at `address`, or the one this process belongs to. `callbacks` receive
    every event and are closed at the end, as are the job's `trackers`.

    Raises:
        ConfigError: the user's input is wrong, or there is no cluster.
    """
    if is_submitted() and not is_supervised():
        warn_of_no_restart()
    patience_s = job.elastic.fleet_patience_s
    prepare_job = partial(prepare, job, cluster_path, address, events_path)
    prepared = with_patience(prepare_job, patience_s)
    job = prepared.job
    document = prepared.document
    if prepared.found is not None and prepared.found.ended:
        return Outcome(True, *summary_of_finished(job, prepared.found, events_path))
    logger.info("Time limits until a step's time is predicted: %s", job.elastic.timeouts())
    with (
        unwind_on_sigterm(),
        _take_over(job) as durable,
        connection(job, document, address) as fleet,
    ):
        if fleet is None:
            # A run that goes on waits for its fleet instead.
            if not is_restart():
                check_gpus(job)
            addresses = ray_cluster.machine_addresses()
            with_patience(partial(check_shared_storage, job, document, addresses), patience_s)
        best = _best_nodes(prepared) if fleet is None else None
        request = fleet_request(job, prepared.cluster, document or {}, address, best)
        request.ask()
        machines = Machines(prepared.cluster, fleet, request)
        try:
            return train_on(job, machines, events_path, show, callbacks, durable)
        finally:
            request.withdraw()


def _best_nodes(prepared: PreparedJob) -> Mapping[str, int] | None:
    """Return the nodes of the best plan by type; those that an earlier driver has found, if any."""
    if prepared.cluster is None:
        return None
    memory = ray_cluster.ClusterMemory("nodes", run_id(prepared.job))
    if prepared.best is not None:
        memory.save(prepared.best)
        return prepared.best
    known = memory.load()
    if known or prepared.job.elastic.has_goal:
        return known
    planning = make_planning(prepared.job, zones=prepared.cluster.zones)
    standing = standing_nodes(prepared.cluster, prepared.document or {})
    return best_counts(planning, prepared.cluster, standing)


@contextmanager
def _take_over(job: Job) -> Iterator[Durable]:
    """Yield the durable storage of a job, owned by this driver alone.

    A second driver is refused before it touches anything of the first one's run.

    Raises:
        ConfigError: another driver is alive, or the storage does not answer.
    """
    durable = make_durable(job)
    try:
        with_patience(durable.take_lease, job.elastic.fleet_patience_s)
    except (StorageError, LeaseHeld) as error:
        durable.close(at_once=True)
        raise ConfigError(str(error)) from error
    try:
        yield durable
    finally:
        # No-op after an orderly end.
        durable.close(at_once=True)


def train_on(
    job: Job,
    machines: Machines,
    events_path: Path | None,
    show: Show,
    callbacks: Sequence[Callback] = (),
    durable: Durable | None = None,
) -> Outcome:
    """Run a job on the cluster that this process is connected to.

    durable: storage of a job that this driver has taken over; None: take it over here.
    """
    if durable is None:
        with _take_over(job) as taken:
            return train_on(job, machines, events_path, show, callbacks, taken)

    directory = Path(".") if events_path is None else events_path.parent
    followers = [RayMetrics(job.name), *_trackers(job, directory), *callbacks]
    dispatch = EventDispatch(followers)
    copies = RunCopies(job, events_path)
    recorder = recorder_beside(events_path) if job.elastic.record_observations else None

    def tell(event: Json) -> None:
        copies.note(event)
        dispatch(event)

    events = EventLog(events_path, listener=tell)
    try:
        return train_with(job, machines, RunFiles(events, copies, recorder), show, durable)
    finally:
        if recorder is not None:
            recorder.close()
        events.close()
        dispatch.close()
        leave_report(events_path)
        copies.close()


def _trackers(job: Job, directory: Path) -> list[Callback]:
    """Create the job's trackers; those of a resumed run resume their own runs."""
    if not job.trackers:
        return []
    ids = TrackerIds(job.checkpoint_storage)
    known = ids.read(is_restart=is_restart())
    found, begun = make_callbacks(job, directory, known)
    if begun and begun != known:
        ids.write(begun)
    return found


def train_with(
    job: Job, machines: Machines, files: RunFiles, show: Show, durable: Durable | None = None
) -> Outcome:
    """Run a job; start again if the run's storage takes the place of an empty one."""
    outcome = _train_once(job, machines, files, show, durable)
    while outcome.storage_is_back:
        found = check_storage(job, load_config(job.model, job.training))
        if found is not None and found.ended:
            return Outcome(True, *summary_of_finished(job, found, files.events.path))
        with _take_over(job) as taken:
            outcome = _train_once(job, machines, files, show, taken)
    return outcome


def _train_once(
    job: Job, machines: Machines, files: RunFiles, show: Show, durable: Durable | None
) -> Outcome:
    try:
        run = JobRun(job, machines, files.events, files.copies.record, files.recorder, durable)
        try:
            run.buy(machines.request)
            with_patience(run.start, job.elastic.fleet_patience_s)
            note_begun()
            files.copies.begin()
        except BaseException:
            # In a process that goes on, its lease would be renewed for ever.
            run.close(at_once=True)
            raise
    except (StorageError, LeaseHeld, Replaced) as error:
        raise ConfigError(str(error)) from error
    try:
        with stop_on_signals(run.workforce.observer):
            guard = Guard(run.controller, run.tick)
            while run.controller.ended is None:
                seen = guard.tick()
                if seen is not None:
                    show(run.controller, seen)
        outcome = run.outcome()
    except KeyboardInterrupt:
        run.close(at_once=True)
        raise
    except BaseException:
        run.close()
        raise
    run.close()
    return outcome


@contextmanager
def connection(
    job: Job, document: Json | None, address: str | None
) -> Iterator[EmulatedFleet | None]:
    """Connect to Ray for the length of a run, and start an emulated cluster file's fleet."""
    import ray

    ray_cluster.quieten()
    options: Document = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "ignore_reinit_error": True,
    }
    if document is not None and is_emulated(document) and address is None:
        devices = gpu_ids(document) if is_this_machine(document) else []
        fleet = EmulatedFleet(document, lambda name: node_directories(job, name))
        with reserved(devices, job.name):
            try:
                ray.init(address=fleet.start(), **options)
                yield fleet
            finally:
                with ignore_signals():
                    fleet.close()
        return
    if ray.is_initialized() and address is None:
        # A notebook's own connection: it is used, and stays when the run has ended.
        yield None
        return
    with_patience(partial(ray_cluster.connect, address), job.elastic.fleet_patience_s)
    try:
        yield None
    finally:
        ray.shutdown()
