"""Who holds what under any plan, against a direct reading of the plan, tensor by tensor and element
by element.
"""

import copy
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.facts.layout import (
    STATE_KINDS,
    layout_of_plan,
    parameter_name,
    state_name,
    tensor_specs,
)
from autohet.runtime.models.parameter_spec import MUON
from planner.plans.muon import orthogonalization_flops
from planner.plans.plan import Plan
from recovery.state.layout import Layout, ShardId
from tests.harness.random_plans import plans
from tests.harness.tiny_models import tiny_config

CONFIGS = {name: tiny_config(name) for name in ("llama", "qwen3", "gpt2")}
EMBEDDING = {
    "llama": "model.embed_tokens.weight",
    "qwen3": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}
# by hand, from the library's parameter names: what goes with the first stage, what with the last
ENDS = {
    "llama": ({"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}),
    "qwen3": ({"model.embed_tokens.weight"}, {"model.norm.weight", "model.embed_tokens.weight"}),
    "gpt2": (
        {"transformer.wte.weight", "transformer.wpe.weight"},
        {"transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight"},
    ),
}
cases = st.sampled_from(sorted(CONFIGS)).flatmap(
    lambda name: st.tuples(st.just(name), plans(3, 4, uneven=True))
)


def belongs(model: str, parameter: str, first_layer: int, num_layers: int) -> bool:
    """Whether a stage of these blocks holds a parameter, read off its name."""
    start, end = ENDS[model]
    if (first_layer == 0 and parameter in start) or (
        first_layer + num_layers == 3 and parameter in end
    ):
        return True
    parts = parameter.split(".")
    return parts[1] in ("layers", "h") and first_layer <= int(parts[2]) < first_layer + num_layers


def rank_and_degree(plan: Plan, worker: str) -> tuple[int, int, int, int]:
    """(rank, degree, first layer, number of layers) of a worker."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if worker in stage.workers:
                return (
                    stage.workers.index(worker),
                    len(stage.workers),
                    stage.first_layer,
                    stage.num_layers,
                )
    raise AssertionError(worker)


@settings(max_examples=40)
@given(cases)
def test_each_worker_holds_its_stages_tensors_in_all_kinds(case: tuple[str, Plan]) -> None:
    model, plan = case
    layout = layout_of_plan(plan, CONFIGS[model])
    parameters = {parameter_name(name) for name in layout.tensors}
    assert set(layout.workers) == set(plan.workers)
    for worker in plan.workers:
        _, _, first, count = rank_and_degree(plan, worker)
        wanted = {
            state_name(kind, p)
            for p in parameters
            if belongs(model, p, first, count)
            for kind in STATE_KINDS
        }
        units = layout.units_of(worker)
        assert set(units) == wanted
        for name, held in units.items():
            assert held == units[state_name("param", parameter_name(name))], (
                "moments lie as their parameter does"
            )


@settings(max_examples=40)
@given(cases)
def test_ranks_of_a_stage_have_their_shares_of_each_tensor_and_hold_all_of_it(
    case: tuple[str, Plan],
) -> None:
    model, plan = case
    layout = layout_of_plan(plan, CONFIGS[model])
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        held = [layout.units_of(worker) for worker in stage.workers]
        for name in held[0]:
            spec = layout.tensors[name]
            lists = [units[name] for units in held]
            if spec.split_dim is None:
                assert lists == [(0,)] * stage.tp_degree
                continue
            assert sorted(unit for units in lists for unit in units) == list(range(spec.num_units))
            shares = stage.tp_shares or (1,) * stage.tp_degree
            assert [len(units) * sum(shares) for units in lists] == [
                share * spec.num_units for share in shares
            ]


@settings(max_examples=40)
@given(cases)
def test_every_shard_is_held_and_bytes_add_up(case: tuple[str, Plan]) -> None:
    model, plan = case
    layout = layout_of_plan(plan, CONFIGS[model])
    assert frozenset().union(*layout.shards_by_worker.values()) == layout.shards
    for shard in layout.shards:
        assert layout.holders(shard) == tuple(
            sorted(w for w, held in layout.shards_by_worker.items() if shard in held)
        )
    replicated = {name for name, spec in layout.tensors.items() if spec.split_dim is None}
    copies: dict[str, int] = defaultdict(int)  # of each tensor, over the whole fleet
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for name in layout.units_of(stage.workers[0]):
                copies[name] += stage.tp_degree if name in replicated else 1
    total = sum(copies[name] * spec.num_bytes for name, spec in layout.tensors.items())
    assert sum(layout.bytes_of(worker) for worker in plan.workers) == total
    assert layout.num_bytes == 3 * sum(
        4 * math.prod(s.shape) for n, s in layout.tensors.items() if n.startswith("param/")
    )


@settings(max_examples=30)
@given(plans(3, 4, uneven=True), st.sampled_from(["gpt2", "qwen3_moe"]))
def test_a_matrix_of_muon_has_one_owner_among_those_that_compute_with_it(
    plan: Plan, model: str
) -> None:
    """It keeps all units and one moment; an expert's matrix is a matrix. All else is held as under
    AdamW, router and embedding among it.
    """
    plain = tiny_config(model)
    config = copy.deepcopy(plain)
    setattr(config, MUON, ["*.mlp.gate.weight"] if model == "qwen3_moe" else [])
    before = layout_of_plan(plan, plain)
    layout = layout_of_plan(plan, config)
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for tensor, spec in before.tensors.items():
        parameter = parameter_name(tensor)
        is_stack = ".experts." in parameter
        in_block = ".layers." in parameter or ".h." in parameter
        is_exempt = parameter.endswith(("bias", ".gate.weight"))
        is_matrix = in_block and len(spec.shape) == 2 + is_stack and not is_exempt
        computing = {
            worker
            for worker in plan.workers
            if any(shard.tensor == tensor for shard in before.shards_by_worker[worker])
        }
        for unit in range(spec.num_units):
            shard = ShardId(tensor, unit)
            if not is_matrix:
                assert layout.holders(shard) == before.holders(shard)
            elif tensor.startswith("exp_avg_sq/"):
                assert shard not in layout.shards
            else:
                (owner,) = layout.holders(shard)
                assert owner in (before.holders(shard) if is_stack else computing)
                owners[parameter, unit if is_stack else 0].add(owner)
    assert {len(each) for each in owners.values()} == {1}


def test_owners_of_muons_matrices_have_work_by_their_shares() -> None:
    """Two pipelines, one of two ranks: each of its ranks has half of the other's work."""
    stages = [
        {"first_layer": 0, "num_layers": 3, "workers": each} for each in (["a/0", "a/1"], ["b/0"])
    ]
    plan = Plan.from_document(
        {
            "version": 1,
            "model": "m",
            "global_batch_sequences": 2,
            "microbatch_sequences": 1,
            "sequence_length": 4,
            "pipelines": [{"num_microbatches": 1, "stages": [stage]} for stage in stages],
        }
    )
    config = copy.deepcopy(CONFIGS["gpt2"])
    setattr(config, MUON, [])
    layout = layout_of_plan(plan, config)
    work = dict.fromkeys(plan.workers, 0.0)
    sizes = []
    for tensor, spec in layout.tensors.items():
        (owner, *others) = layout.holders(ShardId(tensor, 0))
        if tensor.startswith("exp_avg/") and not others:
            sizes.append(orthogonalization_flops(*spec.shape))
            work[owner] += sizes[-1]
    assert len(sizes) == 3 * 4
    for worker, fraction in {"a/0": 0.25, "a/1": 0.25, "b/0": 0.5}.items():
        assert abs(work[worker] - fraction * sum(sizes)) <= max(sizes)


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_units_tile_each_tensor_exactly_once(model: str) -> None:
    for spec in tensor_specs(CONFIGS[model]).values():
        times = torch.zeros(spec.shape)
        for unit in range(spec.num_units):
            times[spec.unit_slices(unit)] += 1
        assert bool((times == 1).all()), spec.name
        assert sum(spec.unit_bytes(unit) for unit in range(spec.num_units)) == 4 * times.numel()


def test_a_tied_embedding_is_one_tensor_with_holders_at_both_ends() -> None:
    stages = [
        {"first_layer": layer, "num_layers": 1, "workers": [f"w/{layer}"]} for layer in range(3)
    ]
    document = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 1,
        "microbatch_sequences": 1,
        "sequence_length": 4,
        "pipelines": [{"num_microbatches": 1, "stages": stages}],
    }
    for model, config in CONFIGS.items():
        layout: Layout = layout_of_plan(Plan.from_document(document), config)
        shards = layout.tensors[f"param/{EMBEDDING[model]}"].shards
        ends = ("w/0", "w/2") if config.tie_word_embeddings else ("w/0",)
        assert {layout.holders(shard) for shard in shards} == {ends}
        assert ("param/lm_head.weight" in layout.tensors) == (not config.tie_word_embeddings)
