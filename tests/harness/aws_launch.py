"""`ray up` and what follows, from a cluster file as it is shipped: run inside namespaces of its own, tells what it saw as JSON.

unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.harness.aws_launch DIRECTORY FILE short|long
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.harness.aws_machines import ROOT, Cloud
from tests.harness.local_fleet import free_port, job_document

BIN = Path(sys.executable).parent
BUCKET = "autohet-tests"


class Scenario:
    """The user's machine: a home with Ray's token and key, and the README's commands."""

    def __init__(self, directory: Path, file: Path) -> None:
        self.directory, self.file = directory, file
        self.home = directory / "laptop"
        (self.home / "tmp").mkdir(parents=True)
        self.cloud = Cloud(directory)
        self.seen: dict[str, Any] = {"seconds": {}}
        self._began = time.monotonic()
        self.environment = {
            **os.environ, **self.cloud.environment, "HOME": str(self.home), "RAY_AUTH_MODE": "token", "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.home / "tmp"), "PATH": f"{BIN}:{os.environ['PATH']}",
        }  # fmt: skip

    def mark(self, what: str) -> None:
        self.seen["seconds"][what] = round(time.monotonic() - self._began, 1)
        print(f"{self.seen['seconds'][what]:7.1f} s  {what}", file=sys.stderr, flush=True)

    def run(self, *command: str, timeout_s: float = 300, cwd: Path = ROOT) -> str:
        """One command of the README; its output goes to a log that a failure quotes."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        with (self.directory / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}")
        return done.stdout

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = 240) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                if found := condition():
                    self.mark(what)
                    return found
            time.sleep(0.5)
        raise TimeoutError(f"waited {timeout_s} s for: {what}\n{self.cloud.log[-3:]}")

    # the README's lines

    def prepare(self) -> None:
        self.seen["prepared"] = json.loads(self.run(sys.executable, "scripts/aws/prepare", "--bucket", BUCKET))
        self.run("bash", "-c", "ray get-auth-token --generate > /dev/null")  # it prints the token
        self.token = (self.home / ".ray" / "auth_token").read_text().strip()
        self.mark("prepared")

    def up(self) -> None:
        self.run("ray", "up", "-y", "--no-config-cache", str(self.file), timeout_s=400)
        self.mark("ray up")
        (head,) = self.cloud.living("head")
        self.head = head

    def tunnel(self) -> None:
        self.port = free_port()
        self._tunnel = subprocess.Popen(
            ["ray", "dashboard", "--no-config-cache", "-p", str(self.port), str(self.file)], cwd=ROOT, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.until("dashboard", lambda: self.run("ray", "job", "list", "--address", self.address))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def submit(self, **sections: Any) -> None:
        place = self.directory / "project"
        place.mkdir()
        document = job_document(place, **sections)
        document["data"] = {"source": "text.txt", "tokenizer": "bytes"}
        for section, key in (("checkpoint", "memory_directory"), ("checkpoint", "local_directory")):
            del document[section][key]
        (place / "job.yaml").write_text(yaml.safe_dump(document))
        self.run(
            "ray", "job", "submit", "--address", self.address, "--working-dir", ".", "--no-wait", "--submission-id", "job",
            "--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}', "--",
            "autohet", "train", "--job", "job.yaml", "--storage", f"s3://{BUCKET}/runs/job", "--events",
            "/home/ubuntu/events.jsonl", "--json", cwd=place,
        )  # fmt: skip
        self.mark("submitted")

    def logs(self) -> str:
        return self.run("ray", "job", "logs", "--address", self.address, "job")

    def events(self) -> list[dict[str, Any]]:
        """What the driver has said so far; its file lies in the head's home."""
        path = self.directory / self.head.instance_id / "home" / "events.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        )

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["kind"] == kind]

    def generation(self) -> int:
        return max((event["generation"] for event in self.events()), default=0)

    def trains_on(self, workers: int, after: int = 0) -> Callable[[], bool]:
        """A condition: five steps of one generation later than `after` are committed by this many workers."""

        def condition() -> bool:
            steps = [event["generation"] for event in self.told("step")]
            generations = [g for g in set(steps) if steps.count(g) >= 5 and g > after]
            return any(self.workers_of(generation) == workers for generation in generations)

        return condition

    def workers_of(self, generation: int) -> int:
        plans = [event for event in self.told("plan") if event["generation"] == generation]
        stages = [
            stage for plan in plans[-1:] for pipeline in plan["plan"]["pipelines"] for stage in pipeline["stages"]
        ]
        return sum(len(stage["workers"]) for stage in stages)

    def on_head(self, command: str) -> str:
        return self.run("ray", "exec", "--no-config-cache", str(self.file), command)

    def down(self) -> None:
        with suppress(AttributeError):
            self._tunnel.terminate()
        self.run("ray", "down", "-y", str(self.file))
        self.until("all instances are gone", lambda: not self.cloud.living(), 60)


def short(scenario: Scenario) -> None:
    """The launch itself: head and floor, the token, and the end."""
    scenario.prepare()
    scenario.up()
    floor = scenario.until("the floor is launched", lambda: scenario.cloud.living("g5-floor"), 60)[0]
    scenario.seen["status"] = scenario.on_head(
        f"until ray status | sed -n '/Active/,/Pending/p' | grep -q {floor.node_type}; do sleep 1; done; ray status"
    )
    scenario.mark("the floor is in the cluster")
    scenario.seen["token_wanted"] = scenario.on_head("RAY_AUTH_MODE=disabled ray status 2>&1 || true")
    scenario.seen["token_told"] = scenario.token in (scenario.directory / "commands.log").read_text()


def long(scenario: Scenario) -> None:
    """A job on two nodes, one of which is interrupted with notice, its replacement terminated without, and the job stopped.

    One node of the type is asked for at a time: moto launches MinCount instances, which is 1 in every request of Ray's.
    """
    scenario.prepare()
    scenario.up()
    scenario.tunnel()
    scenario.submit(
        training={"steps": 1_000_000, "device": "cpu"},
        checkpoint={"storage": None, "every_steps": 1000},
        elastic={"request_nodes": {"g5": 1, "g5-floor": 1}, "min_workers": 1, "step_timeout_s": 120, "metadata_poll_s": 1.0,
                 "wait_for_fleet_s": 400},
        parallelism={"min_pipelines": 1},
        emulation={"block_forward_s": 0.02},
    )  # fmt: skip
    cloud = scenario.cloud
    scenario.until("two nodes train", scenario.trains_on(2), 300)
    victim, before = cloud.living("g5")[0], scenario.generation()
    victim.interrupt(110.0)
    scenario.mark("interruption notice")
    scenario.until("the notice is taken", lambda: scenario.told("notice"), 60)
    newer = lambda: [m for m in cloud.living("g5") if m.launched_at > victim.launched_at]  # noqa: E731
    second = scenario.until("a replacement is launched", newer, 120)[0]
    scenario.until("the interrupted node is given back", lambda: victim not in cloud.living(), 200)
    scenario.until("the replacement trains", scenario.trains_on(2, before), 240)
    before = scenario.generation()
    cloud.terminate(second)
    scenario.mark("terminated without notice")
    scenario.until("the death is known", lambda: scenario.told("death"), 60)
    scenario.until("another one is launched", lambda: [m for m in newer() if m is not second], 180)
    scenario.until("the second replacement trains", scenario.trains_on(2, before), 240)
    scenario.run("ray", "job", "stop", "--address", scenario.address, "job", timeout_s=120)
    scenario.mark("stopped")
    found = [line for line in scenario.logs().splitlines() if line.startswith('{"steps"')]
    scenario.seen["summary"] = json.loads(found[-1])
    listed = scenario.cloud.objects(BUCKET, "runs/job")
    scenario.seen["manifests"] = [key for key in listed if "manifest" in key]


def main() -> None:
    directory, file, form = Path(sys.argv[1]), Path(sys.argv[2]).absolute(), sys.argv[3]
    scenario = Scenario(directory, file)
    try:
        {"short": short, "long": long}[form](scenario)
        scenario.down()
        scenario.seen["ok"] = True
    finally:
        with suppress(Exception):
            scenario.seen["job_log"] = (
                scenario.logs() if "submitted" in scenario.seen["seconds"] and not scenario.seen.get("ok") else ""
            )
        scenario.seen["instances"] = [
            {"type": i["InstanceType"], "state": i["State"]["Name"], "image": i["ImageId"]}
            for i in scenario.cloud.instances()
        ]
        scenario.seen["cloud_log"] = scenario.cloud.log
        (directory / "seen.json").write_text(json.dumps(scenario.seen, indent=1))
        scenario.cloud.close()


if __name__ == "__main__":
    main()
