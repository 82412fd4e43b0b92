"""Carries out the strikes of a seed on a running job, from the driver's own loop.

A worker or a node is struck only while living others hold the newest step whole, so that no step
may be lost. The driver is struck at any time.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from autohet.control.job_state import Building, Ended
from autohet.control.values.observation import Observation
from tests.harness.chaos.holders import others_hold_newest
from tests.harness.chaos.places import FILLER, Places, flip_bit
from tests.harness.chaos.strikes import Strike
from tests.harness.exact_job import NODES, node_type
from tests.harness.struck_run import StruckRun

PATIENCE_S = 8.0
ABSENCE_S = 1.0
NOTICE_S = 5.0
LONG_NOTICE_S = 30.0


@dataclass
class Striker:
    """Strikes one life of a driver; call it after each tick."""

    places: Places
    strikes: list[Strike]
    patience_s: float = PATIENCE_S
    """After that a strike that no node may suffer is left out; one in a rebuild comes anyway."""
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _struck: dict[str, int] = field(default_factory=dict)
    """Process ids of workers that were struck and of which the driver may not know yet."""
    _absent: dict[str, float] = field(default_factory=dict)
    """By name of a node that is gone: when the next one of that name comes."""
    _absence_s: dict[str, float] = field(default_factory=dict)
    _next_gpus: dict[str, int] = field(default_factory=dict)
    _due_at: float | None = None
    _struck_generation: int = 0

    def __call__(self, run: StruckRun, seen: Observation) -> None:
        if isinstance(run.controller.state, Ended):
            return
        now = time.monotonic()
        for each in [each for each in self._later if each[0] <= now]:
            self._later.remove(each)
            each[1]()
        self._forget_known(seen)
        self._bring_back(run, now)
        if self.strikes and run.controller.memory.ledger.committed_steps > 0:
            self._strike_when_due(run, seen, now)

    def _strike_when_due(self, run: StruckRun, seen: Observation, now: float) -> None:
        strike = self.strikes[0]
        if self._due_at is None:
            self._due_at = now + strike.pause_s
        late = now >= self._due_at + self.patience_s
        if now < self._due_at or (strike.in_rebuild and not self._rebuilds(run) and not late):
            return
        if not self._carry_out(strike, run, seen):
            if not late:
                return
            self._note(strike, run, None)
        if strike.in_rebuild:
            self._struck_generation = run.controller.memory.generation
        self.strikes.pop(0)
        self._due_at = None

    def _rebuilds(self, run: StruckRun) -> bool:
        controller = run.controller
        building = isinstance(controller.state, Building) and controller.memory.generation > 1
        return building and controller.memory.generation != self._struck_generation

    def _note(self, strike: Strike, run: StruckRun, victim: str | None) -> None:
        """Write a strike down before it is carried out: the driver may be its victim."""
        line = {
            "number": strike.number,
            "kind": "worker_kill_in_rebuild" if strike.in_rebuild else strike.kind,
            "victim": victim,
            "time": time.time(),
            "step": run.controller.memory.ledger.committed_steps,
            "state": type(run.controller.state).__name__,
        }
        with self.places.strikes.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # victims

    def _forget_known(self, seen: Observation) -> None:
        for worker, process_id in list(self._struck.items()):
            report = seen.reports.get(worker)
            known = worker in seen.losses or report is None or report.process_id != process_id
            if known:
                del self._struck[worker]

    def _forget_thawed(self, struck: Mapping[str, int]) -> None:
        for worker, process_id in struck.items():
            if self._struck.get(worker) == process_id:
                del self._struck[worker]

    def _may_lose(self, run: StruckRun, seen: Observation, victims: Iterable[str]) -> bool:
        doomed = [w for name in seen.notices if name in seen.nodes for w in workers_of(seen, name)]
        return others_hold_newest(run, seen, {*victims, *self._struck, *doomed})

    def _worker(self, strike: Strike, run: StruckRun, seen: Observation) -> str | None:
        for name in strike.nodes:
            workers = [
                worker
                for worker in workers_of(seen, name)
                if worker in seen.reports and worker not in {*self._struck, *seen.losses}
            ]
            if not workers:
                continue
            worker = workers[int(strike.position * len(workers))]
            if self._may_lose(run, seen, [worker]):
                return worker
        return None

    def _node(self, strike: Strike, run: StruckRun, seen: Observation) -> str | None:
        for name in strike.nodes:
            there = name in seen.nodes and name not in seen.notices and run.fleet.is_up(name)
            if there and self._may_lose(run, seen, workers_of(seen, name)):
                return name
        return None

    def _hide(self, seen: Observation, workers: Iterable[str]) -> None:
        for worker in workers:
            if worker in seen.reports:
                self._struck[worker] = seen.reports[worker].process_id

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, call))

    def _bring_back(self, run: StruckRun, now: float) -> None:
        """Start a node by the name of each that is gone, some time after that."""
        for name, num_gpus in NODES.items():
            if run.fleet.has(name):
                self._absent.pop(name, None)
                continue
            until = self._absent.setdefault(name, now + self._absence_s.pop(name, ABSENCE_S))
            if now >= until:
                run.fleet.add(name, node_type(self._next_gpus.pop(name, num_gpus)))

    # kinds: each notes its victim and strikes; False where nothing may be struck just now

    def _carry_out(self, strike: Strike, run: StruckRun, seen: Observation) -> bool:
        match strike.kind.split("_"):
            case ["worker", _]:
                return self._strike_worker(strike, run, seen)
            case ["node" | "agent" | "notice" | "raylet", *_]:
                return self._strike_node(strike, run, seen)
            case ["driver", _]:
                return self._strike_driver(strike, run)
            case ["snapshot", _]:
                return self._flip_snapshot(strike, run)
            case _:
                return self._begin_outage(strike, run)

    def _strike_worker(self, strike: Strike, run: StruckRun, seen: Observation) -> bool:
        worker = self._worker(strike, run, seen)
        if worker is None:
            return False
        self._note(strike, run, worker)
        self._hide(seen, [worker])
        if strike.kind == "worker_kill":
            run.fleet.kill_worker(worker)
            return True
        process = run.fleet.freeze_worker(worker)
        struck = {worker: self._struck[worker]}

        def thaw() -> None:
            process.send_signal(signal.SIGCONT)
            self._forget_thawed(struck)

        self._after(strike.lasts_s, thaw)
        return True

    def _strike_node(self, strike: Strike, run: StruckRun, seen: Observation) -> bool:
        name = self._node(strike, run, seen)
        if name is None:
            return False
        self._note(strike, run, name)
        fleet = run.fleet
        self._absence_s[name] = strike.lasts_s / 2
        if not strike.kind.startswith(("notice", "agent_freeze")):
            self._hide(seen, workers_of(seen, name))
        match strike.kind:
            case "agent_kill":
                fleet.kill_agent(name)
            case "agent_freeze":
                agent = fleet.freeze_agent(name)
                self._after(strike.lasts_s, lambda: agent.send_signal(signal.SIGCONT))
            case "node_kill":
                fleet.kill_node(name)
            case "node_replaced":
                self._absence_s[name] = 0.0
                self._next_gpus[name] = 3 - seen.nodes[name].node.node_type.num_gpus
                fleet.kill_node(name)
            case "node_freeze":
                self._freeze_node(strike, run, name, workers_of(seen, name))
            case "notice":
                fleet.warn(name, NOTICE_S)
            case "notice_repeated":
                fleet.warn(name, NOTICE_S)
                self._after(strike.lasts_s / 3, lambda: fleet.warn(name, NOTICE_S))
            case "notice_withdrawn":
                fleet.warn(name, LONG_NOTICE_S)
                self._after(strike.lasts_s / 3, lambda: fleet.withdraw_notice(name))
        return True

    def _freeze_node(
        self, strike: Strike, run: StruckRun, name: str, workers: tuple[str, ...]
    ) -> None:
        processes = run.fleet.processes_of(name)
        run.fleet.freeze_node(name)
        struck = {worker: self._struck[worker] for worker in workers if worker in self._struck}

        def thaw() -> None:
            run.fleet.thaw_node(name, processes)
            self._forget_thawed(struck)

        self._after(strike.lasts_s, thaw)

    def _strike_driver(self, strike: Strike, run: StruckRun) -> bool:
        if strike.kind == "driver_kill":
            self._note(strike, run, "driver")
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.places.begin_outage(strike.kind, strike.lasts_s):
            return False
        self._note(strike, run, "driver")
        os.kill(os.getpid(), signal.SIGSTOP)
        return True

    def _begin_outage(self, strike: Strike, run: StruckRun) -> bool:
        needs_mount = strike.kind != "storage_away"
        others = {path.stem for path in self.places.outages()}
        if any(each.startswith("storage") for each in others) and "storage" in strike.kind:
            return False
        if needs_mount and not self.places.mounted:
            return False
        empty = strike.position < 0.5
        if not self.places.begin_outage(strike.kind, strike.lasts_s, empty=empty):
            return False
        self._note(strike, run, strike.kind.split("_")[0])
        return True

    def _flip_snapshot(self, strike: Strike, run: StruckRun) -> bool:
        files = [
            path
            for root in (self.places.memory, self.places.disk)
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.name != FILLER
        ]
        if not files:
            return False
        path = files[int(strike.position * len(files))]
        self._note(strike, run, str(path.relative_to(self.places.root)))
        with suppress(FileNotFoundError):  # workers replace their files
            flip_bit(path, int(strike.position * len(files) % 1 * path.stat().st_size))
        return True


def workers_of(seen: Observation, name: str) -> tuple[str, ...]:
    return seen.nodes[name].workers if name in seen.nodes else ()
