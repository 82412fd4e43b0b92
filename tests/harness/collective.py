"""Workers that restore and step together, as a collective does, and know what their state truly is:
no clock, no network.

One that is gone halts its peers, one that says nothing blocks them. Each live state carries its
history; an order that would mix two histories, or keep what is not there, is an AssertionError.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from autohet.runtime.messages import (
    GenerationOrder,
    InterruptedRestore,
    Phase,
    StepRecord,
    WorkerReport,
)
from recovery.state.holdings import Holding, Source
from recovery.state.layout import ShardId
from tests.harness.scripted_workforce import TICK_S, Process, ScriptedWorkforce
from tests.harness.true_copies import Copy, History, TrueCopies

MOVING = (Phase.BUILDING, Phase.TRAINING)
ABSENT = (None, Phase.IDLE, Phase.HALTED, Phase.FAILED)


@dataclass
class Life(Process):
    """One process. `silent_at`: since when it says and hears nothing, until `wakes_at`; `gone`: it
    is no more, and its peers know; `deaf`: it answers, but stays where it is; `mail`: what it was
    told and has not heard yet; `said`: its last answer; `filled`: what a restore has brought that
    has not ended for it; `following`: orders for a cut-over.
    """

    hired_at: float = 0.0
    up_at: float = 0.0
    silent_at: float | None = None
    wakes_at: float = 0.0
    gone: bool = False
    deaf: bool = False
    history: History = ()
    arrived: History = ()
    filled: History | None = None
    following: GenerationOrder | None = None
    durable: bool = False
    steps: list[StepRecord] = field(default_factory=list)
    uploads: list[tuple[float, int, int]] = field(default_factory=list)
    mail: list[Callable[[], None]] = field(default_factory=list)
    said: WorkerReport | None = None

    def halt(self) -> None:
        if self.report.phase in MOVING and not self.deaf and self.silent_at is None:
            self.report = replace(self.report, phase=Phase.HALTED, error="PeerLost")

    def roll_forward(self, step: int) -> None:
        if (
            self.report.prepared_step == step == self.report.step
            and self.report.live_generation is not None
        ):
            self.history = (*self.history, self.report.live_generation)
            self.report = replace(self.report, step=step + 1, prepared_step=None, vote=(step, None))

    def hear(self) -> None:
        while self.mail and self.silent_at is None:
            self.mail.pop(0)()


@dataclass
class Collective(ScriptedWorkforce):
    """The newest generation's workers.

    `advance` lets everybody go on by one step, or by one tick of a build.
    """

    step_timeout_s: float = 6.0
    every_steps: int = 10
    upload_s: float = 3 * TICK_S
    torn: frozenset[str] | None = None
    """If set, the next step's vote, or the next restore's end, is seen by these workers alone."""
    bad_restores: set[str] = field(default_factory=set)
    compute_s: dict[str, float] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    order: GenerationOrder | None = None
    copies: TrueCopies = field(default_factory=TrueCopies)
    cut: set[str] = field(default_factory=set)
    next: GenerationOrder | None = None
    """Generation whose orders are out for a cut-over."""
    num_cut_overs: int = 0
    _cuts_over: bool = False
    """The newest vote says that the next generation begins."""
    _moved_at: float = 0.0
    _vote: tuple[bool, bool] = (False, False)

    # what is true
    # ------------------------------------------------------------------------------

    def live_copies(self) -> list[Copy]:
        """In memory of workers that answer; a step that is prepared and that somebody saw committed
        counts.
        """
        found = []
        lives = [
            p for w, p in self.processes.items() if w not in self.losses and p.silent_at is None
        ]
        votes = {
            (p.report.live_generation, p.report.vote[0]) for p in lives if p.report.vote is not None
        }
        for process in lives:
            report = process.report
            generation = process.report.live_generation
            if generation is None:
                continue
            found.append(
                (self.copies.live(report.worker, report.step, generation), process.history)
            )
            if (generation, report.prepared_step) in votes:
                holding = self.copies.live(report.worker, report.step + 1, generation)
                found.append((holding, (*process.history, generation)))
        return found

    def newest_whole_step(self) -> int | None:
        """What a restore could get at now, if it knew all."""
        return self.copies.newest_whole_step(self.live_copies())

    # going on
    # ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Everybody goes on together, or is blocked.

        True after a moment that only some have seen.
        """
        order = self.order
        moving = (
            [] if order is None else [w for w in order.participants if self._phase(w) in MOVING]
        )
        if order is None or not moving:
            return False
        building = any(self._phase(w) is Phase.BUILDING for w in moving)
        needed = order.participants if building else order.plan.workers
        if (
            any(self._phase(w) in ABSENT for w in needed)
            or self.now - self._moved_at > self.step_timeout_s
        ):
            for worker in moving:
                self.processes[worker].halt()
            return False
        if any(self._stuck(self.processes[w]) for w in moving):
            return False
        self._moved_at = self.now
        torn = self.torn
        self._build(order, moving) if building else self._train(order)
        return torn is not None and self.torn is None

    def _phase(self, worker: str) -> Phase | None:
        """What a peer of this generation would find: None where there is nobody."""
        process = self.processes.get(worker)
        if process is None or process.gone or self.order is None:
            return None
        if self._has_cut_over(process):
            return Phase.TRAINING if process.report.phase is Phase.BUILDING else Phase.HALTED
        if process.report.generation != self.order.generation:
            return Phase.BUILDING if process.mail else None  # it has not read its orders yet
        return process.report.phase

    def _has_cut_over(self, process: Life) -> bool:
        """It has begun the next generation, and others have not seen the vote yet."""
        number = None if self.next is None else self.next.generation
        return self._cuts_over and process.report.generation == number

    def _stuck(self, process: Life) -> bool:
        assert self.order is not None
        return (
            process.silent_at is not None
            or process.deaf
            or (
                process.report.generation != self.order.generation
                and not self._has_cut_over(process)
            )
        )

    # a build
    # ------------------------------------------------------------------------------

    def enter(self, process: Life, order: GenerationOrder) -> None:
        """A worker reads its orders."""
        process.order = order
        process.ticks_to_build = self.builds
        process.stop = process.durable = False
        process.filled = process.following = None
        broken = process.report.broken
        process.report = replace(
            process.report,
            generation=order.generation,
            phase=Phase.BUILDING,
            error=None,
            broken=None if broken is None else replace(broken, bad=()),
        )

    def _build(self, order: GenerationOrder, moving: list[str]) -> None:
        building = [w for w in moving if self._phase(w) is Phase.BUILDING]
        for worker in building:
            self.processes[worker].ticks_to_build -= 1
        if any(self.processes[w].ticks_to_build > 0 for w in building):
            return
        found = {w: self._fill(w, order) for w in order.plan.workers if w in building}
        failing = [
            w for w in building if w in self.bad_restores or (w in found and found[w] is None)
        ]
        if failing:
            self._break_off(order, building, failing)
            return
        for worker, history in found.items():
            self.processes[worker].filled = history
        seers = building if self.torn is None else [w for w in building if w in self.torn]
        if self.torn is not None:
            self._note_arrived(order, [w for w in building if w not in seers])
            self.torn = None
        for worker in seers:
            self._restored(worker, order, found.get(worker))

    def _restored(self, worker: str, order: GenerationOrder, history: History | None) -> None:
        process = self.processes[worker]
        part = history is not None
        process.history = history or ()
        live, step = (order.generation, order.start_step) if part else (None, 0)
        process.report = replace(
            process.report,
            phase=Phase.TRAINING if part else Phase.RELEASED,
            live_generation=live,
            step=step,
            prepared_step=None,
            vote=None,
            broken=None,
            snapshot_step=None,
            replicated_step=None,
        )
        if part and order.start_step >= order.end_step:
            process.report = replace(process.report, phase=Phase.FINISHED)
            self._upload(process, order)

    def _break_off(self, order: GenerationOrder, building: list[str], failing: list[str]) -> None:
        whole = [w for w in building if w not in failing]
        self._note_arrived(order, whole)
        for worker in whole:
            self.processes[worker].halt()
        for worker in failing:
            self.bad_restores.discard(worker)
            process = self.processes[worker]
            broken = process.report.broken or InterruptedRestore(order.start_step, order.generation)
            bad = tuple(self._suspects(worker, order))
            self.copies.bad.update(told for told in bad if told[0].kind != "s3")
            process.report = replace(
                process.report,
                phase=Phase.FAILED,
                error="RestoreError",
                broken=replace(broken, bad=bad),
            )

    def _suspects(self, worker: str, order: GenerationOrder) -> Iterable[tuple[Source, ShardId]]:
        """Copies that this worker will call bad: those that are not there, else the first that it
        was to read.
        """
        part = None if order.transfers is None else order.transfers.parts.get(worker)
        fetches = () if part is None else part.fetches
        missing = [f for f in fetches if self.copies.read(f.sources, f.shards[0]) is None]
        for fetch in missing or fetches[:1]:
            yield from ((fetch.sources[0], shard) for shard in fetch.shards[:2])

    def _note_arrived(self, order: GenerationOrder, workers: Iterable[str]) -> None:
        """What a restore had brought when it broke off: every second shard of what each worker was
        to have.
        """
        for worker in workers:
            history = (
                self._fill(worker, order)
                if worker in order.plan.workers and order.transfers
                else None
            )
            if history is not None:
                process = self.processes[worker]
                process.arrived = history
                shards = sorted(order.layout.shards_by_worker[worker])[::2]
                process.report = replace(
                    process.report,
                    broken=InterruptedRestore(
                        order.start_step, order.generation, frozenset(shards)
                    ),
                )

    def _fill(self, worker: str, order: GenerationOrder) -> History | None:
        """The history of the state that the orders give this worker: one, the same for every shard.
        None: something cannot be had.
        """
        if self.processes[worker].filled is not None:
            return self.processes[worker].filled
        if order.transfers is None:
            assert order.start_step == 0
            return ()
        found = {
            self._read(worker, shard, order) for shard in order.layout.shards_by_worker[worker]
        }
        if None in found:
            return None
        assert len(found) == 1, f"{worker} would mix states of the histories {found}"
        (history,) = found
        assert len(history) == order.start_step
        return history

    def _read(self, worker: str, shard: ShardId, order: GenerationOrder) -> History | None:
        assert order.transfers is not None
        part = order.transfers.parts.get(worker)
        for message in () if part is None else part.messages:
            if message.destination == worker and shard in message.shards:
                return self._read(message.source, shard, order)
        for fetch in () if part is None else part.fetches:
            if shard in fetch.shards:
                return self.copies.read(fetch.sources, shard)
        return self._own(worker, shard, order.start_step)

    def _own(self, worker: str, shard: ShardId, step: int) -> History:
        process = self.processes[worker]
        generation = process.report.live_generation
        broken = process.report.broken
        live = generation is not None and process.report.step == step
        if live and shard in self.copies.layouts[generation].shards_by_worker[worker]:
            return process.history
        assert broken is not None, f"{worker} is to keep {shard}, which it has not"
        assert broken.step == step, (
            f"{worker} is to keep {shard} of step {step}, but has it of {broken.step}"
        )
        assert shard in broken.arrived
        return process.arrived

    # a step
    # ------------------------------------------------------------------------------

    def _train(self, order: GenerationOrder) -> None:
        members = {w: self.processes[w] for w in order.plan.workers}
        behind = [p for p in members.values() if p.report.prepared_step is not None]
        training = [p for p in members.values() if p.report.phase is Phase.TRAINING]
        if not behind:
            self._vote = (any(p.stop for p in training), any(p.durable for p in training))
            self._cuts_over = self._are_ready([*members.values()])
        for process in behind or training:
            if not behind and self.torn is not None and process.report.worker not in self.torn:
                process.report = replace(process.report, prepared_step=process.report.step)
            else:
                self._apply(process, order)
        self.torn = None
        if all(process.report.prepared_step is None for process in members.values()):
            self._replicate(members.values())
            if self._cuts_over:
                self.order, self.next, self._cuts_over = self.next, None, False
                assert self.order is not None
                self.copies.begin(self.order)
                self.num_cut_overs += 1

    def _are_ready(self, members: list[Life]) -> bool:
        """All have their orders, newcomers too, and the vote is that of the step before."""
        order = self.next
        if order is None or any(process.stop for process in members):
            return False
        ready = all(p.following is order and p.report.step == order.start_step - 1 for p in members)
        names = {process.report.worker for process in members}
        newcomers = [self.processes.get(w) for w in order.participants if w not in names]
        return ready and all(
            p is not None and not p.gone and p.report.generation == order.generation
            for p in newcomers
        )

    def _replicate(self, members: Collection[Life]) -> None:
        """A round that every worker ends at once, or that is given up because some copy finds no
        place.
        """
        placed = [
            self.copies.push(p.order, p.history, self.nodes.keys() - self.cut) for p in members
        ]
        if all(placed):
            for process in members:
                process.report = replace(process.report, replicated_step=len(process.history) - 1)

    def _apply(self, process: Life, order: GenerationOrder) -> None:
        worker = process.report.worker
        done = process.report.step + 1
        process.history = (*process.history, order.generation)
        self._record(process, order)
        stop, durable = self._vote
        phase = (
            Phase.FINISHED if done >= order.end_step else Phase.STOPPED if stop else Phase.TRAINING
        )
        process.report = replace(
            process.report,
            step=done,
            phase=phase,
            vote=(done - 1, None),
            prepared_step=None,
            snapshot_step=done,
        )
        if phase is Phase.FINISHED or durable or done % self.every_steps == 0:
            self._upload(process, order)
        if self._cuts_over:
            assert self.next is not None
            self.enter(process, self.next)
        source = Source("memory", node_of(worker), worker, done, order.generation)
        if source.node in self.nodes.keys() - self.cut:
            self.copies.keep(
                Holding(source, order.layout.shards_by_worker[worker]), process.history
            )

    def _record(self, process: Life, order: GenerationOrder) -> None:
        step = process.report.step
        worker = process.report.worker
        rated_s = self.compute_s.get(worker)
        parts_s = (
            {} if rated_s is None else {"compute": rated_s * self.slow.get(node_of(worker), 1.0)}
        )
        record = StepRecord(
            step, 1.0 / (step + 1), 1.0, 64, TICK_S, order.generation, self.now, parts_s
        )
        process.steps.append(record)

    def _upload(self, process: Life, order: GenerationOrder) -> None:
        step = len(process.history)
        self.copies.uploaded[order.generation, step] = process.history
        process.uploads.append((self.now + self.upload_s, order.generation, step))


def node_of(worker: str) -> str:
    return worker.rsplit("/", 1)[0]


def on_nodes(workers: Iterable[str], nodes: Collection[str]) -> list[str]:
    return [worker for worker in workers if node_of(worker) in nodes]
