"""Adapters of every family, cut in any way, are peft's: logits, loss and gradients."""

import functools
import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from autohet.runtime.job import AdapterSection, Job
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers.adapters import (
    adapter_of,
    set_adapter,
    without_any_dropout,
)
from autohet.runtime.models.registry import describe_trained, family_of
from autohet.runtime.models.specs.adapter_spec import adapt_spec
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from autohet.runtime.step.reference import named_adapters
from planner.cost.memory.training_bytes import TokensOnRank, memory_terms
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import ConfigError
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Recompute
from tests.harness.model_specs import spec_of
from tests.harness.peft_reference import peft_gradients
from tests.harness.tiny_models import (
    TINY,
    batch,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)
from tests.runtime.models.test_kept_values import LENGTH, SEQUENCES, kept_bytes
from tests.runtime.models.test_stage_tensor_parallel import summed_over_holders

TOLERANCE = 1e-5
PLAIN = AdapterSection()
PLANNED = AdapterSection(rank=8)
ADAPTERS: dict[str, AdapterSection] = {
    "llama": AdapterSection(rank=4, alpha=8.0),
    "llama-biased-tied": AdapterSection(rank=3, alpha=6.0, rslora=True),
    "llama-grouped": AdapterSection(rank=5, alpha=5.0, targets=("k_proj", "v_proj", "down_proj")),
    "qwen3": AdapterSection(rank=4, alpha=8.0, targets=("*.self_attn.?_proj",)),
    "mistral": AdapterSection(rank=2, alpha=4.0, targets="o_proj"),
    "gpt2": AdapterSection(rank=4, alpha=8.0),
}
SHARES = {name: ((1,), (1, 1)) for name in ADAPTERS} | {
    "llama": ((1, 1), (2, 1, 1)),
    "llama-grouped": ((1, 1), (2, 1, 1), (3, 1)),
}
ENDS: dict[str, tuple[str, AdapterSection]] = {
    "saved": (
        "llama",
        AdapterSection(rank=4, targets="q_proj", modules_to_save=("embed_tokens", "lm_head")),
    ),
    "saved norms and a map": (
        "qwen3",
        AdapterSection(rank=4, targets=("q_proj",), modules_to_save=("norm", "q_norm", "up_proj")),
    ),
    "saved and tied": (
        "llama-biased-tied",
        AdapterSection(rank=3, targets="v_proj", modules_to_save=("embed_tokens",)),
    ),
    "targets": ("llama", AdapterSection(rank=4, targets=("all-linear", "embed_tokens", "lm_head"))),
    "a base in four bits": (
        "llama-grouped",
        AdapterSection(
            rank=3,
            base="nf4",
            targets=("q_proj", "down_proj", "lm_head"),
            modules_to_save=("up_proj",),
        ),
    ),
    "a base in four bits, fused maps": ("phi3", AdapterSection(rank=3, base="nf4")),
    "a base in fp8, fused maps": ("phi3", AdapterSection(rank=3, base="fp8")),
    "a base in four bits, experts": ("deepseek_v3", AdapterSection(rank=3, base="nf4")),
    "a scaled embedding": (
        "gemma2-untied",
        AdapterSection(rank=4, targets=("q_proj", "model.embed_tokens")),
    ),
    "saved experts": (
        "qwen3_moe",
        AdapterSection(rank=3, targets="q_proj", modules_to_save=("mlp.experts", "mlp.gate")),
    ),
    "experts, shared, dense maps and routers": ("deepseek_v3", AdapterSection(rank=3)),
    "experts by their maps": (
        "mixtral",
        AdapterSection(rank=4, rslora=True, targets=("q_proj", "w1", "w2", "w3")),
    ),
    "stacks and a router": (
        "gpt_oss",
        AdapterSection(rank=3, targets=("mlp.experts.gate_up_proj", "down_proj", "router")),
    ),
    "one stack": (
        "olmoe",
        AdapterSection(rank=3, targets=("experts.down_proj",), modules_to_save=("gate",)),
    ),
    "positions": (
        "gpt2-untied",
        AdapterSection(rank=3, targets=("c_attn", "lm_head"), modules_to_save=("wpe", "wte")),
    ),
}
"""Embedding, head and norms that are trained, whole or by an update."""
END_CASES = [(label, shares) for label in ENDS for shares in ((1,), (2, 1, 1))]
CASES = [(name, shares) for name in ADAPTERS for shares in SHARES[name]]
CUTS = (([3], "none"), ([1, 2], "full"), ([1, 1, 1], "selective"))


def trainable(config: Any) -> set[str]:
    """Return the names of the parameters that a run trains."""
    specs = family_of(config).parameter_specs(config)
    return {name for name, spec in specs.items() if spec.trainable}


def adapted_config(name: str, adapter: AdapterSection) -> Any:
    config = tiny_config(name.removesuffix("-untied") if name not in TINY else name)
    if name.endswith("-untied"):
        config.tie_word_embeddings = False
    set_adapter(config, adapter, None, None)
    return config


@pytest.mark.parametrize(("name", "shares"), CASES)
def test_any_cut_of_an_adapted_model_equals_peft(name: str, shares: tuple[int, ...]) -> None:
    check_any_cut(adapted_config(name, ADAPTERS[name]), shares)


@pytest.mark.parametrize(("label", "shares"), END_CASES)
def test_any_cut_with_trained_ends_equals_peft(label: str, shares: tuple[int, ...]) -> None:
    """Wrong: a rank's part of the gradient of an embedding's B is not summed, padding tokens teach
    A, a tied head keeps the frozen weights, or a scaled embedding's update is not scaled.
    """
    config = adapted_config(*ENDS[label])
    finest = family_of(config).max_tp_degree(config)
    check_any_cut(config, shares if finest % sum(shares) == 0 else (1, 1))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("is_on", [True, False])
def test_an_adapted_head_is_fused_with_its_loss(is_on: bool, degree: int) -> None:
    """Wrong: the loss leaves out the head's update, or has it where adapters are off."""
    config = adapted_config(*ENDS["targets"])
    parameters = random_parameters(config)
    tokens, targets = batch(config)
    _, loss, gradients = peft_gradients(config, parameters, tokens, targets)
    specs = family_of(config).parameter_specs(config)

    def work(tp: Any) -> Any:
        (stage,) = stage_chain(config, parameters, [3], tp)
        if not is_on:
            with stage.as_reference({}):
                return stage.loss(tokens, targets).item()
        found = stage.loss(tokens, targets)
        found.backward()
        of_rank = {name: each.grad for name, each in stage.weights.local_parameters().items()}
        for key, gradient in of_rank.items():
            if specs[key].partial_gradient and degree > 1:
                tp.group.all_reduce(gradient)
        return found.item(), of_rank, tp.share

    for found in run_ranks(degree, work, ()):
        if not is_on:
            plain = {**parameters}
            for name in plain:
                if "lora_" in name:
                    plain[name] = torch.zeros_like(plain[name])
            assert found == pytest.approx(peft_gradients(config, plain, tokens, targets)[1])
            continue
        own_loss, of_rank, share = found
        assert own_loss == pytest.approx(loss, rel=TOLERANCE)
        wanted = {key: take(specs[key], each, share) for key, each in gradients.items()}
        assert worst_error(of_rank, wanted) < TOLERANCE


def check_any_cut(config: Any, shares: tuple[int, ...]) -> None:
    degree, uneven = len(shares), shares if len(set(shares)) > 1 else ()
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    logits, loss, gradients = peft_gradients(config, parameters, *batch(config))
    assert set(gradients) == trainable(config)

    def work(tp: Any) -> list[Any]:
        found = []
        for cut, recompute in CUTS:
            stages = stage_chain(config, parameters, cut, tp, recompute)
            local, local_loss, of_rank = run_chain(config, stages)
            for key, gradient in of_rank.items():
                if specs[key].partial_gradient and degree > 1:
                    tp.group.all_reduce(gradient)
                elif specs[key].split_dim is not None and sum(shares) > specs[key].num_units:
                    of_rank[key] = summed_over_holders(specs[key], gradient, tp)
            found.append((local, local_loss, of_rank, tp.share))
        return found

    by_rank = run_ranks(degree, work, uneven)
    for index, (cut, _) in enumerate(CUTS):
        whole = torch.cat([found[index][0] for found in by_rank], -1)
        assert (whole - logits).abs().max() / logits.abs().max() < TOLERANCE, cut
        for found in by_rank:
            assert found[index][1] == pytest.approx(loss, rel=TOLERANCE), cut
            share = found[index][3]
            wanted = {key: take(specs[key], each, share) for key, each in gradients.items()}
            assert worst_error(found[index][2], wanted) < TOLERANCE, cut


def test_a_stage_computes_no_gradient_of_a_frozen_weight() -> None:
    config = adapted_config("llama", ADAPTERS["llama"])
    (stage,) = stage_chain(config, random_parameters(config), [3])
    run_chain(config, [stage])
    with_gradient = {name for name, each in stage.named_parameters() if each.grad is not None}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)


def test_first_adapters_are_drawn_as_peft_draws_them_whatever_else_is_drawn() -> None:
    config = adapted_config("llama", ADAPTERS["llama"])
    names = sorted(trainable(config))
    drawn = dict(initial_parameters(config, names, seed=3))
    (alone,) = initial_parameters(config, names[4:5], seed=3)
    assert torch.equal(alone[1], drawn[alone[0]])
    for name, tensor in drawn.items():
        if "lora_B" in name:
            assert not tensor.any()
            continue
        bound = math.sqrt(6 / ((1 + 5) * tensor.shape[1]))  # kaiming_uniform_, a = sqrt(5)
        assert bound * 0.8 < tensor.abs().max() <= bound, name
    other = dict(initial_parameters(config, names, seed=4))
    assert not torch.equal(other[names[0]], drawn[names[0]])


@functools.cache
def planned_spec(name: str, precision: str) -> ModelSpec:
    """Return the spec of a family with the adapter `PLANNED`."""
    whole = spec_of(name, TINY[name], precision)
    return adapt_spec(whole, adapted_config(name, PLANNED), LENGTH, precision)


@pytest.mark.parametrize("label", ["saved", "saved and tied", "targets"])
def test_trained_ends_are_planned_as_trained(label: str) -> None:
    """Wrong: embedding and head count as frozen, or the backward pass ends before the embedding."""
    name, section = ENDS[label]
    config = adapted_config(name, section)
    specs = family_of(config).parameter_specs(config).values()
    trained = sum(math.prod(each.shape) for each in specs if each.trainable)
    adapted = adapt_spec(spec_of(name, TINY[name], "fp32"), config, LENGTH, "fp32")
    # The final norm comes with a head that is trained.
    assert adapted.parameters - trained in (0, config.hidden_size)
    assert adapted.embedding.backward_share > 0
    plain = adapt_spec(
        spec_of(name, TINY[name], "fp32"), adapted_config(name, PLAIN), LENGTH, "fp32"
    )
    assert plain.embedding.backward_share == 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama-grouped", "qwen3", "gpt2"])
def test_an_adapted_block_keeps_what_the_planner_predicts(
    name: str, precision: str, recompute: Recompute
) -> None:
    """By two stages of which one has a block more, as for whole models."""
    config = adapted_config(name, PLANNED)
    kept = []
    for layers in (1, 2):
        stage = build_stage(
            config, range(layers), None, torch.device("cpu"), COMPUTE_DTYPES[precision], recompute
        )
        shapes = stage.weights.local_shapes()
        stage.weights.load({path: 0.02 * torch.randn(shape) for path, shape in shapes.items()})
        kept.append(kept_bytes(stage))
    parameters = framework_parameters(OURS, CostParameters())
    adapted = planned_spec(name, precision)
    on_rank = TokensOnRank(SEQUENCES * LENGTH, LENGTH, precision, 1)
    terms = memory_terms(adapted, on_rank, recompute, parameters)
    assert terms.activation_bytes[1] == pytest.approx(kept[1] - kept[0], rel=0.02)


# what is refused
# ----------------------------------------------------------------------------------


def specs_with(adapter: AdapterSection) -> object:
    config = adapted_config("llama", adapter)
    return family_of(config).parameter_specs(config)


def test_a_target_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'qproj' matches no linear map .* nearest is q_proj"):
        specs_with(AdapterSection(targets=("k_proj", "qproj")))
    with pytest.raises(ConfigError, match=r"'all_linear' .* nearest is all-linear"):
        specs_with(AdapterSection(targets="all_linear"))


def test_all_linear_among_other_targets_is_all_linear() -> None:
    """Wrong: the other names alone are adapted."""
    assert specs_with(AdapterSection(targets=("all-linear", "q_proj"))) == specs_with(PLAIN)
    with pytest.raises(ConfigError, match="'qproj' matches no linear map"):
        specs_with(AdapterSection(targets=("all-linear", "qproj")))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_config_without_any_dropout_drops_nothing(name: str) -> None:
    """Wrong: the adapter's dropout holds in DPO, where TRL turns it off."""
    config = adapted_config(name, AdapterSection(dropout=0.3))
    drops = []
    for each in (config, without_any_dropout(config)):
        stage = build_stage(each, range(1), None, torch.device("cpu"), torch.float32)
        drops.append(stage.dropout.drops)
    assert drops == [True, False]
    assert adapter_of(config) != adapter_of(without_any_dropout(config))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (AdapterSection(targets=("q_proj", "w1")), "names w1 without w3"),
        (AdapterSection(targets=("q_proj", "mlp.experts")), "'mlp.experts' matches no linear map"),
        (AdapterSection(dropout=0.1), "adapted without dropout, as in peft"),
    ],
)
def test_experts_that_peft_does_not_adapt_either_are_refused(
    adapter: AdapterSection, message: str
) -> None:
    config = adapted_config("mixtral", adapter)
    with pytest.raises(ConfigError, match=message):
        family_of(config).parameter_specs(config)


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "olmoe"])
def test_all_linear_of_a_mixture_trains_what_peft_trains(name: str) -> None:
    """Wrong: routed experts or routers stay frozen, or have another rank or scale."""
    config = adapted_config(name, PLANNED)
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    peft = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    specs = family_of(config).parameter_specs(config)
    ours = {key: math.prod(specs[key].shape) for key in trainable(config)}
    assert ours == {key: tensor.numel() for key, tensor in named_adapters(peft)}
    trained, total = peft.get_nb_trainable_parameters()
    assert (
        describe_trained(config) == f"{trained:,} of {total:,} parameters ({trained / total:.4%})"
    )


@pytest.mark.parametrize("target", ["layers.1.self_attn.q_proj", "lm_head"])
def test_a_block_without_a_target_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="no linear map of block 0"):
        specs_with(AdapterSection(targets=target))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 0}, "model.adapter.rank is 0, but must be at least 1"),
        ({"alpha": 0.0}, "model.adapter.alpha is 0.0, but must be more than 0"),
        ({"dropout": 1.0}, "model.adapter.dropout is 1.0, but must be in [0, 1)"),
        ({"kind": "dora"}, "model.adapter.kind is 'dora' in the job: use one of lora"),
        ({"targets": []}, "model.adapter.targets is empty"),
        ({"ranks": 4}, "unknown key model.adapter.ranks in the job; did you mean"),
    ],
)
def test_a_wrong_adapter_is_one_sentence(adapter: dict[str, Any], message: str) -> None:
    document = {
        "model": {"config": TINY["llama"], "adapter": adapter},
        "training": {"global_batch_sequences": 2, "sequence_length": 8},
    }
    with pytest.raises(ConfigError) as caught:
        Job.from_document(document)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_programs_train_no_adapters() -> None:
    document = {
        "model": {"config": TINY["llama"], "adapter": {"rank": 4}},
        "training": {"global_batch_sequences": 2, "sequence_length": 8},
        "parallelism": {"spmd": True},
    }
    with pytest.raises(ConfigError, match="programs train no adapters"):
        Job.from_document(document)


def test_a_jobs_adapter_is_in_the_config_that_checkpoints_carry() -> None:
    adapter = replace(ADAPTERS["llama-grouped"], base="nf4")
    config = adapted_config("llama", adapter)
    found = adapter_of(json.loads(json.dumps(config.to_dict())))
    assert found is not None
    section = asdict(adapter)
    del section["from_"]
    other = {"base": None, "revision": None, "text_path": "", "base_format": "nf4"}
    assert asdict(found) == {**section, **other}
