"""Which parameters decay: those that transformers' own Trainer lets decay."""

from dataclasses import replace

import pytest
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from autohet.runtime.job import TrainingSection
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.state.optimizer import parameters_without_decay
from planner.errors import ConfigError
from tests.harness.tiny_models import TINY, tiny_config

SETTINGS = TrainingSection(global_batch_sequences=1, sequence_length=1)
PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_default_is_that_of_the_librarys_trainer(name: str) -> None:
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    decayed = set(get_parameter_names(skeleton(config), [nn.LayerNorm], PATTERNS))
    exempt = parameters_without_decay(SETTINGS, specs)
    assert exempt == specs.keys() - decayed
    assert exempt


def test_none_and_patterns() -> None:
    config = tiny_config("llama")
    specs = family_of(config).parameter_specs(config)
    assert parameters_without_decay(replace(SETTINGS, no_decay="none"), specs) == frozenset()
    chosen = replace(SETTINGS, no_decay=("model.embed_tokens.*", "model.norm.weight"))
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    assert parameters_without_decay(chosen, specs) == wanted


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    config = tiny_config("llama")
    specs = family_of(config).parameter_specs(config)
    with pytest.raises(ConfigError, match=r"'model.norms.weight'.*nearest is 'model.norm.weight'"):
        parameters_without_decay(replace(SETTINGS, no_decay=("model.norms.weight",)), specs)
