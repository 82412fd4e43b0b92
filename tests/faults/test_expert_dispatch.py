"""A worker dies in mid-step while one stage sends tokens to the owners of their experts and others
sum; no step is lost, and the losses are those of one process.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Scene, lose_a_worker
from tests.harness.exact_job import LAYERS, PLAN

pytestmark = pytest.mark.faults
MODEL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
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
    ways = {"expert_dispatch": "all_to_all"}
    lose_a_worker(scene.shared, tmp_path, memory, plan_of_two_ways(), SECTIONS, ways, 1e-3)
