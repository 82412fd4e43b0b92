"""Stages whose ranks have unlike parts (heads, vocabulary, sequence) equal plain transformers."""

import itertools
from typing import Any

import pytest

from planner.strategies import plan_with
from tests.harness.parity import (
    ASYMMETRIC,
    BATCH,
    GPT2,
    LENGTH,
    LLAMA,
    QWEN3,
    SLOW,
    STEPS,
    TRAINING,
    check,
    on_both,
    pipeline,
    plan_document,
    those_in_ci,
    with_memory,
)
from tests.harness.training_case import BACK_ENDS, Case
from tests.planner.cases import fleet, request

pytestmark = pytest.mark.multiprocess

FEW_KV_HEADS = {
    "TP 4 beside TP 2": ASYMMETRIC["TP 4 beside TP 2"],
    "TP 2, 1, 4": ASYMMETRIC["TP 2, 1, 4"],
    "TP 8": (pipeline((4, 8), microbatches=8),),
    "TP 4 beside TP 1": (
        pipeline((4, 4), microbatches=5),
        pipeline((1, 1), (3, 2), microbatches=3),
    ),
}


@pytest.mark.parametrize(
    ("name", "back_end", "kv_heads", "sharded"),
    those_in_ci(
        itertools.product(FEW_KV_HEADS, BACK_ENDS, (1, 2), (False, True)),
        {("TP 4 beside TP 1", "gloo", 2, True), ("TP 4 beside TP 2", "gloo", 1, False)},
    ),
)
def test_more_ranks_than_key_value_heads(
    pool: Any, name: str, back_end: str, kv_heads: int, sharded: bool
) -> None:
    """A head that several ranks hold is one shard, whose gradients from all of them, and from other
    pipelines, are added up.
    """
    document = with_memory(plan_document(*FEW_KV_HEADS[name]), "none", sharded=sharded)
    model = (
        {**QWEN3, "num_key_value_heads": kv_heads}
        if back_end == "gloo"
        else {**LLAMA, "num_key_value_heads": kv_heads}
    )
    check(pool, Case(model, document, TRAINING, STEPS, back_end=back_end))


UNEVEN = {
    "2+1+1 alone": (pipeline((4, (2, 1, 1)), microbatches=4, size=2),),
    "3+1 beside TP 1, 2": (
        pipeline((4, (3, 1)), microbatches=5),
        pipeline((1, 1), (3, 2), microbatches=3),
    ),
    "3+3+2 beside TP 4": (
        pipeline((4, (3, 3, 2)), microbatches=5),
        pipeline((4, 4), microbatches=3),
    ),
    "2+1+1, then TP 2": (pipeline((3, (2, 1, 1)), (1, 2), microbatches=4, size=2),),
    "TP 2 to 3+2+1+1+1 on another node": (
        pipeline((1, 2), (3, (3, 2, 1, 1, 1)), microbatches=4, size=2, nodes="ab"),
    ),
    "5+2+1 to 1+3 and back": (
        pipeline((1, (5, 2, 1)), (1, (1, 3)), (2, 2), microbatches=8, nodes="aba"),
    ),
}
"""Shares of a stage's ranks.

Five slices do not divide the hidden states of a microbatch: they are padded over that boundary.
"""


@pytest.mark.parametrize(
    ("name", "back_end", "model"),
    those_in_ci(
        itertools.product(UNEVEN, BACK_ENDS, ("llama", "grouped", "qwen3", "gpt2")),
        {
            ("3+1 beside TP 1, 2", "gloo", "gpt2"),
            ("TP 2 to 3+2+1+1+1 on another node", "gloo", "qwen3"),
        },
    ),
)
def test_uneven_shares_equal_plain_transformers(
    pool: Any, name: str, back_end: str, model: str
) -> None:
    """Ranks of a stage with unequal parts of heads, MLP and vocabulary, next to even stages; state
    sharded where pipelines are several.
    """
    models = {
        "llama": LLAMA,
        "grouped": {**LLAMA, "num_key_value_heads": 2},
        "qwen3": QWEN3,
        "gpt2": GPT2,
    }
    document = with_memory(plan_document(*UNEVEN[name]), "selective", sharded=model == "qwen3")
    check(pool, Case(models[model], document, TRAINING, STEPS, back_end=back_end))


@pytest.mark.parametrize("back_end", ["gloo", pytest.param("deferred", marks=SLOW)])
def test_an_uneven_stage_that_is_found_equals_plain_transformers(pool: Any, back_end: str) -> None:
    """What is left of a node of four GPUs, beside a faster one: with even stages the step would be
    6.5% longer.
    """
    left = fleet(("A10G", 1, 3), ("A100", 1, 1))
    plan = plan_with("autohet", request(left, BATCH, microbatch_sequences=2)).plan
    assert [stage.tp_shares for pipeline in plan.pipelines for stage in pipeline.stages] == [
        (),
        (3, 3, 2),
    ]
    check(
        pool,
        Case(
            {**LLAMA, "num_hidden_layers": 8},
            {**plan.to_document(), "sequence_length": LENGTH},
            TRAINING,
            STEPS,
            back_end=back_end,
        ),
    )


@pytest.mark.parametrize(
    ("name", "back_end"),
    those_in_ci(
        itertools.product(("TP and cuts across", "TP 2, 1, 4", "TP 4 beside TP 2"), BACK_ENDS),
        {("TP and cuts across", "gloo")},
    ),
)
def test_a_padded_vocabulary_changes_nothing(pool: Any, name: str, back_end: str) -> None:
    """67 tokens in 128 rows: at TP 4 one rank has no token at all."""
    model = QWEN3 if back_end == "gloo" else LLAMA
    document = with_memory(plan_document(*ASYMMETRIC[name]), "none", sharded=True)
    check(pool, Case(model, document, TRAINING, STEPS, back_end=back_end, vocabulary_multiple=64))


SEQUENCE_CUT = {
    "TP 2": (pipeline((4, 2), microbatches=8),),
    "TP 2, then 2": (pipeline((1, 2), (3, 2), microbatches=4, size=2),),
    "TP 2 beside 1": (pipeline((4, 2), microbatches=5), pipeline((4, 1), microbatches=3)),
}


@pytest.mark.parametrize(("name", "back_end"), on_both(SEQUENCE_CUT, {"TP 2 beside 1"}))
def test_sequence_parallel_stages_equal_plain_transformers(
    pool: Any, name: str, back_end: str
) -> None:
    document = plan_document(*SEQUENCE_CUT[name])
    for each in document["pipelines"]:
        for stage in each["stages"]:
            stage["sequence_parallel"] = True
    check(pool, Case(LLAMA, document, TRAINING, STEPS, back_end=back_end))
