"""Stages that route tokens to experts have GPUs of one type; dense stages may mix them."""

from dataclasses import replace

import pytest

from planner.errors import ConfigError
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.strategies.autohet_uneven import check_like_gpus
from tests.planner.cases import fleet, model

FLEET = fleet(("A100", 1, 2), ("A10G", 1, 2))


def with_experts(*layers: int) -> ModelSpec:
    """A spec whose blocks of these numbers use a quarter of their matrices for a token."""
    spec = model(8)
    blocks = [
        replace(block, matmul_parameters=block.parameters // 4) if number in layers else block
        for number, block in enumerate(spec.blocks)
    ]
    return replace(spec, blocks=tuple(blocks))


def plan_of(*stages: tuple[int, tuple[str, ...]]) -> Plan:
    first, found = 0, []
    for num_layers, workers in stages:
        found.append(Stage(first, num_layers, workers))
        first += num_layers
    return Plan("tiny", 2, 1, 128, (Pipeline(tuple(found), 2, 1),))


MIXED, LIKE = ("a100-0/0", "a10g-0/0"), ("a10g-0/1",)


def test_a_stage_with_experts_on_two_types_is_refused() -> None:
    plan = plan_of((6, LIKE), (2, MIXED))
    message = r"stage 1 of pipeline 0 routes tokens to experts on .*a100.* and .*a10g"
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        check_like_gpus(plan, FLEET, with_experts(7))


def test_dense_stages_may_mix_types() -> None:
    check_like_gpus(plan_of((6, LIKE), (2, MIXED)), FLEET, with_experts(0, 5))
    check_like_gpus(plan_of((8, MIXED)), FLEET, with_experts())
    check_like_gpus(plan_of((8, ("a10g-0/0", "a10g-0/1"))), FLEET, with_experts(0))
