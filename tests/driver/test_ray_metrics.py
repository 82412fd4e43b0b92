"""A run's figures where people look for them: every panel of the dashboard has its metric, and
Ray's own endpoint serves them all.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autohet.driver.callbacks.ray_metrics import COUNTERS, GAUGES

DASHBOARD = Path(__file__).parents[2] / "cluster_configs" / "grafana-dashboard.json"


def named_metrics(expression: str) -> set[str]:
    return set(re.findall(r"ray_autohet_\w+", expression))


def exported_names() -> set[str]:
    """As Prometheus has them."""
    gauges = {f"ray_{name}" for name in GAUGES}
    return gauges | {f"ray_{name}_total" for name in COUNTERS}


def test_every_panel_draws_metrics_that_exist_and_every_metric_is_drawn() -> None:
    document = json.loads(DASHBOARD.read_text())
    drawn: set[str] = set()
    for panel in document["panels"]:
        for target in panel["targets"]:
            names = named_metrics(target["expr"])
            assert names, panel["title"]
            assert '{job=~"$job"}' in target["expr"]
            drawn |= names
    assert drawn == exported_names()
    (jobs,) = [v["query"]["query"] for v in document["templating"]["list"] if v["name"] == "job"]
    assert named_metrics(jobs) <= exported_names()
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


EVENTS = r"""
import sys, time, urllib.request
import ray
from tests.harness.local_fleet import free_port
from autohet.driver.callbacks.ray_metrics import RayMetrics
from tests.driver.test_ray_metrics import exported_names

port = free_port()
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port,
         _system_config={"metrics_report_interval_ms": 200})
metrics = RayMetrics("toy")
common = {"time": 100.0, "generation": 2}
tiers = {"memory": 0, "disk": 0, "peer": 7000, "s3": 0}
def arrival(node, gpu_type, num_gpus, usd):
    return {"kind": "arrival", "node": node, "gpu_type": gpu_type, "num_gpus": num_gpus, "usd_per_hour": usd}
for event in (
    arrival("a-0", "A100-40", 8, 9.0), arrival("b-0", "L4", 4, None), arrival("b-1", "L4", 4, 3.0),
    {"kind": "death", "nodes": ["b-1"]},
    {"kind": "plan", "transfers": [{"zones": ["x", "y"], "bytes_per_step": 5e9, "usd_per_gb": 0.02}],
     "replication": {"bytes": 10, "by_zones": [{"zones": ["x", "y"], "bytes": 5, "usd_per_gb": 0.02}]}},
    {"kind": "step", "step": 4, "loss": 2.5, "learning_rate": 1e-3, "tokens": 1000, "seconds": 0.5},
    {"kind": "evaluation", "evaluation_loss": 2.75},
    {"kind": "restore", "bytes_by_tier": tiers},
    {"kind": "transfers", "transfers": [{"tier": "s3", "bytes": 500}, {"tier": "s3", "bytes": 40}, {"tier": "disk", "bytes": 3},
                                          {"tier": "peer", "bytes": 2e9}]},
    {"kind": "reconfigure", "cause": "death", "steps_lost": 2, "usd_lost": 0.25, "goodput": 0.9,
     "seconds": {"total": 3.5, "stalled": 1.5, "redone": 4.0}},
    {"kind": "checkpoint", "step": 4},
):
    metrics.on_event(common | event)
wanted, text, deadline = exported_names(), "", time.monotonic() + 150
while not all(name + "{" in text for name in wanted):
    assert time.monotonic() < deadline, [name for name in wanted if name + "{" not in text]
    time.sleep(0.3)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        pass
print("\n".join(line for line in text.splitlines() if line.startswith("ray_autohet")))
"""  # noqa: E501


@pytest.mark.cluster
def test_rays_endpoint_serves_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVENTS],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=DASHBOARD.parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {}
    for line in done.stdout.splitlines():
        name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert tags["job"] == "toy"
        found[name, tags.get("gpu_type") or tags.get("cause") or tags.get("tier")] = float(value)
    assert found["ray_autohet_gpus", "A100-40"] == 8
    assert found["ray_autohet_gpus", "L4"] == 4
    assert found["ray_autohet_usd_per_hour", None] == 9.0
    assert found["ray_autohet_tokens_per_s", None] == 2000.0
    assert found["ray_autohet_usd_per_million_tokens", None] == pytest.approx(
        9.0 / 3600 / 2000 * 1e6
    )
    assert found["ray_autohet_lost_seconds_total", "death"] == 3.5
    assert found["ray_autohet_stalled_seconds_total", "death"] == 1.5
    assert found["ray_autohet_redone_seconds_total", "death"] == 4.0
    assert found["ray_autohet_lost_usd_total", "death"] == 0.25
    assert found["ray_autohet_goodput", None] == 0.9
    assert found["ray_autohet_moved_bytes_total", "peer"] == 7000
    assert (
        found["ray_autohet_saved_bytes_total", "s3"],
        found["ray_autohet_saved_bytes_total", "disk"],
    ) == (540, 3)
    assert found["ray_autohet_step", None] == 5
    assert found["ray_autohet_learning_rate", None] == 1e-3
    assert found["ray_autohet_evaluation_loss", None] == 2.75
