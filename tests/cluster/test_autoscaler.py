"""Ray's real autoscaler: the driver asks it for the fleet, and takes what it brings in place of a
node that leaves.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler.sdk import request_resources

from autohet.driver.job.job_run import JobRun
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.requests.drain import drain
from autohet.driver.ray.requests.scaling import fleet_request
from planner.inputs.cluster import cluster_from_document
from tests.harness.autoscaling_cluster import at_most, autoscaling_cluster
from tests.harness.local_fleet import (
    Interference,
    cluster_document,
    in_generation,
    largest_relative_difference,
    make_job,
    run_on,
    stop,
    trains_a_while,
    trains_at,
    write_documents,
)
from tests.harness.s3_server import s3_server
from tests.harness.waits import HANG_S, wait_until

pytestmark = pytest.mark.cluster
SAMPLE = Path("cluster_configs/aws-mixed-spot.yaml")
WATCHED_S = 60.0


def drain_a_member(run: JobRun, seen: object) -> None:
    """Ray is told that the node of one single-GPU worker will be preempted."""
    alive = {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU") == 1
    }
    assert drain(min(alive), "test", 60.0)


def test_the_fleet_comes_by_request_and_a_drained_node_is_replaced(tmp_path: Path) -> None:
    elastic = {
        "notice_sources": ["ray"],
        "wait_for_fleet_s": HANG_S,
        "request_nodes": {"big": 2},
    }
    parallelism = {"min_pipelines": 1}
    job = make_job(tmp_path, training={"steps": 2000}, elastic=elastic, parallelism=parallelism)
    with autoscaling_cluster(tmp_path, at_most(big=2)) as document:
        assert not ray_cluster.living_nodes()
        cluster = cluster_from_document(document)
        request = fleet_request(job, cluster, document, None, None)
        request.ask()
        events = Interference()
        events.when(trains_at(5, workers=2), drain_a_member)
        events.when(in_generation(3), lambda run, seen: None)
        events.when(trains_a_while(workers=2), stop)
        outcome, log = run_on(job, cluster, None, tmp_path, events)
        request.withdraw()
    changes = outcome.summary["reconfigurations"]
    assert {change["cause"] for change in changes} == {"notice", "arrival"}, changes
    assert outcome.summary["steps_lost"] == 0
    assert all(change["bytes_by_tier"]["s3"] == 0 for change in changes)
    arrived = [event["node"] for event in log if event["kind"] == "arrival"]
    assert len(arrived) == 3, arrived
    # Rounding grows with every step, and a busy machine takes some hundreds until the new node is
    # there.
    assert largest_relative_difference(outcome.summary["losses"][:150], job) < 1e-3


def test_a_head_with_gpus_trains_beside_what_the_autoscaler_brings(tmp_path: Path) -> None:
    """`plan` says what is launched, and `train` runs on the head and on all of that."""
    kind = cluster_document()["available_node_types"]["big"]
    head = {**kind, "min_workers": 0, "max_workers": 0}
    autohet = str(Path(sys.executable).parent / "autohet")
    events = tmp_path / "events.jsonl"
    sections: dict[str, Any] = {
        "training": {"steps": 20},
        "elastic": {"min_workers": 3, "wait_for_fleet_s": HANG_S},
        "parallelism": {"min_pipelines": 3},
    }
    with s3_server() as server, autoscaling_cluster(tmp_path, at_most(big=2), head) as document:
        sections["checkpoint"] = {"storage": server.create_bucket("head") + "/job"}
        job_path, _ = write_documents(tmp_path, {}, **sections)
        documents = ["--job", str(job_path), "--cluster", str(tmp_path / "autoscaled.yaml")]
        planned = subprocess.run(
            [autohet, "plan", *documents, "--json"], capture_output=True, check=True, text=True
        )
        launch = json.loads(planned.stdout)["launch"]
        assert launch["launched"] == {"big": 2}
        address = document["provider"]["gcs_address"]
        command = [autohet, "train", *documents, "--events", str(events), "--address", address]
        trained = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert trained.returncode == 0, trained.stderr[-3000:]
    # Two of the workers' type may exist, so the third GPU is the head's.
    assert gpus_used(events) == 3


def gpus_alive() -> int:
    return int(sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))


def told(events: Path, kind: str) -> list[dict[str, Any]]:
    lines = events.read_text().splitlines() if events.exists() else []
    return [
        event
        for line in lines
        if line.endswith("}") and (event := json.loads(line))["kind"] == kind
    ]


def gpus_used(events: Path) -> int:
    """Of the newest plan."""
    plan = told(events, "plan")[-1]["plan"]
    return sum(
        len(stage["workers"]) for pipeline in plan["pipelines"] for stage in pipeline["stages"]
    )


@pytest.mark.slow
def test_a_job_buys_what_it_uses_and_gives_back_what_it_finds(
    tmp_path: Path,
) -> None:
    """The sample file's node types from Ray's autoscaler; two g5 are left over from somebody
    before. Idle nodes are given back after 20 s here (300 s by default), so that ten minutes pass
    in one.
    """
    kinds = {
        n: k
        for n, k in yaml.safe_load(SAMPLE.read_text())["available_node_types"].items()
        if n != "head"
    }
    for name, kind in kinds.items():
        kind["labels"]["ray.io/node-group"] = (
            name  # which the launcher of AWS's nodes says, and the fake provider does not
        )
    config = {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 64,
        "vocab_size": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    sections: dict[str, Any] = {
        "model": {"config": config},
        "training": {"steps": 100_000, "global_batch_sequences": 8, "sequence_length": 128},
        "elastic": {
            "idle_release_s": 20,
            "wait_for_fleet_s": 200,
            "step_timeout_s": 120,
            "heartbeat_timeout_s": 20,
        },
        "parallelism": {"min_pipelines": 1},
        "emulation": {"block_forward_s": 0.002},
    }
    events = tmp_path / "events.jsonl"
    floor = kinds["g5-floor"]["min_workers"]
    with s3_server() as server, autoscaling_cluster(tmp_path, kinds) as document:
        sections["checkpoint"] = {"storage": server.create_bucket("idle") + "/job"}
        job_path, _ = write_documents(tmp_path, {}, **sections)
        label = {
            "ray.io/market-type": "spot",
            "ray.io/accelerator-type": kinds["g5"]["labels"]["ray.io/accelerator-type"],
        }
        request_resources(bundles=[{"GPU": 1}] * 2, bundle_label_selectors=[label] * 2)
        wait_until(lambda: gpus_alive() == floor + 2, "the left-overs and the floor")
        command = [
            str(Path(sys.executable).parent / "autohet"),
            "train",
            "--job",
            str(job_path),
            "--events",
            str(events),
            "--cluster",
            str(tmp_path / "autoscaled.yaml"),
            "--address",
            document["provider"]["gcs_address"],
        ]
        with (tmp_path / "log").open("wb") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            given_back = lambda: [  # noqa: E731
                d for d in told(events, "decision") if " back, since no plan " in d["reason"]
            ]
            wait_until(
                lambda: len(given_back()) >= 2 or driver.poll() is not None,
                "the left-overs to be given back",
            )
            assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
            wait_until(
                lambda: gpus_alive() == floor + gpus_used(events), "the given-back nodes to go"
            )
            bought, used = 0, 0  # GPU-seconds
            end = time.monotonic() + WATCHED_S
            while time.monotonic() < end:
                bought, used = bought + gpus_alive() - floor, used + gpus_used(events)
                time.sleep(1.0)
            assert driver.poll() is None
        finally:
            driver.terminate()
            driver.wait(120)
        print(
            json.dumps(
                {
                    "bought_gpu_s": bought,
                    "used_gpu_s": used,
                    "said": [d["reason"] for d in told(events, "decision")],
                }
            )
        )
    assert told(events, "step")
    assert bought > 0
    assert bought - used < 0.05 * bought
