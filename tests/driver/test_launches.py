"""Launches that failed, as Ray's autoscaler and its log tell of them; who asks for nodes hears of
it.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.autoscaler.v2.instance_manager.node_provider import LaunchNodeError
from ray.autoscaler.v2.schema import Stats
from ray.autoscaler.v2.utils import ClusterStatusParser
from ray.core.generated.autoscaler_pb2 import (
    AutoscalingState,
    FailedInstanceRequest,
    GetClusterStatusReply,
    PendingInstance,
    PendingInstanceRequest,
)

from autohet.control.planning.buyer import refusal_words
from autohet.control.values.observation import Launches, StartingNode, StartState
from autohet.driver.job.job_run import JobRun
from autohet.driver.ray.requests import launches
from autohet.driver.ray.requests.launches import (
    ENDED,
    LOOK_S,
    TAIL_BYTES,
    Attempts,
    LaunchWatch,
    causes_by_type,
    read_attempts,
    read_monitor_log,
)
from autohet.driver.ray.requests.scaling import fleet_request
from planner.inputs.cluster import cluster_from_document
from tests.driver.test_buying import REASON
from tests.driver.test_scaling import shortest_job

STARTING = StartState.STARTING
KINDS = {"big": {"node_config": {"InstanceType": "g5.12xlarge"}, "max_workers": 2}}
DOCUMENT = {
    "cluster_name": "c",
    "provider": {"type": "aws", "region": "us-east-1"},
    "available_node_types": KINDS,
}


def status_of_ray(monkeypatch: pytest.MonkeyPatch, **state: Any) -> Attempts:
    """Return what is read from a state of the autoscaler, through Ray's own parser."""
    reply = GetClusterStatusReply(autoscaling_state=AutoscalingState(**state))
    status = ClusterStatusParser.from_get_cluster_status_reply(reply, Stats())
    monkeypatch.setattr(launches, "get_cluster_status", lambda address: status)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    return read_attempts()


def test_attempts_are_counted_not_the_nodes_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: eight nodes of one refused request are three attempts and more."""
    message = str(LaunchNodeError("small", 8, "1f-2", 0, "pods is forbidden"))
    failed = [
        FailedInstanceRequest(
            ray_node_type_name=kind,
            start_ts=at,
            failed_ts=at + 1,
            count=1,
            reason=f"launch failed with {message}" if kind == "small" else "",
        )
        for kind, at in [("big", 1)] * 8 + [("big", 6), ("small", 1)]
    ]
    found = status_of_ray(monkeypatch, failed_instance_requests=failed)
    assert found.failed == {"big": 2, "small": 1}
    assert found.causes == {"small": "pods is forbidden"}


def test_requests_and_machines_that_start_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = status_of_ray(
        monkeypatch,
        pending_instance_requests=[
            PendingInstanceRequest(ray_node_type_name="big", count=2, request_ts=7)
        ],
        pending_instances=[PendingInstance(instance_id="im-1", ray_node_type_name="small")],
    )
    states = Counter((node.node_type, node.state.value) for node in found.pending)
    assert states == {("big", "requested"): 2, ("small", "starting"): 1}
    assert len({node.name for node in found.pending}) == 3


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


def pending(name: str, kind: str = "big", state: StartState = STARTING) -> StartingNode:
    return StartingNode(name, kind, state, 0.0)


def test_a_node_keeps_the_time_at_which_it_entered_its_state() -> None:
    now = [pending("a"), pending("b", "small", StartState.UNSCHEDULABLE)]
    watch = LaunchWatch(lambda: Attempts({"big": 1}, pending=tuple(now)), lambda: "")
    watch.look(10.0)
    now[1] = pending("b", "small")
    found = watch.look(100.0)
    assert found is not None
    assert [(node.name, node.since) for node in found.starting] == [("a", 10.0), ("b", 100.0)]
    assert found.polled_at == 100.0
    assert found.failed == {"big": 1}, "however long they take, nothing has failed"
    now.clear()


def test_a_start_that_ends_without_a_node_is_a_failed_attempt() -> None:
    """A pod that crashes is made anew for ever: Ray and Kubernetes count no failure."""
    now = {"pending": (pending("a"), pending("b")), "joined": {"old": "big"}}
    watch = LaunchWatch(lambda: Attempts(**now), lambda: "")  # type: ignore[arg-type]
    watch.look(0.0)
    now = {"pending": (pending("b"),), "joined": {"old": "big", "10.0.0.7": "big"}}
    joined = watch.look(5.0)
    assert joined is not None
    assert joined.failed == {}, "one of them has joined, under another id"
    now = {"pending": (pending("c"),), "joined": {"10.0.0.7": "big"}}
    ended = watch.look(10.0)
    assert ended is not None
    assert ended.failed == {"big": 1}
    assert ended.causes == {"big": ENDED}


def test_kubernetes_words_for_pods_come_before_rays() -> None:
    pods: list[StartingNode] | None = None
    attempts = Attempts(
        pending=(pending("im-1"), pending("r", "big", StartState.REQUESTED)),
        joined={"pod-up": "big"},
    )
    watch = LaunchWatch(lambda: attempts, lambda: "", lambda: pods)
    first = watch.look(0.0)
    pods = [pending("pod-1", state=StartState.UNSCHEDULABLE), pending("pod-up")]
    second = watch.look(5.0)
    assert first is not None
    assert second is not None
    assert [node.name for node in first.starting] == ["im-1", "r"]
    assert [node.name for node in second.starting] == ["r", "pod-1"]
    assert second.failed == {}, "another view of the same nodes: none has ended"


def test_a_watch_asks_seldom_and_goes_on_where_ray_does_not_answer() -> None:
    answers = iter([{"big": 1}, RuntimeError("GCS is away"), {"big": 2}])

    def attempts() -> Attempts:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return Attempts(answer)

    log = Mock(return_value=REASON)
    watch = LaunchWatch(attempts, log)
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
