"""Notices as they come on a real fleet:

Ray drains a node, or EC2's instance metadata tells the node of its end.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.node_type_lookup import NodeTypeLookup
from autohet.driver.ray.requests.drain import drain
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.simple import RayDrains
from planner.inputs.fleet import NodeType
from tests.harness.cloud_metadata_servers import AzureServer, GoogleServer
from tests.harness.imds_server import ImdsServer
from tests.harness.local_fleet import (
    Interference,
    local_fleet,
    make_job,
    node_ids,
    run_job,
    stop,
    trains_a_while,
)
from tests.harness.notice_sources import Case, driver_now, ec2_event
from tests.harness.s3_server import s3_server
from tests.harness.waits import HANG_S, wait_until

pytestmark = pytest.mark.cluster


@ray.remote(num_cpus=0)
class Lease:
    """As an agent: while it lives, a draining node stays."""


def test_sigterm_as_kubernetes_sends_it_is_a_notice_with_its_grace(tmp_path: Path) -> None:
    """A pod of KubeRay runs `ray start --block`; SIGTERM drains its node for the grace that the
    environment names. The node has no label and no cluster file names it: what it is, its metadata
    service says.
    """
    metadata = ImdsServer()
    metadata.__enter__()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}, connect=True)
    command = [
        Path(sys.executable).parent / "ray",
        "start",
        "--block",
        "--num-cpus=1",
        "--num-gpus=1",
        f"--address={cluster.address}",
        "--object-store-memory=100000000",
        "--labels=pod=yes",
    ]
    grace = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "90",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint,
    }
    pod = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **grace})
    try:
        found = lambda: [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Labels"].get("pod")]  # noqa: E731
        wait_until(lambda: bool(found()), "the pod's node")
        (node,) = found()
        introductions = NodeTypeLookup()
        (seen,) = ray_cluster.living_nodes()
        kinds: list[NodeType] = []
        wait_until(
            lambda: bool(
                kinds.extend(filter(None, [introductions.node_type(seen, None)])) or kinds
            ),
            "its type",
        )
        assert (kinds[0].gpu_type, kinds[0].num_gpus) == ("A10G", 1)
        lease = Lease.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        ray.get(lease.__ray_ready__.remote(), timeout=HANG_S)
        pod.terminate()
        case = Case(
            RayDrains(ray_cluster.draining_nodes), say=lambda in_s: None, works=lambda: None
        )
        case.nodes = [WatchedNode("n", node)]
        notice = case.wait(lambda departure, _: departure is not None)
        assert notice is not None
        assert notice.deadline is not None
        assert 60 < notice.deadline - driver_now() <= 91
        ray.kill(lease)
        pod.wait(60)
    finally:
        pod.kill()
        ray.shutdown()
        cluster.shutdown()
        metadata.__exit__(None, None, None)


@pytest.mark.slow
def test_each_source_is_heard_and_decided_on(tmp_path: Path) -> None:
    """How long from the moment at which a source can be seen to say it until it is taken, and
    decided on: `pytest -s` shows the figures, which are recorded in
    scripts/benchmarks/results/notice_latency.json. How often sources are asked has its default.
    """
    said: dict[str, float] = {}
    notices = tmp_path / "notices.jsonl"
    with (
        s3_server() as server,
        ImdsServer() as metadata,
        ImdsServer(instance_id="i-0aaaaaaaaaaaaaaaa") as other,
    ):
        client = boto3.client("sqs", endpoint_url=server.endpoint, region_name="us-east-1")
        queue = client.create_queue(QueueName="notices")["QueueUrl"]
        elastic = {
            "notice_sources": ["ray", "aws", "queue", "file"],
            "notice_queue": queue,
            "notice_file": str(notices),
        }
        job = make_job(
            tmp_path, training={"steps": 5000}, elastic=elastic, parallelism={"min_pipelines": 1}
        )
        body = lambda: ec2_event(  # noqa: E731
            "EC2 Spot Instance Interruption Warning",
            "i-0aaaaaaaaaaaaaaaa",
            "1",
            **{"instance-action": "terminate"},
        )
        actions: dict[str, Callable[[], Any]] = {
            "drained": lambda: drain(*node_ids("drained"), "test", 60.0),
            "interrupted": lambda: metadata.interrupt(time.time() + 60),
            "queued": lambda: client.send_message(QueueUrl=queue, MessageBody=body()),
            "filed": lambda: notices.write_text(json.dumps({"node": "filed", "in_s": 60}) + "\n"),
        }

        def act(name: str) -> Callable[[Any, Any], None]:
            def say(run: Any, seen: Any) -> None:
                said[name] = time.time()
                actions[name]()

            return say

        with local_fleet(big=1) as fleet:
            fleet.add("big", "drained")
            fleet.add("big", "filed")
            for name, service in (("interrupted", metadata), ("queued", other)):
                own = {
                    "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint,
                    "AWS_EC2_METADATA_DISABLED": "false",
                }
                fleet.add("big", name, environment=own)
            events = Interference()
            for left, name in zip((5, 4, 3, 2), actions, strict=True):
                events.when(trains_a_while(workers=left), act(name))
            events.when(trains_a_while(workers=1), stop)
            outcome, log = run_job(job, fleet, tmp_path, events)
    assert outcome.summary["steps_lost"] == 0
    assert show_latencies(said, log) == len(actions)


def show_latencies(said: dict[str, float], log: list[dict[str, Any]]) -> int:
    """Print how long each node's notice took; return the number of nodes that were heard."""
    for name, at in said.items():
        taken = next(
            event["time"] for event in log if event["kind"] == "notice" and event["node"] == name
        )
        decided = next(
            event["time"] for event in log if event["kind"] == "decision" and event["time"] > taken
        )
        source = next(
            event["source"] for event in log if event["kind"] == "notice" and event["node"] == name
        )
        print(
            json.dumps(
                {
                    "source": source,
                    "taken_s": round(taken - at, 2),
                    "decided_s": round(decided - at, 2),
                }
            )
        )
    return len(said)


@pytest.mark.slow
def test_google_and_azure_are_heard_and_azure_is_told_when_the_node_has_left(
    tmp_path: Path,
) -> None:
    """Agents find their cloud by who answers; Azure's event begins only after the node's state has
    moved: `pytest -s` shows the latencies.
    """
    said: dict[str, float] = {}
    with GoogleServer() as google, AzureServer() as azure:
        own = {
            "preempted": {"GCE_METADATA_HOST": google.endpoint.removeprefix("http://")},
            "evicted": {"AZURE_POD_IDENTITY_AUTHORITY_HOST": azure.endpoint},
        }
        actions: dict[str, Callable[[], Any]] = {
            "preempted": lambda: google.values.update({"preempted": "TRUE"}),
            "evicted": lambda: azure.announce("Preempt", time.time() + 30, "pool_3"),
        }

        def act(name: str) -> Callable[[Any, Any], None]:
            def say(run: Any, seen: Any) -> None:
                assert azure.acknowledged == []
                said[name] = time.time()
                actions[name]()

            return say

        job = make_job(tmp_path, training={"steps": 5000}, parallelism={"min_pipelines": 1})
        with local_fleet(big=1) as fleet:
            for name, environment in own.items():
                fleet.add("big", name, environment=environment)
            events = Interference()
            events.when(trains_a_while(workers=3), act("preempted"))
            events.when(trains_a_while(workers=2), act("evicted"))
            events.when(trains_a_while(workers=1), stop)
            outcome, log = run_job(job, fleet, tmp_path, events)
            wait_until(lambda: len(azure.acknowledged) == 1, "the acknowledgement")
    assert outcome.summary["steps_lost"] == 0
    assert show_latencies(said, log) == 2
    texts = {event["node"]: event["source"] for event in log if event["kind"] == "notice"}
    assert texts == {
        "preempted": "Google metadata: preempted",
        "evicted": "Azure scheduled events: Preempt",
    }
