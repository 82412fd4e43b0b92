"""A `sky` executable for tests: clusters and jobs in one JSON file, no cloud.

Its parser has the options of SkyPilot 0.14's own commands and refuses all others; task files must
have SkyPilot's keys. `world.json` in $FAKE_SKY: `capacity` (regions that give nodes), `clusters`,
`calls`, and `stuck` (clusters that `down` fails to terminate).
"""

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml

TASK_KEYS = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs"}
RESOURCE_KEYS = {"cloud", "region", "zone", "instance_type", "use_spot", "disk_size", "image_id"}
NOT_FOUND = "Cluster(s) not found (tip: see `sky status`)."


class World:
    """The state of the fake cloud, in a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "world.json"

    def read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"capacity": [], "clusters": {}, "calls": [], "stuck": [], "submitted": 0}
        return json.loads(self.path.read_text())

    def update(self, **changes: Any) -> None:
        self.path.write_text(json.dumps(self.read() | changes))

    def submit(self, cluster: dict[str, Any]) -> None:
        number = self.read()["submitted"] + 1
        self.update(submitted=number)
        cluster["jobs"].append(
            {"job_id": len(cluster["jobs"]) + 1, "status": "RUNNING", "submitted_at": number}
        )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sky", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)
    launch = commands.add_parser("launch", allow_abbrev=False)
    launch.add_argument("-c", "--cluster")
    launch.add_argument("-d", "--detach-run", action="store_true")
    launch.add_argument("-y", "--yes", action="store_true")
    launch.add_argument("entrypoint")
    status = commands.add_parser("status", allow_abbrev=False)
    status.add_argument("-r", "--refresh", action="store_true")
    status.add_argument("-o", "--output", choices=["table", "json"], default="table")
    status.add_argument("clusters", nargs="*")
    queue = commands.add_parser("queue", allow_abbrev=False)
    queue.add_argument("-s", "--skip-finished", action="store_true")
    queue.add_argument("-o", "--output", choices=["table", "json"], default="table")
    queue.add_argument("clusters", nargs="*")
    down = commands.add_parser("down", allow_abbrev=False)
    down.add_argument("-y", "--yes", action="store_true")
    down.add_argument("clusters", nargs="*")
    return top


def check_task(task: dict[str, Any]) -> str:
    """Refuse unknown keys; return the one region that the task may run in."""
    unknown = set(task) - TASK_KEYS
    options = task["resources"]["any_of"]
    for each in options:
        unknown |= set(each) - RESOURCE_KEYS
    if unknown:
        sys.exit(f"ValueError: Invalid task YAML: Found unsupported field(s) {sorted(unknown)}")
    (region,) = {each["region"] for each in options}
    return region


def launch(world: World, args: argparse.Namespace) -> None:
    if not args.yes:
        sys.exit("Aborted!")
    region = check_task(yaml.safe_load(Path(args.entrypoint).read_text()))
    if region not in world.read()["capacity"]:
        print("Failed to provision all possible launchable resources.")
        sys.exit("sky.exceptions.ResourcesUnavailableError: no capacity")
    clusters = world.read()["clusters"]
    cluster = clusters.setdefault(args.cluster, {"name": args.cluster, "jobs": []})
    cluster |= {"status": "UP", "init_kind": None, "region": region}
    world.submit(cluster)
    world.update(clusters=clusters)


def status(world: World, args: argparse.Namespace) -> None:
    assert args.refresh, "without --refresh the cloud is not asked"
    print("Starting a local server.")
    records = world.read()["clusters"].values()
    print(json.dumps([{k: v for k, v in each.items() if k != "jobs"} for each in records]))


def queue(world: World, args: argparse.Namespace) -> None:
    print(f"Fetching job queue for: {', '.join(args.clusters)}")
    found = {}
    for name in args.clusters:
        cluster = world.read()["clusters"].get(name)
        if cluster is None or cluster["status"] != "UP" or cluster.get("silent"):
            print(f"Failed to get the job queue for cluster {name!r}.")
        else:
            found[name] = cluster["jobs"]
    print(json.dumps(found, indent=2))


def down(world: World, args: argparse.Namespace) -> None:
    if not args.yes:
        sys.exit("Aborted!")
    clusters = world.read()["clusters"]
    for name in args.clusters:
        if name in world.read()["stuck"]:
            sys.exit(f"Failed to terminate {name}")
        if clusters.pop(name, None) is None:
            print(NOT_FOUND)
    world.update(clusters=clusters)


def main(arguments: Sequence[str], folder: Path) -> None:
    args = parser().parse_args(arguments)
    world = World(folder)
    clusters = sorted(world.read()["clusters"])
    world.update(calls=[*world.read()["calls"], [*arguments, clusters]])
    {"launch": launch, "status": status, "queue": queue, "down": down}[args.command](world, args)


def call(
    folder: Path, arguments: Sequence[str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, as the executable would."""
    del timeout_s
    out = io.StringIO()
    code = 0
    said = ""
    with redirect_stdout(out):
        try:
            main(arguments, folder)
        except SystemExit as error:
            code, said = (error.code, "") if isinstance(error.code, int) else (1, str(error.code))
    return subprocess.CompletedProcess([*arguments], code, out.getvalue(), said)


if __name__ == "__main__":
    main(sys.argv[1:], Path(os.environ["FAKE_SKY"]))
