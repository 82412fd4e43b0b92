"""Choices about memory change no loss and no weight: recomputation, sharded state, and sums that
overlap with backward passes.
"""

import itertools
from typing import Any

import pytest

from autohet.runtime.parallel.overlap import sums_have_one_order
from planner.plans.plan import Plan
from tests.harness.parity import (
    ASYMMETRIC,
    GRIDS,
    LLAMA,
    QWEN3,
    STEPS,
    TRAINING,
    check,
    grid,
    on_both,
    pipeline,
    plan_document,
    those_in_ci,
    with_memory,
)
from tests.harness.training_case import Case

pytestmark = pytest.mark.multiprocess

SHARDED_IN_CI = {
    "unequal microbatch size",
    "TP 4 beside TP 2",
    "TP and cuts across",
}

CUT_ALIKE = {
    "data parallel": tuple(pipeline((4, 1), microbatches=count) for count in (2, 5, 1)),
    "two stages": tuple(pipeline((1, 1), (3, 1), microbatches=count) for count in (3, 5)),
    "tensor parallel": tuple(pipeline((1, 2), (3, 1), microbatches=count) for count in (3, 5)),
}


@pytest.mark.parametrize(
    ("name", "sharded"),
    those_in_ci(
        [*itertools.product(CUT_ALIKE, [False]), ("data parallel", True), ("two stages", True)],
        {("data parallel", False), ("tensor parallel", False), ("two stages", True)},
    ),
)
def test_sums_that_overlap_in_stream_order_change_nothing(
    pool: Any, name: str, sharded: bool
) -> None:
    document = with_memory(plan_document(*CUT_ALIKE[name]), "none", sharded=sharded)
    plan = Plan.from_document(document)
    assert sums_have_one_order(plan, Case(LLAMA, document, TRAINING, STEPS).config())
    check(pool, Case(LLAMA, document, TRAINING, STEPS, back_end="deferred"))


MEMORY = [
    pytest.param(
        shape,
        recompute,
        sharded,
        id=f"{shape}-{recompute}-{sharded}",
        marks=[] if in_ci else [pytest.mark.slow],
    )
    for shape, recompute, sharded in itertools.product(
        GRIDS, ("none", "selective", "full", "offload"), (False, True)
    )
    if sharded or recompute != "none"
    for in_ci in [
        (shape, recompute, sharded)
        in {((2, 2, 2), "selective", True), ((4, 2, 1), "offload", True)}
    ]
]


@pytest.mark.parametrize(("shape", "recompute", "sharded"), MEMORY)
def test_recomputation_and_sharded_state_change_nothing(
    pool: Any, shape: tuple[int, int, int], recompute: str, sharded: bool
) -> None:
    check(pool, Case(LLAMA, with_memory(grid(*shape), recompute, sharded=sharded), TRAINING, STEPS))


@pytest.mark.parametrize(
    ("name", "back_end"),
    on_both(ASYMMETRIC, {"TP and cuts across"}, SHARDED_IN_CI.__contains__),
)
def test_sharded_state_of_asymmetric_plans_changes_nothing(
    pool: Any, name: str, back_end: str
) -> None:
    """Sets of holders of any size, parameters that pipelines cut unlike, groups merged into
    supersets; tied and partial gradients.
    """
    document = with_memory(plan_document(*ASYMMETRIC[name]), "mixed", sharded=True)
    check(
        pool,
        Case(QWEN3 if back_end == "gloo" else LLAMA, document, TRAINING, STEPS, back_end=back_end),
    )
