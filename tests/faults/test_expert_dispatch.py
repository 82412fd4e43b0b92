"""A worker dies in mid-step while one stage sends tokens to the owners of their experts and others
sum; no step is lost, and the losses are those of one process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Scene
from tests.harness.exact_job import PLAN, STEPS, exact_job, train_alone
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike, StruckRun, losses_by_step

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]
DEADLINE_S = 90.0
MODEL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"config": MODEL},
    "training": {"learning_rate": 1e-3},
}


def plan_of_two_ways() -> dict[str, Any]:
    """The pair of node a sends tokens; all other stages have whole experts."""
    plan = copy.deepcopy(PLAN)
    plan["pipelines"][0]["stages"][0]["expert_dispatch"] = "all_to_all"
    return plan


def test_a_worker_goes_and_no_step_is_lost(scene: Scene, tmp_path: Path, memory: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    reference = train_alone(alone, scene.shared, **SECTIONS)
    job = exact_job(
        tmp_path,
        scene.shared,
        memory,
        plan_of_two_ways(),
        parallelism={"expert_dispatch": "all_to_all"},
        **SECTIONS,
    )
    with nothing_left(memory):
        run = StruckRun(job, tmp_path, Strike("backward", "worker", "kill", step=6))
        result = run.run(DEADLINE_S)
        assert result.ok, result.reason
    assert result.struck_at_step is not None
    assert losses_by_step(result.events) == pytest.approx(list(reference.losses), rel=1e-3)
    assert result.summary["reconfigurations"]
    assert result.summary["steps_lost"] == 0
    steps = [event for event in result.events if event["kind"] == "step"]
    assert {event["step"] for event in steps} == set(range(STEPS))
