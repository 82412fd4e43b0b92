"""Expert parallelism with all-to-all: logits, loss, gradients and counts are the library's own."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from autohet.runtime.job import AdapterSection
from autohet.runtime.models.layers.adapters import adapter_of
from autohet.runtime.models.layers.experts import CORRECTION_BIAS
from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from planner.plans.plan import Recompute
from tests.harness.peft_reference import peft_gradients
from tests.harness.selection import one_of_each
from tests.harness.tiny_models import (
    MIXTURES,
    batch,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)
from tests.runtime.models.test_adapters import adapted_config
from tests.runtime.models.test_experts import balanced_gradients
from tests.runtime.models.test_stage_tensor_parallel import TOLERANCE, summed_over_holders

WAYS = [(shares, cuts) for shares in ((1, 1, 1, 1), (3, 1)) for cuts in (False, True)]
"""Shares of the ranks, and whether the stage is sequence parallel."""


def uneven(shares: tuple[int, ...]) -> tuple[int, ...]:
    return shares if len(set(shares)) > 1 else ()


def summed(
    config: Any, gradients: dict[str, Tensor], tp: Any, *, cuts_sequence: bool
) -> dict[str, Tensor]:
    """Sum gradients over the group as gradient sync does."""
    specs, found = family_of(config).parameter_specs(config), {}
    for key, gradient in gradients.items():
        spec, whole = specs[key], gradient.clone()
        if spec.split_dim is None and (cuts_sequence or spec.partial_gradient):
            tp.group.all_reduce(whole)
        elif spec.split_dim is not None and tp.share.of > spec.num_units:
            whole = summed_over_holders(spec, whole, tp)
        found[key] = whole
    return found


def check(
    config: Any,
    parameters: dict[str, Tensor],
    way: tuple[tuple[int, ...], bool],
    chains: list[tuple[list[int], Recompute]],
) -> None:
    """Compare logits, loss and gradients of each chain of stages with the library's."""
    shares, cuts_sequence = way
    specs = family_of(config).parameter_specs(config)
    if adapter_of(config) is None:
        logits, loss, gradients = judge(config, parameters)
    else:
        logits, loss, gradients = peft_gradients(config, parameters, *batch(config))

    def work(tp: Any) -> Any:
        found = []
        for cut, recompute in chains:
            chain = stage_chain(config, parameters, cut, tp, recompute)
            local, local_loss, local_gradients = run_chain(config, chain)
            whole = summed(config, local_gradients, tp, cuts_sequence=cuts_sequence)
            found.append((local, local_loss, whole, tp.share))
        return found

    by_rank = run_ranks(
        len(shares), work, uneven(shares), cuts_sequence=cuts_sequence, all_to_all=True
    )
    for index, chain in enumerate(chains):
        whole = torch.cat([found[index][0] for found in by_rank], -1)
        assert (whole - logits).abs().max() / logits.abs().max() < TOLERANCE, chain
        for rank, found in enumerate(by_rank):
            _, found_loss, found_gradients, share = found[index]
            assert found_loss == pytest.approx(loss, rel=TOLERANCE), (chain, rank)
            wanted = {key: take(specs[key], each, share) for key, each in gradients.items()}
            assert worst_error(found_gradients, wanted) < TOLERANCE, (chain, rank)


@pytest.mark.parametrize(("name", "way"), one_of_each(product(MIXTURES, WAYS)))
def test_every_family_and_degree_equals_the_library(
    name: str, way: tuple[tuple[int, ...], bool]
) -> None:
    config = tiny_config(name)
    first: Recompute = "none" if way[1] else "selective"
    check(config, random_parameters(config), way, [([1, 2], first), ([3], "full")])


def test_adapted_experts_compute_the_tokens_of_all_ranks() -> None:
    """Of routed and shared experts, and routers that see parts of sequences."""
    config = adapted_config("deepseek_v3", AdapterSection(rank=4))
    check(config, random_parameters(config), ((3, 1), True), [([1, 2], "full")])


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_gets_no_token_takes_part(way: tuple[tuple[int, ...], bool]) -> None:
    config = tiny_config("gpt_oss")
    parameters = random_parameters(config)
    for name, bias in parameters.items():
        if name.endswith("router.bias"):
            bias[:2] += 100.0
    check(config, parameters, way, [([3], "none")])


@pytest.mark.parametrize("cuts_sequence", [False, True])
@pytest.mark.parametrize(
    ("name", "degree", "length"), [("qwen3_moe", 2, 7), ("qwen3_moe", 8, 13), ("olmoe", 4, 5)]
)
def test_any_length_and_eight_ranks_give_the_loss_and_gradients_of_one(
    name: str, degree: int, length: int, cuts_sequence: bool
) -> None:
    """Also where a rank has nothing but padding."""
    config = tiny_config(name, num_attention_heads=8, num_key_value_heads=8)
    specs, parameters = family_of(config).parameter_specs(config), random_parameters(config)
    tokens = torch.arange(2 * length).view(2, length) % int(config.vocab_size)
    targets = tokens.flip(1).contiguous()

    def work(tp: Any) -> tuple[float, dict[str, Tensor], Any]:
        (stage,) = stage_chain(config, parameters, [3], tp)
        loss = stage.loss(tokens, targets)
        loss.backward()
        found = {name: each.grad for name, each in stage.weights.local_parameters().items()}
        assert all(each is not None for each in found.values())
        if tp is None:
            return float(loss.detach()), found, None  # type: ignore[return-value]
        whole = summed(config, found, tp, cuts_sequence=cuts_sequence)  # type: ignore[arg-type]
        return float(loss.detach()), whole, tp.share

    whole_loss, whole, _ = work(None)
    for loss, found, share in run_ranks(degree, work, cuts_sequence=cuts_sequence, all_to_all=True):
        assert loss == pytest.approx(whole_loss, rel=TOLERANCE)
        expected = {name: take(specs[name], each, share) for name, each in whole.items()}
        assert worst_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("way", [((1, 1), False), ((3, 1), True)])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_ranks_add_the_parts_of_the_balance_loss(
    name: str, way: tuple[tuple[int, ...], bool]
) -> None:
    """The share of an expert is that of whole sequences, of which each rank routes a part."""
    weight, config, (shares, cuts_sequence) = 0.5, tiny_config(name), way
    specs, parameters = family_of(config).parameter_specs(config), random_parameters(config)
    expected = balanced_gradients(name, weight)

    def work(tp: Any) -> None:
        (stage,) = stage_chain(config, parameters, [3], tp, "full")
        stage.loss_terms = LossTerms(router_balance=weight)
        gradients = run_chain(config, [stage])[2]
        found = summed(config, gradients, tp, cuts_sequence=cuts_sequence)
        wanted = {key: take(specs[key], each, tp.share) for key, each in expected.items()}
        assert worst_error(found, wanted) < TOLERANCE

    run_ranks(len(shares), work, uneven(shares), cuts_sequence=cuts_sequence, all_to_all=True)


def counts_of_library(config: Any, parameters: dict[str, Tensor], tokens: Tensor) -> Any:
    """Tokens that each router of the library's model sends to each expert."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(parameters)
    found = {}

    def counting(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            counts = out[2].flatten().bincount(minlength=config.n_routed_experts)
            found[f"{name}.{CORRECTION_BIAS}"] = counts.float()

        return hook

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(counting(name))
    model(tokens)
    return found


@pytest.mark.parametrize("all_to_all", [False, True])
@pytest.mark.parametrize("way", [((1, 1, 1, 1), False), ((1, 1, 1, 1), True), ((3, 1), False)])
def test_both_ways_count_each_token_once(
    way: tuple[tuple[int, ...], bool], all_to_all: bool
) -> None:
    """Padding, which 11 tokens on 4 ranks have, is no token."""
    config, (shares, cuts_sequence) = tiny_config("deepseek_v3"), way
    parameters, tokens = random_parameters(config), batch(config)[0][:, :11].contiguous()
    expected = counts_of_library(config, parameters, tokens)
    assert len(expected) == 2

    def work(tp: Any) -> None:
        (stage,) = stage_chain(config, parameters, [3], tp)
        stage.loss_terms = LossTerms(counts_tokens=True)
        stage.loss(tokens, tokens).backward()
        for name, wanted in expected.items():
            counts: Any = stage.weights.local_parameters()[name].grad
            tp.group.all_reduce(counts)
            assert torch.equal(counts, wanted)

    run_ranks(len(shares), work, uneven(shares), cuts_sequence=cuts_sequence, all_to_all=all_to_all)


def test_a_token_goes_once_to_each_owner_and_no_further() -> None:
    """Rows of hidden states that the group moves, there and back."""
    config = tiny_config("qwen3_moe")
    parameters, (tokens, _) = random_parameters(config), batch(config)
    owners: list[set[tuple[int, int]]] = []

    def work(tp: Any) -> list[int]:
        moved: list[int] = []
        move = tp.group.all_to_all

        def counted(out: Tensor, given: Tensor, received: Any, sent: Any) -> None:
            if given.dim() == 2 and given.shape[1] == config.hidden_size:
                moved.append(len(given))
            move(out, given, received, sent)

        object.__setattr__(tp.group, "all_to_all", counted)
        (stage,) = stage_chain(config, parameters, [3], tp)
        for name, module in stage.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(
                    lambda _, args, out: owners.append(
                        {
                            (row, int(each) // 2)
                            for row, chosen in enumerate(out[2])
                            for each in chosen
                        }
                    )
                )
        stage(tokens)
        return moved

    by_rank = run_ranks(4, work, all_to_all=True)
    there = sum(rows for moved in by_rank for rows in moved[::2])
    back = sum(rows for moved in by_rank for rows in moved[1::2])
    assert there == back == sum(map(len, owners))
    assert there < 2 * 2 * tokens.numel(), "some tokens have both experts on one rank"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_bf16_is_near_to_fp32(name: str) -> None:
    config = tiny_config(name)
    specs, parameters = family_of(config).parameter_specs(config), random_parameters(config)
    _, loss, _ = judge(config, parameters)
    inputs, targets = batch(config)

    def work(tp: Any) -> None:
        stage = build_stage(config, range(3), tp, torch.device("cpu"), torch.bfloat16)
        stage.weights.load({key: take(specs[key], parameters[key], tp.share) for key in specs})
        found = stage.loss(inputs, targets)
        found.backward()
        assert found.item() == pytest.approx(loss, rel=0.02)
        for each in stage.weights.local_parameters().values():
            assert each.grad is not None
            assert each.grad.isfinite().all()

    run_ranks(2, work, all_to_all=True)
