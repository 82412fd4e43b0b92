"""`autohet plan --strategy hap`: what no program can be made of is one message, never a
traceback.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.cli.main import main

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def _run(directory: Path, config: dict[str, Any], *arguments: str) -> int:
    job = {
        "name": "small",
        "model": {"config": config},
        "training": {"global_batch_sequences": 8, "sequence_length": 32, "precision": "fp32"},
    }
    types = {
        name: {"node_config": {"InstanceType": instance}, "max_workers": 1}
        for name, instance in (("t4", "g4dn.xlarge"), ("a10g", "g5.xlarge"))
    }
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    (directory / "cluster.yaml").write_text(
        yaml.safe_dump({"cluster_name": "c", "available_node_types": types})
    )
    return main(
        [
            "plan",
            "--job",
            str(directory / "job.yaml"),
            "--cluster",
            str(directory / "cluster.yaml"),
            *arguments,
        ]
    )


def _refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one message."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.strip().count("\n") == 0
    return captured.err


@pytest.mark.slow
def test_an_operator_without_a_rule_is_computed_whole_and_named(tmp_path, capsys):
    config = {**LLAMA, "hidden_act": "mish", "num_hidden_layers": 1}
    assert _run(tmp_path, config, "--strategy", "hap") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "operator 'mish' has no sharding rule: every rank computes the whole of it" in told


def test_a_model_that_fits_no_mix_is_one_message(tmp_path, capsys):
    config = {**LLAMA, "hidden_size": 32768, "intermediate_size": 262144, "num_hidden_layers": 1}
    assert _run(tmp_path, config, "--strategy", "hap") == 2
    message = _refusal(capsys)
    assert "fits no mix of these 2 devices" in message
    assert "add devices" in message


def test_a_ratio_that_rounds_to_nothing_is_one_message(tmp_path, capsys):
    """A worker of the plan that has a share, but none of its eight samples."""
    out = tmp_path / "plan.json"
    given = {
        "version": 1,
        "model": "small",
        "global_batch_sequences": 8,
        "microbatch_sequences": 8,
        "sequence_length": 32,
        "pipelines": [
            {
                "num_microbatches": 1,
                "stages": [
                    {
                        "first_layer": 0,
                        "num_layers": 2,
                        "workers": ["t4-0/0", "a10g-0/0"],
                        "spmd": {
                            "ratios": [[0.01, 0.99]],
                            "units": {"ids.0": [0, 8]},
                            "program": ["load ids:sharded(0)"],
                        },
                    }
                ],
            }
        ],
    }
    out.write_text(json.dumps(given))
    assert _run(tmp_path, LLAMA, "--evaluate", str(out)) == 2
    message = _refusal(capsys)
    assert "the ratio 0.01 of 't4-0/0' rounds to nothing" in message
    assert "at least 0.125" in message
