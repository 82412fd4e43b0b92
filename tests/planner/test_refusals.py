"""What a refusal says of memory: true sums, and remedies that are not in use already."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.cost.layers.layer_costs import MemoryChoices
from planner.errors import InfeasibleError
from planner.inputs.cluster import GIB
from planner.search.walk.judge import lack_of_memory
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, request


def tables(*rows: tuple[float, float, float], border: float = 0.0) -> Any:
    """One kind of one resource of four GPUs; rows of (state, fixed, limit) GiB. border: that the
    embedding and the head take off what every stage holds.
    """
    made = [
        SimpleNamespace(
            kind=0,
            microbatch=8,
            state_bytes=np.array([-border, state, -border]) * GIB,
            activation_bytes=np.array([0.0]),
            tied_bytes=0.0,
            fixed_bytes=fixed * GIB,
            limit_bytes=limit * GIB,
        )
        for state, fixed, limit in rows
    ]
    kind = SimpleNamespace(resource=0, tp_degree=1)
    return SimpleNamespace(rows=made, kinds=[kind], resources=[SimpleNamespace(num_gpus=4)])


def asked(*recompute: str) -> Any:
    choices = MemoryChoices(recompute)  # type: ignore[arg-type]
    return SimpleNamespace(cost=SimpleNamespace(choices=choices))


def test_a_gpu_that_cannot_hold_the_logits_makes_no_negative_sum() -> None:
    said = lack_of_memory(asked("none"), tables((100.0, 90.0, 78.0), (100.0, 85.0, 78.0)))
    assert "a stage holds 85.0 GiB beside its layers" in said
    assert "a GPU has 78.0 GiB" in said
    assert "-" not in said.split("Add GPUs")[0]
    said = lack_of_memory(asked("none"), tables((400.0, 90.0, 78.0), (400.0, 39.0, 78.0)))
    assert "one copy needs 800.0 GiB" in said
    assert "488.0 GiB too little" in said


@pytest.mark.parametrize(("recompute", "told"), [(("none",), True), (("none", "full"), False)])
def test_recomputation_is_a_remedy_only_where_it_is_not_in_use(
    recompute: tuple[str, ...], told: bool
) -> None:
    said = lack_of_memory(asked(*recompute), tables((400.0, 1.0, 78.0)))
    assert ("recomputation" in said) is told


def test_borders_larger_than_the_model_make_no_negative_sum() -> None:
    """Wrong: an embedding that is less than nothing, since it has one border, not two."""
    said = lack_of_memory(asked("none"), tables((20.0, 70.0, 78.0), border=50.0))
    assert "one copy needs 195.0 GiB" in said
    assert "-" not in said.split("Add GPUs")[0]


def test_selective_recomputation_leaves_full_as_a_remedy() -> None:
    said = lack_of_memory(asked("selective"), tables((400.0, 1.0, 78.0)))
    assert "full recomputation (training.recompute: full)" in said


def test_varuna_refuses_a_model_whose_blocks_fit_only_at_a_higher_tp_degree() -> None:
    """The tables have no row of its TP degree, which is 1."""
    small = fleet(("A100", 4, 2), memory_gib={"A100": 2.2})
    with pytest.raises(InfeasibleError, match="varuna finds no plan that fits"):
        plan_with("varuna", request(small, 8, model(4, 3000)))
