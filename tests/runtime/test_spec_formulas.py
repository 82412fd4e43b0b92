"""Specs by formulas are those of the library's own modules, and what has no formula is left to
these.
"""

import subprocess
import sys

import pytest

from autohet.runtime.models.model_spec import model_spec_from_config
from autohet.runtime.spec_formulas import spec_by_formula

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 172,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1},
        {"intermediate_size": 48},
        {"vocab_size": 7},
        {"head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
)
def test_a_formula_gives_the_spec_of_the_modules(
    family: str, tied: bool, precision: str, other: dict
) -> None:
    config = {"model_type": family, **SIZES, "tie_word_embeddings": tied, **other}
    assert spec_by_formula("m", config, precision) == model_spec_from_config(
        "m", config, precision=precision
    )


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "qwen2"},
        {"attention_bias": True},
        {"num_attention_heads": 7},
        {"hidden_size": None},
        {"head_dim": 5},
    ],
)
def test_what_has_no_formula_is_left_to_the_modules(other: dict) -> None:
    assert spec_by_formula("m", {"model_type": "llama", **SIZES, **other}, "bf16") is None


def test_planning_a_known_family_imports_no_torch() -> None:
    program = (
        "import sys, autohet.cli.plan; from autohet.runtime.job import Job; from"
        " autohet.runtime.planning import planning_inputs;"
        " planning_inputs(Job.from_yaml(sys.argv[1])); assert 'torch' not in sys.modules and"
        " 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "cluster_configs/jobs/llama-1b-bf16.yaml"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
