"""Strike a job at random, on real processes, and compare it with one undisturbed process.

    python scripts/benchmarks/chaos.py [--seeds 1,2,3,4] [--strikes 50] [--minutes 9] [--append]
    [--json scripts/benchmarks/results/chaos.json]

The product's controller, workers, agents, planner and storage run the exact model on a fleet of
plain processes (tests/harness/process_fleet.py). Workers, agents, nodes and the driver are killed
and frozen, nodes come back under the name of one that is gone, notices are given, repeated and
withdrawn, the storage is away, read-only and full, disks and host memory are full, snapshots are
flipped, and workers are killed inside rebuilds. A seed gives kinds, victims and pauses; when they
take effect is the machine's.

A worker is struck only where the others hold the newest step whole, so that no step may be lost
but by the death of the driver. Judged afterwards: every step has the loss of the undisturbed
process, the last checkpoint has its bits, no step was lost while a holder lived, and no run ended
early.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from provenance import provenance  # noqa: E402

from autohet.driver.control.observation import Observation  # noqa: E402
from autohet.driver.control.states import Building, Ended  # noqa: E402
from autohet.runtime.job import Job  # noqa: E402
from tests.harness.exact_job import (  # noqa: E402
    NODES,
    Reference,
    differing_shards,
    exact_job,
    node_type,
    train_alone,
)
from tests.harness.holders import others_hold_all  # noqa: E402
from tests.harness.living import kill  # noqa: E402
from tests.harness.remote_process import (  # noqa: E402
    RemoteProcess,
    forking_context,
    server_address,
    use_server,
)
from tests.harness.struck_run import StruckRun, read_events  # noqa: E402

STEPS = 100
STRIKES_A_JOB = 12
JOB_TIMEOUT_S = 400.0
LIFE_TIMEOUT_S = 300.0
FILE_SYSTEM_MIB = 64
KINDS: dict[str, int] = {
    "worker_kill": 5,
    "worker_freeze": 3,
    "agent_kill": 2,
    "agent_freeze": 1,
    "node_kill": 3,
    "node_freeze": 2,
    "notice": 2,
    "notice_repeated": 1,
    "notice_withdrawn": 1,
    "rebuild_kills": 6,
    "driver_kill": 2,
    "driver_freeze": 1,
    "storage_away": 1,
    "storage_read_only": 1,
    "storage_full": 1,
    "disk_full": 1,
    "memory_full": 1,
    "snapshot_flip": 2,
}
"""Kinds of strikes, and how often each is drawn."""
NEED_MOUNTS = ("storage_read_only", "storage_full", "disk_full", "memory_full")


@dataclass(frozen=True)
class Places:
    """Where one job's files are; `mounted`: each of the three on a file system of its own."""

    root: Path
    mounted: bool

    @property
    def storage(self) -> Path:
        return self.root / "storage" / "checkpoints"

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def disk(self) -> Path:
        return self.root / "disk"

    @property
    def strikes(self) -> Path:
        return self.root / "strikes.jsonl"


@contextmanager
def made_places(root: Path) -> Iterator[Places]:
    """File systems of the job's own where this process may mount them."""
    names = ("storage", "memory", "disk")
    mounted = []
    for name in names:
        (root / name).mkdir(parents=True)
        options = f"size={FILE_SYSTEM_MIB}m"
        command = ["mount", "-t", "tmpfs", "-o", options, "autohet-chaos", str(root / name)]
        if os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0:
            mounted.append(root / name)
    places = Places(root, len(mounted) == len(names))
    places.storage.mkdir()
    try:
        yield places
    finally:
        for path in mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


# strikes
# --------------------------------------------------------------------------------------------------


@dataclass
class Chaos:
    """Strikes one life of a driver, from its own loop. `left`: strikes that are still to come."""

    places: Places
    draw: random.Random
    left: int
    reverts: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    """Workers that were struck: nobody may know of it yet."""
    rebuild_kills: int = 0
    next_at: float = 0.0
    killed_in: int = 0
    """Generation whose rebuild has lost a worker already."""

    def __call__(self, run: StruckRun, seen: Observation) -> None:
        now = time.monotonic()
        for due in [revert for revert in self.reverts if revert[0] <= now]:
            self.reverts.remove(due)
            due[1]()
        self.hidden &= seen.reports.keys() - seen.losses.keys()
        if self.rebuild_kills and self._rebuilds_anew(run):
            self._kill_in_rebuild(run, seen)
        if self.left > 0 and now >= self.next_at and self._has_begun(run):
            kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            if self._strike(kind, run, seen):
                pause_s = self.draw.choice((0.2, 0.5, 1.0, 2.0, 4.0))
                self.next_at = time.monotonic() + pause_s

    def _has_begun(self, run: StruckRun) -> bool:
        return run.controller.ledger.committed_steps > 0

    def _strike(self, kind: str, run: StruckRun, seen: Observation) -> bool:
        """Strike once; False where nothing of the kind can be done just now."""
        if kind in NEED_MOUNTS and not self.places.mounted:
            return False
        if isinstance(run.controller.state, Ended):
            return False
        note = self._note(kind, run)
        struck: str | None = getattr(self, f"_{kind}")(run, seen, note)
        return struck is not None

    def _note(self, kind: str, run: StruckRun) -> Callable[[str], str]:
        """Write a strike down, before it is carried out: the driver may be its victim."""

        def note(victim: str) -> str:
            self.left -= 1
            line = {
                "time": time.time(),
                "kind": kind,
                "victim": victim,
                "step": run.controller.ledger.committed_steps,
                "state": type(run.controller.state).__name__,
            }
            with self.places.strikes.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return victim

        return note

    # victims

    def _may_lose(self, run: StruckRun, seen: Observation, victims: Collection[str]) -> bool:
        """Whether the other workers hold the newest step whole, as far as is known."""
        return others_hold_all(run, seen, {*victims, *self.hidden})

    def _worker(self, run: StruckRun, seen: Observation) -> str | None:
        there = [w for w in run.fleet._workers if w in seen.reports and w not in self.hidden]
        self.draw.shuffle(there)
        return next((w for w in there if self._may_lose(run, seen, [w])), None)

    def _node(self, run: StruckRun, seen: Observation) -> str | None:
        names = sorted(seen.nodes.keys() - seen.notices.keys())
        self.draw.shuffle(names)
        return next((n for n in names if self._may_lose(run, seen, _workers_of(seen, n))), None)

    def _later(self, low_s: float, high_s: float, revert: Callable[[], None]) -> None:
        self.reverts.append((time.monotonic() + self.draw.uniform(low_s, high_s), revert))

    def _return(self, run: StruckRun, name: str) -> None:
        """Another node takes the name of one that is gone."""
        if name in run.fleet._seats:
            self._later(0.5, 1.0, lambda: self._return(run, name))
            return
        run.fleet.add(name, node_type(NODES[name]))

    # kinds; each takes the run, what it saw last and how to write the strike down

    def _worker_kill(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        worker = self._worker(run, seen)
        if worker is None:
            return None
        self.hidden.add(note(worker))
        run.fleet.kill_worker(worker)
        return worker

    def _worker_freeze(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        worker = self._worker(run, seen)
        if worker is None:
            return None
        self.hidden.add(note(worker))
        process = run.fleet._workers[worker].process
        process.send_signal(signal.SIGSTOP)
        self._later(0.3, 6.0, lambda: process.send_signal(signal.SIGCONT))
        return worker

    def _rebuild_kills(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """The next rebuilds lose a worker each."""
        struck = self._worker_kill(run, seen, note)
        if struck is not None:
            self.rebuild_kills = self.draw.randint(1, 4)
        return struck

    def _rebuilds_anew(self, run: StruckRun) -> bool:
        controller = run.controller
        if controller.generation < 2 or not isinstance(controller.state, Building):
            return False
        return controller.generation != self.killed_in

    def _kill_in_rebuild(self, run: StruckRun, seen: Observation) -> None:
        note = self._note("kill_inside_rebuild", run)
        if self._worker_kill(run, seen, note) is not None:
            self.killed_in = run.controller.generation
            self.rebuild_kills -= 1

    def _agent_kill(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """Its node is given up, and taken on anew under its name."""
        name = self._node(run, seen)
        if name is None:
            return None
        self.hidden |= {*_workers_of(seen, note(name))}
        run.fleet.kill_agent(name)
        self._later(1.0, 3.0, lambda: self._return(run, name))
        return name

    def _agent_freeze(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        names = sorted(run.fleet._seats)
        if not names:
            return None
        agent: RemoteProcess = run.fleet._seats[note(self.draw.choice(names))].agent
        agent.send_signal(signal.SIGSTOP)
        self._later(0.5, 6.0, lambda: agent.send_signal(signal.SIGCONT))
        return agent.name

    def _node_kill(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """With what it keeps; another comes by its name."""
        name = self._node(run, seen)
        if name is None:
            return None
        self.hidden |= {*_workers_of(seen, note(name))}
        run.fleet.kill_node(name)
        self._later(0.1, 3.0, lambda: self._return(run, name))
        return name

    def _node_freeze(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        name = self._node(run, seen)
        if name is None:
            return None
        self.hidden |= {*_workers_of(seen, note(name))}
        processes = run.fleet.processes_of(name)
        run.fleet.freeze_node(name)

        def thaw() -> None:
            run.fleet.thaw_node(name, processes)
            self._later(0.5, 2.0, lambda: self._return_if_gone(run, name))

        self._later(0.5, 8.0, thaw)
        return name

    def _return_if_gone(self, run: StruckRun, name: str) -> None:
        if name not in run.fleet._seats:
            self._return(run, name)

    def _notice(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """The node goes at its deadline or before, and another comes by its name."""
        names = sorted(seen.nodes.keys() - seen.notices.keys())
        if len(names) < 3 or seen.notices or self.hidden:
            return None
        name = note(self.draw.choice(names))
        run.fleet.warn(name, self.draw.uniform(4.0, 8.0))
        self._later(9.0, 11.0, lambda: self._return(run, name))
        return name

    def _notice_repeated(
        self, run: Any, seen: Observation, note: Callable[[str], str]
    ) -> str | None:
        name = self._notice(run, seen, note)
        if name is not None:
            self._later(0.3, 2.0, lambda: run.fleet.warn(name, 6.0))
        return name

    def _notice_withdrawn(
        self, run: Any, seen: Observation, note: Callable[[str], str]
    ) -> str | None:
        """Nothing happens to the node after all."""
        names = sorted(seen.nodes.keys() - seen.notices.keys())
        if len(names) < 3 or seen.notices or self.hidden:
            return None
        name = note(self.draw.choice(names))
        run.fleet.warn(name, 30.0)
        self._later(0.1, 2.0, lambda: run.fleet.notices.pop(name, None))
        self._later(3.0, 4.0, lambda: self._return_if_gone(run, name))
        return name

    def _driver_kill(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """What is away for a while comes back by the next driver (`repair`)."""
        note("driver")
        os.kill(os.getpid(), signal.SIGKILL)
        return "driver"

    def _driver_freeze(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        """Stopped; a shell that outlives it for a while lets it go on."""
        note("driver")
        seconds = self.draw.uniform(0.5, 5.0)
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return "driver"

    def _storage_away(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        away = _away(self.places)
        if away.exists() or not self.places.storage.exists():
            return None
        note("storage")
        self.places.storage.rename(away)
        self._later(1.0, 6.0, lambda: repair(self.places))
        return "storage"

    def _storage_read_only(
        self, run: Any, seen: Observation, note: Callable[[str], str]
    ) -> str | None:
        note("storage")
        _remount(self.places, "ro")
        self._later(1.0, 6.0, lambda: _remount(self.places, "rw"))
        return "storage"

    def _storage_full(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        return self._fill(note("storage"), self.places.storage.parent)

    def _disk_full(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        return self._fill(note("disk"), self.places.disk)

    def _memory_full(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        return self._fill(note("memory"), self.places.memory)

    def _fill(self, what: str, directory: Path) -> str:
        filler = directory / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        self._later(1.0, 6.0, lambda: filler.unlink(missing_ok=True))
        return what

    def _snapshot_flip(self, run: Any, seen: Observation, note: Callable[[str], str]) -> str | None:
        files = [
            path
            for root in (self.places.memory, self.places.disk)
            for path in root.rglob("*")
            if path.is_file() and path.name != "filler" and path.stat().st_size
        ]
        if not files:
            return None
        path = self.draw.choice(files)
        note(str(path.relative_to(self.places.root)))
        with suppress(OSError), path.open("r+b") as file:
            at = self.draw.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << self.draw.randrange(8)]))
        return path.name


def _workers_of(seen: Observation, name: str) -> tuple[str, ...]:
    return seen.nodes[name].workers if name in seen.nodes else ()


def _away(places: Places) -> Path:
    return places.storage.with_name("away")


def _remount(places: Places, how: str) -> None:
    path = str(places.storage.parent)
    subprocess.run(["mount", "-o", f"remount,{how}", path], capture_output=True, check=False)


def repair(places: Places) -> None:
    """What a killed driver has left away, read-only or full."""
    if places.mounted:
        _remount(places, "rw")
    for root in (places.storage.parent, places.memory, places.disk):
        (root / "filler").unlink(missing_ok=True)
    if _away(places).exists():
        shutil.rmtree(places.storage, ignore_errors=True)  # written to meanwhile
        _away(places).rename(places.storage)


# lives
# --------------------------------------------------------------------------------------------------


def drive(job: Job, places: Places, directory: Path, seed: str, left: int, address: str) -> None:
    """One life of the driver, in a process of its own."""
    use_server(address)
    import torch

    torch.set_num_threads(1)
    run = StruckRun(job, directory)
    result = run.run(LIFE_TIMEOUT_S, Chaos(places, random.Random(seed), left))
    (directory / "result.json").write_text(json.dumps({"ok": result.ok, "reason": result.reason}))


def strike_job(seed: str, strikes: int, reference: Reference, shared: Path, root: Path) -> Any:
    """One job to its end, through as many lives of its driver as it takes, and the judgement."""
    with made_places(root) as places:
        job = exact_job(
            root,
            shared,
            places.memory,
            training={"steps": STEPS, "decay_steps": STEPS},
            checkpoint={
                "storage": str(places.storage),
                "local_directory": str(places.disk),
                "every_steps": 20,
            },
        )
        began = time.monotonic()
        lives = []
        while time.monotonic() - began < JOB_TIMEOUT_S:
            done = len(_lines(places.strikes))
            directory = root / f"life-{len(lives)}"
            directory.mkdir()
            code = _live(job, places, directory, f"{seed}-{len(lives)}", max(0, strikes - done))
            lives.append(directory)
            if code != -signal.SIGKILL:
                break
            repair(places)
        return _judge(places, lives, code, reference) | {
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
        }


def _live(job: Job, places: Places, directory: Path, seed: str, left: int) -> int:
    arguments = (job, places, directory, seed, left, server_address())
    process = forking_context().Process(target=drive, args=arguments)
    process.start()
    process.join(LIFE_TIMEOUT_S + 60.0)
    code = process.exitcode
    started = directory / "logs" / "processes"
    left = started.read_text().split() if started.exists() else []
    for pid in (process.pid, *map(int, left)):
        kill(pid)
    process.join(10.0)
    return -signal.SIGALRM if code is None else int(code)


def _judge(places: Places, lives: list[Path], code: int, reference: Reference) -> dict[str, Any]:
    """What must hold of the whole job."""
    wrong: list[str] = []
    result = lives[-1] / "result.json"
    ended = json.loads(result.read_text()) if result.exists() else {"ok": False, "reason": code}
    if not ended["ok"]:
        wrong.append(f"ended early: {ended['reason']}")
    told: dict[int, float] = {}
    lost_by_drivers = missing = 0
    for number, life in enumerate(lives):
        for path in life.glob("events-*.jsonl"):
            for index, event in enumerate(_events(path)):
                if event["kind"] == "step":
                    told[event["step"]] = event["loss"]
                if event["kind"] == "restore" and event["steps_lost"]:
                    wrong.append(
                        f"life {number}: {event['steps_lost']} steps lost ({event['cause']})"
                    )
                if event["kind"] == "restore" and event["cause"] == "start" and number:
                    lost_by_drivers += max(0, max(told, default=-1) + 1 - event["step"])
                if event["kind"] == "failed" and index:
                    wrong.append(f"life {number} failed: {event['reason']}")
    losses = dict(enumerate(reference.losses))
    differing = sorted(step for step, loss in told.items() if loss != losses[step])
    missing = len(losses.keys() - told.keys())
    if differing:
        wrong.append(f"losses differ at steps {differing[:8]}")
    if missing > 2 * (len(lives) - 1):
        wrong.append(f"{missing} steps without a loss, after {len(lives) - 1} kills of the driver")
    if ended["ok"] and (bits := differing_shards(str(places.storage), STEPS, reference)):
        wrong.append(f"{len(bits)} shards of the last checkpoint differ: {bits[:3]}")
    strikes = _lines(places.strikes)
    return {
        "strikes": len(strikes),
        "by_kind": dict(Counter(strike["kind"] for strike in strikes)),
        "by_state": dict(Counter(strike["state"] for strike in strikes)),
        "lives": len(lives),
        "steps_without_loss": missing,
        "steps_run_again_after_kills_of_the_driver": lost_by_drivers,
        "wrong": wrong,
        "mounted": places.mounted,
    }


def _events(path: Path) -> list[dict[str, Any]]:
    """Without a line that a kill has cut off."""
    text = path.read_text()
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    return read_events(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# the command
# --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--strikes", type=int, default=50, help="of each seed")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no job after that")
    parser.add_argument("--append", action="store_true", help="to the jobs in the document")
    parser.add_argument("--keep", type=Path, help="keep the directories of jobs here")
    where = REPOSITORY / "scripts/benchmarks/results/chaos.json"
    parser.add_argument("--json", type=Path, default=where)
    options = parser.parse_args()
    jobs = json.loads(options.json.read_text())["jobs"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        root = options.keep or Path(directory)
        shared, alone = root / "shared", root / "alone"
        for path in (shared, alone):
            path.mkdir(parents=True)
        training = {"steps": STEPS, "decay_steps": STEPS}
        reference = train_alone(alone, shared, training=training)
        for seed in options.seeds.split(","):
            done = sum(job["strikes"] for job in jobs if job["seed"].split(".")[0] == seed)
            number = sum(job["seed"].split(".")[0] == seed for job in jobs)
            while done < options.strikes and time.monotonic() < until:
                strikes = min(STRIKES_A_JOB, options.strikes - done)
                name = f"{seed}.{number}"
                job = strike_job(name, strikes, reference, shared, root / f"job-{name}")
                job["commit"] = provenance()["commit"]
                jobs.append(job)
                done, number = done + max(1, job["strikes"]), number + 1
                print(json.dumps(job), flush=True)
                _write(options.json, jobs)
    return 1 if any(job["wrong"] for job in jobs) else 0


def _write(path: Path, jobs: list[dict[str, Any]]) -> None:
    kinds: Counter[str] = Counter()
    for job in jobs:
        kinds.update(job["by_kind"])
    document = {
        **provenance(),
        "strikes": sum(job["strikes"] for job in jobs),
        "seeds": sorted({job["seed"].split(".")[0] for job in jobs}),
        "by_kind": dict(kinds),
        "wrong": [f"{job['seed']}: {wrong}" for job in jobs for wrong in job["wrong"]],
        "jobs": jobs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
