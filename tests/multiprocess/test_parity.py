"""The fleet never changes the mathematics: any plan of up to 8 workers gives the losses and weights
of plain transformers in one process.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from planner.plans.plan import Plan
from tests.harness.parity import (
    ACROSS_NODES,
    ASYMMETRIC,
    GENERATIONS,
    GPT2,
    GRIDS,
    LLAMA,
    QWEN3,
    SLOW,
    STEPS,
    TRAINING,
    _hashable,
    check,
    grid,
    on_both,
    pipeline,
    plan_document,
    reference,
    those_in_ci,
    with_memory,
)
from tests.harness.training_case import Case, run_case

pytestmark = pytest.mark.multiprocess


def in_ci(shape: tuple[int, int, int]) -> bool:
    """DP and TP at their most, pairs of ways, all three, and an uneven batch."""
    return shape in IN_CI


IN_CI = {(8, 1, 1), (1, 1, 8), (2, 1, 4), (1, 4, 2), (4, 2, 1), (2, 2, 2), (3, 2, 1)}

MORE_IN_FLIGHT = {
    "one more": (pipeline(*((1, 1),) * 4, microbatches=8, in_flight=(5, 4, 3, 1)),),
    "one more, TP 2 across nodes": (
        pipeline(*((1, 2),) * 4, microbatches=8, nodes="aabb", in_flight=(5, 4, 2, 1)),
    ),
    "two for each stage": (
        pipeline(*((1, 1),) * 4, microbatches=8, nodes="abcd", in_flight=(7, 5, 3, 1)),
    ),
    "three for each stage": (
        pipeline(*((1, 1),) * 4, microbatches=8, nodes="abcd", in_flight=(10, 7, 4, 1)),
    ),
    "three more, TP 4 across nodes": (
        pipeline((1, 4), (3, 4), microbatches=8, nodes="ab", in_flight=(4, 1)),
    ),
    "more than microbatches": (
        pipeline(*((1, 1),) * 4, microbatches=3, nodes="abcd", in_flight=(8, 5, 3, 1)),
        pipeline((4, 2), microbatches=5),
    ),
}


@pytest.mark.parametrize(("shape", "back_end"), on_both(GRIDS, {(2, 2, 2), (3, 2, 1)}, in_ci))
def test_every_factorisation_equals_plain_transformers(
    pool: Any, shape: tuple[int, int, int], back_end: str
) -> None:
    check(pool, Case(LLAMA, grid(*shape), TRAINING, STEPS, back_end=back_end))


CONTAINED = frozenset(
    {
        "one stage beside three",  # three pipelines
        "unequal layers",  # unequal depth
        "TP 2 then 1",  # TP 2, 1, 4
        "TP 1 then 2",  # TP 2, 1, 4
        "TP 2 beside TP 1",  # TP and cuts across
        "TP 1, 2",  # TP 1, 2 beside TP 2, 1
        "TP 2, 4",  # TP 2, 2, 4, one boundary on a node
        "one more",  # one more, TP 2 across nodes
        "three for each stage",  # two for each stage, more than microbatches
    }
)
"""Plans whose every boundary, or number in flight, another plan has: beside each, that plan."""


def is_own(name: str) -> bool:
    return name not in CONTAINED


@pytest.mark.parametrize(
    ("name", "back_end"),
    on_both(ASYMMETRIC, {"unequal depth", "TP and cuts across"}, is_own),
)
def test_asymmetric_plans_equal_plain_transformers(pool: Any, name: str, back_end: str) -> None:
    check(pool, Case(LLAMA, plan_document(*ASYMMETRIC[name]), TRAINING, STEPS, back_end=back_end))


FUSED_OR_NORMED = {
    "olmo2": {**LLAMA, "model_type": "olmo2", "pad_token_id": 1},
    "phi3": {**LLAMA, "model_type": "phi3", "sliding_window": 5, "pad_token_id": 1},
}
"""A norm over all heads of a cut projection; parts of unequal size in one projection."""


@pytest.mark.parametrize("name", FUSED_OR_NORMED)
def test_families_read_off_plans_equal_plain_transformers(pool: Any, name: str) -> None:
    model = {**FUSED_OR_NORMED[name], "num_key_value_heads": 4}
    document = plan_document(*ASYMMETRIC["TP and cuts across"])
    check(pool, Case(model, document, TRAINING, STEPS, back_end="gloo"))


@pytest.mark.parametrize(
    ("name", "back_end"), on_both(ACROSS_NODES, {"TP 2, 1, 2", "TP 1, 2 beside TP 2, 1"}, is_own)
)
def test_slices_between_nodes_equal_plain_transformers(pool: Any, name: str, back_end: str) -> None:
    """Each rank takes a slice of the hidden states over a boundary between nodes, and its stage
    gathers the whole.
    """
    check(pool, Case(LLAMA, plan_document(*ACROSS_NODES[name]), TRAINING, STEPS, back_end=back_end))


@pytest.mark.parametrize(
    ("name", "back_end"),
    on_both(MORE_IN_FLIGHT, {"two for each stage"}, is_own),
)
def test_more_in_flight_equals_plain_transformers(pool: Any, name: str, back_end: str) -> None:
    check(
        pool, Case(LLAMA, plan_document(*MORE_IN_FLIGHT[name]), TRAINING, STEPS, back_end=back_end)
    )


@pytest.mark.parametrize(
    ("model", "name"),
    those_in_ci(
        itertools.product(
            ("gpt2", "qwen3"),
            ("unequal depth", "TP 2, 1, 4", "TP and cuts across", "three pipelines"),
        ),
        {
            ("gpt2", "TP and cuts across"),
            ("gpt2", "three pipelines"),
            ("qwen3", "unequal depth"),
            ("qwen3", "TP 2, 1, 4"),
        },
    ),
)
def test_tied_and_partial_gradients(pool: Any, model: str, name: str) -> None:
    config = {"gpt2": GPT2, "qwen3": QWEN3}[model]
    check(pool, Case(config, plan_document(*ASYMMETRIC[name]), TRAINING, STEPS))


@pytest.mark.parametrize("name", ["unequal depth", pytest.param("TP and cuts across", marks=SLOW)])
def test_recompute_and_no_overlap_change_nothing(pool: Any, name: str) -> None:
    document = plan_document(*ASYMMETRIC[name])
    check(pool, Case(LLAMA, document, {**TRAINING, "recompute": "full"}, STEPS, overlap=False))


@pytest.mark.parametrize(
    ("pipelines", "sharded"),
    [
        pytest.param(ASYMMETRIC["TP and cuts across"], True, id="one node, sharded"),
        pytest.param(ACROSS_NODES["TP 1, 2 beside TP 2, 1"], False, id="across nodes"),
    ],
)
def test_bf16_follows_fp32(pool: Any, pipelines: tuple[dict[str, Any], ...], sharded: bool) -> None:
    """bf16 compute with fp32 masters: 3 significant digits of the losses, and every holder's bits
    are the same.
    """
    processes, port = pool
    document = with_memory(plan_document(*pipelines), "none", sharded=sharded)
    case = Case(LLAMA, document, {**TRAINING, "precision": "bf16"}, STEPS)
    workers = Plan.from_document(document).workers
    generation = next(GENERATIONS)
    answers = processes.map(run_case, [(case, worker, port, generation) for worker in workers])
    losses, weights = reference(_hashable(LLAMA), _hashable(TRAINING), STEPS)
    np.testing.assert_allclose([loss for loss, _ in answers[0][0]], losses, rtol=2e-3)
    for _, state in answers:
        for name, tensor in state.items():
            assert tensor.dtype == np.float32, name
            if name.startswith("param/") and tensor.shape == weights[name[6:]].shape:
                moved = np.abs(tensor - weights[name[6:]]).max()
                assert moved <= 3 * STEPS * TRAINING["learning_rate"], (
                    f"{name} is {moved} from the fp32 run"
                )
    assert torch.isfinite(torch.tensor([norm for _, norm in answers[0][0]])).all()
