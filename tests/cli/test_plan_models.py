"""`autohet plan` on the models of transformers: decoders are planned, everything else is refused in
one message.
"""

import json

import pytest

from autohet.cli.main import main

CLUSTER = """
cluster_name: c
available_node_types:
  a10g: {node_config: {InstanceType: g5.12xlarge}, max_workers: 1}
"""
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}


def _plan(tmp_path, config, *more):
    job = {
        "name": "m",
        "model": {"config": config},
        "training": {"global_batch_sequences": 4, "sequence_length": 32, "precision": "bf16"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    files = ["--job", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    return main(["plan", *files, "--strategy", "megatron", *(more or ("--json",))])


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, **SIZES},
        {
            "model_type": "gpt_neo",
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 64,
            "vocab_size": 128,
            "attention_types": [[["global", "local"], 1]],
        },
        {"model_type": "qwen2", "intermediate_size": 128, "num_key_value_heads": 2, **SIZES},
        {
            "model_type": "gpt2",
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "n_ctx": 32,
            "vocab_size": 128,
        },
        {"model_type": "gpt_neox", "intermediate_size": 128, **SIZES},
        {"model_type": "bert", "intermediate_size": 128, "is_decoder": True, **SIZES},
    ],
    ids=lambda config: config["model_type"],
)
def test_decoders_are_planned_and_train_is_spoken_of(tmp_path, capsys, config):
    assert _plan(tmp_path, config) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["pipelines"]
    can_run = config["model_type"] in ("qwen2", "gpt2")
    assert document["training"]["can_run"] == can_run
    assert document["training"]["activation_memory"] == ("counted" if can_run else "estimated")
    if not can_run:
        assert f"model_type '{config['model_type']}'" in document["training"]["reason"]


def test_a_plan_that_train_cannot_run_says_so_in_words(tmp_path, capsys):
    opt = {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, **SIZES}
    assert _plan(tmp_path, opt, "--time-limit", "1") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "autohet train cannot run this model: model_type 'opt' cannot be trained" in said


def test_activation_memory_of_a_family_is_counted_and_said(tmp_path, capsys):
    sizes = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16}
    assert _plan(tmp_path, {"model_type": "gemma2", **sizes}) == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training == {"can_run": True, "reason": None, "activation_memory": "counted"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "roberta"}, "is_decoder: true"),
        ({"model_type": "bart"}, "no decoder-only language model"),
        ({"model_type": "t5"}, "no decoder-only language model"),
        ({"model_type": "vit"}, "no decoder-only language model"),
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"model_type": "llama", "hiden_size": 64}, "did you mean hidden_size?"),
        (
            {"model_type": "llama", "hidden_size": "big"},
            "'hidden_size' expected int, got str (value: 'big')",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 7},
            "not a multiple of the number of attention heads (7)",
        ),
        ({"model_type": "llama", "num_hidden_layers": 0}, "has 0 layers"),
        ({"model_type": "gemma3"}, "model_type gemma3_text"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 8},
            "num_experts_per_tok is 9, but the model has 8 experts; give 1 to 8",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 0, "num_experts": 8},
            "num_experts_per_tok is 0, but the model has 8 experts; give 1 to 8",
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 12, "n_group": 5},
            "n_group is 5, but the model has 12 experts; give a divisor",
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_is_no_decoder_is_refused_in_one_line(tmp_path, capsys, config, said):
    assert _plan(tmp_path, config) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = next(line for line in printed.err.splitlines() if line.startswith("autohet plan: "))
    assert said in line
    assert len(line) < 400


def test_a_key_that_another_family_does_not_know_is_named(tmp_path, capsys, caplog):
    config = {
        "model_type": "opt",
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "ffn_dimm": 3,
        **SIZES,
    }
    assert _plan(tmp_path, config) == 0
    assert "opt has no key ffn_dimm; the default is used" in caplog.text
