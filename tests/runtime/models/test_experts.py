"""Mixtures of experts: files with single experts, the ranks' own experts, and what is refused.

`test_stage_parity`, `test_stage_tensor_parallel` and `test_sequence_parallel` compare logits and
gradients with the library's, for every family of `AUTO`.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.layers.experts import (
    CORRECTION_BIAS,
    ROUTERS,
    is_dense,
    keep_own_experts,
    num_experts,
)
from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import WHOLE, local_shape, local_units
from autohet.runtime.models.pretrained import pretrained_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from autohet.runtime.models.stages.kernels import wants_compiled
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from autohet.runtime.state.optimizer import move_bias
from planner.errors import ConfigError
from planner.plans.plan import Recompute, TensorShare
from tests.harness.tiny_models import (
    AUTO,
    MIXTURES,
    TINY,
    batch,
    gradients_of_biases,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model by the library, and return its parameters."""
    config, parameters = tiny_config(name), random_parameters(tiny_config(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(parameters)
    model.save_pretrained(folder)
    return parameters


@pytest.mark.parametrize("name", [each for each in MIXTURES if each != "gpt_oss"])
def test_files_with_single_experts_are_read_as_stacks(name: str, tmp_path: Path) -> None:
    parameters = saved(name, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(".experts.0." in each for each in stored) >= 3, "the files hold single experts"
    given = ModelSection(config=None, pretrained=str(tmp_path), revision=None)
    config = load_config(given)
    read = dict(pretrained_parameters(str(tmp_path), config, family_of(config), parameters))
    assert read.keys() == parameters.keys()
    assert all(torch.equal(read[each], parameters[each]) for each in read)


@pytest.mark.parametrize("name", MIXTURES)
def test_files_with_stacks_are_read_too(name: str, tmp_path: Path) -> None:
    parameters = saved(name, tmp_path)
    save_file(parameters, tmp_path / "model.safetensors", {"format": "pt"})
    config = load_config(ModelSection(pretrained=str(tmp_path)))
    read = dict(pretrained_parameters(str(tmp_path), config, family_of(config), parameters))
    assert all(torch.equal(read[each], parameters[each]) for each in parameters)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.2.mlp.experts.5.up_proj.weight"
    del stored[lost]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=lost):
        load_config(ModelSection(pretrained=str(tmp_path)))


def test_ranks_compute_their_own_experts_of_all_tokens() -> None:
    """The parts of two ranks add up, and no rank computes a token of an expert it lacks."""
    config = tiny_config("qwen3_moe")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, config.hidden_size, generator=generator)
    index = torch.rand(20, 8, generator=generator).topk(2).indices
    weights = torch.rand(20, 2, generator=generator)
    stacks: dict[str, torch.Tensor] = {}
    outputs = []
    for first, end in ((0, 8), (0, 3), (3, 8)):
        experts: Any = skeleton(config).model.layers[0].mlp.experts  # type: ignore[union-attr]
        for name, parameter in list(experts.named_parameters(recurse=False)):
            stacks.setdefault(name, torch.randn(parameter.shape, generator=generator))
            setattr(experts, name, torch.nn.Parameter(stacks[name][first:end]))
        keep_own_experts(experts, first, end)
        out = experts(hidden, index, weights)
        out.sum().backward()
        used = {int(expert) for expert in index.flatten()}
        for expert in range(first, end):
            has_gradient = bool(experts.down_proj.grad[expert - first].any())
            assert has_gradient == (expert in used)
        outputs.append(out.detach())
    torch.testing.assert_close(outputs[1] + outputs[2], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_rank_without_tokens_takes_part_in_the_backward_pass(implementation: str) -> None:
    """The other ranks of its group wait for the gradient of what it read."""
    model: Any = skeleton(tiny_config("mixtral"))
    experts = model.model.layers[0].mlp.experts
    experts.config._experts_implementation = implementation
    for name, parameter in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, torch.nn.Parameter(torch.randn(parameter.shape)[4:]))
    keep_own_experts(experts, 4, 6)
    hidden = torch.randn(7, 32, requires_grad=True)
    weights = torch.rand(7, 2, requires_grad=True)
    out = experts(hidden, torch.tensor([[0, 3]] * 7), weights)
    assert not out.any()
    out.sum().backward()
    for each in (hidden, weights, *experts.parameters()):
        assert each.grad is not None
        assert not each.grad.any()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but the model has 8"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("deepseek_v3", {"n_group": 5}, "n_group is 5, but the model has 12 experts"),
        ("deepseek_v3", {"n_group": 12}, "at least 2 experts in each group"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5, but n_group is 4"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, "1 groups have 3 experts"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2, but latent"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim is 8, but latent attention rotates"),
        ("mixtral", {"output_router_logits": True}, "depends on the microbatch"),
        ("mixtral", {"router_jitter_noise": 0.1}, "multiplies what the router reads by noise"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    config = {**AUTO[name], **changes}
    with pytest.raises(ConfigError, match=message):
        load_config(ModelSection(config=config))


def balanced_gradients(name: str, weight: float) -> dict[str, torch.Tensor]:
    """Gradients of the library's model with the balance loss as its formula says."""
    config, parameters = tiny_config(name), random_parameters(tiny_config(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(parameters)
    inputs, targets = batch(config)
    routings = []
    for key, module in model.named_modules():
        if key.endswith(ROUTERS):
            module.register_forward_hook(lambda _, args, out: routings.append((out[0], out[2])))
    out = model(inputs)
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    used, length = config.num_experts_per_tok, inputs.shape[1]
    for all_logits, all_choices in routings:
        for logits, choices in zip(all_logits.split(length), all_choices.split(length)):
            probabilities = logits.softmax(-1)
            if name == "deepseek_v3":
                probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            for expert in range(logits.shape[1]):
                chosen = (choices == expert).sum() / (used * length)
                share = chosen.item() * logits.shape[1]
                loss = loss + weight * length * share * probabilities[:, expert].mean()
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return gradients | gradients_of_biases(model)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shares", [(), (1, 1), (3, 1)])
def test_the_gradient_of_a_correction_bias_counts_tokens(
    shares: tuple[int, ...], recompute: Recompute
) -> None:
    """Once for all ranks of a group, whose other gradients stay as they are."""
    config = tiny_config("deepseek_v3")
    parameters = random_parameters(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(parameters)
    expected: dict[str, torch.Tensor] = {}

    def counting(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            expected[f"{name}.{CORRECTION_BIAS}"] = out[2].flatten().bincount(minlength=12).float()

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(counting(name))
    model(batch(config)[0])
    assert len(expected) == 2

    def work(tp: TensorParallel | None) -> dict[str, torch.Tensor]:
        stages = stage_chain(config, parameters, [1, 2], tp, recompute)
        for stage in stages:
            stage.loss_terms = LossTerms(counts_tokens=True)
        gradients = run_chain(config, stages)[2]
        found = {name: gradients[name] for name in expected}
        if tp is not None:
            for counts in found.values():
                tp.group.all_reduce(counts)
        return found

    uneven = shares if len(set(shares)) > 1 else ()
    for found in run_ranks(len(shares), work, uneven) if shares else [work(None)]:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_bias_falls_where_more_tokens_than_the_mean_go() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5, -0.5])
    move_bias(bias, torch.tensor([7.0, 0.0, 3.0, 2.0]), 0.25)
    assert bias.tolist() == [0.25, 0.75, 0.5, -0.25]


def test_bf16_computes_with_the_biases_in_fp32() -> None:
    """In bf16 a bias of 0.5 would not change by 0.001."""
    config = tiny_config("deepseek_v3")
    stage = build_stage(config, range(3), None, torch.device("cpu"), torch.bfloat16)
    stage.weights.load(random_parameters(config))
    dtypes = {name: each.dtype for name, each in stage.weights.local_parameters().items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {f"model.layers.{layer}.mlp.gate.{CORRECTION_BIAS}" for layer in (1, 2)}


def test_tensors_of_prediction_modules_are_left_out(tmp_path: Path) -> None:
    """DeepSeek's files hold a further block, with scales, which the library ignores."""
    saved("deepseek_v3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.3.mlp.experts.0.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    load_config(ModelSection(pretrained=str(tmp_path)))
    stored["model.layers.2.mlp.extra.weight_scale_inv"] = torch.ones(1, 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.extra"):
        load_config(ModelSection(pretrained=str(tmp_path)))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_balance_loss_of_sequences_reaches_every_router(
    name: str, recompute: Recompute
) -> None:
    weight, config = 0.5, tiny_config(name)
    stages = stage_chain(config, random_parameters(config), [1, 2], recompute=recompute)
    for stage in stages:
        stage.loss_terms = LossTerms(router_balance=weight)
    _, _, gradients = run_chain(config, stages)
    expected = balanced_gradients(name, weight)
    assert worst_error(gradients, expected) < 1e-5
    assert worst_error(judge(config, random_parameters(config))[2], expected) > 1e-3


@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
def test_ranks_add_the_balance_loss_once(shares: tuple[int, ...]) -> None:
    weight, config = 0.5, tiny_config("qwen3_moe")
    specs, parameters = family_of(config).parameter_specs(config), random_parameters(config)
    expected = balanced_gradients("qwen3_moe", weight)
    gate = "model.layers.0.mlp.gate.weight"

    def work(tp: TensorParallel) -> torch.Tensor:
        (stage,) = stage_chain(config, parameters, [3], tp)
        stage.loss_terms = LossTerms(router_balance=weight)
        _, _, gradients = run_chain(config, [stage])
        assert specs[gate].partial_gradient
        tp.group.all_reduce(gradients[gate])
        return gradients[gate]

    for found in run_ranks(len(shares), work, shares if len(set(shares)) > 1 else None):
        torch.testing.assert_close(found, expected[gate], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_the_spec_has_the_experts_of_the_fullest_rank(name: str) -> None:
    """Its parameters are those of the modules, also where the parts do not divide the experts."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = tiny_config(name, **heads)
    family = family_of(config)
    spec = model_spec_from_config("m", {**TINY[name], **heads}, precision="fp32")
    for degree in (2, family.max_tp_degree(config)):
        for layer, block in enumerate(spec.blocks):
            counted = [
                sum(
                    math.prod(
                        local_shape(each, local_units(each, TensorShare(rank, rank + 1, degree)))
                    )
                    for each in family.parameter_specs(config).values()
                    if each.layer == layer
                )
                for rank in range(degree)
            ]
            assert block.parameters_per_worker(degree) == pytest.approx(max(counted), rel=0.05)
            assert (block.experts is None) == is_dense(config, layer)
    experts = spec.blocks[-1].experts
    assert experts is not None
    assert experts.number == num_experts(config)
    assert experts.per_token == config.num_experts_per_tok


def test_more_parts_than_experts_are_refused() -> None:
    config = tiny_config("mixtral", num_attention_heads=8)  # of 6 experts
    eight = TensorParallel.even(None, 0, 8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="TP degree 8 does not divide this model's 6 experts"):
        build_stage(config, range(3), eight, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("shares", [(), (1, 1), (2, 1, 1)])
def test_widths_that_grouped_products_do_not_take(shares: tuple[int, ...]) -> None:
    """Rows of 50 numbers in fp32 are no multiple of 16 bytes: experts come one after the other."""
    config = tiny_config("mixtral", intermediate_size=50)
    specs, parameters = family_of(config).parameter_specs(config), random_parameters(config)
    library = copy.deepcopy(config)
    library._experts_implementation = "eager"
    _, loss, gradients = judge(library, parameters)

    def work(tp: TensorParallel | None) -> None:
        (stage,) = stage_chain(config, parameters, [3], tp)
        share = WHOLE if tp is None else tp.share
        _, found, found_gradients = run_chain(config, [stage])
        assert found == pytest.approx(loss, rel=1e-5)
        stack = "model.layers.1.mlp.experts.gate_up_proj"
        expected = take(specs[stack], gradients[stack], share)
        assert worst_error({stack: found_gradients[stack]}, {stack: expected}) < 1e-5

    if shares:
        run_ranks(len(shares), work, shares if len(set(shares)) > 1 else ())
    else:
        work(None)


def test_blocks_with_experts_are_not_compiled_unasked() -> None:
    (stage,) = stage_chain(tiny_config("olmoe"), random_parameters(tiny_config("olmoe")), [3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autohet.runtime.models.stages.kernels.MIN_COMPILED_PARAMETERS", 0)
        patch.setattr("autohet.runtime.models.stages.kernels.can_compile", lambda device: True)
        assert not wants_compiled("auto", stage)
        assert wants_compiled(True, stage)


def test_the_finest_cut_has_an_expert_on_each_rank() -> None:
    config = tiny_config("mixtral", num_attention_heads=8, num_key_value_heads=8)
    assert family_of(config).max_tp_degree(config) == 4, "6 experts"
