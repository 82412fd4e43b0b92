"""One run of the exact job on a fleet of processes, struck where a test says, and what came of
it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autohet.control.job_state import Training
from autohet.control.planning.orders import OrderBuilder
from autohet.control.states import cutting_over
from autohet.control.values.observation import Observation
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.planning import Planning, make_planning
from autohet.driver.loop.recorder import RecordedPlanning, Recorder
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.search.problem import limits
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.storage.open import open_storage
from tests.harness import toy_model  # noqa: F401
from tests.harness.exact_job import NODES, node_type
from tests.harness.fault_points import FILES, PHASES, RECONFIGURING, UPDATING, FaultPoint
from tests.harness.process_fleet import ProcessFleet
from tests.harness.waits import HANG_S

FEW_TRIES = 120
"""Steps of the planner's search, a tenth: tests/planner tests how good a plan is."""
NOTICE_S = 6.0
LEASE_S = 4.0
STEP_PHASES = tuple(phase for phase in PHASES if phase not in ("gather", "evaluate"))
WORKER_POINTS = (*STEP_PHASES, *UPDATING, *FILES, *RECONFIGURING)
DRIVER_POINTS = ("manifest", "replan", "claimed")
"""claimed: the journal has a generation whose orders reach nobody, and the one before trains on."""
SENT_S = 0.5
"""Seconds that the orders of a cut-over have to come to all workers."""
VICTIMS = {"worker": ("b/0",), "node": ("a",), "pipeline": ("b", "c"), "driver": ()}
"""Of each scope: one worker's process, a node with two workers, the two nodes of a pipeline, this
process.
"""
ARRIVES = {"worker": "b/0", "node": "a/0", "pipeline": "b/0", "driver": "b/0"}
HELD = "c/0"


@dataclass(frozen=True)
class Strike:
    """What befalls the run: at `point` (of `step`, or of the second generation), `mode` happens to
    `scope`; "fail": the point is one where the worker's own code fails.

    `before`: what happens first, at step 5, where the point is a part of a reconfiguration; a
    notice and its node, and the seconds that are left where it names a deadline.
    """

    point: str
    scope: str
    mode: str
    step: int = 6
    before: str | None = None

    @property
    def fault_point(self) -> FaultPoint | None:
        if self.point in DRIVER_POINTS:
            return None
        if self.point in (*RECONFIGURING, "cut_over"):
            return FaultPoint(self.point, ARRIVES[self.scope], generation=2)
        if self.point == "unseen_vote":
            return FaultPoint(self.point, HELD, self.step)
        return FaultPoint(self.point, ARRIVES[self.scope], self.step)

    @property
    def hold(self) -> FaultPoint | None:
        """Where a worker waits for the driver's answer to a notice: a driver that a busy machine
        delays would answer after the last step.
        """
        if self.before is not None:
            return FaultPoint("forward", HELD, 7)
        if self.mode == "notice" and self.scope != "driver":
            return FaultPoint("forward", HELD, self.step + 2)
        return None


@dataclass
class Result:
    """How a run ended.

    `struck_at_step`: steps committed when the strike came; `resources`: each survivor's files and
    threads.
    """

    ok: bool
    reason: str
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    seconds: float
    struck_at_step: int | None
    complaints: list[str]
    starts: dict[str, int]
    resources: dict[str, tuple[int, int]] = field(default_factory=dict)


class StruckRun:
    """The product's controller, orders, planner, events and durable storage over a fleet of
    processes.
    """

    def __init__(
        self,
        job: Job,
        directory: Path,
        strike: Strike | None = None,
        nodes: dict[str, int] | None = None,
        fleet: Callable[..., ProcessFleet] = ProcessFleet,
        *,
        records: bool = False,
        hold: int | None = None,
    ) -> None:
        """hold: step at which `HELD` waits until the test harms or stops the run, which a driver
        that a busy machine delays would do after the last step.
        """
        config = load_config(job.model, job.training)
        self.job = job
        self.strike = strike
        self.durable = Durable(
            open_storage(job.checkpoint_storage),
            RunFacts(job.name, config.to_dict(), {"seed": job.training.seed}),
            Retention(job.checkpoint.num_kept),
            lease_s=LEASE_S,
        )
        held = None if hold is None else FaultPoint("forward", HELD, hold)
        self.hold = held if strike is None else strike.hold
        points = (self.hold, None if strike is None else strike.fault_point)
        self.fleet = fleet(
            job,
            "run",
            self.durable,
            directory / "logs",
            tuple(point for point in points if point is not None),
            self.at_point,
        )
        self.observations = directory / f"observations-{time.monotonic_ns()}.jsonl"
        self.events = EventLog(directory / f"events-{time.monotonic_ns()}.jsonl")
        self.planning = make_planning(job)
        self.orders = OrderBuilder(job, layout_builder(config), driver=self.durable.lease.driver)
        self.recorder = Recorder(self.observations) if records else None
        asked: Planning = self.planning
        if self.recorder is not None:
            asked = RecordedPlanning(self.planning, self.recorder)
        self.controller = Controller(job, self.fleet, asked, self.orders, self.events)
        self.controller.memory.prepares = True
        self.controller.memory.cuts_over = True
        self.controller.memory.keeps_passes = True
        self.controller.memory.prepares_at_death = True
        self.controller.recorder = self.recorder
        self.struck_at_step: int | None = None
        self._before_done = strike is None or strike.before is None
        self._held = False
        self._is_interfered_with = False
        self._sent_at: float | None = None
        self._claimed_step: float = math.inf
        self._wrap_driver()
        for name, num_gpus in (NODES if nodes is None else nodes).items():
            self.fleet.add(name, node_type(num_gpus))

    # the strike
    # ------------------------------------------------------------------------------

    def _wrap_driver(self) -> None:
        """Points in this process: before a plan is drawn anew; between a checkpoint's metadata and
        its manifest.
        """
        strike = self.strike
        if strike is not None and strike.point == "replan":
            self.planning.propose = self._before(
                self.planning.propose, lambda *_: self.controller.memory.generation >= 1
            )  # type: ignore[method-assign]
        if strike is not None and strike.point == "claimed":
            cutting_over.LEAD_S = 0.0  # this process has one life
            begin = self.fleet.begin

            def lose(orders: Any) -> None:
                (order, *_) = orders.values()
                if order.follows is None:
                    begin(orders)
                else:
                    self._claimed_step = order.start_step

            self.fleet.begin = lose  # type: ignore[method-assign]
        if strike is not None and strike.point == "manifest":
            storage: Any = self.durable.storage
            first = f"step-{strike.step:08d}/"  # or a later one, where this one had to wait
            storage.put = self._before(
                storage.put, lambda name, *_: name.endswith(f"/{MANIFEST_NAME}") and name >= first
            )

    def _before(self, call: Callable[..., Any], due: Callable[..., bool]) -> Callable[..., Any]:
        def late(*arguments: Any, **named: Any) -> Any:
            if self.struck_at_step is None and due(*arguments):
                self.strike_now()
            return call(*arguments, **named)

        return late

    def at_point(self, point: FaultPoint) -> None:
        """A worker stands at the fault point: strike once, then let it go on if it still can."""
        if point == self.hold:
            self._held = True
            return
        if (
            self.struck_at_step is not None
        ):  # a process that took the place of one that was struck here
            self.fleet.open_gate(point)
            return
        if self.strike is not None and self.strike.scope == "driver":
            self.fleet.open_gate(point)
            self.strike_now()
            return
        self.strike_now()
        self.fleet.open_gate(point)

    def strike_now(self) -> None:
        assert self.strike is not None
        self.struck_at_step = self.controller.memory.ledger.committed_steps
        if self.strike.mode == "fail":  # the worker does that by itself
            return
        scope = self.strike.scope
        mode = self.strike.mode
        if scope == "driver":
            os.kill(
                os.getpid(),
                {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "notice": signal.SIGTERM}[mode],
            )
        for victim in VICTIMS[scope]:
            self.harm(mode, victim)

    def harm(self, mode: str, victim: str) -> None:
        """Let `mode` happen to a node, or to a worker (named node/gpu); a notice is always a
        node's.
        """
        self._is_interfered_with = True
        fleet = self.fleet
        node = victim.split("/")[0]
        if mode == "notice":
            fleet.warn(node, NOTICE_S)
        elif "/" in victim:
            {"kill": fleet.kill_worker, "freeze": fleet.freeze_worker}[mode](victim)
        else:
            {"kill": fleet.kill_node, "freeze": fleet.freeze_node}[mode](victim)

    def stop(self) -> None:
        """Ask for a stop with a committed checkpoint, as a signal does."""
        self._is_interfered_with = True
        self.fleet.stop_reason = "the test"

    # running
    # ------------------------------------------------------------------------------

    def start(self) -> None:
        self.durable.take_lease()
        found = self.durable.load_newest()
        self.controller.memory.generation = found.ancestry.newest or 0
        if found.manifest is not None:
            self.controller.memory.generation = max(
                self.controller.memory.generation, found.manifest.generation
            )
        begun = {"generation": self.controller.memory.generation, "first_step": 0}
        if self.recorder is not None:
            begun |= {"prepares": True, "cuts_over": True, "keeps_passes": True}
            begun["prepares_at_death"] = True
            self.recorder.begin(job=self.job, driver=self.orders.driver, **begun)
        self.events.emit(
            "started", self.controller.memory.generation, job=self.job.name, step=found.step or 0
        )
        self.fleet.await_agents()

    def tick(self) -> Observation:
        seen = self.controller.tick()
        training = isinstance(self.controller.state, Training)
        if self._held and self._may_go_on():
            assert self.hold is not None
            self._held = False
            self.fleet.open_gate(self.hold)
        if self.controller.memory.ledger.committed_steps > self._claimed_step + 1:
            self.strike_now()
        if (
            not self._before_done
            and training
            and self.controller.memory.ledger.committed_steps >= 5
        ):
            assert self.strike is not None
            assert self.strike.before is not None
            self._before_done = True
            mode, victim, *left_s = self.strike.before.split()
            assert mode == "notice"
            # A short deadline might pass before a busy driver answers.
            self.fleet.warn(victim, float(left_s[0]) if left_s else None)
        return seen

    def _may_go_on(self) -> bool:
        """The test has interfered, or its strike's notice is answered: the workers stop, or have
        the orders of a cut-over.
        """
        if self.strike is None:
            return self._is_interfered_with
        state = self.controller.state
        if not isinstance(state, Training) or self.controller.memory.generation > 1:
            return True
        cut_over = None if state.preparing is None else state.preparing.cut_over
        if cut_over is None or not cut_over.is_sent:
            return False
        self._sent_at = self._sent_at or time.monotonic()
        return time.monotonic() - self._sent_at > SENT_S

    def run(
        self,
        interfere: Callable[[StruckRun, Observation], None] | None = None,
        timeout_s: float = HANG_S,
    ) -> Result:
        """To the end; everything that was started is ended afterwards."""
        with patch.object(limits, "MOST_TRIES", FEW_TRIES):
            return self._run(interfere, timeout_s)

    def _run(
        self, interfere: Callable[[StruckRun, Observation], None] | None, timeout_s: float
    ) -> Result:
        began = time.monotonic()
        resources: dict[str, tuple[int, int]] = {}
        try:
            self.start()
            while self.controller.ended is None:
                seen = self.tick()
                if interfere is not None:
                    interfere(self, seen)
                assert time.monotonic() - began < timeout_s, (
                    f"no end after {timeout_s} s: {self.state()}"
                )
            for worker in self.controller.memory.members:
                if worker in seen.reports and worker not in seen.losses:
                    resources[worker] = self.fleet.call(worker, "resources")
        finally:
            ended = self.controller.ended
            self.close(forget=ended is not None and ended.ok)
        assert ended is not None
        assert self.events.path is not None
        return Result(
            ended.ok,
            ended.reason,
            self.controller.summary(),
            read_events(self.events.path),
            time.monotonic() - began,
            self.struck_at_step,
            self.fleet.complaints,
            dict(self.fleet.starts),
            resources,
        )

    def forget(self) -> None:
        """Remove what a run that is to be taken up again has kept in host memory."""
        shutil.rmtree(self.job.checkpoint.memory_directory, ignore_errors=True)

    def state(self) -> str:
        assert self.events.path is not None
        last = [event for event in read_events(self.events.path) if event["kind"] != "step"][-6:]
        return (
            f"{self.controller.state}; last events: {json.dumps(last)}; complaints:"
            f" {self.fleet.complaints}"
        )

    def close(self, *, forget: bool) -> None:
        self.fleet.close(forget_snapshots=forget)
        self.durable.close()
        self.events.close()
        if self.recorder is not None:
            self.recorder.close()


def losses_by_step(events: list[dict[str, Any]]) -> list[float]:
    """What each step's loss was when it was last run, in order of steps."""
    found = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    return [found[step] for step in sorted(found)]


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
