"""Strike the driver, Ray's GCS or both at random on a real Ray cluster of this machine, half of the
time with the death of a worker or a node in the gap.

    python -m scripts.benchmarks.recovery.headless_strikes [--seeds 1,2,3] [--strikes 6]
    [--minutes 20] [--append] [--redis SERVER] [--keep DIRECTORY]
    [--json scripts/benchmarks/results/headless_strikes.json]

Each seed is one job of the exact model under `autohet train` on four nodes of five workers, whose
GCS keeps its tables in RocksDB, or with --redis in the Redis server that this program starts. What
is struck: `driver`, the child that its parent starts again; `submission`, parent and child,
submitted again; `gcs`, killed and started again some seconds later; `both`, GCS and driver; `head`,
GCS, submission and the head's raylet, which comes back as another node; `frozen`, the submission
stands still until another one has taken over, and wakes. A node that dies comes back under its
name. Some strikes come before the run has recovered from the one before.

In the end the job is stopped by SIGTERM. Wrong is: an end before that, a step without a loss or
with another loss than in one undisturbed process, a step with two events, a step lost, a last
checkpoint with other bits or with layers of unlike histories. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from autohet.driver.emulated import fleet as emulated_fleet
from autohet.driver.emulated.fleet import HEALTH_CHECKS
from autohet.driver.ray import cluster as ray_cluster
from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.recovery.chaos import strike_parser
from tests.harness.chaos.raylets import RayNodes, cluster_of_nodes
from tests.harness.exact_job import NODES, differing_shards, exact_job, train_alone
from tests.harness.history import history_of
from tests.harness.host_memory import memory_directory, owned_memory
from tests.harness.local_fleet import free_port
from tests.harness.served_objects import STEP_PAUSE_S
from tests.harness.waits import HANG_S, wait_until
from tests.harness.warm_ray import warm_ray_workers

RESULTS = Path(__file__).resolve().parents[1] / "results/headless_strikes.json"
STRUCK = ("driver", "submission", "gcs", "both", "head", "frozen")
DEATHS = (None, None, "worker", "node")
STEPS = 100_000
"""Steps of a job: more than it reaches before it is stopped."""
PAUSE_S = 0.15
RECOVERY_S = 300.0
"""Seconds for the whole fleet to train again after a strike."""
CALM_STEPS = 8
TRIES = 4
"""Further tries to start a Ray node on a busy machine."""
START_S = 60.0
"""Seconds for a raylet to register."""
BACK_S = 1.0
"""Seconds after a gap until a node is back that has died in it."""
RAY = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    STEP_PAUSE_S: str(PAUSE_S),
    **HEALTH_CHECKS,
}


@dataclass(frozen=True)
class Strike:
    """gap_s: seconds until the GCS, or the submission, is back; death_s: seconds until the death.

    waits: the run has recovered before the next strike.
    """

    struck: str
    death: str | None
    victim: str
    gap_s: float
    death_s: float
    waits: bool
    calm_s: float


def draw_strikes(seed: int, count: int) -> list[Strike]:
    draw = random.Random(seed)
    kinds = [STRUCK[(seed + number) % len(STRUCK)] for number in range(count)]
    draw.shuffle(kinds)
    strikes = []
    for kind in kinds:
        gap_s = draw.uniform(0.2, 6.0)
        death = draw.choice(DEATHS)
        victim = draw.choice(list(NODES))
        death_s = draw.uniform(0.0, gap_s)
        # Two deaths before a repair may take all holders of a layer.
        waits = death is not None or draw.random() < 0.5
        calm_s = draw.uniform(0.0, 3.0)
        strikes.append(Strike(kind, death, victim, gap_s, death_s, waits, calm_s))
    return strikes


@dataclass
class StruckJob:
    """One job, its cluster and the processes of its driver."""

    root: Path
    fleet: RayNodes
    address: str
    driver: subprocess.Popen[bytes] | None = None
    heads: list[Any] = field(default_factory=list)
    """Ray's nodes on the head so far; the last one lives."""

    @property
    def events_path(self) -> Path:
        return self.root / "events.jsonl"

    def events(self) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_text().split("\n")
        return [json.loads(line) for line in lines if line.endswith("}")]

    def submit(self) -> None:
        with (self.root / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.harness.train_exact", "train"),
                    *("--restarts", "1000", "--address", self.address),
                    *("--job", str(self.root / "job.yaml"), "--events", str(self.events_path)),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def num_steps(self) -> int:
        steps = [event["step"] for event in self.events() if event["kind"] == "step"]
        return max(steps, default=-1) + 1

    def trains_whole(self, since: int) -> bool:
        """True once all nodes train, and have done so for some steps after step `since`."""
        assert self.driver is not None
        code = self.driver.poll()
        assert code is None, f"the run ended early with code {code}"
        events = self.events()
        plans = {e["generation"]: e["plan"] for e in events if e["kind"] == "plan"}
        newest = max((event["generation"] for event in events), default=0)
        steps = [
            event["step"]
            for event in events
            if event["kind"] == "step" and event["step"] >= since and event["generation"] == newest
        ]
        return len(steps) >= CALM_STEPS and num_workers(plans.get(newest)) == sum(NODES.values())

    def await_recovery(self, since: int, within_s: float) -> dict[str, Any]:
        began = time.monotonic()
        wait_until(lambda: self.trains_whole(since), "all nodes to train", within_s)
        return {"recovered_s": round(time.monotonic() - began, 1), "at_step": self.num_steps()}

    def carry_out(self, strike: Strike) -> dict[str, Any]:
        """Strike, let what was struck come back, and start the nodes again that are gone."""
        assert self.driver is not None
        assert self.fleet.cluster is not None
        time.sleep(strike.calm_s)
        step = self.num_steps()
        began = time.monotonic()
        head = self.fleet.cluster.head_node
        if strike.struck == "head":
            kill(self.heads[-1].all_processes["raylet"][0].process.pid)
        if strike.struck in ("gcs", "both", "head"):
            head.kill_gcs_server()
        if strike.struck in ("driver", "both"):
            for child in children_of(self.driver.pid):
                kill(child)
        if strike.struck in ("submission", "head"):
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()
        frozen = self.driver
        if strike.struck == "frozen":
            os.killpg(frozen.pid, signal.SIGSTOP)
        time.sleep(strike.death_s)
        self.let_die(strike)
        time.sleep(max(0.0, began + strike.gap_s - time.monotonic()))
        if strike.struck in ("gcs", "both", "head"):
            head.start_gcs_server()
        if strike.struck == "head":
            add_node = self.fleet.cluster.add_node
            self.heads.append(start_patiently(lambda: add_node(num_cpus=2, num_gpus=0)))
        if strike.struck in ("submission", "head", "frozen"):
            self.submit()
        if strike.struck == "frozen":
            self.wake(frozen)
        if strike.death == "node":
            time.sleep(BACK_S)
            self.fleet.has(strike.victim)
            start_patiently(lambda: self.fleet.start_node(strike.victim))
        return {
            "struck": strike.struck,
            "death": strike.death,
            "gap_s": round(strike.gap_s, 1),
            "death_s": round(strike.death_s, 1),
            "victim": strike.victim,
            "step": step,
        }

    def wake(self, frozen: subprocess.Popen[bytes]) -> None:
        """Wake a driver once another one is in charge; it ends, since it has been replaced."""
        before = self.num_started()
        wait_until(lambda: self.num_started() > before, "another driver in charge", HANG_S)
        os.killpg(frozen.pid, signal.SIGCONT)
        frozen.wait(RECOVERY_S)
        log = (self.root / "driver.log").read_text()
        assert "has taken the job over" in log, f"it ended with {frozen.returncode}"

    def num_started(self) -> int:
        return sum(event["kind"] == "started" for event in self.events())

    def let_die(self, strike: Strike) -> None:
        """Kill one worker, or the processes of one node."""
        workers = own_workers()
        if strike.death == "worker" and workers:
            kill(workers[list(NODES).index(strike.victim) % len(workers)])
        if strike.death == "node":
            raylet = self.fleet.raylet_of(strike.victim).pid
            for process_id in (*children_of(raylet), raylet):
                kill(process_id)

    def stop(self) -> None:
        """Stop the job; its last step is committed."""
        assert self.driver is not None
        self.driver.terminate()
        self.driver.wait(RECOVERY_S)
        wait_until(lambda: not own_workers(), "the end of the workers", RECOVERY_S)

    def dump_stacks(self) -> None:
        """Write the stacks of all workers and of the driver, where py-spy is installed."""
        if shutil.which("py-spy") is None:
            return
        assert self.driver is not None
        with (self.root / "stacks.txt").open("w") as file:
            for process_id in (*own_workers(), *children_of(self.driver.pid)):
                command = ["py-spy", "dump", "--pid", str(process_id)]
                subprocess.run(command, stdout=file, stderr=file, check=False, timeout=60)

    def end(self) -> None:
        """Kill what is left of the driver."""
        if self.driver is not None and self.driver.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()


def num_workers(plan: dict[str, Any] | None) -> int:
    pipelines = [] if plan is None else plan["pipelines"]
    return sum(len(stage["workers"]) for each in pipelines for stage in each["stages"])


def start_patiently(start: Callable[[], Any]) -> Any:
    """Start Ray's processes; try again where a raylet ends, since its agent is slow to start."""
    for _ in range(TRIES):
        # Ray raises a bare Exception.
        with suppress(Exception):
            return start()
    return start()


def children_of(process_id: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def descendants_of(process_id: int) -> list[int]:
    found = children_of(process_id)
    return found + [each for child in found for each in descendants_of(child)]


def kill(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


def own_workers() -> list[int]:
    """Process ids of the workers that this process's fork server has forked."""
    found = []
    for process_id in descendants_of(os.getpid()):
        with suppress(OSError):
            command = Path(f"/proc/{process_id}/cmdline").read_bytes()
            if command.startswith(b"ray::WorkerActor"):
                found.append(process_id)
    return sorted(found)


@contextmanager
def surviving_store(root: Path, redis: str | None) -> Iterator[dict[str, str]]:
    """Yield the variables by which the GCS keeps its tables beyond its process."""
    if redis is None:
        (root / "gcs").mkdir()
        yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(root / "gcs")}
        return
    port = free_port()
    command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(root)]
    with (root / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log) as server:
        try:
            wait_until(lambda: answers(port), "Redis")
            yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            server.kill()


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def strike_job(
    seed: int, strikes: list[Strike], root: Path, redis: str | None = None
) -> dict[str, Any]:
    """Run one job under these strikes; return what came of each and what was wrong."""
    training = {"steps": STEPS, "decay_steps": STEPS}
    checkpoint = {"every_steps": 40, "keep": 3}
    elastic = {"notice_sources": ["ray"]}
    sections: dict[str, Any] = {"training": training, "checkpoint": checkpoint, "elastic": elastic}
    job = exact_job(root, root, memory_directory(root), **sections)
    (root / "job.yaml").write_text(yaml.safe_dump(job.to_document()))
    fleet = RayNodes(cluster_of_nodes())
    session = ray_cluster.private_session()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with ExitStack() as stack:
        os.environ.update(RAY | stack.enter_context(surviving_store(root, redis)))
        stack.callback(fleet.close)

        def start_head() -> str:
            store = {"redis_address": os.environ["RAY_REDIS_ADDRESS"]} if redis else {}
            names = {"gcs_server_port": free_port(), "session_name": session}
            fleet.head_arguments = names | store
            return fleet.start({})

        struck = StruckJob(root, fleet, start_patiently(start_head))
        stack.callback(struck.end)
        assert fleet.cluster is not None
        struck.heads.append(fleet.cluster.head_node)
        for name in NODES:
            start_patiently(partial(fleet.start_node, name))
        struck.submit()
        try:
            struck.await_recovery(0, HANG_S)
            for number, strike in enumerate(strikes):
                row = struck.carry_out(strike)
                if strike.waits or number + 1 == len(strikes):
                    row |= struck.await_recovery(row["step"], RECOVERY_S)
                rows.append(row)
                print(json.dumps({"seed": seed, "number": number} | row), flush=True)
            struck.stop()
        except AssertionError as error:
            wrong.append(f"strike {len(rows)}: {error}")
            struck.dump_stacks()
    return {
        "seed": seed,
        "store": "RocksDB" if redis is None else "Redis",
        "strikes": rows,
        "steps": struck.num_steps(),
        "wrong": wrong or wrong_of(struck, job.checkpoint_storage),
        "commit": provenance()["commit"],
    }


def wrong_of(struck: StruckJob, storage: str) -> list[str]:
    """Compare events and the last checkpoint with one undisturbed process."""
    events = struck.events()
    steps = [event for event in events if event["kind"] == "step"]
    (struck.root / "alone").mkdir()
    training = {"steps": struck.num_steps(), "decay_steps": STEPS}
    reference = train_alone(struck.root / "alone", struck.root, training=training)
    wrong = []
    times = Counter(event["step"] for event in steps)
    unlike = [step for step in range(struck.num_steps()) if times[step] != 1]
    if unlike:
        wrong.append(f"steps with no or two events: {[(s, times[s]) for s in unlike[:8]]}")
    different = [e["step"] for e in steps if e["loss"] != reference.losses[e["step"]]]
    if different:
        wrong.append(f"losses differ at steps {different[:8]}")
    for event in events:
        if event["kind"] == "restore" and event["steps_lost"]:
            wrong.append(f"{event['steps_lost']} steps lost ({event['cause']})")
        if event["kind"] == "failed" and "has taken the job over" not in event["reason"]:
            wrong.append(f"failed: {event['reason']}")
    shards = differing_shards(storage, reference, history_of(events))
    if shards:
        wrong.append(f"{len(shards)} shards of the last checkpoint differ: {shards[:3]}")
    return wrong


def main() -> int:
    options = _options()
    jobs = json.loads(options.json.read_text())["jobs"] if options.append else []
    until = time.monotonic() + 60 * options.minutes
    ray_cluster.quieten()
    emulated_fleet.START_S = START_S
    broken = False
    with warm_ray_workers(), owned_memory(), tempfile.TemporaryDirectory() as directory:
        for seed in (int(seed) for seed in options.seeds.split(",")):
            if time.monotonic() > until:
                break
            root = Path(directory, f"seed-{seed}")
            root.mkdir()
            found = strike_job(seed, draw_strikes(seed, options.strikes), root, options.redis)
            broken = broken or bool(found["wrong"])
            print(json.dumps({"seed": seed, "wrong": found["wrong"]}), flush=True)
            if found["wrong"] and options.keep is not None:
                shutil.copytree(root, options.keep / root.name, dirs_exist_ok=True)
            jobs.append(found)
            options.json.write_text(json.dumps(_document(jobs), indent=1) + "\n")
    return int(broken)


def _options() -> argparse.Namespace:
    parser = strike_parser(__doc__, "1,2,3,4,5,6,7,8,9,10", 6, 20.0)
    parser.add_argument("--redis", metavar="SERVER", help="binary of a Redis server")
    parser.add_argument("--json", type=Path, default=RESULTS)
    return parser.parse_args()


def _document(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    strikes = [strike for job in jobs for strike in job["strikes"]]
    return {
        "what": "random strikes on driver and GCS of the exact model's job on real Ray",
        **provenance(),
        "strikes": len(strikes),
        "by_kind": Counter(f"{each['struck']}, {each['death']}" for each in strikes),
        "wrong": [f"seed {job['seed']}: {wrong}" for job in jobs for wrong in job["wrong"]],
        "jobs": jobs,
    }


if __name__ == "__main__":
    raise SystemExit(main())
