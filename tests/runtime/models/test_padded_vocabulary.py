"""Rows that pad a vocabulary: zeros, in no library's model, the same loss; slices suit tensor cores
at every TP degree.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autohet.runtime.facts.layout import tensor_specs
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job, ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.parameter_spec import local_shape, local_units
from autohet.runtime.models.pretrained import pretrained_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.reference import reference_model
from planner.errors import ConfigError
from planner.plans.plan import TensorShare
from tests.harness.tiny_models import (
    TINY,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
    worst_error,
)

MULTIPLE, ROWS = 64, 128
NAMES = ["llama", "llama-biased-tied", "gpt2", "gpt2-untied"]


def padded_config(name: str) -> Any:
    return load_config(ModelSection(config=TINY[name], vocabulary_multiple=MULTIPLE))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_librarys_whatever_lies_in_the_rows(name: str) -> None:
    config = padded_config(name)
    parameters = random_parameters(config)
    rows = family_of(config).vocabulary_parameters()
    trimmed = {
        key: tensor[: config.vocab_size] if key in rows else tensor
        for key, tensor in parameters.items()
    }
    logits, loss, gradients = judge(tiny_config(name), trimmed)
    found, our_loss, ours = run_chain(config, stage_chain(config, parameters, [1, 2]))
    assert found.shape[-1] == ROWS
    torch.testing.assert_close(found[..., : config.vocab_size], logits, rtol=1e-5, atol=1e-5)
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert all(not ours[key][config.vocab_size :].any() for key in rows & set(ours))
    assert worst_error({key: g[: len(gradients[key])] for key, g in ours.items()}, gradients) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_slice_at_every_degree_is_a_multiple_of_eight_rows(name: str) -> None:
    config = padded_config(name)
    specs = family_of(config).parameter_specs(config)
    for key in family_of(config).vocabulary_parameters() & set(specs):
        for degree in (1, 2, 4):
            shapes = [
                local_shape(
                    specs[key], local_units(specs[key], TensorShare(rank, rank + 1, degree))
                )
                for rank in range(degree)
            ]
            assert {shape[0] for shape in shapes} == {ROWS // degree}
        assert tensor_specs(config)[f"exp_avg/{key}"].shape[0] == ROWS


def test_first_weights_are_those_without_padding_and_zeros(tmp_path: Path) -> None:
    config, plain = padded_config("llama"), tiny_config("llama")
    names = list(family_of(config).parameter_specs(config))
    drawn, unpadded = (dict(initial_parameters(each, names, 5)) for each in (config, plain))
    model = reference_model(config, iter(drawn.items()))
    AutoModelForCausalLM.from_config(plain).save_pretrained(tmp_path)
    read = dict(pretrained_parameters(str(tmp_path), config, family_of(config), names))
    for name, tensor in unpadded.items():
        assert torch.equal(drawn[name][: len(tensor)], tensor)
        assert not drawn[name][len(tensor) :].any()
        assert torch.equal(model.get_parameter(name), tensor)
        assert read[name].shape == drawn[name].shape
        assert not read[name][len(tensor) :].any()


def test_the_planner_counts_the_rows_and_a_multiple_that_suits_nothing_is_refused() -> None:
    def job(multiple: int) -> Job:
        model = {"config": TINY["gpt2-untied"], "vocabulary_multiple": multiple}
        training = {"global_batch_sequences": 2, "sequence_length": 8, "precision": "fp32"}
        return Job.from_document({"name": "j", "model": model, "training": training})

    wide, narrow = planning_inputs(job(MULTIPLE)).spec, planning_inputs(job(1)).spec
    assert (wide.vocab_size, narrow.vocab_size) == (ROWS, 67)
    assert wide.parameters - narrow.parameters == 2 * (ROWS - 67) * wide.hidden_size
    with pytest.raises(ConfigError, match="multiple of 8"):
        job(12)
