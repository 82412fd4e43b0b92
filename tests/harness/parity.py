"""Parity of any plan with plain transformers in one process: models, plans and the comparison.

Tolerance, fp32: losses 2e-5 relative; weights 2e-5 of the largest weight of the tensor.
"""

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
from autohet.runtime.step.reference import reference_model, train_reference
from planner.plans.plan import Plan
from recovery.state.slices import unit_views
from tests.harness.training_case import BACK_ENDS, Case, rows_of, run_case
from tests.harness.worker_pool import WorkerPool

TOLERANCE = 2e-5

ADAM_EPS = 1e-2
"""Adam's epsilon wherever weights are compared, no smaller than any learning rate.

Adam divides by sqrt(v) + eps: a weight moves by up to lr / eps times the error of its gradient.
With a small epsilon the last bit of a gradient near zero, which processors round unlike, becomes a
whole step.
"""

LAYERS = 4
"""As many as the deepest pipeline has stages."""
BATCH = 8
LENGTH = 6
STEPS = 2
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
    "eps": ADAM_EPS,
}

GENERATIONS = itertools.count()

SLOW = pytest.mark.slow


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


def those_in_ci(cases: Iterable[Any], in_ci: Collection[Any]) -> list[Any]:
    """The cases as parameters; those that CI does not run are slow."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in in_ci else SLOW)
        for case in cases
    ]


def pipeline(
    *stages: tuple[int, int | tuple[int, ...]],
    microbatches: int,
    size: int = 1,
    nodes: str = "",
    in_flight: tuple[int, ...] = (),
    last: int = 0,
) -> dict[str, Any]:
    """A pipeline of (layers, TP degree or shares of the ranks) stages. `nodes` has a letter for
    each stage, its node; without, all are on node w. last: size of the last microbatch.
    """
    extra: dict[str, Any] = {"in_flight": list(in_flight)} if in_flight else {}
    if last:
        extra["last_microbatch_sequences"] = last
    return {
        "shape": stages,
        "nodes": nodes or "w" * len(stages),
        "rest": {"num_microbatches": microbatches, "microbatch_sequences": size, **extra},
    }


def plan_document(*pipelines: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    documents = []
    for each in pipelines:
        first = 0
        stages = []
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
    for dp, pp, tp in itertools.product(range(1, 9), range(1, LAYERS + 1), (1, 2, 4, 8))
    if dp * pp * tp <= 8
]

ASYMMETRIC = {
    "unequal depth": (pipeline((4, 1), microbatches=3), pipeline((2, 1), (2, 1), microbatches=5)),
    "one stage beside three": (
        pipeline((4, 1), microbatches=2),
        pipeline((1, 1), (1, 1), (2, 1), microbatches=6),
    ),
    "unequal layers": (
        pipeline((1, 1), (3, 1), microbatches=4),
        pipeline((3, 1), (1, 1), microbatches=4),
    ),
    "unequal microbatch size": (
        pipeline((4, 1), microbatches=2, size=2),
        pipeline((1, 1), (3, 1), microbatches=4),
    ),
    "more stages than microbatches": (
        pipeline(*((1, 1),) * 4, microbatches=2),
        pipeline((4, 1), microbatches=6),
    ),
    "TP 2 then 1": (pipeline((2, 2), (2, 1), microbatches=4, size=2),),
    "TP 1 then 2": (pipeline((1, 1), (3, 2), microbatches=8),),
    "TP 2, 1, 4": (pipeline((1, 2), (1, 1), (2, 4), microbatches=8),),
    "TP 4 then 2": (pipeline((2, 4), (2, 2), microbatches=4, size=2),),
    "TP 2 beside TP 1": (pipeline((4, 2), microbatches=5), pipeline((4, 1), microbatches=3)),
    "TP 4 beside TP 2": (pipeline((4, 4), microbatches=4), pipeline((4, 2), microbatches=4)),
    "TP and cuts across": (
        pipeline((3, 2), (1, 1), microbatches=3),
        pipeline((1, 1), (3, 2), microbatches=3, size=2, last=1),
    ),
    "three pipelines": (
        pipeline((4, 1), microbatches=1),
        pipeline((1, 1), (3, 2), microbatches=3),
        pipeline((1, 1), (1, 1), (2, 2), microbatches=2, size=2),
    ),
}

ACROSS_NODES = {
    "TP 2, 2": (pipeline((2, 2), (2, 2), microbatches=4, size=2, nodes="ab"),),
    "TP 1, 2": (pipeline((1, 1), (3, 2), microbatches=3, size=3, last=2, nodes="ab"),),
    "TP 4, 2": (pipeline((2, 4), (2, 2), microbatches=4, size=2, nodes="ab"),),
    "TP 2, 4": (pipeline((3, 2), (1, 4), microbatches=8, nodes="ab"),),
    "TP 2, 1, 2": (pipeline((1, 2), (1, 1), (2, 2), microbatches=4, size=2, nodes="aba"),),
    "TP 2, 2, 4, one boundary on a node": (
        pipeline((1, 2), (1, 2), (2, 4), microbatches=8, nodes="aab"),
    ),
    "TP 1, 2 beside TP 2, 1": (
        pipeline((3, 1), (1, 2), microbatches=3, nodes="ab"),
        pipeline((1, 2), (3, 1), microbatches=5, nodes="ba"),
    ),
}

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
    layout = layout_of_plan(plan, config)
    specs = tensor_specs(config)
    for worker, state in zip(plan.workers, states, strict=True):
        units = layout.units_of(worker)
        for name, tensor in state.items():
            if not name.startswith("param/"):
                continue
            whole = weights[name.removeprefix("param/")]
            padding = specs[name].shape[0] - len(whole)  # of rows, which stay 0
            whole = np.pad(whole, [(0, padding)] + [(0, 0)] * (whole.ndim - 1))
            for unit, view in unit_views(
                specs[name], units[name], torch.from_numpy(tensor)
            ).items():
                wanted = whole
                if specs[name].split_dim is not None:
                    wanted = whole[specs[name].unit_slices(unit)]
                worst = float(np.abs(view.numpy() - wanted).max())
                assert worst <= TOLERANCE * float(np.abs(whole).max()), (
                    f"{name} unit {unit} of {worker}: off by {worst}"
                )


def check_holders(case: Case, plan: Plan, states: list[dict[str, np.ndarray]]) -> None:
    """Every shard is held by somebody, and all its holders have the same bits."""
    config = case.config()
    layout = layout_of_plan(plan, config)
    specs = tensor_specs(config)
    bits: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    for worker, state in zip(plan.workers, states, strict=True):
        units = layout.units_of(worker)
        assert set(state) == set(units)
        for name, tensor in state.items():
            views = unit_views(specs[name], units[name], torch.from_numpy(tensor))
            for unit, view in views.items():
                bits[name, unit].add(view.numpy().tobytes())
    assert set(bits) == set(layout.shards), "some shard is held by nobody"
    assert all(len(versions) == 1 for versions in bits.values()), (
        "holders of one shard differ in bits"
    )


BALANCED = {**TRAINING, "router_balance": "bias", "router_bias_speed": 0.01}
