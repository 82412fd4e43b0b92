"""Every family at TP 2 and 4, and on ranks with unequal shares, in threads:
whole logits, loss and every gradient are the library's own, whatever the cut."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.parameter_spec import local_units
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from tests.harness.selection import one_of_each
from tests.harness.tiny_models import (
    AUTO,
    TINY,
    batch,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)

TOLERANCE = 1e-5
CUTS = (([3], "none"), ([1, 2], "full"), ([1, 1, 1], "selective"))
SHARES = ((1, 1), (1, 1, 1, 1), (2, 1, 1), (3, 1), (1, 2, 1))
"""Of the four heads: with two key-value heads (3, 1) gives a rank three query heads on two of them,
(1, 2, 1) one head of each.
"""
SHARES_OF_AUTO = ((1, 1), (1, 1, 1, 1), (3, 1))


def cases(cuts):
    """Return (name, shares, cut): each family meets each cut, and all shares meet each cut."""
    return [
        (name, shares, cuts[(number + place) % len(cuts)])
        for number, name in enumerate(TINY)
        for place, shares in enumerate(SHARES_OF_AUTO if name in AUTO else SHARES)
    ]


def summed_over_holders(spec, gradient, tp):
    """Of a key-value head that several ranks hold, as gradient sync does it: the sum over these."""
    whole, units = torch.zeros(spec.shape), local_units(spec, tp.share)
    whole.narrow(spec.split_dim, spec.cuts[units[0]], gradient.shape[spec.split_dim]).copy_(
        gradient
    )
    tp.group.all_reduce(whole)
    return take(spec, whole, tp.share)


@pytest.mark.parametrize(("name", "shares", "cut"), one_of_each(cases(CUTS)))
def test_every_family_and_degree_equals_the_library(name, shares, cut):
    degree, uneven = len(shares), shares if len(set(shares)) > 1 else ()
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    logits, loss, gradients = judge(config, parameters)

    def work(tp):
        layers, recompute = cut
        local, local_loss, local_gradients = run_chain(
            config, stage_chain(config, parameters, layers, tp, recompute)
        )
        for key, gradient in local_gradients.items():
            if specs[key].partial_gradient:
                tp.group.all_reduce(gradient)
            elif specs[key].split_dim is not None and sum(shares) > specs[key].num_units:
                local_gradients[key] = summed_over_holders(specs[key], gradient, tp)
        return local, local_loss, local_gradients, tp.share

    by_rank = run_ranks(degree, work, uneven)
    whole = torch.cat([found[0] for found in by_rank], -1)
    assert (whole - logits).abs().max() / logits.abs().max() < TOLERANCE
    for rank, (_, local_loss, local_gradients, share) in enumerate(by_rank):
        assert local_loss == pytest.approx(loss, rel=TOLERANCE), rank
        assert local_loss == by_rank[0][1], "ranks disagree about the loss"
        wanted = {key: take(specs[key], gradient, share) for key, gradient in gradients.items()}
        assert worst_error(local_gradients, wanted) < TOLERANCE, rank


@pytest.mark.parametrize("name", TINY)
def test_replicated_parameters_have_the_whole_gradient_unless_marked_partial(name):
    """What gradient sync relies on: dividing by the degree, or adding, gives the whole gradient
    exactly once.
    """
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)

    def work(tp):
        (stage,) = stage_chain(config, parameters, [3], tp)
        stage.loss_terms = LossTerms(counts_tokens=True)
        return run_chain(config, [stage])[2]

    by_rank = run_ranks(2, work)
    for key, spec in specs.items():
        if spec.split_dim is None:
            equal = torch.equal(by_rank[0][key], by_rank[1][key])
            assert equal != spec.partial_gradient, key


@pytest.mark.parametrize("name", ["llama-grouped", "qwen3", "mistral", "gpt2", *AUTO])
@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bf16_is_as_near_to_fp32_as_the_librarys_bf16(name, degree):
    """The loss is summed in fp32; every error is at most twice that of the library's own bf16 model
    (or bf16's resolution).
    """
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    logits, loss, _ = judge(config, parameters)
    inputs, targets = batch(config)
    theirs = AutoModelForCausalLM.from_config(
        config, attn_implementation=family_of(config).stock_attention, dtype=torch.bfloat16
    )
    theirs.load_state_dict(
        {key: tensor.bfloat16() for key, tensor in parameters.items()}, strict=False
    )
    their_logits = theirs(inputs).logits.float()
    their_loss = F.cross_entropy(
        their_logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )

    def work(tp):
        stage = build_stage(config, range(3), tp, torch.device("cpu"), torch.bfloat16)
        stage.weights.load({key: take(specs[key], parameters[key], tp.share) for key in specs})
        out = stage(inputs)
        total = stage.loss_sum(out, targets)
        total.backward()
        assert all(torch.isfinite(p.grad).all() for p in stage.weights.local_parameters().values())
        return out.detach(), total.detach()

    by_rank = run_ranks(degree, work)
    ours = torch.cat([out for out, _ in by_rank], -1)
    assert ours.dtype == torch.bfloat16
    assert by_rank[0][1].dtype == torch.float32
    assert (ours.float() - logits).abs().max() <= 2 * (their_logits - logits).abs().max()
    resolution = loss * 2**-8
    assert abs(by_rank[0][1].item() - loss) <= max(2 * abs(their_loss.item() - loss), resolution)
