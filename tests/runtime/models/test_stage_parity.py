"""Stages chained, however cut, are the library's own model: logits, loss and every gradient."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from autohet.runtime.models.registry import family_of, stage_parameter_names
from autohet.runtime.models.stages.stage import build_stage
from planner.errors import ConfigError
from tests.harness.tiny_models import (
    TINY,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
    worst_error,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", TINY)
def test_every_cut_of_every_family_equals_the_library(name):
    config = tiny_config(name)
    parameters = random_parameters(config)
    logits, loss, gradients = judge(config, parameters)
    for cut, recompute in (
        ([3], "none"),
        ([3], "offload"),
        ([1, 2], "selective"),
        ([1, 1, 1], "full"),
    ):
        ours, our_loss, our_gradients = run_chain(
            config, stage_chain(config, parameters, cut, recompute=recompute)
        )
        assert (ours - logits).abs().max() / logits.abs().max() < TOLERANCE, cut
        assert our_loss == pytest.approx(loss, rel=TOLERANCE), cut
        assert worst_error(our_gradients, gradients) < TOLERANCE, cut


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_the_librarys(name):
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    model = AutoModelForCausalLM.from_config(config)
    stored = model.state_dict()
    buffers = {n: each for n, each in model.named_buffers() if n in stored}
    assert {n: s.shape for n, s in specs.items()} == {
        n: tuple(p.shape) for n, p in [*model.named_parameters(), *buffers.items()]
    }


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_belongs_to_one_stage_and_a_tied_embedding_to_two(name):
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    held = [n for first in range(3) for n in stage_parameter_names(config, first, 1)]
    twice = {n for n in held if held.count(n) > 1}
    assert set(held) == set(specs)
    assert twice == (
        {f"{family_of(config).token_embedding}.weight"} if config.tie_word_embeddings else set()
    )


def test_a_tied_embedding_on_one_stage_is_one_parameter():
    config = tiny_config("gpt2")
    (stage,) = stage_chain(config, random_parameters(config), [3])
    assert stage.embedding.weight is stage.head.weight
    assert "lm_head.weight" not in stage.weights.local_parameters()


def test_a_sequence_length_that_changes_renews_masks_and_rotary_tables():
    config = tiny_config("mistral")
    parameters = random_parameters(config)
    (reused,) = stage_chain(config, parameters, [3])
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 11), (1, 7), (3, 16), (2, 11)):
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        (fresh,) = stage_chain(config, parameters, [3])
        assert torch.equal(reused(tokens), fresh(tokens))


def test_a_slice_of_the_wrong_shape_is_not_taken():
    config = tiny_config("llama")
    parameters = random_parameters(config)
    parameters["model.norm.weight"] = torch.ones(5)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        build_stage(config, range(3), None, torch.device("cpu"), torch.float32).weights.load(
            parameters
        )


def test_more_tokens_than_learned_positions_is_the_users_error():
    config = tiny_config("gpt2")
    (stage,) = stage_chain(config, random_parameters(config), [3])
    with pytest.raises(ConfigError, match="32 learned positions"):
        stage(torch.zeros(1, 33, dtype=torch.int64))
