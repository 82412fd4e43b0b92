"""Launches that failed, as Ray's autoscaler and its log tell of them; who asks for nodes hears of
it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest

from autohet.control.planning.buyer import refusal_words
from autohet.control.values.observation import Launches
from autohet.driver.job.job_run import JobRun
from autohet.driver.ray.requests import launches
from autohet.driver.ray.requests.launches import (
    LOOK_S,
    PENDING_S,
    TAIL_BYTES,
    LaunchWatch,
    causes_by_type,
    failed_launches,
    read_monitor_log,
)
from autohet.driver.ray.requests.scaling import fleet_request
from planner.inputs.cluster import cluster_from_document
from tests.driver.test_buying import REASON
from tests.driver.test_scaling import shortest_job

KINDS = {"big": {"node_config": {"InstanceType": "g5.12xlarge"}, "max_workers": 2}}
DOCUMENT = {
    "cluster_name": "c",
    "provider": {"type": "aws", "region": "us-east-1"},
    "available_node_types": KINDS,
}


def test_failed_launches_are_counted_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [
        LaunchRequest("g5.12xlarge", kind, 1, LaunchRequest.Status.FAILED, 1, 2, "no capacity")
        for kind in ("big", "big", "small")
    ]
    monkeypatch.setattr(
        launches, "get_cluster_status", lambda address: ClusterStatus(failed_launches=failed)
    )
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    assert failed_launches() == {"big": 2, "small": 1}


def test_the_autoscalers_log_is_read_at_its_end_and_missing_off_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    assert read_monitor_log() == ""
    (tmp_path / "monitor.log").write_bytes(b"x" * TAIL_BYTES + b"\xff the end")
    assert read_monitor_log().endswith("� the end")
    assert len(read_monitor_log()) == TAIL_BYTES
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    assert read_monitor_log() == ""


def test_two_failures_with_two_causes_are_told_apart() -> None:
    quota = REASON.replace("type p4d", "type g6e")
    quota = quota.replace("InsufficientInstanceCapacity", "MaxSpotInstanceCountExceeded")
    plain = "2026-11-24 10:00:09 INFO Failed to launch 2 nodes of type g5: no subnet\n"
    found = causes_by_type(REASON + quota + plain)
    assert found["p4d"].startswith("EC2 has no capacity (InsufficientInstanceCapacity")
    assert found["g6e"].startswith("the spot quota is used up (MaxSpotInstanceCountExceeded")
    assert found["g5"] == "no subnet"
    seen = Launches({"p4d": 3, "g6e": 3}, "whatever came last", found)
    words = refusal_words({"p4d", "g6e"}, seen)
    assert "no g6e can be had: the spot quota" in words
    assert "no p4d can be had: EC2 has no capacity" in words
    assert refusal_words({"p4d", "old"}, Launches({}, "one cause")) == (
        "no old, p4d can be had: one cause"
    )


def test_a_pod_that_stays_pending_counts_as_launches_that_fail() -> None:
    """Kubernetes refuses nothing: it waits for ever for a node that nobody has."""
    waiting = {"pod-a": "big", "pod-b": "small"}
    watch = LaunchWatch(lambda: {"big": 1}, lambda: "", lambda: waiting)
    assert watch.look(0.0) == Launches({"big": 1})
    del waiting["pod-b"]
    later = watch.look(2 * PENDING_S + 1)
    assert later is not None
    assert later.failed == {"big": 3}
    assert "stays pending" in later.causes["big"]
    waiting.clear()
    assert watch.look(3 * PENDING_S) == Launches({"big": 3}, "", later.causes)


def test_a_watch_asks_seldom_and_goes_on_where_ray_does_not_answer() -> None:
    answers = iter([{"big": 1}, RuntimeError("GCS is away"), {"big": 2}])

    def failed() -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    log = Mock(return_value=REASON)
    watch = LaunchWatch(failed, log)
    first = watch.look(0.0)
    assert first is not None
    assert first.failed == {"big": 1}
    assert "InsufficientInstanceCapacity" in first.cause
    assert watch.look(LOOK_S - 1) is first
    assert watch.look(LOOK_S) is first, "Ray did not answer"
    assert watch.look(2 * LOOK_S) == Launches({"big": 2}, first.cause, first.causes)
    assert log.call_count == 2, "only for news"


@pytest.mark.parametrize("wish", [{"request_nodes": {"big": 1}}, {}])
def test_a_job_that_asks_for_nodes_hears_of_launches_that_fail(wish: dict[str, object]) -> None:
    """One that names them, too."""
    job, cluster = shortest_job(elastic=wish), cluster_from_document(DOCUMENT)
    request = fleet_request(job, cluster, DOCUMENT, None, {"big": 1})
    run = Mock(job=job)
    JobRun.buy(run, request)
    run.workforce.autoscaler.set_request.assert_called_once_with(request)
    assert run.market == request.market
