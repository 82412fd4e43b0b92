"""SIMULATED workers: the processes of a job, and the generation that they train in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autohet.control.checkpoint_pace import MOST_S
from autohet.control.job_memory import CheckpointPace
from autohet.control.values.observation import Loss
from autohet.runtime.messages import (
    GenerationOrder,
    Phase,
    RestoreRecord,
    StepRecord,
    WorkerReport,
)
from autohet.simulate.costs import Costs, PushedCopies
from autohet.simulate.dollars.spending import S3Requests
from autohet.simulate.fleet.clock import SimulatedClock
from autohet.simulate.fleet.copies import SimulatedCopies
from autohet.simulate.fleet.generation import MOVING, SimulatedGeneration, SimulatedJob
from autohet.simulate.fleet.machines import SimulatedMachines
from autohet.simulate.fleet.order_bytes import push_s, snapshot_s, upload_s
from autohet.simulate.fleet.preparation import SimulatedPreparation
from autohet.simulate.trained_span import TrainedSpan
from planner.inputs.fleet import node_of
from planner.plans.communicators import communicators_by_worker
from planner.plans.plan import Plan

PaceOfPlan = Callable[[Plan], tuple[float, float]]
"""Function from a plan to its predicted seconds: (step, exposed gradient sync of it)."""


class SimulatedWorkers:
    """Worker processes, the newest generation, and the spans of steps that were trained."""

    def __init__(
        self,
        machines: SimulatedMachines,
        copies: SimulatedCopies,
        pace: PaceOfPlan,
        costs: Costs,
        job: SimulatedJob,
        clock: SimulatedClock,
    ) -> None:
        self.generation: SimulatedGeneration | None = None
        self.spans: list[TrainedSpan] = []
        self.losses: dict[str, Loss] = {}
        self.s3_requests = S3Requests()
        self.checkpoint_pace = CheckpointPace()
        """The controller's, by which it requests checkpoints."""
        self._machines = machines
        self._copies = copies
        self._pace = pace
        self._costs = costs
        self._job = job
        self._clock = clock
        self._live: dict[str, tuple[int | None, int]] = {}
        """Live generation and step of each worker that has a process."""
        self._starts: dict[str, float] = {}
        """Second at which each worker's process is up."""
        self._restored: tuple[str, RestoreRecord] | None = None
        self.preparation = SimulatedPreparation(costs, clock, self._starts)
        self.prepare = self.preparation.prepare
        self.withdraw = self.preparation.withdraw

    # directions
    # ------------------------------------------------------------------------------

    def hire(self, workers: Sequence[str]) -> None:
        start_s = self._costs.process_start_s + self._costs.data_s
        for worker in workers:
            is_new = worker not in self._live
            if is_new and node_of(worker) in self._machines.nodes:
                self.losses.pop(worker, None)
                self._live[worker] = (None, 0)
                self._starts[worker] = self._clock.now + start_s

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self._live.pop(worker, None)
            self._starts.pop(worker, None)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        order = _any_order(orders)
        if order.follows is not None:
            self.preparation.orders = orders
            return
        rebuild_s = self.preparation.rebuild_s(order.generation)
        if not self._job.on_cpu:
            num_groups = max(communicators_by_worker(order.plan, tied=False).values())
            rebuild_s += self._costs.nccl_s(len(orders), num_groups)
        self._begin(orders, self._clock.now + rebuild_s)

    def _begin(
        self, orders: Mapping[str, GenerationOrder], rebuilt_at: float
    ) -> SimulatedGeneration:
        # The copies of the present generation are those that it has made until this moment.
        self._copies.keep_newest_round(self.generation)
        order = _any_order(orders)
        is_warm = self.preparation.is_ready(order.generation)
        self.preparation.end()
        restore_s = 0.0
        bytes_by_tier: dict[str, int] = {}
        if order.transfers is not None:
            restore_s = order.transfers.makespan_s
            bytes_by_tier = dict(order.transfers.bytes_by_tier)

        _drop_steps_from(self.spans, order.start_step)
        self.generation = generation = self._make_generation(
            orders, rebuilt_at + restore_s, is_warm=is_warm
        )
        self.spans.append(generation.span)

        self.s3_requests.count_restore(bytes_by_tier.get("s3", 0))
        # One worker reports the restore of all, so that the driver counts its bytes once.
        self._restored = (order.plan.workers[0], RestoreRecord(bytes_by_tier, 0.0, restore_s))
        self._copies.inventories = None
        self._clock.note_change()
        # A member may have died unnoticed between the decision and this moment.
        self.halt_on(self._machines.dead)
        return generation

    def _make_generation(
        self, orders: Mapping[str, GenerationOrder], ready_at: float, *, is_warm: bool
    ) -> SimulatedGeneration:
        order = _any_order(orders)
        members = order.plan.workers
        uploading_s = upload_s(orders, self._costs.s3_bytes_per_s)
        pushing_s = push_s(orders)

        undisturbed_s, sync_s = self._pace(order.plan)
        network_bytes_per_s = self._machines.slowest_network([node_of(each) for each in members])
        rounds_every = max(1, order.replicate_every_steps)
        copies = PushedCopies(
            pushing_s / rounds_every,
            self._job.replication_share,
            snapshot_s(orders, self._costs.snapshot_bytes_per_s),
        )
        step_s = self._costs.disturbed_step_s(
            undisturbed_s,
            sync_s,
            network_bytes_per_s,
            uploading_s,
            # The interval of the checkpoints that the controller requests is as known now.
            self._job.every_steps
            or self.checkpoint_pace.steps
            or max(1, round(MOST_S / undisturbed_s)),
            copies,
        )
        has_new = any(self._live.get(worker, (None, 0))[0] is None for worker in members)
        # A stage of several workers communicates in its first pass, which nothing runs ahead.
        is_warm &= all(stage.tp_degree == 1 for stage in order.plan.stages)
        is_cold = has_new and not is_warm
        warm_up_s = self._costs.first_step_s if is_cold else self._costs.warm_step_s
        span = TrainedSpan(
            order.generation,
            order.start_step,
            ready_at + warm_up_s,
            step_s,
            len(members),
        )
        return SimulatedGeneration(
            orders,
            order,
            ready_at,
            step_s,
            uploading_s,
            pushing_s,
            span,
            step=order.start_step,
            members=frozenset(members),
            first_member=members[0],
        )

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        if self.generation is not None:
            self.generation.stop = True
            self.generation.upload = checkpoint

    def request_checkpoint(self, worker: str) -> None:
        if self.generation is not None:
            self.generation.saves = True

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        running = self.generation
        if running is None or running.phase not in MOVING or running.members.isdisjoint(workers):
            return
        if running.order.generation <= generation:
            running.phase = Phase.HALTED
            self._clock.note_change()

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        """Roll workers forward: no-op, since steps end for all at once here."""

    # time
    # ------------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """True if workers train and are not to stop."""
        generation = self.generation
        return generation is not None and generation.phase is Phase.TRAINING and not generation.stop

    def due(self) -> list[float]:
        """Return the times at which processes are up, and the generation is built."""
        moments = [at for at in self._starts.values() if at > self._clock.now]
        generation = self.generation
        if generation is not None and generation.phase is Phase.BUILDING:
            moments.append(generation.ready_at)
        return moments + self.preparation.due()

    def make_steps(self, moment: float) -> None:
        """Make the steps that end until `moment`."""
        generation = self.generation
        if generation is None:
            return
        ended_at = generation.step_ends_at
        if generation.make_steps(moment, self._job, self.preparation.begins_at):
            if generation.phase is Phase.STOPPED:
                # The workers stood from the step's end on, before the moment that is looked at.
                self._clock.changed_at = ended_at
            self._note_state(generation)
        if generation.is_at(self.preparation.begins_at):
            ended_at = generation.step_ends_at - generation.step_s
            following = self._begin(self.preparation.orders, ended_at + self._costs.cut_over_s)
            following.records = generation.records

    def finish_building(self) -> None:
        """Begin to train once the generation is built."""
        generation = self.generation
        if generation is None or generation.phase is not Phase.BUILDING:
            return
        if generation.ready_at <= self._clock.now:
            generation.phase = Phase.TRAINING
            generation.step_ends_at = generation.span.begin_s + generation.step_s
            self._clock.note_change()
            self._note_state(generation)

    def _note_state(self, generation: SimulatedGeneration) -> None:
        """Record that all members hold the generation's state of this step."""
        for worker in generation.order.plan.workers:
            self._live[worker] = (generation.order.generation, generation.step)

    def halt_on(self, nodes: Collection[str]) -> None:
        """Halt the generation if it has workers on one of these nodes, which have died."""
        generation = self.generation
        if generation is None or generation.phase not in MOVING:
            return
        # Those that only gave their state are needed until it is built.
        needed = generation.orders if generation.phase is Phase.BUILDING else generation.members
        if any(node_of(worker) in nodes for worker in needed):
            generation.phase = Phase.HALTED

    def lose(self, node: str, died: float) -> None:
        """Lose the processes of a node that has died or was released."""
        lost = [worker for worker in self._live if node_of(worker) == node]
        for worker in lost:
            del self._live[worker]
            self._starts.pop(worker, None)
            self.losses[worker] = Loss(worker, "its node died", self._clock.now, died)

    # reports
    # ------------------------------------------------------------------------------

    def take_reports(self) -> dict[str, WorkerReport]:
        """Return the reports of all processes that are up; news is reported once."""
        now = self._clock.now
        reports = {}
        for worker in self._live:
            if self._starts.get(worker, 0.0) <= now:
                reports[worker] = self._report(worker)
        if self.generation is not None:
            self.generation.drop_news(now)
        return reports

    def _report(self, worker: str) -> WorkerReport:
        live_generation, step = self._live[worker]
        generation = self.generation
        prepared = self.preparation.outcome(worker)
        if generation is None or worker not in generation.orders:
            idle = Phase.IDLE
            return WorkerReport(worker, 1, 0, idle, step, live_generation, prepared=prepared)

        number = generation.order.generation
        phase = generation.phase
        receipts = []
        if worker in generation.members:
            uploaded = [step for ends_at, step in generation.uploads if ends_at <= self._clock.now]
            # A newer checkpoint replaces the older ones, so the newest receipt is enough.
            receipts = [(number, newest, ("simulated",)) for newest in uploaded[-1:]]
        elif phase not in (Phase.BUILDING, Phase.HALTED):
            # It only gave its state to the new members, and is done once these are built.
            phase = Phase.RELEASED

        # All members make the same steps: one of them reports these for all.
        records: list[StepRecord] = []
        if worker == generation.first_member:
            records = generation.records

        restore = None
        if self._restored is not None and self._restored[0] == worker:
            restore = self._restored[1]
        return WorkerReport(
            worker,
            1,
            number,
            phase,
            step,
            live_generation,
            steps=tuple(records),
            receipts=tuple(receipts),
            restore=restore,
            prepared=prepared,
        )


def _any_order(orders: Mapping[str, GenerationOrder]) -> GenerationOrder:
    """Return one order of a generation, for the fields that all its orders share."""
    return next(iter(orders.values()))


def _drop_steps_from(spans: Sequence[TrainedSpan], step: int) -> None:
    """Remove the steps from this one on, which are lost."""
    for span in spans:
        num_before = step - span.first_step
        span.num_steps = max(0, min(span.num_steps, num_before))
