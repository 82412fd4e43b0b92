"""What `autohet profile` measures on this machine's CPU, as the planner then reads it."""

import json

import pytest

from autohet.cli.main import main
from planner.errors import ConfigError
from planner.profile import read_profile

JOB = """
name: tiny
model:
  config:
    {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4,
     num_key_value_heads: 2, vocab_size: 64}
training: {global_batch_sequences: 4, sequence_length: 16, precision: fp32}
"""  # noqa: E501
CLUSTER = """
cluster_name: c
available_node_types:
  cpu:
    resources: {GPU: 2}
    max_workers: 1
    labels: {autohet.io/gpu-type: CPU, autohet.io/gpu-memory-gib: "8", autohet.io/intra-node-gbps: "8",
             autohet.io/inter-node-gbps: "8"}
"""  # noqa: E501


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def _profile(job, *more):
    return main(
        [
            "profile",
            "--job",
            str(job),
            "--device",
            "cpu",
            "--microbatches",
            "1,2",
            "--repeats",
            "2",
            *more,
        ]
    )


def test_every_layer_and_microbatch_is_measured_and_the_planner_reads_it(job, tmp_path, capsys):
    table = tmp_path / "profile.parquet"
    assert _profile(job, "--out", str(table), "--json") == 0
    assert json.loads(capsys.readouterr().out)["measurements"] == 6
    rows = read_profile(table).measurements
    assert {(m.layer, m.microbatch_sequences) for m in rows} == {
        (layer, size) for layer in ("embedding", "block", "head") for size in (1, 2)
    }
    assert all(
        m.forward_s > 0 and m.backward_s > 0 and m.update_s > 0 and m.gpu_type == "CPU"
        for m in rows
    )
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    stage = {"first_layer": 0, "num_layers": 4, "workers": ["cpu-0/0"]}
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 4,
        "microbatch_sequences": 1,
        "sequence_length": 16,
    }
    (tmp_path / "plan.json").write_text(
        json.dumps(plan | {"pipelines": [{"num_microbatches": 4, "stages": [stage]}]})
    )
    files = [
        "--job",
        str(job),
        "--cluster",
        str(tmp_path / "cluster.yaml"),
        "--profile",
        str(table),
    ]
    assert main(["plan", *files, "--evaluate", str(tmp_path / "plan.json"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["estimated"] == []
    assert predicted["step_time_s"] > 0


@pytest.mark.multiprocess
def test_tensor_parallel_layers_are_measured_in_as_many_processes(job, tmp_path):
    table = tmp_path / "profile.csv"
    assert (
        _profile(
            job,
            "--out",
            str(table),
            "--tp-degrees",
            "2",
            "--links-out",
            str(tmp_path / "links.csv"),
        )
        == 0
    )
    assert {m.tp_degree for m in read_profile(table).measurements} == {2}
    from planner.cost.links import read_links

    assert read_links(tmp_path / "links.csv").bytes_per_s("intra", "CPU", "CPU", 1e6) > 0


def test_wrong_arguments_say_what_to_do(job, tmp_path, capsys):
    assert _profile(job, "--out", str(tmp_path / "table.json")) == 2
    assert ".parquet" in capsys.readouterr().err
    assert _profile(job, "--out", str(tmp_path / "t.csv"), "--tp-degrees", "8") == 2
    assert "TP degree 8" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_an_error(job, tmp_path, capsys):
    assert _profile(job, "--out", str(tmp_path / "absent" / "t.csv")) == 2
    assert "no directory" in capsys.readouterr().err
    assert (
        _profile(job, "--out", str(tmp_path / "t.csv"), "--links-out", str(tmp_path / "l.txt")) == 2
    )
    assert "--links-out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        _profile(job, "--out", str(tmp_path / "t.csv"), "--repeats", "0")
    assert stopped.value.code == 2


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("model_type", ["gpt2", "qwen2"])
def test_a_model_of_one_or_two_blocks_is_measured_too(tmp_path, capsys, model_type, blocks):
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": blocks,
        "vocab_size": 64,
    }
    more = (
        {"n_positions": 16}
        if model_type == "gpt2"
        else {"intermediate_size": 64, "num_key_value_heads": 2}
    )
    training = {"global_batch_sequences": 4, "sequence_length": 16, "precision": "fp32"}
    document = {
        "name": "m",
        "model": {"config": {"model_type": model_type, **sizes, **more}},
        "training": training,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    assert _profile(tmp_path / "job.yaml", "--out", str(tmp_path / "t.csv"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["measurements"] == 6


def test_errors_are_values():
    assert issubclass(ConfigError, ValueError)
