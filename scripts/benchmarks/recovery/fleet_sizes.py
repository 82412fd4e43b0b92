"""What a death and a notice cost the driver of 64, 256 and 1,024 workers that hold no tensors.

    python -m scripts.benchmarks.recovery.fleet_sizes [--workers N ...] [--json FILE]

Real are the controller, the planner, the orders (pickled as calls are), the report
channel and the rendezvous store; the workers are values in one other process, which follow their
orders in steps of 5 s. A node of 8 is killed, or gets a notice. Seconds are wall time and the
driver's processor time from the strike to the last order, and to the first new step; messages and
bytes are counted from the strike to that step. Idle: the driver's share of a core while all train.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autohet.control.job_state import Training
from autohet.control.planning.orders import OrderBuilder
from autohet.control.values.observation import Loss, NodeView, Notice, Observation
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.background_search import BackgroundPlanning
from autohet.driver.loop.controller import Controller
from autohet.driver.ray.observer import all_train
from autohet.driver.ray.reports.merge_reports import merge_reports
from autohet.driver.ray.reports.report_server import ReportServer
from autohet.driver.ray.reports.wake_up import WakeUp
from autohet.driver.ray.store.rendezvous import Rendezvous
from autohet.driver.ray.workforce import BUSY_GATHER_S, BUSY_TICK_S, CALM_TICK_S, calm_gather_s
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.messages import (
    WITHDRAWN,
    AgentEndpoint,
    Phase,
    Prepared,
    StepRecord,
    WorkerReport,
    split_orders,
)
from autohet.runtime.models.config import load_config
from autohet.runtime.process.report_channel import ReportSender
from autohet.runtime.process.store_connector import StoreConnector
from planner.inputs.fleet import Node, NodeType
from scripts.benchmarks.provenance import provenance
from tests.harness.local_fleet import make_job
from tests.harness.scripted_workforce import ScriptedWorkforce

STEP_S = 5.0
BEAT_S = 0.75
"""Seconds between two signs of life, as under the default `elastic.heartbeat_timeout_s`."""
TICK_S = 0.02
IDLE_S = 15.0
NODE = NodeType(
    "eight", "A100-40", 8, 40 << 30, 300e9, 12e9, usd_per_hour=10.0, spot=True, max_nodes=200
)
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
}


# Workers
# --------------------------------------------------------------------------------------


class QuietSender(ReportSender):
    """A sender without a thread: the process of all workers has one loop."""

    def _run(self) -> None:
        pass


@dataclass
class Life:
    report: WorkerReport
    sender: QuietSender | None = None
    order: Any = None
    following: Any = None
    has_met: bool = False
    stop: bool = False

    def say(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)


class Host:
    """All workers of a run."""

    def __init__(self, commands: Connection) -> None:
        self._commands = commands
        self._lives: dict[str, Life] = {}
        self._store = StoreConnector(60.0)
        self._connected = 0
        self._client: Any = None
        self._next_step_at = 0.0
        self._spoke_at = 0.0
        self.store_calls = 0

    def run(self) -> None:
        while True:
            until = time.monotonic() + TICK_S
            while self._commands.poll(max(0.0, until - time.monotonic())):
                name, arguments = self._commands.recv()
                if name == "close":
                    return
                getattr(self, name)(*arguments)
            self._build()
            if time.monotonic() >= self._next_step_at:
                self._step()
            beats = time.monotonic() - self._spoke_at >= BEAT_S / 2
            if beats:
                self._spoke_at = time.monotonic()
            for life in self._lives.values():
                assert life.sender is not None
                life.sender._look()
                if beats or life.sender._unsent:
                    life.sender._speak()
                if life.report.steps:
                    life.say(steps=())

    def count(self) -> None:
        self._commands.send(self.store_calls)

    def hire(self, addresses: Mapping[str, Any]) -> None:
        for worker, address in addresses.items():
            life = Life(WorkerReport(worker, os.getpid(), 0, Phase.IDLE, 0, None))
            life.sender = QuietSender(
                address, lambda life=life: life.report, lambda old, new: new.is_news_after(old)
            )
            self._lives[worker] = life

    def kill(self, workers: Collection[str]) -> None:
        for worker in workers:
            life = self._lives.pop(worker, None)
            if life is not None and life.sender is not None:
                life.sender._drop()

    def break_off(self) -> None:
        for life in self._lives.values():
            if life.report.phase in (Phase.TRAINING, Phase.BUILDING):
                life.say(phase=Phase.HALTED, error="PeerLost")

    def prepare(self, shared: bytes, workers: Collection[str]) -> None:
        order = pickle.loads(shared)
        for worker in workers:
            self._lives[worker].say(prepared=Prepared(order.generation))

    def begin(self, shared: bytes, own: Mapping[str, bytes]) -> None:
        common = pickle.loads(shared)
        for worker, data in own.items():
            life = self._lives[worker]
            order = replace(common, **pickle.loads(data))
            life.has_met = False
            if order.follows is not None and life.report.live_generation == order.follows:
                life.following = order
            else:
                self._enter(life, order)

    def withdraw(self, workers: Collection[str], generation: int) -> None:
        for worker in workers:
            life = self._lives[worker]
            if life.following is not None and life.following.generation == generation:
                life.following = None
                life.say(prepared=Prepared(generation, WITHDRAWN))

    def request_stop(self, workers: Collection[str]) -> None:
        for worker in workers:
            self._lives[worker].stop = True

    def interrupt(self, workers: Collection[str], generation: int) -> None:
        for worker in workers:
            life = self._lives[worker]
            if life.report.generation <= generation and life.report.phase is Phase.TRAINING:
                life.say(phase=Phase.HALTED)

    def _enter(self, life: Life, order: Any) -> None:
        life.order = order
        life.following = None
        life.stop = False
        life.say(generation=order.generation, phase=Phase.BUILDING, prepared=None, error=None)

    def _build(self) -> None:
        """Workers that build meet in the store, as `GenerationGroups.meet` does."""
        building = [life for life in self._lives.values() if life.report.phase is Phase.BUILDING]
        for life in building:
            order = life.order
            if self._connected != order.generation:
                self._connected = order.generation
                self._client = self._store.connect(order)
            if not life.has_met:
                life.has_met = True
                self.store_calls += 1
                if self._client.add("arrived", 1) == len(order.participants):
                    self._client.set("complete", "1")
        if building and self._client.check(["complete"]):
            self._next_step_at = time.monotonic() + 0.1
            for life in building:
                self.store_calls += 1
                used = life.report.worker in life.order.plan.workers
                life.say(
                    phase=Phase.TRAINING if used else Phase.RELEASED,
                    live_generation=life.order.generation if used else None,
                    step=life.order.start_step,
                    whole=True,
                )

    def _step(self) -> None:
        members = [life for life in self._lives.values() if life.report.phase is Phase.TRAINING]
        if not members or len(members) < len(members[0].order.plan.workers):
            return
        self._next_step_at = time.monotonic() + STEP_S
        step = members[0].report.step
        stops = any(life.stop for life in members)
        following = members[0].following
        begins = following is not None and following.start_step == step + 1 and not stops
        begins = begins and all(life.following is not None for life in members)
        for life in members:
            record = StepRecord(step, 1.0, 1.0, 64, STEP_S, life.order.generation, time.monotonic())
            life.say(steps=(record,), step=step + 1, vote=(step, None))
            if stops:
                life.say(phase=Phase.STOPPED)
            elif begins:
                self._enter(life, life.following)


def serve(commands: Connection) -> None:
    Host(commands).run()


# The driver's side
# --------------------------------------------------------------------------------------


@dataclass
class HostFleet(ScriptedWorkforce):
    """Implements `Workforce` over the process of all workers."""

    sent: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    last_orders_at: float = 0.0
    last_orders_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous("127.0.0.1")
        self.server = ReportServer("127.0.0.1", BEAT_S)
        self.commands, end = multiprocessing.Pipe()
        self.host = multiprocessing.Process(target=serve, args=(end,), daemon=True)
        self.host.start()
        self._names: dict[str, str] = {}
        self._reports: dict[str, WorkerReport | None] = {}
        self._merged_at = 0.0
        self._waited_at = 0.0
        self._wake_up = WakeUp()
        self._wake_up.watch(self.server)

    def observe(self) -> Observation:
        self.now = time.monotonic()
        _, news = self.server.take()
        fresh = []
        for each in news:
            worker = self._names[each.name]
            if worker not in self._reports:
                continue
            self.sent["reports"] += 1
            self.sent_bytes["reports"] += len(pickle.dumps(each.value))
            fresh.append(each.value)
        for report in fresh:
            self._reports[report.worker] = report.without_news()
        reports = merge_reports(self._reports, fresh, self.losses, self._merged_at)
        self._merged_at = self.now
        self.server.acknowledge()
        return Observation(
            self.now,
            dict(self.nodes),
            dict(self.notices),
            reports,
            dict(self.losses),
            self.inventories,
            self.checkpoint,
            store=self.rendezvous.address,
        )

    def wait(self) -> None:
        """As `RayWorkforce.wait` does."""
        phases = {None if each is None else each.phase for each in self._reports.values()}
        is_calm = all_train(phases)
        tick_s = min(CALM_TICK_S, BEAT_S) if is_calm else BUSY_TICK_S
        left_s = self._waited_at + tick_s - time.monotonic()
        self._wake_up.wait(left_s, calm_gather_s(len(self._reports)) if is_calm else BUSY_GATHER_S)
        self._waited_at = time.monotonic()

    def hire(self, workers: Sequence[str]) -> None:
        new = [worker for worker in workers if worker not in self._reports]
        addresses = {}
        for worker in new:
            addresses[worker] = self.server.expect(worker)
            self._names[addresses[worker].name] = worker
            self._reports[worker] = None
        if new:
            self.commands.send(("hire", (addresses,)))

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self._reports.pop(worker, None)
        self.commands.send(("kill", (workers,)))

    def prepare(self, orders: Mapping[str, Any]) -> None:
        (order, *_) = orders.values()
        shared = pickle.dumps(self.rendezvous.with_secret(order))
        self.sent["prepare"] += len(orders)
        self.sent_bytes["prepare"] += self._copied(shared, orders)
        self.commands.send(("prepare", (shared, tuple(orders))))

    def _copied(self, shared: bytes, workers: Collection[str]) -> int:
        """Bytes of an object that Ray's store copies to each node once."""
        return len(shared) * len({worker.split("/")[0] for worker in workers})

    def begin(self, orders: Mapping[str, Any]) -> None:
        common, fields = split_orders(orders)
        shared = pickle.dumps(self.rendezvous.with_secret(common))
        own = {worker: pickle.dumps(each) for worker, each in fields.items()}
        self.sent["begin"] += len(own)
        self.sent_bytes["begin"] += self._copied(shared, own) + sum(map(len, own.values()))
        self.commands.send(("begin", (shared, own)))
        self.last_orders_at = time.monotonic()
        self.last_orders_cpu_s = time.process_time()

    def withdraw(self, workers: Sequence[str], generation: int) -> None:
        self.sent["withdraw"] += len(workers)
        self.commands.send(("withdraw", (workers, generation)))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self.sent["request_stop"] += len(workers)
        self.commands.send(("request_stop", (workers,)))

    def request_checkpoint(self, worker: str) -> None:
        pass

    def interrupt(self, workers: Sequence[str], generation: int, *, keep: bool = False) -> None:
        self.sent["interrupt"] += len(workers)
        self.commands.send(("interrupt", (workers, generation)))

    def kill(self, name: str) -> None:
        del self.nodes[name]
        gone = [worker for worker in self._reports if worker.startswith(f"{name}/")]
        for worker in gone:
            del self._reports[worker]
            self.losses[worker] = Loss(worker, "killed", self.now, self.now)
        self.commands.send(("kill", (gone,)))
        self.commands.send(("break_off", ()))

    def count_store_calls(self) -> int:
        self.commands.send(("count", ()))
        return int(self.commands.recv())

    def close(self) -> None:
        self.commands.send(("close", ()))
        self.host.join(10)
        self._wake_up.close()
        self.server.close()
        self.rendezvous.close()


def measure(job: Job, num_workers: int) -> dict[str, Any]:
    """Return the figures of one size: of a node's death, of a notice, and of rest."""
    fleet = HostFleet(NODE)
    planning = BackgroundPlanning(planning_inputs(job))
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)))
    controller = Controller(job, fleet, planning, orders, EventLog(None))
    controller.memory.prepares = True
    controller.memory.cuts_over = True
    try:
        for number in range(num_workers // NODE.num_gpus):
            name = f"n{number}"
            view = NodeView(Node(name, NODE), time.monotonic())
            fleet.nodes[name] = replace(view, endpoint=_endpoint(name))
        started = time.monotonic()
        run_until_trained(controller, fleet, 0)
        document: dict[str, Any] = {"start_s": round(time.monotonic() - started, 2)}
        document["idle_share_of_a_core"] = round(rest(controller), 4)
        for event in ("death", "notice"):
            document[event] = strike(controller, fleet, event)
            rest(controller)
        return document
    finally:
        fleet.close()


def _endpoint(name: str) -> AgentEndpoint:
    return AgentEndpoint(name, "here", 1, "token")


def rest(controller: Controller) -> float:
    """Return the driver's share of a core while all workers train."""
    began = time.monotonic()
    cpu_s = time.process_time()
    while time.monotonic() - began < IDLE_S:
        controller.tick()
    return (time.process_time() - cpu_s) / (time.monotonic() - began)


def run_until_trained(controller: Controller, fleet: HostFleet, generation: int) -> None:
    """Run until a step of a later generation than this one is committed."""
    deadline = time.monotonic() + 500
    while True:
        controller.tick()
        memory = controller.memory
        assert controller.ended is None, controller.ended
        assert time.monotonic() < deadline, controller.state
        is_new = memory.generation > generation and isinstance(controller.state, Training)
        if is_new and memory.ledger.open_change is None:
            return


def strike(controller: Controller, fleet: HostFleet, event: str) -> dict[str, Any]:
    victim = max(fleet.nodes, key=lambda name: int(name[1:]))
    generation = controller.memory.generation
    fleet.sent.clear()
    fleet.sent_bytes.clear()
    calls = fleet.count_store_calls()
    began = time.monotonic()
    cpu_s = time.process_time()
    if event == "death":
        fleet.kill(victim)
    else:
        fleet.notices[victim] = Notice(victim, "test", fleet.now, fleet.now + 120.0)
    run_until_trained(controller, fleet, generation)
    return {
        "last_order_s": round(fleet.last_orders_at - began, 3),
        "last_order_processor_s": round(fleet.last_orders_cpu_s - cpu_s, 3),
        "first_step_s": round(time.monotonic() - began, 3),
        "processor_s": round(time.process_time() - cpu_s, 3),
        "messages": dict(fleet.sent),
        "bytes": dict(fleet.sent_bytes),
        "store_calls": fleet.count_store_calls() - calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"what": __doc__.splitlines()[0], **provenance(), "sizes": {}}
    for number in options.workers:
        with tempfile.TemporaryDirectory() as directory:
            job = make_job(
                Path(directory),
                model={"config": {"model_type": "llama", "max_position_embeddings": 2048, **MODEL}},
                training={
                    "global_batch_sequences": 4 * number,
                    "sequence_length": 16,
                    "steps": 100_000,
                },
                parallelism={"max_tp_degree": 8, "min_pipelines": 2, "microbatch_sequences": 4},
            )
            document["sizes"][number] = measure(job, number)
        print(number, json.dumps(document["sizes"][number]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
