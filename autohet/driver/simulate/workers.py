"""SIMULATED workers: the processes of a job, and the generation that they train in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autohet.driver.control.observation import Loss
from autohet.driver.simulate.clock import SimulatedClock
from autohet.driver.simulate.copies import SimulatedCopies
from autohet.driver.simulate.costs import Costs, PushedCopies
from autohet.driver.simulate.generation import MOVING, SimulatedGeneration, SimulatedJob
from autohet.driver.simulate.machines import SimulatedMachines
from autohet.driver.simulate.order_bytes import push_s, upload_s
from autohet.driver.simulate.spending import S3Requests
from autohet.driver.simulate.trained_span import TrainedSpan
from autohet.runtime.messages import GenerationOrder, Phase, RestoreRecord, WorkerReport
from planner.cluster import node_of
from planner.plan import Plan

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

    # directions
    # ------------------------------------------------------------------------------

    def hire(self, workers: Sequence[str]) -> None:
        start_s = self._costs.process_start_s + self._costs.data_s
        for worker in workers:
            if worker not in self._live and node_of(worker) in self._machines.nodes:
                self.losses.pop(worker, None)
                self._live[worker] = (None, 0)
                self._starts[worker] = self._clock.now + start_s

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self._live.pop(worker, None)
            self._starts.pop(worker, None)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self._copies.keep_newest_round(self.generation)
        order = next(iter(orders.values()))
        transfers = order.transfers
        restore_s = 0.0 if transfers is None else transfers.makespan_s
        rebuilt_at = self._clock.now + self._costs.rebuild_s + self._costs.nccl_s(len(orders))
        self._drop_steps_from(order.start_step)
        generation = self._prepare(orders, rebuilt_at + restore_s)
        self.spans.append(generation.span)
        self.generation = generation
        tiers = {} if transfers is None else dict(transfers.bytes_by_tier)
        self.s3_requests.count_restore(tiers.get("s3", 0))
        self._restored = (order.plan.workers[0], RestoreRecord(tiers, 0.0, restore_s))
        self._copies.inventories = None
        self._clock.note_change()
        self.halt_on(self._machines.dead)

    def _prepare(
        self, orders: Mapping[str, GenerationOrder], ready_at: float
    ) -> SimulatedGeneration:
        order = next(iter(orders.values()))
        members = order.plan.workers
        uploading_s = upload_s(orders, self._costs.s3_bytes_per_s)
        pushing_s = push_s(orders)
        rounds_every = max(1, order.replicate_every_steps)
        undisturbed_s, sync_s = self._pace(order.plan)
        step_s = self._costs.disturbed_step_s(
            undisturbed_s,
            sync_s,
            self._machines.slowest_network([node_of(worker) for worker in members]),
            uploading_s,
            self._job.every_steps,
            PushedCopies(pushing_s / rounds_every, self._job.replication_share),
        )
        span = TrainedSpan(
            order.generation,
            order.start_step,
            ready_at + self._costs.first_step_s,
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

    def _drop_steps_from(self, step: int) -> None:
        """Remove the steps from this one on, which are lost."""
        for span in self.spans:
            span.num_steps = max(0, min(span.num_steps, step - span.first_step))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        if self.generation is not None:
            self.generation.stop = True
            self.generation.upload = checkpoint

    def interrupt(self, workers: Sequence[str], generation: int) -> None:
        running = self.generation
        if running is None or running.phase not in MOVING:
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
        if self.generation is not None and self.generation.phase is Phase.BUILDING:
            moments.append(self.generation.ready_at)
        return moments

    def make_steps(self, moment: float) -> None:
        """Make the steps that end until `moment`."""
        generation = self.generation
        if generation is None:
            return
        ended_at = generation.step_ends_at
        if generation.make_steps(moment, self._job):
            if generation.phase is Phase.STOPPED:
                self._clock.changed_at = ended_at
            self._note_state(generation)

    def finish_building(self) -> None:
        """Begin to train once the generation is built."""
        generation = self.generation
        if generation is None or generation.phase is not Phase.BUILDING:
            return
        if generation.ready_at <= self._clock.now:
            generation.phase = Phase.TRAINING
            generation.step_ends_at = (
                generation.ready_at + self._costs.first_step_s + generation.step_s
            )
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
        if any(node_of(worker) in nodes for worker in generation.orders):
            generation.phase = Phase.HALTED

    def lose(self, node: str, died: float) -> None:
        """Lose the processes of a node that has died or was released."""
        for worker in [worker for worker in self._live if node_of(worker) == node]:
            del self._live[worker]
            self._starts.pop(worker, None)
            self.losses[worker] = Loss(worker, "its node died", self._clock.now, died)

    # reports
    # ------------------------------------------------------------------------------

    def take_reports(self) -> dict[str, WorkerReport]:
        """Return the reports of all processes that are up; news is reported once."""
        now = self._clock.now
        reports = {
            worker: self._report(worker)
            for worker in self._live
            if self._starts.get(worker, 0.0) <= now
        }
        if self.generation is not None:
            self.generation.drop_news(now)
        return reports

    def _report(self, worker: str) -> WorkerReport:
        live_generation, step = self._live[worker]
        generation = self.generation
        if generation is None or worker not in generation.orders:
            return WorkerReport(worker, 1, 0, Phase.IDLE, step, live_generation)
        number = generation.order.generation
        phase = generation.phase
        done: list[int] = []
        if worker in generation.members:
            done = [s for at, s in generation.uploads if at <= self._clock.now]
        elif phase not in (Phase.BUILDING, Phase.HALTED):
            phase = Phase.RELEASED
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
            steps=tuple(generation.records) if worker == generation.first_member else (),
            receipts=tuple((number, s, ("simulated",)) for s in done[-1:]),
            restore=restore,
        )
