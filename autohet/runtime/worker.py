"""Process of one GPU, without Ray: it keeps its live state through every generation.

Orders run in a thread that a generation owns; everything else (reports, stops, interrupts) comes
from other threads.
"""

import gc
import logging
import os
import threading
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from transformers import PreTrainedConfig

from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.facts.layout import frozen_units
from autohet.runtime.groups import (
    GenerationGroups,
    GroupTimeouts,
    Interrupted,
    PeerLost,
    reconfigure,
)
from autohet.runtime.job import Job, TrainingSection
from autohet.runtime.messages import (
    STANDING_PHASES,
    GenerationOrder,
    Phase,
    PreparationOrder,
    RestoreRecord,
    RollForwardOutcome,
    WorkerPlace,
    WorkerReport,
)
from autohet.runtime.models.config import load_config
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.compilation import fallback_reason
from autohet.runtime.parallel.place import redeal
from autohet.runtime.process.log import RunRecord
from autohet.runtime.process.step_profile import StepProfiler
from autohet.runtime.process.store_connector import StoreConnector
from autohet.runtime.profiling.exact_products import check_products
from autohet.runtime.spmd.trainer import SpmdTrainer
from autohet.runtime.state.arrived_shards import ArrivedShards
from autohet.runtime.state.frozen import FrozenWeights
from autohet.runtime.state.live import Live
from autohet.runtime.state.state_source import StateSource
from autohet.runtime.step.batches import Batches, EvaluationRows
from autohet.runtime.step.device import choose_device
from autohet.runtime.step.generation import PhaseHook, TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.length_work import LengthWork, length_work
from autohet.runtime.step.next_generation import NextGeneration, meet_participants
from autohet.runtime.step.precision import format_of
from autohet.runtime.step.stage_parts import StageParts
from autohet.runtime.step.step_commit import KeptPasses, StateVersion, Trainer
from autohet.runtime.step.trainer import StageTrainer
from autohet.runtime.step.training_loop import TrainingLoop, TrainingResources, UnreportedRecords
from planner.errors import ConfigError
from recovery.errors import Cancelled
from recovery.state.layout import Layout
from recovery.storage.open import open_storage
from recovery.transfer.restore import LiveState, RestoreProgress

logger = logging.getLogger("autohet.worker")


class Worker:
    """A worker for the length of a job.

    `report`, the requests, `interrupt` and `roll_forward` may be called from any thread.
    """

    def __init__(
        self,
        place: WorkerPlace,
        job: Job,
        phase_hook: PhaseHook | None = None,
        record: RunRecord | None = None,
    ) -> None:
        self.place = place
        self.timeouts = job.elastic.timeouts()
        compute = format_of(job, place.gpu_type) or job.training.precision
        expected_gpu = None
        if job.emulation is None and place.gpu_type != "CPU":
            expected_gpu = place.gpu_type
        self.device = choose_device(job.training.device, compute, expected_gpu)
        self.dtype = COMPUTE_DTYPES[compute]
        check_products(self.device, self.dtype)
        self.config = load_config(job.model, job.training)
        dataset = prepare_dataset(job.require_training(), job.training.sequence_length)
        dataset.check(
            vocab_size=int(self.config.vocab_size),
            global_batch_sequences=job.training.global_batch_sequences,
        )
        job = replace(job, training=job.training.with_rows(len(dataset)))
        self.job = job
        self._batches = _batches_of(dataset, job.training, self.device)
        # One client for checkpoints and restores.
        self._storage = open_storage(job.checkpoint_storage)
        self.preservation = Preservation(place, job, self._storage)
        self._setup = TrainingSetup(
            self.config,
            job.training,
            self.device,
            begins=self._batches.begins if dataset.facts.isolated else None,
            length_work=_length_work_of(dataset, self.config),
        )
        self._hooks = TrainerHooks(
            phase_hook, self.preservation.before_update, self.preservation.status
        )
        record = record or RunRecord(job.checkpoint_storage, "runs/profiles")
        steps = job.training.profile_steps
        self._profiler = StepProfiler(steps, place.worker, record, self.device)
        self.records = UnreportedRecords()
        """What is trained, for the next report."""
        self._resources = TrainingResources(
            job,
            self.device,
            self._batches,
            _open_evaluation(job, self.config, self.device),
            self.preservation,
            self._profiler,
            self.records,
        )
        frozen_dtype = COMPUTE_DTYPES[job.training.precision]
        self._frozen = FrozenWeights(
            job.model, self.config, job.training.seed, self.device, frozen_dtype
        )
        self._lock = threading.Lock()
        self._beginning = threading.RLock()
        self._over = 0
        """Highest cancelled generation, which may not have begun yet."""
        self._rolling = threading.Lock()
        """Held while a roll-forward is under way, so that no generation begins."""
        self.live: Live | None = None
        """State in this process's memory; None before the first restore has ended."""
        self.groups: GenerationGroups | None = None
        """Groups of the present generation; None before the first."""
        self._store = StoreConnector(self.timeouts.rendezvous_s)
        limits = GroupTimeouts(self.timeouts.step_s, self.timeouts.rendezvous_s)
        self._next = NextGeneration(place.worker, self._setup, limits, self.preservation.plan)
        self._parts: StageParts | None = None
        """Parts of the present generation's trainer that were built ahead, until it has them."""
        self._left: GenerationGroups | None = None
        """Groups of the generation before a cut-over, until all workers have left them."""
        self._kept: KeptPasses | None = None
        """Passes of the generation before that the present one goes on from."""
        self._thread: threading.Thread | None = None
        self._arrived = ArrivedShards()
        self._report = WorkerReport(place.worker, os.getpid(), 0, Phase.IDLE, 0, None)
        # What was imported so far stays: a full collection would look through it for 0.3 s, in the
        # middle of a step or of a change.
        gc.freeze()

    # called from outside
    # ------------------------------------------------------------------------------

    def report(self) -> WorkerReport:
        """Return this worker's state; each step, receipt and transfer is in one report only.

        Transfers come along with steps, receipts or evaluations, or once the worker has stopped.
        """
        with self._lock:
            uploading = self.preservation.uploads.busy
            steps, evaluations = self.records.take()
            receipts = tuple(self.preservation.uploads.take_receipts())
            told = steps or receipts or evaluations or self._report.phase in STANDING_PHASES
            transfers = self.preservation.transfers.take() if told else ()
            report = replace(
                self._report,
                steps=steps,
                receipts=receipts,
                transfers=transfers,
                evaluations=evaluations,
                memory_shortage=self.preservation.snapshots.shortage,
                compile_fallback=fallback_reason(),
                prepared=self._next.outcome,
                uploading=uploading,
            )
            live = self.live
            if live is None:
                return report
            # Read before the version: a step that ends now is not both prepared and applied.
            prepared = None if live.trainer is None else live.trainer.prepared
            version = live.version
            return replace(
                report,
                step=version.step,
                whole=version.whole,
                live_generation=live.generation,
                prepared_step=prepared if version.whole else None,
                kept_step=_kept_step(live),
                vote=live.last_vote,
                snapshot_step=self.preservation.snapshots.newest(live.generation),
                replicated_step=self.preservation.replication.complete_step(live.generation),
            )

    @property
    def phase(self) -> Phase:
        return self._report.phase

    def prepare(self, order: PreparationOrder) -> None:
        """Build what the next generation needs beside its state, while the present one trains.

        An order of a generation that is over, or not newer than the present one, is dropped.
        """
        if order.generation > max(self._over, self._report.generation):
            live = self.live
            trainer = None if live is None else live.trainer
            present = trainer.parts if isinstance(trainer, StageTrainer) else None
            self._next.begin(order, present, warms_up=live is None)

    def begin(self, order: GenerationOrder) -> None:
        """Start a generation; the one before is interrupted if it still runs.

        An interrupt that comes meanwhile ends the new generation. An error at the start goes into
        the report, since nobody reads this call's answer. An order of a generation that is over, or
        not newer than the present one, is dropped.
        """
        if order.is_prepared and self.place.worker in order.plan.workers:
            self._next.await_outcome(order.generation, lambda: self._over >= order.generation)
        with self._beginning:
            newest = max(self._over, self._report.generation)
            if order.generation <= newest:
                logger.info(
                    "generation %d does not begin: %d is over, or has begun",
                    order.generation,
                    newest,
                )
                return
            try:
                live = self.live
                trainer = None if live is None else live.trainer
                if live and trainer and order.follows == live.generation:
                    self._next.follow(order, trainer.voter)
                else:
                    self._begin(order)
            except Exception as error:  # noqa: BLE001
                trace = traceback.format_exc()
                logger.error("generation %d cannot begin: %s", order.generation, trace)
                self._refuse(order, f"{type(error).__name__}: {error}")

    def _cut_over(self, groups: GenerationGroups) -> None:
        """Start the next generation, from the thread of the one that has ended with its vote."""
        with self._beginning:
            order = self._next.following
            assert order is not None, "the vote counted a worker without orders as ready"
            if order.generation <= self._over:
                raise Interrupted(f"generation {order.generation} is over")
            # Other workers may still read the vote from these groups.
            self._left = groups
            self.groups = None
            with self._rolling:
                self._start(order)

    def _begin(self, order: GenerationOrder) -> None:
        self.interrupt()
        if self._thread is not None:
            self._thread.join(self.timeouts.quiesce_s)
        ended = self._thread is None or not self._thread.is_alive()
        if not ended or not self._rolling.acquire(timeout=self.timeouts.quiesce_s):
            self._refuse(order, "its state is still being changed for the generation before")
            return
        try:
            self._start(order)
        finally:
            self._rolling.release()

    def _refuse(self, order: GenerationOrder, why: str) -> None:
        """Report the generation as failed, so that this process does not train in it.

        The driver ends late processes; this guards against one that it took for ready all the same.
        """
        with self._lock:
            self._report = replace(
                self._report, generation=order.generation, phase=Phase.FAILED, error=why
            )

    def _start(self, order: GenerationOrder) -> None:
        ready = self._next.take(order.generation)
        handles: Store | GenerationGroups
        if ready is None:
            handles = self._store.connect(order)
        else:
            self._store.close()
            self._store = ready.connector
            handles = ready.groups
        self._parts = None if ready is None else ready.parts
        step_timeout_s = order.step_timeout_s or self.timeouts.step_s
        groups = reconfigure(
            self.groups,
            order.generation,
            handles,
            self.place.worker,
            self.device,
            GroupTimeouts(step_timeout_s, self.timeouts.rendezvous_s),
        )
        groups.wants_gate = order.gated
        with self._lock:
            self.groups = groups
            trainer = None if self.live is None else self.live.trainer
            self._kept = None if trainer is None or order.kept_plan is None else trainer.kept
            if self.live is not None:
                # No roll-forward of its generation can come any more.
                self.live = self.live.without_trainer()
                parts = self._parts
                if parts and isinstance(trainer, StageTrainer) and parts.stage is trainer.stage:
                    # The stage that is taken over keeps none of the memory that is to be free.
                    parts.stage.weights.unload()
            # The shards that arrived may still be of use; copies that proved bad are reported once.
            broken = self._report.broken
            if broken is not None:
                broken = replace(broken, bad=())
            self._report = replace(
                self._report,
                generation=order.generation,
                phase=Phase.BUILDING,
                error=None,
                restore=None,
                broken=broken,
            )
        self._thread = threading.Thread(
            target=self._run,
            args=(order, groups),
            name=f"generation-{order.generation}",
            daemon=True,
        )
        self._thread.start()

    def request_stop(self, *, checkpoint: bool) -> None:
        """Stop after the step in flight, together with all other workers."""
        live = self.live
        if live is not None and live.trainer is not None:
            live.trainer.voter.request_stop(checkpoint=checkpoint)

    def request_checkpoint(self) -> None:
        """Make the next step that this worker votes on durable, at all workers."""
        live = self.live
        if live is not None and live.trainer is not None:
            live.trainer.voter.request_checkpoint()

    def interrupt(self, generation: int | None = None, keep: bool = False) -> None:
        """Leave the generation now; a step that is not committed did not happen.

        With `generation`, cancel this one and all before it, even if its order is yet to come:
        calls overtake each other. A later generation goes on.

        keep: if the step is gated and this worker is in its passes, end them first and keep them.
        """
        with self._lock:
            self._over = max(self._over, generation or 0)
        with self._beginning:
            groups = self.groups
            is_later = generation is not None and self._report.generation > generation
        if groups is None or is_later:
            return
        trainer = None if self.live is None else self.live.trainer
        is_gated = isinstance(trainer, StageTrainer) and trainer.groups is groups and groups.gated
        if keep and is_gated:
            assert isinstance(trainer, StageTrainer)
            groups.interrupt_beyond(trainer.place.pipeline.workers)
        else:
            groups.interrupt()

    def roll_forward(self, generation: int, vote: tuple[int, Any]) -> RollForwardOutcome:
        """Apply the prepared step of `generation` with the vote that another survivor saw.

        Blocks until that is done or refused; later reports contain the outcome, too.
        """
        error = "another roll-forward is under way"
        if self._rolling.acquire(blocking=False):
            try:
                error = self._roll(generation, *vote)
            finally:
                self._rolling.release()
        outcome = RollForwardOutcome(generation, vote[0], error or None)
        with self._lock:
            self._report = replace(self._report, rolled=outcome)
        return outcome

    def _roll(self, generation: int, step: int, result: Any) -> str:
        """Apply the prepared step; return the reason if it is not applied, else an empty string."""
        live = self.live
        trainer = None if live is None else live.trainer
        if (
            live is None
            or trainer is None
            or (live.generation, self._report.generation) != (generation, generation)
        ):
            return f"this worker is not of generation {generation} (any more)"
        if trainer.prepared != step:
            return f"step {trainer.prepared} is prepared, not {step}"
        try:
            trainer.apply_prepared(result)
        except Exception as error:  # noqa: BLE001
            logger.error("the roll-forward over step %d failed: %s", step, traceback.format_exc())
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        """End everything that this worker started."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join(5)
        self._next.drop()
        self.preservation.close()
        self._profiler.close()
        self._batches.close()
        self._storage.close()
        self._store.close()

    # a generation's thread
    # ------------------------------------------------------------------------------

    def _run(self, order: GenerationOrder, groups: GenerationGroups) -> None:
        """Run the generation's thread: each way in which it can end becomes a reported phase."""
        try:
            phase = self._generation(order, groups)
            if phase is Phase.BUILDING:
                self._cut_over(groups)
            else:
                self._set(order.generation, phase)
        except (Interrupted, PeerLost, Cancelled) as error:
            self._set(order.generation, Phase.HALTED, f"{type(error).__name__}: {error}")
        except ConfigError as error:
            self._set(order.generation, Phase.FAILED, str(error), unfit=True)
        except Exception as error:  # noqa: BLE001
            logger.error("generation %d failed: %s", order.generation, traceback.format_exc())
            phase = Phase.HALTED if groups.interrupted else Phase.FAILED
            self._set(order.generation, phase, f"{type(error).__name__}: {error}")

    def _set(
        self, generation: int, phase: Phase, error: str | None = None, *, unfit: bool = False
    ) -> None:
        with self._lock:
            if self._report.generation == generation:
                self._report = replace(self._report, phase=phase, error=error, unfit=unfit)

    def _generation(self, order: GenerationOrder, groups: GenerationGroups) -> Phase:
        started = time.perf_counter()
        left = self._left
        self._left = None
        world = meet_participants(order, groups, left)
        self._set(order.generation, Phase.RESTORING)
        grouped = time.perf_counter()
        source = StateSource(self.place, self.job, self.config, self.device, self._storage)
        progress = RestoreProgress()
        try:
            filled = source.fill(order, self._known(order), world, groups.over, progress)
            # Untrained weights are no part of the state: each node reads its own from the origin.
            keeps_first = self.job.model.keeps_reference(self.job.training.objective)
            frozen = frozen_units(
                order.plan, self.config, self.place.worker, with_first=keeps_first
            )
            read_bytes = self._frozen.hold(frozen, groups.over)
            if frozen:
                filled.bytes_by_tier["origin"] = read_bytes
            # Once every worker has its state, the generation is committed.
            world.barrier_on_host()
        except BaseException as error:
            broken = self._arrived.keep(order, progress, error, self.device)
            with self._lock:
                self._report = replace(self._report, broken=broken)
            raise
        state = filled.state
        restored = time.perf_counter()
        is_used = self.place.worker in order.plan.workers
        with self._lock:
            replaced = self.live
            self.live = None
            self._arrived.clear()
            if is_used:
                self.live = Live(
                    self.place.worker,
                    order.generation,
                    order.layout,
                    state,
                    StateVersion(order.start_step),
                    offloaded=order.plan.offloads,
                )
            record = RestoreRecord(
                filled.bytes_by_tier,
                grouped - started,
                restored - grouped,
                filled.bad,
                progress.slow,
            )
            self._report = replace(self._report, restore=record, broken=None)
        # From here on the memory of the old state, and what the trainer lets go of in the new one,
        # is free: no name of this frame has it.
        progress.arrived.clear()
        if replaced is not None:
            replaced.close()
            del replaced
        if not is_used:
            return Phase.RELEASED
        return self._train(order, groups, state)

    def _known(self, order: GenerationOrder) -> LiveState | None:
        """Return the state in this worker's memory that the order needs.

        It is the live state, and shards that arrived in an earlier, interrupted restore.
        """
        live = self.live
        arrived = self._arrived.usable_in(order)
        if live is None:
            return LiveState(Layout({}, {}), {}, arrived) if arrived else None
        same = live.version == StateVersion(order.start_step) and order.continues(live.generation)
        return live.known(same, arrived, self.preservation.snapshots.lease)

    def _train(
        self, order: GenerationOrder, groups: GenerationGroups, state: dict[str, Tensor]
    ) -> Phase:
        self.preservation.begin(order)
        generation = WorkerGeneration(
            order.plan,
            self.place.worker,
            groups,
            state,
            order.start_step,
            order.pace,
            self._frozen.tensors,
            self._frozen.reload,
            order.loss_scale,
        )
        trainer: Trainer
        if order.plan.spmd is None:
            parts = self._parts
            self._parts = None
            trainer = StageTrainer(self._setup, generation, self._hooks, parts)
            kept = self._kept
            self._kept = None
            if order.kept_plan is not None:
                assert kept is not None, "the order counts on passes that are not kept"
                dealt = redeal(order.kept_plan, order.plan)
                trainer.resume(kept, dealt[trainer.place.pipeline.stages])
        else:
            trainer = SpmdTrainer(self._setup, generation, self._hooks)
        with self._lock:
            assert self.live is not None
            self.live.trainer = trainer
        self._set(order.generation, Phase.TRAINING)
        return TrainingLoop(order, trainer, self._resources).run()


def _kept_step(live: Live) -> int | None:
    """Return the step whose passes are kept, if it is the next one of the state."""
    kept = None if live.trainer is None else live.trainer.kept
    return kept.step if kept is not None and kept.step == live.version.step else None


def _batches_of(dataset: TokenDataset, training: TrainingSection, device: torch.device) -> Batches:
    """Return the reader of the run's batches, from its place in the sample order on."""
    batch = training.global_batch_sequences
    return Batches(dataset, training.seed, batch, device, first_row=training.first_row)


def _open_evaluation(
    job: Job, config: PreTrainedConfig, device: torch.device
) -> EvaluationRows | None:
    """Open the evaluation rows; None if the job has none."""
    data = job.evaluation_data
    section = job.evaluation
    if data is None or section is None:
        return None
    training = job.training
    dataset = prepare_dataset(data, training.sequence_length)
    dataset.check(vocab_size=int(config.vocab_size), global_batch_sequences=1)
    return EvaluationRows(dataset, training.global_batch_sequences, device, section.max_sequences)


def _length_work_of(dataset: TokenDataset, config: PreTrainedConfig) -> LengthWork | None:
    """Return the work as a function of document lengths; None if rows are alike."""
    squares = dataset.facts.mean_squared_length
    if squares is None:
        return None
    return length_work(config, dataset.sequence_length, squares)
