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

from autohet.driver.control.observation import Launches
from autohet.driver.ray import launches
from autohet.driver.ray.launches import (
    LOOK_S,
    TAIL_BYTES,
    LaunchWatch,
    failed_launches,
    read_monitor_log,
)
from autohet.driver.ray.scaling import fleet_request
from autohet.driver.run import JobRun
from planner.cluster import cluster_from_document
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
    assert watch.look(2 * LOOK_S) == Launches({"big": 2}, first.cause)
    assert log.call_count == 2, "only for news"


@pytest.mark.parametrize("wish", [{"request_nodes": {"big": 1}}, {}])
def test_a_job_that_asks_for_nodes_hears_of_launches_that_fail(wish: dict[str, object]) -> None:
    """One that names them, too."""
    job, cluster = shortest_job(elastic=wish), cluster_from_document(DOCUMENT)
    request = fleet_request(job, cluster, DOCUMENT, None, {"big": 1})
    run = Mock(job=job)
    JobRun.buy(run, request)
    run.workforce.buy_by.assert_called_once_with(request)
    assert run.market == request.market
