"""Run of one job from start to end: sets up controller, workforce and planner, and ticks."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

from autohet.driver.callbacks import Callback, EventDispatch
from autohet.driver.callbacks.ray_metrics import RayMetrics
from autohet.driver.callbacks.trackers import TrackerIds, make_callbacks
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.checkpoints.evaluation_losses import EVALUATION_LOSSES, losses_of, losses_text
from autohet.driver.checkpoints.resumption import (
    found_checkpoint,
    loss_scales,
    skipped_from,
    summary_of_finished,
)
from autohet.driver.checks import (
    check_data,
    check_fit,
    check_gpus,
    check_min_workers,
    check_paces,
    check_shared_storage,
    check_storage_path,
    check_writable,
)
from autohet.driver.cluster_choice import find_document
from autohet.driver.control.controller import Controller, Guard
from autohet.driver.control.observation import Observation
from autohet.driver.emulate.fleet import EmulatedFleet, first_nodes, is_emulated
from autohet.driver.emulate.pacing import paces_of
from autohet.driver.emulate.rehearsal import Rehearsal, check_script
from autohet.driver.history.events import EventLog
from autohet.driver.history.skipped_steps import SKIPPED_FROM
from autohet.driver.history.told_steps import NOTHING_TOLD, ToldSteps
from autohet.driver.patience import with_patience
from autohet.driver.planning.background_search import BackgroundPlanning
from autohet.driver.planning.buyer import Buyer
from autohet.driver.planning.buying import Market, best_counts
from autohet.driver.planning.orders import OrderBuilder
from autohet.driver.planning.proposals import make_planning
from autohet.driver.planning.replanning import drop_search
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.scaling import FleetRequest, check_wish, fleet_request, standing_nodes
from autohet.driver.ray.this_machine import CORES_A_WORKER, for_this_machine, is_this_machine
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.driver.recording.recorder import RecordedPlanning, Recorder, recorder_beside
from autohet.driver.report.write import leave_report
from autohet.driver.run_record import RunCopies, steps_told
from autohet.driver.sources.instance_types import with_described_types
from autohet.driver.stop_signals import ending_on_sigterm, signals, undisturbed
from autohet.driver.submission import is_submitted, warn_of_no_restart
from autohet.driver.supervise import is_restart, is_supervised, note_begun
from autohet.runtime.job import Job
from autohet.runtime.job.identity import DATA_DIGEST, decides
from autohet.runtime.loss_scale import LOSS_SCALE
from autohet.runtime.models import load_config, saved_document
from autohet.runtime.models.pretrained import weights_identity
from autohet.runtime.models.proof import require_proof
from autohet.runtime.planning import planning_inputs
from autohet.runtime.precision import without_incapable_nodes
from autohet.runtime.process.log import RunRecord
from autohet.runtime.state.model_files import model_files
from autohet.runtime.worker import choose_device
from planner.cluster import Cluster, cluster_from_document
from planner.errors import ConfigError
from recovery.checkpoint.commit import CheckpointInfo, list_checkpoints
from recovery.checkpoint.errors import LeaseHeld
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")
STATUS_PERIOD_S = 2.0
Show = Callable[[Controller, Observation], None]


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    `ok`: all its steps are trained and committed. `may_pass`: a restarted driver may do better.
    """

    ok: bool
    reason: str
    summary: dict[str, Any]
    may_pass: bool = False


@dataclass(frozen=True)
class Machines:
    """Machines of a run.

    cluster: cluster document that plans are made for; None without one. emulated: emulated fleet
    that the run is on, if it is. request: request to the autoscaler, which is kept as the job wants
    it.
    """

    cluster: Cluster | None = None
    emulated: EmulatedFleet | None = None
    request: FleetRequest | None = None


@dataclass(frozen=True)
class RunFiles:
    """Files that a run writes: its events, their copies in the storage, and its record."""

    events: EventLog
    copies: RunCopies
    recorder: Recorder | None = None


class JobRun:
    """Owner of everything that one run of a job has on the driver's side.

    Call `start`, then `tick` until `controller.ended`, then `close`.
    """

    def __init__(
        self,
        job: Job,
        machines: Machines,
        events: EventLog,
        record: RunRecord | None = None,
        recorder: Recorder | None = None,
        durable: Durable | None = None,
    ) -> None:
        cluster = machines.cluster
        fleet = machines.emulated
        self.job = job
        self.events = events
        self.fleet = fleet
        config = load_config(job.model)
        if job.model.family is not None:
            require_proof(config)
        check_data(job, int(config.vocab_size), here=fleet is not None)
        self.durable = durable or make_durable(job)
        self._told = steps_told(events.path) if is_restart() else NOTHING_TOLD
        zones = None if cluster is None else cluster.zones
        self.planning = planning = BackgroundPlanning(planning_inputs(job, zones=zones))
        self.workforce = RayWorkforce(
            job,
            run_id(job),
            self.durable,
            cluster,
            WorkerSettings(threads_of_a_worker(job, fleet), record),
        )
        pace = paces_of if job.emulation is not None else None
        self.orders = OrderBuilder(job, config, pace, self.durable.lease.driver, zones=zones)
        asked = planning if recorder is None else RecordedPlanning(planning, recorder)
        self.controller = Controller(job, self.workforce, asked, self.orders, events)
        self.controller.recorder = recorder
        rehearsal = Rehearsal(
            fleet,
            self.workforce.observer.scripted,
            self.workforce.workers.kill_processes,
            time.monotonic,
        )
        self.workforce.rehearsal = rehearsal.happen
        self.market: Market | None = None
        self._losses: dict[int, float] = {}
        """Evaluation losses by step, also of earlier parts of the run."""
        self._num_recorded = 0
        self._published_at = -math.inf
        self._clock = time.monotonic

    def start(self) -> None:
        """Make sure that no other driver is alive, and find a checkpoint to resume from.

        The controller does the rest. After an error it can be called again.

        Raises:
            LeaseHeld: another driver of this job is alive. StorageError: the storage does not
            answer.
        """
        self.durable.take_lease()
        found = self.durable.load_newest()
        self.controller.memory.generation = found.ancestry.newest or 0
        if found.manifest is not None:
            self.controller.memory.generation = max(
                self.controller.memory.generation, found.manifest.generation
            )
            self.controller.memory.ledger.skipped.go_on_from(skipped_from(found.manifest))
            self._losses = losses_of(found.manifest.scalars)
            if self._losses:
                self.durable.record(
                    EVALUATION_LOSSES, str(found.manifest.scalars[EVALUATION_LOSSES])
                )
            logger.info("Going on from step %d of %s", found.step, found.uri)
            if not any(key.startswith("data.") for key in self.job.checkpoint.allow_changes):
                digest = found.manifest.scalars.get(DATA_DIGEST)
                self.workforce.observer.expect_data(None if digest is None else str(digest))
        step = 0 if found.manifest is None else found.manifest.step
        scales = "" if found.manifest is None else loss_scales(found.manifest)
        self.controller.memory.ledger.go_on_from(step, self._told, scales)
        if self.controller.recorder is not None:
            begun = {
                "generation": self.controller.memory.generation,
                "first_step": self.controller.memory.ledger.committed_steps,
                "told": self._told,
                "loss_scales": scales,
            }
            self.controller.recorder.begin(
                job=self.job,
                driver=self.orders.driver,
                market=self.market,
                zones=self.orders.zones,
                **begun,
            )
        self.events.emit(
            "started",
            self.controller.memory.generation,
            job=self.job.name,
            step=found.step or 0,
            checkpoint=found.uri,
            restart=is_restart(),
        )

    def buy(self, request: FleetRequest | None) -> None:
        """Keep the autoscaler's request as the job wants it, and read its refusals."""
        if request is not None and request.bundles:
            self.workforce.autoscaler.set_request(request)
            self.market = request.market
            self.controller.memory.buyer = Buyer(
                self.job, self.controller.memory.planning, self.market
            )

    def tick(self) -> Observation:
        self.durable.record(SKIPPED_FROM, self.controller.memory.ledger.skipped.first)
        self.durable.record(LOSS_SCALE, self.controller.memory.ledger.loss_scales.text or None)
        self._record_losses()
        seen = self.controller.tick()
        if self.fleet is not None:
            self.fleet.reap(self._clock())
        if self._clock() - self._published_at >= STATUS_PERIOD_S:
            self._published_at = self._clock()
            self.workforce.publish(self.controller.status())
        return seen

    def _record_losses(self) -> None:
        """Record in checkpoints the losses by which the best of them are kept."""
        section = self.job.checkpoint
        evaluations = self.controller.memory.ledger.evaluations
        if section.keep_best is None or len(evaluations) == self._num_recorded:
            return
        self._num_recorded = len(evaluations)
        self._losses |= {step: record.loss for step, record in evaluations.items()}
        text = losses_text(self._losses, section.every_steps, section.keep_best)
        self.durable.record(EVALUATION_LOSSES, text)

    def outcome(self) -> Outcome:
        ended = self.controller.ended
        assert ended is not None
        return Outcome(ended.ok, ended.reason, self.controller.summary(), ended.may_pass)

    def close(self, *, at_once: bool = False) -> None:
        """End all that the run started; `at_once`: without waiting for work in flight.

        Snapshots stay only if a restart may want them.
        """
        ended = self.controller.ended
        drop_search(self.controller.state)
        with ExitStack() as stack:
            stack.callback(self.durable.close, at_once=at_once)
            stack.callback(
                self.workforce.close,
                forget_snapshots=ended is not None and ended.ok,
                at_once=at_once,
            )
            if not at_once:
                self.workforce.publish(self.controller.status())


def make_durable(job: Job) -> Durable:
    """Create the driver's side of the job's checkpoint storage."""
    document = saved_document(job.model)
    return Durable(
        open_storage(job.checkpoint_storage),
        RunFacts(
            job.name,
            document,
            {"seed": job.training.seed, **job.identity(_weights(job))},
            model_files(job, document),
        ),
        Retention(job.checkpoint.num_kept, job.checkpoint.keep_best),
    )


def threads_of_a_worker(job: Job, fleet: EmulatedFleet | None) -> int:
    """Return the CPU threads of one worker.

    It is one if many workers share this machine's cores and speeds are emulated.
    """
    if job.emulation is not None:
        return 1
    alone = fleet is not None and is_this_machine(fleet.document)
    return min(CORES_A_WORKER, os.cpu_count() or 1) if alone else 4


def check_inputs(
    job: Job,
    cluster: Cluster | None,
    *,
    here: bool = True,
    standing: Mapping[str, int] | None = None,
) -> tuple[CheckpointInfo | None, dict[str, int] | None]:
    """Check all of a job that can be checked before a cluster is asked.

    These are the model, the storage, the data (`here`: the nodes are on this machine), and that all
    of `cluster`, if it is known, has a plan for the job. Returns the checkpoint that the job
    resumes from, and the nodes of that plan by type. The price of `standing` nodes counts within
    the job's bound. If the checkpoint is of the job's last step, nothing more is checked.

    Raises:
        ConfigError: says what to fix.
    """
    config = load_config(job.model)
    found = check_storage(job, config)
    if is_finished(found, job):
        return found, None
    check_data(job, int(config.vocab_size), here=here)
    planning = make_planning(job, zones=None if cluster is None else cluster.zones)
    planning.read_fixed_plan()
    if cluster is not None:
        check_paces(job, cluster)
        check_min_workers(job, cluster)
        return found, best_counts(planning, cluster, standing or {})
    return found, None


def is_finished(found: CheckpointInfo | None, job: Job) -> TypeGuard[CheckpointInfo]:
    return found is not None and job.training.steps is not None and found.step >= job.training.steps


@contextmanager
def _storage_of(job: Job) -> Iterator[Storage]:
    """Open the job's storage for the block; a storage's error becomes a ConfigError."""
    try:
        with closing(open_storage(job.checkpoint_storage)) as storage:
            yield storage
    except StorageError as error:
        raise ConfigError(str(error)) from error


def check_storage(job: Job, config: PreTrainedConfig) -> CheckpointInfo | None:
    """Return the checkpoint to resume from, if any.

    The storage must be able to take another checkpoint, unless that one was the last.

    Raises:
        ConfigError: it cannot be read or written, or holds something else.
    """
    with _storage_of(job) as storage:
        found = found_checkpoint(job, config, storage)
        if not is_finished(found, job):
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
        if told.checkpoint_step is None:
            lacks = next(iter(storage.list()), None) is None
        else:
            lacks = not list_checkpoints(storage)
    if not lacks:
        return
    done = (
        f"run {told.until} steps with this storage, which is empty"
        if told.checkpoint_step is None
        else f"committed step {told.checkpoint_step} there, and no checkpoint is there now"
    )
    raise ConfigError(
        f"{job.checkpoint_storage}: this run has {done}: check that the file system is mounted, or"
        " start the job anew"
    )


def _weights(job: Job) -> str | None:
    """Return the identity of the job's pretrained weights; None if it has none."""
    model = job.model
    return None if model.pretrained is None else weights_identity(model.pretrained, model.revision)


def run_id(job: Job) -> str:
    """Return the name of a job's directories on its nodes.

    A resumed run has the same one; another model, storage, or other mathematics have another.
    """
    identity = json.dumps(
        [
            job.name,
            job.model.config,
            job.model.pretrained,
            {key: value for key, value in job.identity().items() if decides(key)},
            job.checkpoint_storage,
        ],
        sort_keys=True,
    )
    return f"{job.name}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


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
    prepare = partial(_prepare, job, cluster_path, address, events_path)
    prepared = with_patience(prepare, patience_s)
    job = prepared.job
    document = prepared.document
    if is_finished(prepared.found, job):
        return Outcome(True, *summary_of_finished(job, prepared.found, events_path))
    logger.info("Time limits until a step's time is predicted: %s", job.elastic.timeouts())
    with (
        ending_on_sigterm(),
        _taken_over(job) as durable,
        connection(job, document, address) as fleet,
    ):
        if fleet is None:
            if not is_restart():  # a run that goes on waits for its fleet
                check_gpus(job)
            addresses = ray_cluster.machine_addresses()
            with_patience(partial(check_shared_storage, job, document, addresses), patience_s)
        request = fleet_request(job, prepared.cluster, document or {}, address, prepared.best)
        request.ask()
        machines = Machines(prepared.cluster, fleet, request)
        try:
            return train_on(job, machines, events_path, show, callbacks, durable)
        finally:
            request.withdraw()


@dataclass(frozen=True)
class _Prepared:
    """Facts of a job known before a cluster is asked; see `check_inputs`."""

    job: Job
    document: Mapping[str, Any] | None
    cluster: Cluster | None
    found: CheckpointInfo | None
    best: dict[str, int] | None


def _prepare(
    job: Job, cluster_path: str | None, address: str | None, events_path: Path | None
) -> _Prepared:
    """Check all that can be checked before anything is started.

    Raises:
        ConfigError: says what to fix.
    """
    job.require_training()
    if events_path is not None:
        check_writable(events_path)
    check_fit(job)
    document = find_document(job, cluster_path, address)
    if document is not None and is_this_machine(document):
        job = for_this_machine(job, document)
    cluster = None
    if document is not None:
        cluster = cluster_from_document(with_described_types(document))
    if cluster is not None:
        for note in cluster.notes:
            logger.warning("Without effect: %s", note)
        check_wish(cluster, job.elastic.request_nodes or {})
        cluster = without_incapable_nodes(cluster, job)
    emulated = document is not None and is_emulated(document) and address is None
    if emulated:  # the workers will be processes of this machine
        choose_device(job.training.device, job.training.precision)
    if "script" in job.elastic.notice_sources:
        first = first_nodes(document) if document is not None and emulated else None
        check_script(job.elastic.script, cluster, first, job.training.steps or sys.maxsize)
    check_shared_storage(job, document if address is None else None, set())
    standing = {} if cluster is None or emulated else standing_nodes(cluster, document or {})
    if is_restart():
        require_own_storage(job, steps_told(events_path))
    found, best = check_inputs(job, cluster, here=emulated, standing=standing)
    return _Prepared(job, document, cluster, found, best)


@contextmanager
def _taken_over(job: Job) -> Iterator[Durable]:
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
        durable.close(at_once=True)  # no-op after an orderly end


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
        with _taken_over(job) as taken:
            return train_on(job, machines, events_path, show, callbacks, taken)
    directory = Path(".") if events_path is None else events_path.parent
    followers = [RayMetrics(job.name), *_trackers(job, directory), *callbacks]
    dispatch = EventDispatch(followers)
    copies = RunCopies(job, events_path)
    recorder = recorder_beside(events_path) if job.elastic.record_observations else None

    def tell(event: Mapping[str, Any]) -> None:
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
    try:
        run = JobRun(job, machines, files.events, files.copies.record, files.recorder, durable)
        try:
            run.buy(machines.request)
            with_patience(run.start, job.elastic.fleet_patience_s)
            note_begun()
            files.copies.begin()
        except BaseException:  # in a process that goes on, its lease would be renewed for ever
            run.close(at_once=True)
            raise
    except (StorageError, LeaseHeld) as error:
        raise ConfigError(str(error)) from error
    try:
        with signals(run.workforce.observer):
            guard = Guard(run.controller, run.tick)
            while run.controller.ended is None:
                if (seen := guard.tick()) is not None:
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
    job: Job, document: Mapping[str, Any] | None, address: str | None
) -> Iterator[EmulatedFleet | None]:
    """Connect to Ray for the length of a run, and start an emulated cluster file's fleet."""
    import ray

    ray_cluster.quieten()
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "ignore_reinit_error": True,
    }
    if document is not None and is_emulated(document) and address is None:
        fleet = EmulatedFleet(document, lambda name: node_directories(job, name))
        try:
            ray.init(address=fleet.start(), **options)
            yield fleet
        finally:
            with undisturbed():
                fleet.close()
        return
    if ray.is_initialized() and address is None:  # a notebook's own connection stays its own
        yield None
        return
    with_patience(partial(ray_cluster.connect, address), job.elastic.fleet_patience_s)
    try:
        yield None
    finally:
        ray.shutdown()


def node_directories(job: Job, node: str) -> tuple[str, ...]:
    """Return the directories of an emulated node's host memory and disk, which die with it.

    Directories of a node whose name only begins with this name are not among them
    (`ray_cluster.directory_name`).
    """
    roots = (job.checkpoint.memory_directory, job.checkpoint.local_directory)
    pattern = glob.escape(node) + "-" + "[0-9a-f]" * 8
    return tuple(str(path) for root in roots for path in Path(root, run_id(job)).glob(pattern))
