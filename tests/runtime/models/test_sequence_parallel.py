"""Sequence parallelism: whatever the family, the degree, the shares and the cut, logits, loss and
every gradient are the library's own, and a rank has its part of the sequence between cut parts.
"""

from typing import Any

import pytest
import torch

from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from planner.errors import ConfigError
from tests.harness.selection import one_of_each
from tests.harness.tiny_models import (
    batch,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)
from tests.runtime.models.test_stage_tensor_parallel import (
    TOLERANCE,
    cases,
    summed_over_holders,
)

CUTS: Any = (([3], "none"), ([1, 2], "full"), ([1, 1, 1], "none"))


@pytest.mark.parametrize(("name", "shares", "cut"), one_of_each(cases(CUTS)))
def test_every_family_and_degree_equals_the_library(
    name: str, shares: tuple[int, ...], cut: Any
) -> None:
    degree, uneven = len(shares), shares if len(set(shares)) > 1 else ()
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    logits, loss, gradients = judge(config, parameters)

    def work(tp: Any) -> Any:
        layers, recompute = cut
        chain = stage_chain(config, parameters, layers, tp, recompute)
        local, local_loss, local_gradients = run_chain(config, chain)
        for key, gradient in local_gradients.items():
            if specs[key].split_dim is None:
                tp.group.all_reduce(gradient)
            elif sum(shares) > specs[key].num_units:
                local_gradients[key] = summed_over_holders(specs[key], gradient, tp)
        return local, local_loss, local_gradients, tp.share

    by_rank = run_ranks(degree, work, uneven, cuts_sequence=True)
    whole = torch.cat([found[0] for found in by_rank], -1)
    assert (whole - logits).abs().max() / logits.abs().max() < TOLERANCE
    for rank, (_, local_loss, local_gradients, share) in enumerate(by_rank):
        assert local_loss == pytest.approx(loss, rel=TOLERANCE), rank
        expected = {key: take(specs[key], gradient, share) for key, gradient in gradients.items()}
        assert worst_error(local_gradients, expected) < TOLERANCE, rank


def test_norms_see_a_part_of_the_sequence() -> None:
    """Wrong: gathered hidden states between blocks, which save no memory."""
    config = tiny_config("llama")
    parameters = random_parameters(config)
    inputs, _ = batch(config)

    def work(tp: Any) -> set[int]:
        (stage,) = stage_chain(config, parameters, [3], tp)
        lengths: set[int] = set()
        for module in stage.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.register_forward_hook(lambda _, args, out: lengths.add(out.shape[1]))
        stage(inputs)
        return lengths

    assert run_ranks(4, work, cuts_sequence=True) == [{inputs.shape[1] // 4}] * 4


def test_what_it_cannot_do_is_refused() -> None:
    config = tiny_config("llama")

    def selective(tp: Any) -> None:
        build_stage(config, range(3), tp, torch.device("cpu"), torch.float32, "selective")

    with pytest.raises(ConfigError, match="cannot recompute selectively"):
        run_ranks(2, selective, cuts_sequence=True)


@pytest.mark.parametrize(
    ("name", "degree", "length"),
    [
        ("llama", 2, 7),
        ("llama", 4, 9),
        ("llama", 4, 3),
        ("llama", 8, 16),
        ("llama", 8, 13),
        ("qwen3_moe", 2, 7),
        ("qwen3_moe", 8, 13),
        ("olmoe", 4, 9),
    ],
)
def test_any_length_and_eight_ranks_give_the_loss_and_gradients_of_one(
    name: str, degree: int, length: int
) -> None:
    """Also where a rank has nothing but padding."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 32}
    config = tiny_config(name, **heads)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    tokens = torch.arange(2 * length).view(2, length) % int(config.vocab_size)
    targets = tokens.flip(1).contiguous()

    def gradients(tp: Any) -> tuple[float, dict[str, Any], Any]:
        (stage,) = stage_chain(config, parameters, [3], tp)
        loss = stage.loss(tokens, targets)
        loss.backward()
        found = {name: each.grad for name, each in stage.weights.local_parameters().items()}
        if tp is not None:
            for name in found:
                if specs[name].split_dim is None:
                    tp.group.all_reduce(found[name])
        return float(loss.detach()), found, None if tp is None else tp.share

    whole_loss, whole, _ = gradients(None)
    for loss, found, share in run_ranks(degree, gradients, cuts_sequence=True):
        assert loss == pytest.approx(whole_loss, rel=TOLERANCE)
        expected = {name: take(specs[name], each, share) for name, each in whole.items()}
        assert worst_error(found, expected) < TOLERANCE
