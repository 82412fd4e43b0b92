"""The fleet never changes the mathematics: any plan of up to 8 workers gives the losses and weights
of plain transformers in one process.

Tolerance, fp32: losses 2e-5 relative; weights 2e-5 of the largest weight of the tensor. Adam
divides by sqrt(v) + eps, which makes full-size updates out of rounding noise where a gradient is
nothing else (GPT-2's key bias cannot change the loss); eps 1e-4 keeps that out of the comparison.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from autohet.runtime.facts.layout import layout_of_plan, tensor_specs
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.parallel.overlap import sums_have_one_order
from autohet.runtime.step.reference import reference_model, train_reference
from planner.plans.plan import Plan
from planner.strategies import plan_with
from tests.harness.training_case import BACK_ENDS, Case, rows_of, run_case
from tests.harness.worker_pool import WorkerPool
from tests.planner.cases import fleet, request

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow

TOLERANCE = 2e-5
LAYERS, BATCH, LENGTH, STEPS = 8, 8, 6, 2
"""Losses of the second step show the first update, weights after it the moments."""
COMMON = {
    "vocab_size": 67,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    **COMMON,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "head_dim": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "layer_types": None,
}
GPT2 = {
    **COMMON,
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 8,
    "n_positions": 16,
    "tie_word_embeddings": True,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
TRAINING = {
    "global_batch_sequences": BATCH,
    "sequence_length": LENGTH,
    "steps": 10,
    "precision": "fp32",
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "clip_norm": 0.5,
    "eps": 1e-4,
}
GENERATIONS = itertools.count()


def on_both(
    cases: Iterable[Any],
    deferred_in_ci: Collection[Any],
    gloo_in_ci: Callable[[Any], bool] = lambda case: True,
) -> list[Any]:
    """(case, back end): each on gloo and on groups with CUDA's semantics; those that CI does not
    run are slow.
    """
    return [
        pytest.param(case, back_end, id=f"{case}-{back_end}", marks=slow)
        for case in cases
        for back_end in BACK_ENDS
        for in_ci in [gloo_in_ci(case) if back_end == "gloo" else case in deferred_in_ci]
        for slow in [[] if in_ci else [pytest.mark.slow]]
    ]


def pipeline(
    *stages: tuple[int, int | tuple[int, ...]],
    microbatches: int,
    size: int = 1,
    nodes: str = "",
    in_flight: tuple[int, ...] = (),
) -> dict[str, Any]:
    """A pipeline of (layers, TP degree or shares of the ranks) stages. `nodes` has a letter for
    each stage, its node; without, all are on node w.
    """
    extra = {"in_flight": list(in_flight)} if in_flight else {}
    return {
        "shape": stages,
        "nodes": nodes or "w" * len(stages),
        "rest": {"num_microbatches": microbatches, "microbatch_sequences": size, **extra},
    }


def plan_document(*pipelines: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    documents = []
    for each in pipelines:
        first, stages = 0, []
        for (layers, ranks), node in zip(each["shape"], each["nodes"], strict=True):
            shares = {"tp_shares": list(ranks)} if isinstance(ranks, tuple) else {}
            workers = [
                f"{node}/{next(numbers[node])}"
                for _ in range(len(ranks) if isinstance(ranks, tuple) else ranks)
            ]
            stages.append(
                {"first_layer": first, "num_layers": layers, "workers": workers, **shares}
            )
            first += layers
        documents.append({**each["rest"], "stages": stages})
    return {
        "version": 1,
        "model": "m",
        "global_batch_sequences": BATCH,
        "microbatch_sequences": 1,
        "sequence_length": LENGTH,
        "pipelines": documents,
    }


def with_stages(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A plan with these fields in every stage."""
    changed = copy.deepcopy(document)
    for each in changed["pipelines"]:
        for stage in each["stages"]:
            stage.update(changes)
    return changed


def with_all_to_all(document: dict[str, Any]) -> dict[str, Any]:
    """A plan whose every second stage sends tokens to the owners of their experts."""
    changed = copy.deepcopy(document)
    stages = [stage for each in changed["pipelines"] for stage in each["stages"]]
    for stage in stages[::2]:
        stage["expert_dispatch"] = "all_to_all"
    return changed


def even(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


def grid(dp: int, pp: int, tp: int) -> dict[str, Any]:
    """Microbatches of one sequence, so that 3, 5, 6 and 7 pipelines get unequal numbers; larger
    ones at TP 4 and 8.
    """
    size = BATCH // dp // 2 if tp >= 4 else 1
    shape = [(layers, tp) for layers in even(LAYERS, pp)]
    return plan_document(
        *(pipeline(*shape, microbatches=count // size, size=size) for count in even(BATCH, dp))
    )


GRIDS = [
    (dp, pp, tp)
    for dp, pp, tp in itertools.product(range(1, 9), range(1, 9), (1, 2, 4, 8))
    if dp * pp * tp <= 8
]


def in_ci(shape: tuple[int, int, int]) -> bool:
    """Each way to cut by itself at its most, pairs of ways, all three, and an uneven batch."""
    return shape in IN_CI


IN_CI = {(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 1, 4), (1, 4, 2), (4, 2, 1), (2, 2, 2), (3, 2, 1)}
SHARDED_IN_CI = {
    "unequal microbatch size",
    "TP 4 beside TP 2",
    "TP and cuts across",
}


ASYMMETRIC = {
    "unequal depth": (pipeline((8, 1), microbatches=3), pipeline((4, 1), (4, 1), microbatches=5)),
    "one stage beside three": (
        pipeline((8, 1), microbatches=2),
        pipeline((2, 1), (3, 1), (3, 1), microbatches=6),
    ),
    "unequal layers": (
        pipeline((1, 1), (7, 1), microbatches=4),
        pipeline((6, 1), (2, 1), microbatches=4),
    ),
    "unequal microbatch size": (
        pipeline((8, 1), microbatches=2, size=2),
        pipeline((3, 1), (5, 1), microbatches=4),
    ),
    "more stages than microbatches": (
        pipeline(*((2, 1),) * 4, microbatches=2),
        pipeline((8, 1), microbatches=6),
    ),
    "TP 2 then 1": (pipeline((4, 2), (4, 1), microbatches=4, size=2),),
    "TP 1 then 2": (pipeline((3, 1), (5, 2), microbatches=8),),
    "TP 2, 1, 4": (pipeline((3, 2), (2, 1), (3, 4), microbatches=8),),
    "TP 4 then 2": (pipeline((4, 4), (4, 2), microbatches=4, size=2),),
    "TP 2 beside TP 1": (pipeline((8, 2), microbatches=5), pipeline((8, 1), microbatches=3)),
    "TP 4 beside TP 2": (pipeline((8, 4), microbatches=4), pipeline((8, 2), microbatches=4)),
    "TP and cuts across": (
        pipeline((5, 2), (3, 1), microbatches=3),
        pipeline((2, 1), (6, 2), microbatches=5),
    ),
    "three pipelines": (
        pipeline((8, 1), microbatches=1),
        pipeline((3, 1), (5, 2), microbatches=3),
        pipeline((2, 1), (2, 1), (4, 2), microbatches=2, size=2),
    ),
}

ACROSS_NODES = {
    "TP 2, 2": (pipeline((4, 2), (4, 2), microbatches=4, size=2, nodes="ab"),),
    "TP 1, 2": (pipeline((3, 1), (5, 2), microbatches=8, nodes="ab"),),
    "TP 4, 2": (pipeline((4, 4), (4, 2), microbatches=4, size=2, nodes="ab"),),
    "TP 2, 4": (pipeline((5, 2), (3, 4), microbatches=8, nodes="ab"),),
    "TP 2, 1, 2": (pipeline((3, 2), (2, 1), (3, 2), microbatches=4, size=2, nodes="aba"),),
    "TP 2, 2, 4, one boundary on a node": (
        pipeline((3, 2), (2, 2), (3, 4), microbatches=8, nodes="aab"),
    ),
    "TP 1, 2 beside TP 2, 1": (
        pipeline((5, 1), (3, 2), microbatches=3, nodes="ab"),
        pipeline((2, 2), (6, 1), microbatches=5, nodes="ba"),
    ),
}
MORE_IN_FLIGHT = {
    "one more": (pipeline(*((2, 1),) * 4, microbatches=8, in_flight=(5, 4, 3, 1)),),
    "one more, TP 2 across nodes": (
        pipeline(*((2, 2),) * 4, microbatches=8, nodes="aabb", in_flight=(5, 4, 2, 1)),
    ),
    "two for each stage": (
        pipeline(*((2, 1),) * 4, microbatches=8, nodes="abcd", in_flight=(7, 5, 3, 1)),
    ),
    "three for each stage": (
        pipeline(*((2, 1),) * 4, microbatches=8, nodes="abcd", in_flight=(10, 7, 4, 1)),
    ),
    "three more, TP 4 across nodes": (
        pipeline((3, 4), (5, 4), microbatches=8, nodes="ab", in_flight=(4, 1)),
    ),
    "more than microbatches": (
        pipeline(*((2, 1),) * 4, microbatches=3, nodes="abcd", in_flight=(8, 5, 3, 1)),
        pipeline((8, 2), microbatches=5),
    ),
}


@functools.cache
def reference(
    model: tuple[tuple[str, Any], ...], training: tuple[tuple[str, Any], ...], steps: int
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights of the plain run."""
    case = Case(dict(model), grid(1, 1, 1), dict(training), steps)
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    plain = reference_model(config, initial_parameters(config, names, case.seed))
    losses = list(train_reference(plain, case.section(), rows_of(case), steps, 3))
    tensors = [*plain.named_parameters(), *plain.named_buffers()]
    return losses, {name: tensor.detach().numpy().copy() for name, tensor in tensors}


def _hashable(document: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(document.items(), key=str))


def check(pool: tuple[WorkerPool, int], case: Case) -> list[dict[str, np.ndarray]]:
    """Compare a case with the plain run; return the workers' final states."""
    processes, port = pool
    plan = Plan.from_document(case.plan)
    generation = next(GENERATIONS)
    answers = processes.map(run_case, [(case, worker, port, generation) for worker in plan.workers])
    losses, weights = reference(_hashable(case.model), _hashable(case.training), case.steps)
    for results, _ in answers:
        assert results == answers[0][0], "workers disagree about losses or norms"
    np.testing.assert_allclose([loss for loss, _ in answers[0][0]], losses, rtol=TOLERANCE)
    assert all(norm > TRAINING["clip_norm"] for _, norm in answers[0][0]), (
        "clipping is not active: the case tests less than it says"
    )
    states = [state for _, state in answers]
    check_weights(case, plan, states, weights)
    return states


def check_weights(
    case: Case, plan: Plan, states: list[dict[str, np.ndarray]], weights: dict[str, np.ndarray]
) -> None:
    check_holders(case, plan, states)
    config = case.config()
    layout, specs = layout_of_plan(plan, config), tensor_specs(config)
    for worker, state in zip(plan.workers, states, strict=True):
        units = layout.units_of(worker)
        for name, tensor in state.items():
            for unit, slices in (
                specs[name].local_slices(units[name]).items()
                if specs[name].split_dim is not None
                else [(0, (...,))]
            ):
                if name.startswith("param/"):
                    whole = weights[name.removeprefix("param/")]
                    padding = specs[name].shape[0] - len(whole)  # of rows, which stay 0
                    whole = np.pad(whole, [(0, padding)] + [(0, 0)] * (whole.ndim - 1))
                    wanted = (
                        whole
                        if specs[name].split_dim is None
                        else whole[specs[name].unit_slices(unit)]
                    )
                    worst = float(np.abs(tensor[slices] - wanted).max())
                    assert worst <= TOLERANCE * float(np.abs(whole).max()), (
                        f"{name} unit {unit} of {worker}: off by {worst}"
                    )


def check_holders(case: Case, plan: Plan, states: list[dict[str, np.ndarray]]) -> None:
    """Every shard is held by somebody, and all its holders have the same bits."""
    config = case.config()
    layout, specs = layout_of_plan(plan, config), tensor_specs(config)
    bits: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for worker, state in zip(plan.workers, states, strict=True):
        units = layout.units_of(worker)
        assert set(state) == set(units)
        for name, tensor in state.items():
            parts = {0: (...,)}
            if specs[name].split_dim is not None:
                parts = specs[name].local_slices(units[name])
            for unit, slices in parts.items():
                bits[name, unit].add(tensor[slices].tobytes())
    assert set(bits) == set(layout.shards), "some shard is held by nobody"
    assert all(len(versions) == 1 for versions in bits.values()), (
        "holders of one shard differ in bits"
    )


@pytest.mark.parametrize(("shape", "back_end"), on_both(GRIDS, {(2, 2, 2), (3, 2, 1)}, in_ci))
def test_every_factorisation_equals_plain_transformers(
    pool: Any, shape: tuple[int, int, int], back_end: str
) -> None:
    check(pool, Case(LLAMA, grid(*shape), TRAINING, STEPS, back_end=back_end))


@pytest.mark.parametrize(
    ("name", "back_end"),
    on_both(ASYMMETRIC, {"unequal depth", "TP and cuts across"}),
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


MIXTURES = {
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_key_value_heads": 4,
        "num_local_experts": 9,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        **LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
    },
    "deepseek_v3": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 16,
        "n_routed_experts": 10,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 3,
    },
}
EXPERT_PLANS = {
    "DP 2, PP 2, TP 2": grid(2, 2, 2),
    "TP 8": grid(1, 1, 8),
    "PP 8": grid(1, 8, 1),
    "TP 4 beside TP 2": plan_document(*ASYMMETRIC["TP 4 beside TP 2"]),
    "TP and cuts across": plan_document(*ASYMMETRIC["TP and cuts across"]),
    "three pipelines": plan_document(*ASYMMETRIC["three pipelines"]),
    "uneven beside TP 1, 2": plan_document(
        pipeline((8, (3, 1)), microbatches=5),
        pipeline((3, 1), (5, 2), microbatches=3),
    ),
    "all-to-all beside a sum": with_all_to_all(
        plan_document(
            pipeline((4, (2, 1, 1)), (4, 2), microbatches=5),
            pipeline((8, 2), microbatches=3),
        )
    ),
}


def those_in_ci(cases: Iterable[Any], in_ci: Collection[Any]) -> list[Any]:
    """The cases as parameters; those that CI does not run are slow."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in in_ci else SLOW)
        for case in cases
    ]


DEEPSEEK_PLANS = {
    **EXPERT_PLANS,
    "DP 8": grid(8, 1, 1),
    "sequence parallel": with_stages(grid(2, 1, 4), sequence_parallel=True),
    "sharded": with_stages(grid(2, 2, 2), shard_optimizer=True),
    "all-to-all, sequence parallel": with_all_to_all(
        with_stages(grid(2, 1, 4), sequence_parallel=True)
    ),
}


@pytest.mark.parametrize(
    ("plan", "name", "back_end"),
    those_in_ci(
        [
            ("DP 2, PP 2, TP 2", "qwen3_moe", "deferred"),
            ("TP 8", "qwen3_moe", "gloo"),
            ("TP 8", "mixtral", "gloo"),
            ("PP 8", "mixtral", "gloo"),
            ("TP 4 beside TP 2", "mixtral", "gloo"),
            ("TP and cuts across", "qwen3_moe", "gloo"),
            ("three pipelines", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "mixtral", "deferred"),
            ("uneven beside TP 1, 2", "deepseek_v3", "gloo"),
            ("uneven beside TP 1, 2", "gpt_oss", "gloo"),
            ("TP 8", "gpt_oss", "deferred"),
            ("all-to-all beside a sum", "qwen3_moe", "gloo"),
            ("all-to-all beside a sum", "mixtral", "deferred"),
        ],
        {
            ("DP 2, PP 2, TP 2", "qwen3_moe", "deferred"),
            ("TP 8", "mixtral", "gloo"),
            ("three pipelines", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "mixtral", "deferred"),
            ("uneven beside TP 1, 2", "deepseek_v3", "gloo"),
            ("uneven beside TP 1, 2", "gpt_oss", "gloo"),
            ("all-to-all beside a sum", "qwen3_moe", "gloo"),
            ("all-to-all beside a sum", "mixtral", "deferred"),
        },
    ),
)
def test_experts_of_any_plan_equal_plain_transformers(
    pool: Any, plan: str, name: str, back_end: str
) -> None:
    """Ranks hold experts of their own; tokens go to the same experts whatever the plan.

    The routers of two families have a balance loss, of each sequence alone.
    """
    training = dict(TRAINING)
    if name in ("deepseek_v3", "qwen3_moe"):
        training |= {"router_balance": "sequence", "router_balance_weight": 0.1}
    check(pool, Case(MIXTURES[name], EXPERT_PLANS[plan], training, STEPS, back_end=back_end))


BALANCED = {**TRAINING, "router_balance": "bias", "router_bias_speed": 0.01}
BALANCED_STEPS = 3
"""The second step moves the biases, the third routes by them."""
BIAS = "mlp.gate.e_score_correction_bias"


@functools.cache
def counts_of_last_step() -> dict[str, np.ndarray]:
    """Tokens that the library's routers send to each expert in the last step of the plain run."""
    case = Case(MIXTURES["deepseek_v3"], grid(1, 1, 1), BALANCED, BALANCED_STEPS)
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    plain = reference_model(config, initial_parameters(config, names, case.seed))
    counts: dict[str, np.ndarray] = {}

    def counting(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            found = np.bincount(out[2].flatten().numpy(), minlength=config.n_routed_experts)
            counts[name] = counts.get(name, 0) + found

        return hook

    for name, module in plain.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(counting(name.removesuffix("mlp.gate") + BIAS))
    for _ in train_reference(plain, case.section(), rows_of(case), BALANCED_STEPS, 3):
        last = dict(counts)
        counts.clear()
    return last


@pytest.mark.parametrize(
    ("plan", "back_end"),
    those_in_ci(
        [
            ("DP 2, PP 2, TP 2", "deferred"),
            ("TP 8", "gloo"),
            ("TP 4 beside TP 2", "gloo"),
            ("TP and cuts across", "gloo"),
            ("three pipelines", "deferred"),
            ("uneven beside TP 1, 2", "gloo"),
            ("sequence parallel", "gloo"),
            ("all-to-all beside a sum", "gloo"),
            ("all-to-all, sequence parallel", "gloo"),
            ("sharded", "gloo"),
            ("PP 8", "gloo"),
            ("DP 8", "gloo"),
        ],
        {
            ("DP 2, PP 2, TP 2", "deferred"),
            ("TP and cuts across", "gloo"),
            ("uneven beside TP 1, 2", "gloo"),
            ("sequence parallel", "gloo"),
            ("all-to-all beside a sum", "gloo"),
            ("all-to-all, sequence parallel", "gloo"),
            ("sharded", "gloo"),
        },
    ),
)
def test_counted_tokens_and_biases_of_any_plan_equal_plain_transformers(
    pool: Any, plan: str, back_end: str
) -> None:
    """The counts of the global batch move the biases, so that later steps route by them."""
    model, document = MIXTURES["deepseek_v3"], DEEPSEEK_PLANS[plan]
    case = Case(model, document, BALANCED, BALANCED_STEPS, back_end=back_end)
    found = check(pool, case)
    expected = counts_of_last_step()
    held = [(name, state) for state in found for name in state if name.endswith(BIAS)]
    assert {name.partition("/")[2] for name, _ in held} == set(expected)
    for name, state in held:
        kind, _, parameter = name.partition("/")
        if kind == "exp_avg":
            np.testing.assert_array_equal(state[name], expected[parameter])
        if kind == "param":
            assert state[name].any(), "the bias has not moved"


@pytest.mark.parametrize(
    ("name", "back_end"), on_both(ACROSS_NODES, {"TP 2, 1, 2", "TP 1, 2 beside TP 2, 1"})
)
def test_slices_between_nodes_equal_plain_transformers(pool: Any, name: str, back_end: str) -> None:
    """Each rank takes a slice of the hidden states over a boundary between nodes, and its stage
    gathers the whole.
    """
    check(pool, Case(LLAMA, plan_document(*ACROSS_NODES[name]), TRAINING, STEPS, back_end=back_end))


@pytest.mark.parametrize(
    ("name", "back_end"),
    on_both(MORE_IN_FLIGHT, {"two for each stage"}),
)
def test_more_in_flight_equals_plain_transformers(pool: Any, name: str, back_end: str) -> None:
    check(
        pool, Case(LLAMA, plan_document(*MORE_IN_FLIGHT[name]), TRAINING, STEPS, back_end=back_end)
    )


FEW_KV_HEADS = {
    "TP 4 beside TP 2": ASYMMETRIC["TP 4 beside TP 2"],
    "TP 2, 1, 4": ASYMMETRIC["TP 2, 1, 4"],
    "TP 8": (pipeline((8, 8), microbatches=8),),
    "TP 4 beside TP 1": (
        pipeline((8, 4), microbatches=5),
        pipeline((3, 1), (5, 2), microbatches=3),
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
    "2+1+1 alone": (pipeline((8, (2, 1, 1)), microbatches=4, size=2),),
    "3+1 beside TP 1, 2": (
        pipeline((8, (3, 1)), microbatches=5),
        pipeline((3, 1), (5, 2), microbatches=3),
    ),
    "3+3+2 beside TP 4": (
        pipeline((8, (3, 3, 2)), microbatches=5),
        pipeline((8, 4), microbatches=3),
    ),
    "2+1+1, then TP 2": (pipeline((5, (2, 1, 1)), (3, 2), microbatches=4, size=2),),
    "TP 2 to 3+2+1+1+1 on another node": (
        pipeline((3, 2), (5, (3, 2, 1, 1, 1)), microbatches=4, size=2, nodes="ab"),
    ),
    "5+2+1 to 1+3 and back": (
        pipeline((3, (5, 2, 1)), (2, (1, 3)), (3, 2), microbatches=8, nodes="aba"),
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
            LLAMA,
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


SEQUENCE_CUT = {
    "TP 2": (pipeline((8, 2), microbatches=8),),
    "TP 2, then 2": (pipeline((3, 2), (5, 2), microbatches=4, size=2),),
    "TP 2 beside 1": (pipeline((8, 2), microbatches=5), pipeline((8, 1), microbatches=3)),
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


CUT_ALIKE = {
    "data parallel": tuple(pipeline((8, 1), microbatches=count) for count in (2, 5, 1)),
    "two stages": tuple(pipeline((3, 1), (5, 1), microbatches=count) for count in (3, 5)),
    "tensor parallel": tuple(pipeline((3, 2), (5, 1), microbatches=count) for count in (3, 5)),
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


def with_memory(document: dict[str, Any], recompute: str, *, sharded: bool) -> dict[str, Any]:
    """The plan with a choice of recomputation for each stage ("mixed": another one for each), and
    its optimizer state sharded.
    """
    choices = itertools.cycle(
        ("selective", "none", "full") if recompute == "mixed" else (recompute,)
    )
    pipelines = [
        {
            **each,
            "stages": [
                {**s, "recompute": next(choices), "shard_optimizer": sharded}
                for s in each["stages"]
            ],
        }
        for each in document["pipelines"]
    ]
    return {**document, "pipelines": pipelines}


MEMORY = [
    pytest.param(
        shape,
        recompute,
        sharded,
        id=f"{shape}-{recompute}-{sharded}",
        marks=[] if in_ci else [pytest.mark.slow],
    )
    for shape, recompute, sharded in itertools.product(
        GRIDS, ("none", "selective", "full"), (False, True)
    )
    if sharded or recompute != "none"
    for in_ci in [
        (shape, recompute, sharded) in {((2, 2, 2), "selective", True), ((4, 2, 1), "none", True)}
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
