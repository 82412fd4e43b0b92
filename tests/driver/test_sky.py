"""`autohet sky`: one region trains at a time; another goes on from the newest checkpoint."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autohet.driver.sky import task_file
from autohet.driver.sky.command import (
    NO_JOB,
    SkyCluster,
    SkyCommand,
    SkyFailed,
    SkyJob,
    find_sky,
)
from autohet.driver.sky.supervisor import (
    MOST_ROUNDS,
    LaunchableRegions,
    Limits,
    Record,
    Seen,
    Supervisor,
    decide_round,
)
from autohet.driver.sky.task_file import Region
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from planner.inputs.zones import ZoneLink, ZoneTable
from recovery.checkpoint.commit import CheckpointFacts, commit_checkpoint, find_newest
from recovery.checkpoint.journal import encode_entry, entry_name
from recovery.checkpoint.lease import DriverLease
from recovery.state.ancestry import Descent
from recovery.storage.open import open_storage
from tests.harness import fake_sky
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all
from tests.harness.fake_job import fake_job

PATIENCE_S = 1800.0
LIMITS = Limits(steps=100, region_patience_s=PATIENCE_S, max_failures_in_a_row=2)
EAST, WEST = "us-east-1", "us-west-2"
ZONES = ZoneTable((((EAST, WEST), ZoneLink(1e9, 0.06, 0.02)),))
DOCUMENT = {
    "cluster_name": "c",
    "provider": {"type": "aws", "region": EAST},
    "max_workers": 4,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"node_config": {"InstanceType": "m6i.large"}, "max_workers": 0},
        "g5": {
            "node_config": {
                "InstanceType": "g5.2xlarge",
                "InstanceMarketOptions": {"MarketType": "spot"},
                "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 300}}],
            },
            "max_workers": 2,
        },
    },
}


class Clouds:
    """Two regions with storages, a fake `sky` and a supervisor on a fake clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, 1e6
        self.world = fake_sky.World(folder)
        self.regions = [Region(name, str(folder / name)) for name in (EAST, WEST)]
        self.storages = {each.name: open_storage(each.storage) for each in self.regions}
        self.tasks = {name: folder / f"{name}.yaml" for name in self.storages}
        for region in self.regions:
            kinds = cluster_from_document(DOCUMENT).node_types
            task = task_file.task_of(
                fake_job(), folder / "fake.yaml", DOCUMENT, kinds, region=region, num_nodes=1
            )
            task_file.write_task(task, self.tasks[region.name])
        self.supervisor = self.new_supervisor()

    def new_supervisor(self) -> Supervisor:
        return Supervisor(
            "fake",
            LaunchableRegions(self.regions, self.tasks, ZONES),
            LIMITS,
            sky=SkyCommand(partial(fake_sky.call, self.folder)),
            clock=lambda: self.now_s,
        )

    def lose_capacity(self, region: str) -> None:
        """All nodes of a region are taken, and no new ones are given."""
        world = self.world.read()
        kept = {k: v for k, v in world["clusters"].items() if v["region"] != region}
        capacity = [each for each in world["capacity"] if each != region]
        self.world.update(clusters=kept, capacity=capacity)

    def calls(self, command: str) -> list[list[str]]:
        return [call for call in self.world.read()["calls"] if call[0] == command]

    def launched(self) -> list[str]:
        """Region of each launch."""
        return [Path(call[-2]).stem for call in self.calls("launch")]

    def commit(self, region: str, step: int, generation: int) -> None:
        storage = self.storages[region]
        entry = Descent(generation=generation, parent=generation - 1 or None, first_step=0)
        storage.put(entry_name(generation), encode_entry(entry))
        layout = two_worker_layout(state_specs())
        receipts = write_all(storage, step, layout, full_state(layout.tensors, seed=generation))
        commit_checkpoint(
            storage,
            step,
            layout,
            receipts,
            CheckpointFacts({}, {}, job="fake", generation=generation),
        )

    def newest(self, region: str) -> tuple[int, int]:
        manifest = find_newest(self.storages[region], whole=True).manifest
        assert manifest is not None
        return manifest.generation, manifest.step


@pytest.fixture
def clouds(tmp_path: Path) -> Clouds:
    found = Clouds(tmp_path)
    found.world.update(capacity=[EAST, WEST])
    return found


def test_a_starved_region_hands_the_newest_checkpoint_to_the_next(
    clouds: Clouds, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong: patience counts from the start; the copy is made after the launch, or has no price."""
    caplog.set_level(logging.INFO, "autohet")
    caplog.set_level(logging.INFO, "recovery")
    assert clouds.supervisor.round() is None
    assert clouds.launched() == [EAST]
    clouds.now_s += 10 * PATIENCE_S
    clouds.supervisor.round()
    clouds.commit(EAST, 10, generation=1)
    clouds.commit(EAST, 20, generation=1)
    clouds.lose_capacity(EAST)
    clouds.supervisor.round()
    clouds.now_s += PATIENCE_S - 1
    clouds.supervisor.round()
    assert clouds.launched() == [EAST] * 3, "tried again while patience lasts"
    clouds.now_s += 1
    clouds.supervisor.round()
    assert clouds.launched() == [EAST] * 3 + [WEST]
    assert clouds.newest(WEST) == (1, 20)
    said = [record.getMessage() for record in caplog.records]
    price = next(i for i, text in enumerate(said) if text.startswith("Copying step 20 from"))
    copied = next(i for i, text in enumerate(said) if text.startswith("Copied step 20 to"))
    assert price < copied
    assert said[price].endswith(" $")
    clouds.now_s += 1
    clouds.supervisor.round()
    assert clouds.launched() == [EAST] * 3 + [WEST], "it trains there"


def test_the_price_of_a_copy_is_bytes_by_the_link_of_both_regions() -> None:
    assert ZONES.usd(50 * 10**9, EAST, WEST) == pytest.approx(1.0)
    assert ZONES.usd(10**9, WEST, EAST) == pytest.approx(0.02)


def test_a_region_that_comes_back_gets_what_the_other_trained(clouds: Clouds) -> None:
    """Wrong: a region goes on from its own old checkpoint, or the same step is taken for the same
    state.
    """
    clouds.commit(EAST, 20, generation=1)
    clouds.commit(EAST, 30, generation=2)
    clouds.storages[WEST].put(
        "sky/unused", b""
    )  # something of its own, which no copy may trip over
    record = Record(region=WEST)
    clouds.storages[EAST].put("sky/supervisor.json", msgspec.json.encode(record))
    clouds.supervisor.round()
    assert clouds.newest(WEST) == (2, 30)
    clouds.commit(WEST, 31, generation=3)
    clouds.commit(EAST, 40, generation=2)  # late, of a history that was left
    clouds.lose_capacity(WEST)
    record = Record(region=EAST)
    clouds.storages[EAST].put("sky/supervisor.json", msgspec.json.encode(record))
    clouds.supervisor.round()
    assert clouds.newest(EAST) == (3, 31)


def test_no_region_is_launched_beside_a_cluster_of_another(clouds: Clouds) -> None:
    clouds.supervisor.round()
    clouds.storages[EAST].put(
        "sky/supervisor.json", msgspec.json.encode(Record(region=WEST, starved_since_s=1e6))
    )
    clouds.world.update(stuck=["autohet-fake-us-east-1"])
    with pytest.raises(SkyFailed, match="Failed to terminate"):
        clouds.supervisor.round()
    assert clouds.launched() == [EAST]
    clouds.world.update(stuck=[])
    clouds.supervisor.round()
    assert clouds.launched() == [EAST, WEST]
    assert clouds.calls("launch")[-1][-1] == [], "no cluster stood when it was launched"


def test_a_restarted_supervisor_knows_how_long_a_region_has_starved(clouds: Clouds) -> None:
    clouds.lose_capacity(EAST)
    clouds.supervisor.round()
    clouds.now_s += PATIENCE_S
    clouds.new_supervisor().round()
    assert clouds.launched() == [EAST, WEST]


def test_a_restarted_supervisor_without_a_record_goes_on_where_the_newest_checkpoint_is(
    clouds: Clouds,
) -> None:
    clouds.commit(WEST, 10, generation=1)
    clouds.new_supervisor().round()
    assert clouds.launched() == [WEST]


def test_nodes_that_are_missing_do_not_matter_while_a_driver_lives(clouds: Clouds) -> None:
    """A cluster with a lost node is INIT, and SkyPilot does not tell its jobs."""
    clouds.supervisor.round()
    clusters = clouds.world.read()["clusters"]
    clusters["autohet-fake-us-east-1"] |= {"status": "INIT", "init_kind": "unhealthy"}
    clouds.world.update(clusters=clusters)
    lease = DriverLease(clouds.storages[EAST])
    lease.renew()
    clouds.supervisor.round()
    assert clouds.launched() == [EAST]
    lease.release()
    clouds.supervisor.round()
    assert clouds.launched() == [EAST, EAST]


def test_the_end_of_the_job_ends_the_cluster(clouds: Clouds) -> None:
    clouds.supervisor.round()
    clusters = clouds.world.read()["clusters"]
    clusters["autohet-fake-us-east-1"]["jobs"][0]["status"] = "SUCCEEDED"
    clouds.world.update(clusters=clusters)
    ended = clouds.supervisor.run()
    assert ended.action == "finish"
    assert clouds.world.read()["clusters"] == {}


NOTHING = Seen(now_s=0.0, cluster=None, job=None, driver_lives=False, step=-1)
UP = SkyCluster("c", "UP")


@pytest.mark.parametrize(
    ("look", "action"),
    [
        ({"cluster": UP, "job": SkyJob("RUNNING", 1.0)}, "wait"),
        ({"cluster": UP, "job": SkyJob("RUNNING", 1.0), "step": 100}, "wait"),
        ({"cluster": UP, "job": SkyJob("SUCCEEDED", 1.0)}, "finish"),
        ({"step": 100}, "finish"),
        ({"cluster": UP, "job": SkyJob("CANCELLED", 1.0)}, "give_up"),
        ({"cluster": UP, "job": NO_JOB}, "launch"),
        ({"cluster": UP, "job": None}, "wait"),
        ({"cluster": SkyCluster("c", "INIT", is_launching=True)}, "wait"),
        ({"cluster": SkyCluster("c", "INIT")}, "launch"),
        ({}, "launch"),
    ],
)
def test_what_is_seen_decides(look: dict[str, Any], action: str) -> None:
    decision = decide_round(Record(region=EAST), replace(NOTHING, **look), (EAST, WEST), LIMITS)
    assert decision.action == action, decision.reason


def test_a_job_that_fails_without_a_newer_checkpoint_is_given_up() -> None:
    """Wrong: one failed job is counted each time that it is looked at."""
    record, actions = Record(region=EAST), []
    for submitted_at in (1.0, 1.0, 2.0, 3.0):
        job = SkyJob("FAILED", submitted_at)
        decision = decide_round(record, replace(NOTHING, cluster=UP, job=job), (EAST,), LIMITS)
        record = decision.record
        actions.append(decision.action)
    assert actions == ["launch", "launch", "launch", "give_up"]
    progressed = decide_round(
        record, replace(NOTHING, cluster=UP, job=SkyJob("FAILED", 4.0), step=7), (EAST,), LIMITS
    )
    assert progressed.action == "launch"


def test_regions_that_starve_without_end_end_the_job() -> None:
    record, now_s, moves = Record(region=EAST), 0.0, 0
    while True:
        decision = decide_round(record, replace(NOTHING, now_s=now_s), (EAST, WEST), LIMITS)
        record, now_s = decision.record, now_s + PATIENCE_S
        if decision.action == "give_up":
            break
        moves += decision.action == "move"
        assert moves < 2 * MOST_ROUNDS
    assert moves == 2 * MOST_ROUNDS - 1


def test_a_task_has_the_regions_machines_and_storage(clouds: Clouds) -> None:
    task = yaml.safe_load(clouds.tasks[WEST].read_text())
    assert task["resources"]["any_of"] == [
        {
            "cloud": "aws",
            "region": WEST,
            "instance_type": "g5.2xlarge",
            "use_spot": True,
            "disk_size": 300,
        }
    ]
    assert f"--storage {clouds.folder / WEST}" in task["run"]
    checked = subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False)
    assert checked.returncode == 0


def test_the_executable_is_called_and_its_refusal_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    executable = tmp_path / "sky"
    executable.write_text(
        f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.harness.fake_sky "$@"\n'
    )
    executable.chmod(0o755)
    monkeypatch.setenv("FAKE_SKY", str(tmp_path))
    sky = SkyCommand(find_sky(str(executable)))
    assert sky.clusters() == {}
    with pytest.raises(SkyFailed, match="sky launch failed with exit code 1: "):
        sky.launch("c", Path("/does/not/exist"), 60.0)
    with pytest.raises(ConfigError, match="pipx install"):
        find_sky(str(tmp_path / "none"))


def test_another_provider_is_refused() -> None:
    with pytest.raises(ConfigError, match="provider type 'gcp'"):
        task_file.require_aws({"provider": {"type": "gcp"}}, "cluster 'c'")


def skypilot_python() -> str | None:
    """The Python that has SkyPilot: $SKYPILOT_PYTHON, or this one."""
    if "SKYPILOT_PYTHON" in os.environ:
        return os.environ["SKYPILOT_PYTHON"]
    return sys.executable if importlib.util.find_spec("sky") else None


@pytest.mark.skipif(skypilot_python() is None, reason="SkyPilot is not installed (SKYPILOT_PYTHON)")
def test_skypilot_itself_takes_the_task_and_the_commands(clouds: Clouds) -> None:
    clouds.supervisor.round()
    clouds.supervisor.round()
    clouds.supervisor.end_clusters(but=None)
    commands = [call[:-1] for call in clouds.world.read()["calls"]]
    assert {command[0] for command in commands} == {"launch", "status", "queue", "down"}
    script = Path(__file__).parents[1] / "harness" / "check_with_skypilot.py"
    python = skypilot_python()
    assert python is not None
    ended = subprocess.run(
        [python, str(script), str(clouds.tasks[EAST])],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(clouds.folder), "PYTHONPATH": ""},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
