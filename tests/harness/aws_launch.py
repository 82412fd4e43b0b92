"""`ray up` and what follows, from a cluster file as it is shipped: run inside namespaces of its
own, tells what it saw as JSON.

unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.harness.aws_launch
DIRECTORY FILE short|whole|efa|long
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from planner.inputs.catalogue import instance_types
from tests.harness import aws_readme
from tests.harness.aws_machines import ROOT, Cloud
from tests.harness.aws_network import make_private_subnet
from tests.harness.local_fleet import job_document
from tests.harness.waits import HANG_S

BIN = Path(sys.executable).parent
BUCKET = "autohet-tests"
STEPS = 8
ADDRESS = "http://127.0.0.1:8265"
"""The README's; this scenario has a network of its own."""


class Scenario:
    """The user's machine: a home with Ray's token and key, and the README's commands."""

    def __init__(self, directory: Path, file: Path) -> None:
        self.directory = directory
        self.file = file
        self.home = directory / "laptop"
        (self.home / "tmp").mkdir(parents=True)
        self.cloud = Cloud(directory)
        self.seen: dict[str, Any] = {"seconds": {}}
        self._began = time.monotonic()
        self.environment = {
            **os.environ,
            **self.cloud.environment,
            "HOME": str(self.home),
            "RAY_AUTH_MODE": "token",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.home / "tmp"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }

    def mark(self, what: str) -> None:
        self.seen["seconds"][what] = round(time.monotonic() - self._began, 1)
        print(f"{self.seen['seconds'][what]:7.1f} s  {what}", file=sys.stderr, flush=True)

    def run(self, *command: str, timeout_s: float = HANG_S, cwd: Path = ROOT) -> str:
        """One command of the README; its output goes to a log that a failure quotes."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        with (self.directory / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
            )
        return done.stdout

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = HANG_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                if found := condition():
                    self.mark(what)
                    return found
            time.sleep(0.5)
        raise TimeoutError(f"waited {timeout_s} s for: {what}\n{self.cloud.log[-3:]}")

    # the README's lines

    def line(self, start: str) -> str:
        """README.md's command that begins so, with this file, bucket and job."""
        (found,) = [
            command for command in aws_readme.readme_commands() if command.startswith(start)
        ]
        found = found.replace("cluster_configs/aws-mixed-spot.yaml", str(self.file)).replace(
            aws_readme.BUCKET, BUCKET
        )
        return re.sub(r"--job \S+", "--job job.yaml", found).removesuffix("&")

    def run_line(self, start: str, **options: Any) -> str:
        return self.run("bash", "-c", self.line(start), **options)

    def prepare(self) -> None:
        self.seen["prepared"] = json.loads(self.run_line("scripts/aws/prepare"))
        self.run_line("ray get-auth-token")
        self.token = (self.home / ".ray" / "auth_token").read_text().strip()
        self.mark("prepared")

    def up(self) -> None:
        self.run_line("ray up")
        self.mark("ray up")
        (head,) = self.cloud.living("head")
        self.head = head

    def tunnel(self) -> None:
        self._tunnel = subprocess.Popen(
            shlex.split(self.line("ray dashboard")),
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.until("dashboard", lambda: self.run("ray", "job", "list", "--address", ADDRESS))

    def write_job(self, **sections: Any) -> Path:
        """The directory from which it is submitted."""
        place = self.directory / "project"
        place.mkdir()
        document = job_document(place, **sections)
        document["data"] = {"source": "text.txt", "tokenizer": "bytes"}
        for section, key in (("checkpoint", "memory_directory"), ("checkpoint", "local_directory")):
            del document[section][key]
        (place / "job.yaml").write_text(yaml.safe_dump(document))
        return place

    def submit(self, **sections: Any) -> None:
        """And go on at once, with the driver's events on the head."""
        options = "ray job submit --no-wait --submission-id job"
        line = self.line("ray job submit").replace("ray job submit", options)
        self.run(
            "bash",
            "-c",
            f"{line} --events /home/ubuntu/events.jsonl --json",
            cwd=self.write_job(**sections),
        )
        self.mark("submitted")

    def logs(self) -> str:
        return self.run("ray", "job", "logs", "--address", ADDRESS, "job")

    def events(self) -> list[dict[str, Any]]:
        """What the driver has said so far; its file lies in the head's home."""
        path = self.directory / self.head.instance_id / "home" / "events.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if path.exists()
            else []
        )

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["kind"] == kind]

    def generation(self) -> int:
        return max((event["generation"] for event in self.events()), default=0)

    def trains_on(self, workers: int, after: int = 0) -> Callable[[], bool]:
        """A condition: five steps of one generation later than `after` are committed by this many
        workers.
        """

        def condition() -> bool:
            steps = [event["generation"] for event in self.told("step")]
            generations = [g for g in set(steps) if steps.count(g) >= 5 and g > after]
            return any(self.workers_of(generation) == workers for generation in generations)

        return condition

    def workers_of(self, generation: int) -> int:
        plans = [event for event in self.told("plan") if event["generation"] == generation]
        stages = [
            stage
            for plan in plans[-1:]
            for pipeline in plan["plan"]["pipelines"]
            for stage in pipeline["stages"]
        ]
        return sum(len(stage["workers"]) for stage in stages)

    def on_head(self, command: str) -> str:
        return self.run("ray", "exec", str(self.file), command)

    def down(self) -> None:
        with suppress(AttributeError):
            self._tunnel.terminate()
        self.run_line("ray down")
        self.until("all instances are gone", lambda: not self.cloud.living())


def short(scenario: Scenario) -> None:
    """The launch itself: head and floor, the token, and the end."""
    scenario.prepare()
    scenario.up()
    floor = floor_of(scenario)
    scenario.seen["status"] = scenario.on_head(
        f"until ray status | sed -n '/Active/,/Pending/p' | grep -q {floor}; do sleep 1; done; ray"
        " status"
    )
    scenario.mark("the floor is in the cluster")
    scenario.seen["token_wanted"] = scenario.on_head(
        "RAY_AUTH_MODE=disabled ray status 2>&1 || true"
    )
    scenario.seen["token_told"] = (
        scenario.token in (scenario.directory / "commands.log").read_text()
    )


def floor_of(scenario: Scenario) -> str:
    """The node type that stands without any job."""
    workers = lambda: [  # noqa: E731
        machine for machine in scenario.cloud.living() if machine is not scenario.head
    ]
    return str(scenario.until("the floor is launched", workers)[0].node_type)


def whole(scenario: Scenario) -> None:
    """A few steps of a job on the floor, by the README's lines alone; then each node type of the
    file is launched once.
    """
    scenario.prepare()
    scenario.up()
    scenario.tunnel()
    scenario.seen["floor"] = floor_of(scenario)
    place = scenario.write_job(
        training={"steps": STEPS, "device": "cpu"},
        checkpoint={"storage": None, "every_steps": 1000},
        elastic={
            "request_nodes": {scenario.seen["floor"]: 1},
            "step_timeout_s": 120,
            "wait_for_fleet_s": 200,
        },
        parallelism={"min_pipelines": 1},
        emulation={
            "relative_speed_by_gpu_type": {kind.gpu_type: 1.0 for kind in instance_types().values()}
        },
    )
    scenario.seen["job_log"] = scenario.run_line("ray job submit", cwd=place)
    scenario.mark("trained")
    scenario.seen["checkpoints"] = [
        key for key in scenario.cloud.objects(BUCKET, "") if "manifest" in key
    ]
    said = scenario.on_head("cd ~/autohet && python -m tests.harness.aws_every_type")
    scenario.mark("each node type is in the cluster")
    scenario.seen["nodes"] = json.loads(
        next(line for line in said.splitlines() if line.startswith("[{"))
    )
    scenario.seen["public_addresses"] = [
        i["PublicIpAddress"] for i in scenario.cloud.instances() if "PublicIpAddress" in i
    ]


def efa(scenario: Scenario) -> None:
    """The whole form, of what scripts/aws/efa makes of the file."""
    subnet = make_private_subnet(scenario.cloud.ec2)
    written = scenario.run("scripts/aws/efa", str(scenario.file), "--subnet", subnet)
    scenario.file = scenario.directory / "efa.yaml"
    scenario.file.write_text(written)
    whole(scenario)


def long(scenario: Scenario) -> None:
    """A job on two nodes, one of which is interrupted with notice, its replacement terminated
    without, and the job stopped.

    One node of the type is asked for at a time: moto launches MinCount instances, which is 1 in
    every request of Ray's.
    """
    scenario.prepare()
    scenario.up()
    scenario.tunnel()
    scenario.submit(
        training={"steps": 1_000_000, "device": "cpu"},
        checkpoint={"storage": None, "every_steps": 1000},
        elastic={
            "request_nodes": {"g5": 1, "g5-floor": 1},
            "min_workers": 1,
            "step_timeout_s": 120,
            "metadata_poll_s": 1.0,
            "wait_for_fleet_s": 400,
        },
        parallelism={"min_pipelines": 1},
        emulation={"block_forward_s": 0.02},
    )
    cloud = scenario.cloud
    scenario.until("two nodes train", scenario.trains_on(2))
    victim = cloud.living("g5")[0]
    before = scenario.generation()
    victim.interrupt(110.0)
    scenario.mark("interruption notice")
    scenario.until("the notice is taken", lambda: scenario.told("notice"))
    newer = lambda: [m for m in cloud.living("g5") if m.launched_at > victim.launched_at]  # noqa: E731
    second = scenario.until("a replacement is launched", newer)[0]
    scenario.until("the interrupted node is given back", lambda: victim not in cloud.living())
    scenario.until("the replacement trains", scenario.trains_on(2, before))
    before = scenario.generation()
    cloud.terminate(second)
    scenario.mark("terminated without notice")
    scenario.until("the death is known", lambda: scenario.told("death"))
    scenario.until("another one is launched", lambda: [m for m in newer() if m is not second])
    scenario.until("the second replacement trains", scenario.trains_on(2, before))
    scenario.run("ray", "job", "stop", "--address", ADDRESS, "job")
    scenario.mark("stopped")
    found = [line for line in scenario.logs().splitlines() if line.startswith('{"steps"')]
    scenario.seen["summary"] = json.loads(found[-1])
    listed = scenario.cloud.objects(BUCKET, "")
    scenario.seen["manifests"] = [key for key in listed if "manifest" in key]


def facts_of(instance: dict[str, Any]) -> dict[str, Any]:
    """What EC2 says of an instance; its node type is Ray's tag."""
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    return {
        "node_type": tags.get("ray-user-node-type", ""),
        "type": instance["InstanceType"],
        "state": instance["State"]["Name"],
        "market": instance.get("InstanceLifecycle", "on-demand"),
        "image": instance["ImageId"],
        "ip": instance["PrivateIpAddress"],
    }


def main() -> None:
    directory = Path(sys.argv[1])
    file = Path(sys.argv[2]).absolute()
    form = sys.argv[3]
    scenario = Scenario(directory, file)
    try:
        {"short": short, "whole": whole, "efa": efa, "long": long}[form](scenario)
        scenario.down()
        scenario.seen["ok"] = True
    finally:
        if "submitted" in scenario.seen["seconds"] and not scenario.seen.get("ok"):
            with suppress(Exception):
                scenario.seen["job_log"] = scenario.logs()
        scenario.seen["instances"] = [facts_of(instance) for instance in scenario.cloud.instances()]
        scenario.seen["cloud_log"] = scenario.cloud.log
        (directory / "seen.json").write_text(json.dumps(scenario.seen, indent=1))
        scenario.cloud.close()


if __name__ == "__main__":
    main()
