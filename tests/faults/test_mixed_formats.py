"""A worker dies in mid-step while some stages compute in fp16; no step is lost, and the others go
on in the formats that the job names, with the scale of the step before.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from autohet.runtime.step.loss_scale import FIRST_SCALE, LossScales
from tests.faults.conftest import FEW_STEPS, Scene, lose_a_worker
from tests.harness.exact_job import LAYERS, PLAN

pytestmark = pytest.mark.faults
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"config": MODEL},
    "training": {"precision": "bf16", "learning_rate": 1e-3},
}


def mixed_plan() -> dict[str, Any]:
    """Holders of each layer compute it in both formats."""
    plan = copy.deepcopy(PLAN)
    plan["pipelines"][0]["stages"][0]["compute"] = "fp16"
    plan["pipelines"][1]["stages"][1]["compute"] = "fp16"
    return plan


def test_a_worker_goes_and_no_step_is_lost(scene: Scene, tmp_path: Path, memory: Path) -> None:
    formats = {"compute_formats": {"A10G": "fp16"}}
    run, result = lose_a_worker(
        scene.shared, tmp_path, memory, mixed_plan(), SECTIONS, formats, 1e-2
    )
    steps = [event for event in result.events if event["kind"] == "step"]
    assert {event["loss_scale"] for event in steps} == {FIRST_SCALE.factor}
    scales: LossScales = run.controller.memory.ledger.loss_scales
    assert scales.before(FEW_STEPS) == FIRST_SCALE
    plans = [event["plan"] for event in result.events if event["kind"] == "plan"]
    stages = [stage for each in plans[1]["pipelines"] for stage in each["stages"]]
    assert {stage.get("compute") for stage in stages} == {"fp16", None}, "stages stay what they are"
