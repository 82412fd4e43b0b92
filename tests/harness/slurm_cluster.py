"""Slurm's own daemons on the loopback, and a scenario of scripts/slurm/autohet.sbatch on them: run
inside namespaces of its own, prints what it saw as JSON.

unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.harness.slurm_cluster
DIRECTORY
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tests.harness.local_fleet import job_document
from tests.harness.waits import HANG_S

ROOT = Path(__file__).parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
"""Programs of Debian's packages munge, slurmctld, slurmd and slurm-client."""
ADDRESS = "10.77.0.1"
NETWORK = (
    "link set lo up",
    "link add eth0 type veth peer name eth1",
    f"addr add {ADDRESS}/24 dev eth0",
    "link set eth0 up",
    "link set eth1 up",
    "route add default dev eth0",
)
"""Arguments of `ip`: an address by which this machine knows itself, as a node of a cluster does."""
NUM_NODES = 4
KILL_WAIT_S = 20
GRACE_S = 60
CONFIG = """
ClusterName=autohet
SlurmctldHost=localhost({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
FirstJobId={first_job}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
NodeName=n[1-{nodes}] NodeAddr={address} NodeHostname={host} Port=[17001-1700{nodes}] CPUs=2
PartitionName=DEFAULT Nodes=n[1-{nodes}] MaxTime=INFINITE OverSubscribe=EXCLUSIVE PriorityTier=1
PartitionName=main Default=YES PreemptMode=OFF
PartitionName=urgent PriorityTier=2 PreemptMode=OFF
PartitionName=preemptible GraceTime={grace}
"""
LABELS = "autohet.io/gpu-type={gpu},autohet.io/gpu-memory-gib=2"
LABELS += ",autohet.io/intra-node-gbps=10,autohet.io/inter-node-gbps=10"


class SlurmCluster:
    """A controller and some nodes, which are all this machine, and a job that they train."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "job.log"
        self.events_file = directory / "events.jsonl"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "AUTOHET_RAY_ARGS": "--num-cpus=2 --num-gpus=1 --object-store-memory=100000000",
            "AUTOHET_RAY_ARGS_0": f"--labels={LABELS.format(gpu='A100-40')}",
            "AUTOHET_RAY_ARGS_1": f"--labels={LABELS.format(gpu='A10G')}",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_TMPDIR": str(directory),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for line in NETWORK:
            subprocess.run(["ip", *line.split()], check=True)
        (self.directory / "state").mkdir()
        (self.directory / "munge.key").write_bytes(os.urandom(128))
        (self.directory / "munge.key").chmod(0o400)
        host = subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip()
        config = CONFIG.format(
            address=ADDRESS,
            directory=self.directory,
            first_job=int(time.time()) % 1_000_000 + 1000,
            host=host,
            kill_wait=KILL_WAIT_S,
            grace=GRACE_S,
            nodes=NUM_NODES,
        )
        (self.directory / "slurm.conf").write_text(config)
        munge = self.directory / "munge"
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={munge}.key"),
            *(f"--socket={munge}.socket", f"--pid-file={munge}.pid"),
            *(f"--log-file={munge}.log", f"--seed-file={munge}.seed"),
        )
        self.until("munge", lambda: (self.directory / "munge.socket").exists())
        self._start("slurmctld", "-D")
        for number in range(1, NUM_NODES + 1):
            self._start("slurmd", "-D", "-N", f"n{number}")
        self.until(
            "nodes", lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == f"{NUM_NODES}"
        )

    def _start(self, *command: str) -> None:
        with (self.directory / f"{command[0]}{len(self._children)}.out").open("wb") as out:
            child = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        self._children.append(child)

    def run(self, *command: str, **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        return (done.stdout if done.returncode == 0 else done.stderr).strip()

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            if found := condition():
                print(f"{time.monotonic():9.1f} s  {what}", file=sys.stderr, flush=True)
                return found
            time.sleep(0.5)
        tail = self.log.read_text()[-4000:] if self.log.exists() else ""
        raise TimeoutError(f"waited for: {what}\n{self.run('squeue')}\n{tail}")

    def submit(self, *arguments: str, **variables: str) -> str:
        """Return the number of the job."""
        said = self.run("sbatch", "--parsable", f"--output={self.log}", *arguments, **variables)
        assert said.isdigit(), said
        return said

    def state(self, job: str) -> str:
        return self.run("squeue", "-h", "-j", job, "-o", "%t").split("\n")[0]

    def signalled_at(self, job: str) -> float:
        """Return the time at which a slurmd has sent SIGTERM to the job's processes."""
        line = re.compile(rf"\[(\S+)\] .*sending signal {signal.SIGTERM:d} to all steps job {job} ")
        logs = "".join(path.read_text() for path in self.directory.glob("n*.log"))
        return min(datetime.fromisoformat(at).timestamp() for at in line.findall(logs))

    def events(self, kind: str) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        lines = self.events_file.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["kind"] == kind]

    def trains_on(self, workers: int, after: int = 0) -> Callable[[], bool]:
        """A condition: a generation later than `after` with this many workers has taken a step."""

        def condition() -> bool:
            steps = {event["generation"] for event in self.events("step")}
            for plan in self.events("plan"):
                stages = [each for line in plan["plan"]["pipelines"] for each in line["stages"]]
                number = sum(len(stage["workers"]) for stage in stages)
                if number == workers and plan["generation"] > after and plan["generation"] in steps:
                    return True
            return False

        return condition

    def generation(self) -> int:
        return max((event["generation"] for event in self.events("step")), default=0)


def scenario(slurm: SlurmCluster) -> dict[str, Any]:
    """A heterogeneous job, a node that joins and is preempted, the time limit, the end."""
    # Compute outweighs messages, so that each further node is worth its use.
    document = job_document(
        slurm.directory,
        training={"steps": 10**6, "global_batch_sequences": 12},
        parallelism={"min_pipelines": 1},
        emulation={"block_forward_s": 0.02},
    )
    job_file = slurm.directory / "job.yaml"
    job_file.write_text(yaml.safe_dump(document))
    script = str(ROOT / "scripts" / "slurm" / "autohet.sbatch")
    slurm.start()

    seen: dict[str, Any] = {}
    job = slurm.submit(
        *("-N1", ":", "-N1", script, str(job_file), "--events", str(slurm.events_file))
    )
    slurm.until("two groups train", slurm.trains_on(2))
    seen["nodes"] = sorted(event["node"] for event in slurm.events("arrival"))

    joined = slurm.submit(
        *("-p", "preemptible", "-N1", script),
        AUTOHET_JOIN=job,
        AUTOHET_RAY_ARGS_0=slurm.environment["AUTOHET_RAY_ARGS_1"],
    )
    slurm.until("the node that joined trains", slurm.trains_on(3))
    before = slurm.generation()
    urgent = slurm.submit("-p", "urgent", "-N2", "--wrap", "sleep 5")
    notice = slurm.until("a notice", lambda: slurm.events("notice"))[0]
    slurm.until("the others train on", slurm.trains_on(2, before))
    decided = next(e for e in slurm.events("decision") if e["time"] > notice["time"])
    signalled_at = slurm.signalled_at(joined)
    seen["taken_s"] = round(notice["time"] - signalled_at, 2)
    seen["decided_s"] = round(decided["time"] - signalled_at, 2)
    slurm.until("the preempted job waits", lambda: slurm.state(joined) in ("PD", "CG", "R"))
    slurm.until("the urgent job has run", lambda: slurm.state(urgent) == "")
    seen["deaths_by_preemption"] = len(slurm.events("death"))
    slurm.run("scancel", joined)

    step = slurm.events("step")[-1]["step"]
    before = slurm.generation()
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.until("queued again", lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job))
    resumed = slurm.until(
        "it goes on",
        lambda: [e for e in slurm.events("step") if e["generation"] > before and e["step"] > step],
    )
    seen["steps_lost_by_the_limit"] = max(0, step - resumed[0]["step"] + 1)
    slurm.run("scancel", job)
    slurm.until("it has ended", lambda: slurm.state(job) == "")
    stored = [event["step"] for event in slurm.events("checkpoint")]
    seen["steps_after_the_last_checkpoint"] = slurm.events("step")[-1]["step"] + 1 - stored[-1]
    shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)
    return seen


if __name__ == "__main__":
    print(json.dumps(scenario(SlurmCluster(Path(sys.argv[1])))))
