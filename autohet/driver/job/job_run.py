"""All that one run of a job has on the driver's side: controller, workforce and planner."""

import logging
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from autohet.control.job_state import Inherited
from autohet.control.ledger.ledger import NOTHING_TOLD
from autohet.control.planning.buyer import Buyer
from autohet.control.planning.buying import Market
from autohet.control.planning.goal import Goal
from autohet.control.planning.orders import OrderBuilder
from autohet.control.replanning import drop_search
from autohet.control.states.waiting import inherit
from autohet.control.values.observation import CheckpointState, Observation
from autohet.driver.checkpoints.durable import Durable
from autohet.driver.checkpoints.resumption import loss_scales
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.emulated.rehearsal import Rehearsal
from autohet.driver.events.event_log import EventLog
from autohet.driver.job.checks import check_data
from autohet.driver.job.goals import GoalKeeper
from autohet.driver.job.run_record import steps_told
from autohet.driver.job.run_storage import CheckpointScalars, make_durable
from autohet.driver.job.supervise import is_restart
from autohet.driver.loop.background_search import BackgroundPlanning
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.emulated_paces import paces_of
from autohet.driver.loop.recorder import RecordedPlanning, Recorder
from autohet.driver.loop.run_directories import run_id
from autohet.driver.ray.gpu_users import publish_name
from autohet.driver.ray.requests.scaling import FleetRequest
from autohet.driver.ray.this_machine import threads_of_a_worker
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.proof import require_proof
from autohet.runtime.process.log import RunRecord
from planner.inputs.cluster import Cluster
from recovery.checkpoint.receipts import read_uploads

logger = logging.getLogger("autohet")
STATUS_PERIOD_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    `ok`: all its steps are trained and committed. `may_pass`: a restarted driver may do better.
    `storage_is_back`: the run is to start again at once, from what its storage holds now.
    """

    ok: bool
    reason: str
    summary: dict[str, Any]
    may_pass: bool = False
    storage_is_back: bool = False


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
        config = load_config(job.model, job.training)
        if job.model.family is not None:
            require_proof(config)
        check_data(job, int(config.vocab_size), here=fleet is not None)
        self.durable = durable or make_durable(job)
        self._inherited: Inherited | None = None
        """Generations of living workers that this driver has taken over; None before `start`."""
        self._told = NOTHING_TOLD

        zones = None if cluster is None else cluster.zones
        self.planning = BackgroundPlanning(planning_inputs(job, zones=zones))
        settings = WorkerSettings(
            threads_of_a_worker(job, None if fleet is None else fleet.document),
            record,
            # An emulated machine is a process of its driver's.
            outlives=fleet is None,
        )
        self.workforce = RayWorkforce(job, run_id(job), self.durable, cluster, settings)
        pace = paces_of if job.emulation is not None else None
        self.orders = OrderBuilder(
            job, layout_builder(config), pace, self.durable.lease.driver, zones=zones
        )

        planning: BackgroundPlanning | RecordedPlanning = self.planning
        if recorder is not None:
            planning = RecordedPlanning(self.planning, recorder)
        self.controller = Controller(job, self.workforce, planning, self.orders, events)
        self.controller.memory.prepares = True
        # Two generations at a time have not run over NCCL.
        self.controller.memory.cuts_over = job.computes_on_cpu
        self.controller.memory.keeps_passes = True
        self.controller.memory.prepares_at_death = True
        self.controller.recorder = recorder
        self.controller.events.is_silenced = self.workforce.is_replaced
        rehearsal = Rehearsal(
            fleet,
            self.workforce.observer.scripted,
            self.workforce.workers.kill_processes,
            time.monotonic,
        )
        self.workforce.rehearsal = rehearsal.happen

        self.market: Market | None = None
        self._facts = CheckpointScalars(job, self.durable)
        self._goal = GoalKeeper(job, self.durable, time.monotonic)
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
        publish_name(self.job.name)
        if self._inherited is None:
            orders = self.workforce.take_over(self.durable.epoch, restart=is_restart())
            self._inherited = Inherited(orders)
        goes_on = is_restart() or bool(self._inherited.orders)
        if goes_on:
            self._told = steps_told(self.events.path)
        found = self.durable.load_newest()
        memory = self.controller.memory
        memory.generation = found.ancestry.newest or 0
        step = 0
        scales = ""
        if found.manifest is not None:
            inherits = bool(self._inherited.orders)
            self._facts.go_on_from(found.manifest, memory, inherits=inherits)
            # Nodes whose data has other tokens are refused.
            self.workforce.observer.expect_data(self._facts.expected_data(found.manifest))
            step = found.manifest.step
            scales = loss_scales(found.manifest)
            logger.info("Going on from step %d of %s", found.step, found.uri)
        memory.ledger.go_on_from(step, self._told, scales)
        self._inherit(found)
        terms = self._goal.begin()
        memory.goal = None if terms is None else Goal(terms)

        self._begin_recording(scales)
        self.events.emit(
            "started",
            memory.generation,
            job=self.job.name,
            step=found.step or 0,
            checkpoint=found.uri,
            restart=goes_on,
        )

    def _inherit(self, found: CheckpointState) -> None:
        """Go on with the processes that were taken over, if the journal knows what they hold."""
        inherited = self._inherited
        if inherited is None or not inherited.orders:
            return
        generation = inherited.orders[-1].generation
        if generation not in found.ancestry.entries:
            logger.warning(
                "Generation %d, which living workers are in, is not in the journal of %s: they are"
                " ended",
                generation,
                self.durable.storage.uri,
            )
            self.workforce.workers.dismiss(list(self.workforce.observer.workers))
            self._inherited = Inherited(())
            return
        uploads = read_uploads(self.durable.storage, -1 if found.step is None else found.step)
        parts = []
        for upload in uploads:
            for worker, receipt in upload.receipts.items():
                parts.append((worker, (upload.generation, upload.step, receipt)))
        self._inherited = replace(
            inherited,
            receipts=tuple(parts),
            newest=found.ancestry.newest,
            committed=-1 if found.step is None else found.step,
        )
        inherit(self.controller.memory, self._inherited)

    def _begin_recording(self, scales: str) -> None:
        """Record what a replay needs beside the observations; no-op without a recorder."""
        recorder = self.controller.recorder
        if recorder is None:
            return
        recorder.begin(
            job=self.job,
            driver=self.orders.driver,
            market=self.market,
            zones=self.orders.zones,
            generation=self.controller.memory.generation,
            first_step=self.controller.memory.ledger.committed_steps,
            told=self._told,
            loss_scales=scales,
            prepares=self.controller.memory.prepares,
            cuts_over=self.controller.memory.cuts_over,
            keeps_passes=self.controller.memory.keeps_passes,
            prepares_at_death=self.controller.memory.prepares_at_death,
            evaluations=self.controller.memory.ledger.evaluation_log.document,
            inherited=self._inherited,
            goal=None if self.controller.memory.goal is None else self.controller.memory.goal.terms,
        )

    def buy(self, request: FleetRequest | None) -> None:
        """Keep the autoscaler's request as the job wants it, and read its refusals."""
        if request is None or not request.bundles:
            return
        self.workforce.autoscaler.set_request(request)
        self.market = request.market
        memory = self.controller.memory
        memory.buyer = Buyer(self.job, memory.planning, self.market)

    def tick(self) -> Observation:
        # Before the controller's tick, which may commit a checkpoint with these facts.
        self._facts.record(self.controller.memory)
        seen = self.controller.tick()
        self._goal.store(self.controller.memory.goal)
        if self.fleet is not None:
            self.fleet.reap(self._clock())
        if self._clock() - self._published_at >= STATUS_PERIOD_S:
            self._published_at = self._clock()
            self.workforce.publish(self.controller.status())
        return seen

    def outcome(self) -> Outcome:
        ended = self.controller.ended
        assert ended is not None
        return Outcome(
            ended.ok,
            ended.reason,
            self.controller.summary(),
            ended.may_pass,
            ended.storage_is_back,
        )

    def close(self, *, at_once: bool = False) -> None:
        """End all that the run started; `at_once`: without waiting for work in flight.

        Snapshots stay only if a restart may want them.
        """
        ended = self.controller.ended
        is_done = ended is not None and ended.ok
        drop_search(self.controller.state)
        # The callbacks run in the reverse order, each of them also if one before it fails.
        with ExitStack() as stack:
            stack.callback(self.durable.close, at_once=at_once)
            stack.callback(self.workforce.close, forget_snapshots=is_done, at_once=at_once)
            if not at_once:
                self.workforce.publish(self.controller.status())
