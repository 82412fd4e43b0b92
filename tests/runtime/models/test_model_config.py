"""What a user may write under `model`, what is refused, and how finely a model may be cut."""

import logging

import pytest
import torch

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import local_units
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import build_stage
from planner.errors import ConfigError
from planner.plans.plan import Stage, TensorShare
from tests.harness.tiny_models import TINY, random_parameters, take, tiny_config


def load(**mapping):
    return load_config(ModelSection(config=mapping))


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"model_type": "mamba"}, "granite, llama, ministral, ministral3, mistral, mixtral, olmo2"),
        ({"model_type": "llama", "hiden_size": 64}, "'hiden_size'; did you mean hidden_size"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        (
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 3,
            },
            "3 does not",
        ),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}, "65"),
        ({"model_type": "gpt2", "n_embd": 65, "n_head": 4}, "65"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_a_wrong_config_is_named(mapping, says):
    with pytest.raises(ConfigError) as raised:
        load(**mapping)
    assert says in str(raised.value)


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_config(ModelSection(pretrained=str(tmp_path)))


def test_a_published_config_with_older_spellings_is_taken():
    older = {
        "model_type": "llama",
        "rope_theta": 5e5,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }
    assert load(**older).rope_parameters["rope_theta"] == 5e5


def test_the_librarys_modules_drop_nothing_and_the_price_of_attention_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        config = load(model_type="gpt2", attn_pdrop=0.17, resid_pdrop=0.2, embd_pdrop=0.3)
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.0, 0.0, 0.0)
    assert "probability 0.17: attention trains without fused kernels" in caplog.text


@pytest.mark.parametrize(
    ("heads", "groups", "finest"),
    [
        (32, 8, 8),
        (32, 4, 8),
        (32, 1, 8),
        (12, 12, 4),
        (12, 6, 2),
        (24, 3, 1),
        (14, 2, 2),
        (25, 25, 1),
        (64, 16, 8),
    ],
)
def test_the_finest_tp_degree_follows_the_heads(heads, groups, finest):
    config = load(
        model_type="llama",
        hidden_size=heads * 8,
        num_attention_heads=heads,
        num_key_value_heads=groups,
    )
    assert family_of(config).max_tp_degree(config) == finest


def test_a_tp_degree_that_does_not_divide_the_heads_is_refused():
    config = tiny_config("llama", num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="TP degree 4"):
        build_stage(
            config, range(3), TensorParallel.even(None, 0, 4), torch.device("cpu"), torch.float32
        )


def test_shares_that_do_not_divide_the_heads_are_refused():
    config = tiny_config("llama")  # of 4 heads
    uneven = TensorParallel(None, 0, Stage(0, 3, ("a", "b"), tp_shares=(5, 3)))
    with pytest.raises(ConfigError, match="tp_shares of 8"):
        build_stage(config, range(3), uneven, torch.device("cpu"), torch.float32)


def test_an_intermediate_size_below_the_finest_degree_is_refused():
    config = tiny_config("llama", intermediate_size=3)
    with pytest.raises(ConfigError, match="only 3 rows"):
        family_of(config).parameter_specs(config)


@pytest.mark.parametrize("name", TINY)
def test_units_partition_every_tensor_at_every_degree(name):
    config = tiny_config(name)
    finest = family_of(config).max_tp_degree(config)
    whole = random_parameters(config)
    for spec in family_of(config).parameter_specs(config).values():
        if spec.split_dim is None:
            continue
        for shares in (
            each
            for each in ((1,), (1, 1), (1, 1, 1, 1), (2, 1, 1), (1, 3))
            if finest % sum(each) == 0
        ):
            of = [
                Stage(0, 1, ("w",) * len(shares), tp_shares=shares).share(rank)
                for rank in range(len(shares))
            ]
            units = [unit for share in of for unit in local_units(spec, share)]
            assert set(units) == set(range(spec.num_units))
            assert len(units) <= max(spec.num_units, sum(shares)), (
                "a unit lies on no more ranks than have a part of it"
            )
            if len(set(shares)) == 1:
                assert len(units) == max(spec.num_units, len(shares)), (
                    "a unit lies on as many ranks as the next"
                )
            rebuilt = torch.empty(spec.shape)
            for share in of:
                local, position = take(spec, whole[spec.name], share), 0
                for unit in local_units(spec, share):
                    size = spec.cuts[unit + 1] - spec.cuts[unit]
                    piece = local.narrow(spec.split_dim, position, size)
                    rebuilt.narrow(spec.split_dim, spec.cuts[unit], size).copy_(piece)
                    position += size
            assert torch.equal(rebuilt, whole[spec.name]), spec.name


def test_packed_query_key_value_are_cut_alike():
    config = tiny_config("gpt2")
    spec = family_of(config).parameter_specs(config)["transformer.h.0.attn.c_attn.weight"]
    half = take(spec, torch.arange(96).expand(32, 96), TensorShare(1, 2, 2))
    assert half[0].tolist() == [*range(16, 32), *range(48, 64), *range(80, 96)]
