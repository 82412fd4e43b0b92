"""A job whose checkpoints go to S3 is stopped, everything ends, and it goes on elsewhere on another
fleet under another plan.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from autohet.cli.main import main
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.models.config import load_config
from planner.plans.plan import Plan
from tests.harness.local_fleet import (
    Interference,
    largest_relative_difference,
    local_fleet,
    make_job,
    run_job,
    stop,
    trains_at,
)
from tests.harness.s3_server import s3_server

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_another_fleet_goes_on_from_s3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        {"first_layer": 0, "num_layers": 3, "workers": ["pair-0/0", "pair-0/1"]},
        {"first_layer": 3, "num_layers": 1, "workers": ["big-0/0"]},
    ]
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 8,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [{"num_microbatches": 8, "stages": stages}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with s3_server() as server:
        uri = server.create_bucket("checkpoints") + "/tiny"
        sections = {"training": {"steps": 40}, "checkpoint": {"storage": uri}}
        wishes = {"plan": str(tmp_path / "plan.json"), "min_pipelines": 1}
        first = make_job(tmp_path, **sections, parallelism=wishes)
        with local_fleet(pair=1, big=1) as fleet:
            before, _ = run_job(first, fleet, tmp_path, Interference().when(trains_at(8), stop))
        assert before.reason == "stopped by the test"
        done = before.summary["steps"]
        assert 8 <= done < 40
        second = make_job(tmp_path, **sections)
        with local_fleet(small=2) as fleet:
            after, log = run_job(second, fleet, tmp_path)
        assert after.ok, after.reason
        assert after.summary["first_step"] == done
        losses = before.summary["losses"] + after.summary["losses"]
        assert len(losses) == 40
        assert largest_relative_difference(losses, second) < 1e-3
        restore = next(event for event in log if event["kind"] == "restore")
        plan_after = Plan.from_document(after.summary["plans"][0]["plan"])
        layout = layout_of_plan(plan_after, load_config(second.model))
        tiers = restore["bytes_by_tier"]
        assert tiers["s3"] == sum(
            spec.unit_bytes(unit)
            for spec in layout.tensors.values()
            for unit in range(spec.num_units)
        )
        assert sum(tiers.values()) == sum(layout.bytes_of(worker) for worker in plan_after.workers)
        _check_the_command_line(uri, tmp_path, capsys)


def _check_the_command_line(uri: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was committed verifies and, exported, is a Hugging Face checkpoint."""
    capsys.readouterr()
    assert main(["checkpoint", "verify", "--storage", uri, "--json"]) == 0
    assert all(report["ok"] for report in json.loads(capsys.readouterr().out)["checkpoints"])
    assert (
        main(
            [
                "checkpoint",
                "export",
                "--storage",
                uri,
                "--out",
                str(directory / "exported"),
                "--json",
            ]
        )
        == 0
    )
    json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(directory / "exported")
    assert torch.isfinite(model(torch.arange(16)[None]).logits).all()
