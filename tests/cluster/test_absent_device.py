"""On real Ray: a worker that can never start ends the job with its first word, and Ray starts none
a second time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autohet.driver.ray.workforce import RayWorkforce
from tests.harness.local_fleet import local_fleet, make_job, run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = RayWorkforce._start
    monkeypatch.setattr(
        RayWorkforce, "_start", lambda self, w, seat: (started.append(w), start(self, w, seat))[1]
    )
    with local_fleet(big=1, small=1) as fleet:
        outcome, events = run_job(make_job(tmp_path, training={"device": "cuda"}), fleet, tmp_path)
    assert not outcome.ok
    assert "training.device is cuda" in outcome.reason
    assert any(f"worker {name}/0 on node {name}" in outcome.reason for name in ("big-0", "small-0"))
    assert sorted(started) == sorted(set(started))
    assert [
        event["kind"] for event in events if event["kind"] in ("failed", "finished", "plan")
    ] == ["failed"]
