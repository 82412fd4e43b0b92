"""`autohet plan`: documents in, JSON out; wrong input is one message, never a traceback."""

import gc
import json

import pytest

from autohet.cli.main import main
from planner.strategies import STRATEGIES

JOB = """
name: small
model: {config: {model_type: gpt2, n_layer: 4, n_embd: 64, n_head: 4, vocab_size: 128, n_positions: 32}}
training: {global_batch_sequences: 8, sequence_length: 32, precision: fp16}
"""  # noqa: E501
CLUSTER = """
cluster_name: c
available_node_types:
  t4: {node_config: {InstanceType: g4dn.12xlarge}, max_workers: 1}
  a10g: {node_config: {InstanceType: g5.12xlarge}, max_workers: 1}
"""


def _plan_document(workers=("t4-0/0", "a10g-0/0"), **change):
    stages = [
        {"first_layer": 0, "num_layers": 1, "workers": [workers[0]]},
        {"first_layer": 1, "num_layers": 3, "workers": [workers[1]]},
    ]
    document = {
        "version": 1,
        "model": "small",
        "global_batch_sequences": 8,
        "microbatch_sequences": 2,
        "sequence_length": 32,
        "pipelines": [{"num_microbatches": 4, "stages": stages}],
    }
    return document | change


@pytest.fixture
def case(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "a.json").write_text(json.dumps(_plan_document()))
    (tmp_path / "b.json").write_text(json.dumps(_plan_document(("a10g-0/0", "t4-0/0"))))
    return tmp_path


def _run(case, *more):
    return main(
        ["plan", "--job", str(case / "job.yaml"), "--cluster", str(case / "cluster.yaml"), *more]
    )


@pytest.mark.parametrize("given", ["a.json", "absent.json"])
def test_the_garbage_collector_is_left_as_it_was(case, given):
    before = gc.get_threshold()
    _run(case, "--evaluate", str(case / given), "--json")
    assert gc.get_threshold() == before


def test_one_plan_is_costed_as_one_document(case, capsys):
    trace, out = case / "trace.json", case / "out.json"
    arguments = [
        "--evaluate",
        str(case / "a.json"),
        "--json",
        "--trace-out",
        str(trace),
        "--out",
        str(out),
    ]
    assert _run(case, *arguments) == 0
    document = json.loads(capsys.readouterr().out)
    predicted = document["predicted"]
    assert document["feasible"]
    assert document["plan"] == _plan_document()
    assert predicted["step_time_s"] > 0
    assert predicted["usd_per_hour"] == pytest.approx(3.912 + 5.672)
    assert set(predicted["memory_bytes_by_worker"]) == {"t4-0/0", "a10g-0/0"}
    assert sum(predicted["breakdown_s"].values()) == pytest.approx(predicted["step_time_s"])
    assert any("T4" in note for note in predicted["estimated"])
    assert json.loads(out.read_text()) == _plan_document()
    lanes = {
        e["args"]["name"]
        for e in json.loads(trace.read_text())["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert lanes == {"t4-0/0", "a10g-0/0"}


def test_host_memory_is_said_where_it_is_known(case, capsys):
    """A label counts before the catalogue's 192 GiB; without either there is nothing to say."""
    arguments = ["--evaluate", str(case / "a.json"), "--framework", "autohet", "--json"]
    assert _run(case, *arguments) == 0
    known = json.loads(capsys.readouterr().out)["host_memory"]
    assert known["sentences"] == []
    assert [node["node"] for node in known["by_node"]] == ["t4-0", "a10g-0"]
    assert known["by_node"][0]["snapshot_bytes"] == 2 * known["by_node"][0]["state_bytes"] > 0
    label = (
        'node_config: {InstanceType: g4dn.12xlarge}, labels: {autohet.io/host-memory-gib: "0.001"}'
    )
    (case / "cluster.yaml").write_text(
        CLUSTER.replace("node_config: {InstanceType: g4dn.12xlarge}", label)
    )
    assert _run(case, *arguments) == 0
    (sentence,) = json.loads(capsys.readouterr().out)["host_memory"]["sentences"]
    assert sentence.startswith("Host memory of t4-0 (0.0 GiB): snapshots of its")
    assert _run(case, *arguments[:-1]) == 0
    assert "Host memory of t4-0" in capsys.readouterr().out
    facts = {
        "gpu-type": "T4",
        "gpu-memory-gib": "15",
        "intra-node-gbps": "128",
        "inter-node-gbps": "25",
        "usd-per-hour": "1",
    }
    labels = ", ".join(f'autohet.io/{name}: "{value}"' for name, value in facts.items())
    unknown = (
        "cluster_name: c\navailable_node_types:\n  t4: {resources: {GPU: 1}, labels:"
        f" {{{labels}}}, max_workers: 2}}\n"
    )
    (case / "cluster.yaml").write_text(unknown)
    (case / "a.json").write_text(json.dumps(_plan_document(("t4-0/0", "t4-1/0"))))
    assert _run(case, *arguments) == 0
    assert "host_memory" not in json.loads(capsys.readouterr().out)


def test_several_plans_keep_their_order_and_runs_calibrate(case, capsys):
    both = [str(case / "a.json"), str(case / "b.json")]
    assert _run(case, "--evaluate", *both, "--json") == 0
    plain = json.loads(capsys.readouterr().out)["results"]
    assert [r["plan"] for r in plain] == [
        json.loads((case / n).read_text()) for n in ("a.json", "b.json")
    ]
    slower = 1.3 * plain[0]["predicted"]["step_time_s"]
    (case / "runs.csv").write_text(f"plan,measured_s\na.json,{slower}\n")
    assert _run(case, "--evaluate", *both, "--calibrate", str(case / "runs.csv"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        document["calibration"]["mean_error_after"] < document["calibration"]["mean_error_before"]
    )
    assert document["results"][0]["predicted"]["step_time_s"] > plain[0]["predicted"]["step_time_s"]


def test_a_plans_own_batch_and_length_win_over_the_jobs(case, capsys):
    (case / "a.json").write_text(json.dumps(_plan_document(sequence_length=16)))
    assert _run(case, "--evaluate", str(case / "a.json"), "--json") == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["tokens_per_s"] == pytest.approx(predicted["sequences_per_s"] * 16)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("job.yaml", JOB.replace("model_type", "model_kind"), "model_type"),
        ("job.yaml", JOB.replace("training", "trainning"), "trainning"),
        ("job.yaml", JOB.replace("gpt2", "nothing-like-it"), "nothing-like-it"),
        ("cluster.yaml", CLUSTER.replace("max_workers", "max_worker"), "max_worker"),
        (
            "cluster.yaml",
            CLUSTER.replace("g4dn.12xlarge", "m5.large").replace("g5.12", "m5.12"),
            "has GPUs",
        ),
        ("a.json", "{", "not JSON"),
        ("a.json", json.dumps(_plan_document(colour=1)), "colour"),
        ("a.json", json.dumps(_plan_document(("t4-0/0", "t4-0/0"))), "2 times"),
        ("a.json", json.dumps(_plan_document(("t4-0/0", "t4-9/0"))), "t4-9/0"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(case, capsys, file, text, named):
    (case / file).write_text(text)
    assert _run(case, "--evaluate", str(case / "a.json"), "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--evaluate", "absent.json"], "absent.json"),
        (["--profile", "absent.csv"], "absent.csv"),
        (["--links", "absent.csv"], "absent.csv"),
        (["--calibrate", "absent.csv"], "absent.csv"),
        (["--strategy", "luck"], "luck"),
    ],
)
def test_what_is_not_there_is_named(case, capsys, arguments, named):
    assert _run(case, *arguments, "--json") == 2
    assert named in capsys.readouterr().err


def test_help_names_exactly_the_strategies_that_exist(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    listed = words.partition("the search: ")[2].partition(" (default")[0]
    assert listed.split(", ") == list(STRATEGIES), "options.py names them by hand"


def test_every_strategy_of_the_contract_answers_and_is_in_the_help(case, capsys):
    names = ["autohet", "metis", "fasop", "hap", "megatron", "varuna"]
    assert _run(case, "--compare", ",".join(names), "--json") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["strategy"] for result in results] == names
    assert all(result["feasible"] for result in results)
    pipelines = [r for r in results if r["strategy"] != "hap"]
    assert (
        min(r["predicted"]["step_time_s"] for r in pipelines)
        == results[0]["predicted"]["step_time_s"]
    )
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in [*names, "exhaustive"])


def test_a_program_is_explained_tensor_by_tensor_and_costed_again_from_its_document(case, capsys):
    out = case / "program.json"
    assert _run(case, "--strategy", "hap", "--explain", "--out", str(out), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (stage,) = document["plan"]["pipelines"][0]["stages"]
    assert set(stage["spmd"]) == {"ratios", "units", "program"}
    entries = {entry["tensor"]: entry for entry in document["program"]}
    assert entries["transformer.h.3.mlp.c_fc.weight"]["shape"] == [64, 256]
    assert all(entry["instructions"] for entry in entries.values())
    assert _run(case, "--evaluate", str(out), "--framework", "autohet", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["predicted"]["step_time_s"] == document["predicted"]["step_time_s"]
    assert _run(case, "--strategy", "hap", "--trace-out", str(case / "t.json")) == 2


def test_the_search_predicts_our_runtime_and_given_plans_of_no_data_whose_framework_is_asked_for(
    case, capsys
):
    def framework(*arguments):
        assert _run(case, *arguments, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        return document["framework"], document["predicted"]["step_time_s"]

    evaluate = ("--evaluate", str(case / "a.json"))
    assert framework()[0] == "autohet"
    (theirs, waiting_s), (ours, receiving_s) = (
        framework(*evaluate),
        framework(*evaluate, "--framework", "autohet"),
    )
    assert (theirs, ours) == ("deepspeed", "autohet")
    assert receiving_s < waiting_s
    (case / "job.yaml").write_text(JOB + "data: {source: builtin:python-stdlib}\n")
    assert framework(*evaluate) == ("autohet", receiving_s)


@pytest.mark.parametrize("option", ["--out", "--trace-out", "--picture"])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    case, capsys, option, monkeypatch
):
    monkeypatch.setattr(
        "planner.strategies.plan_with", lambda *arguments: pytest.fail("it searched first")
    )
    assert _run(case, option, str(case / "absent" / "file.png"), "--json") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{option} is" in printed.err
    assert "make it first" in printed.err
    assert _run(case, option, str(case)) == 2


def test_a_plan_says_how_robust_it_is_and_with_explain_why_it_is_so(case, capsys):
    assert _run(case, "--explain", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    told, explained = document["robustness"], document["explanation"]
    assert told["draws"] == 6
    assert (
        told["step_time_s"]["least"]
        < document["predicted"]["step_time_s"]
        < told["step_time_s"]["worst"]
    )
    assert f"({told['draws']} draws, seed 0)" in told["sentence"]
    used = {
        worker.split("-")[0]
        for p in document["plan"]["pipelines"]
        for s in p["stages"]
        for worker in s["workers"]
    }
    assert {place["node_type"] for place in explained["places"]} == used
    assert {more["node_type"] for more in explained["one_more_node"]} == {"t4", "a10g"}
    assert len(explained["sentences"]) == len(used) + 2
    assert _run(case) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "6 draws, seed 0" in text
    assert "One more" not in text


def test_a_node_that_lost_a_gpu_gets_an_uneven_stage_and_is_told_what_it_gains(case, capsys):
    sizes = (
        "num_hidden_layers: 8, hidden_size: 4096, intermediate_size: 11008, num_attention_heads:"
        " 32, vocab_size: 32000"
    )
    training = "{global_batch_sequences: 2, sequence_length: 1024, precision: bf16}"
    (case / "job.yaml").write_text(
        f"name: small\nmodel: {{config: {{model_type: llama, {sizes}}}}}\ntraining: {training}\n"
    )
    node = "{node_config: {InstanceType: g5.12xlarge}, resources: {CPU: 8, GPU: 3}, max_workers: 1}"
    (case / "cluster.yaml").write_text(f"cluster_name: c\navailable_node_types:\n  a10g: {node}\n")
    assert _run(case, "--json", "--explain", "--out", str(case / "out.json")) == 0
    document = json.loads(capsys.readouterr().out)
    (stage,) = document["plan"]["pipelines"][0]["stages"]
    assert stage["tp_shares"] == [3, 3, 2]
    assert (
        "3 to a10g-0/0, 3 to a10g-0/1, 2 to a10g-0/2: with even stages alone the step would be"
        in document["choice"]
    )
    assert document["explanation"]["sentences"][0] == f"{document['choice']}."
    assert _run(case, "--evaluate", str(case / "out.json"), "--framework", "autohet", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"] == document["plan"]
    assert again["predicted"]["step_time_s"] == document["predicted"]["step_time_s"]


def test_a_strategy_that_refuses_is_a_row_beside_the_others(case, capsys):
    assert _run(case, "--compare", " megatron, exhaustive", "--json") == 0
    megatron, exhaustive = json.loads(capsys.readouterr().out)["results"]
    assert megatron["feasible"]
    assert not exhaustive["feasible"]
    assert "at most 5 GPUs, not 8" in exhaustive["reason"]
    assert _run(case, "--compare", "megatron,exhaustive") == 0
    assert "no plan: strategy exhaustive takes at most 5 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [["--compare", ""], ["--compare", "megatron,"], ["--max-usd-per-hour", "much"]]
)
def test_an_option_that_is_no_value_says_what_it_takes(case, capsys, option):
    with pytest.raises(SystemExit) as stopped:
        _run(case, *option)
    assert stopped.value.code == 2
    assert f"{option[0]}: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text", "named"),
    [
        ("--evaluate", b"\xff\xfe\x00", "not UTF-8 text"),
        ("--calibrate", b"\xff\xfe\x00", "not UTF-8 text"),
        ("--calibrate", b"measured_s,plan\n1.0\n", "names no plan"),
    ],
)
def test_a_file_of_another_kind_is_refused(case, capsys, option, text, named):
    (case / "file").write_bytes(text)
    assert _run(case, option, str(case / "file")) == 2
    assert named in capsys.readouterr().err


def test_no_plan_is_an_error_for_a_person_and_an_answer_in_a_document(case, capsys):
    (case / "job.yaml").write_text(JOB.replace("sequence_length: 32", "sequence_length: 32000000"))
    assert _run(case) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "GiB too little" in printed.err
    assert _run(case, "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert not document["feasible"]
    assert {"strategy", "reason", "plan", "predicted", "search", "rejected"} <= document.keys()


def test_a_given_plan_that_does_not_fit_is_never_the_best(case, capsys):
    (case / "b.json").write_text(json.dumps(_plan_document(sequence_length=3200000)))
    assert _run(case, "--evaluate", str(case / "a.json"), str(case / "b.json")) == 0
    text = capsys.readouterr().out
    rows = {
        name: next(line for line in text.splitlines() if line.lstrip().startswith(name))
        for name in ("a", "b")
    }
    assert "1.000" in rows["a"]
    assert "no fit" in rows["b"]
    assert "does not fit: worker '" in text
    assert _run(case, "--evaluate", str(case / "b.json")) == 0
    assert "does not fit: worker '" in capsys.readouterr().out


def test_a_person_is_told_what_was_assumed(case, capsys):
    (case / "runs.csv").write_text("plan,measured_s\na.json,0.01\n")
    assert (
        _run(case, "--evaluate", str(case / "a.json"), "--calibrate", str(case / "runs.csv")) == 0
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "predicted as deepspeed would run it" in text
    assert "calibrated on 1 runs, mean error" in text
    assert "{'default'" not in text
    assert "not measured: block on T4 (fp16, TP 1): estimated from" in text
    assert _run(case, "--evaluate", str(case / "a.json"), "--framework", "autohet") == 0
    assert "predicted as" not in capsys.readouterr().out


def test_copies_of_the_model_are_planned_as_training_would(case, capsys):
    (case / "cluster.yaml").write_text(CLUSTER.replace("g4dn.12xlarge", "g5.12xlarge"))
    (case / "job.yaml").write_text(JOB + "parallelism: {min_pipelines: 2}\n")
    assert _run(case, "--json") == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    for layer in range(4):
        stages = [s for p in plan["pipelines"] for s in p["stages"]]
        holders = [
            s for s in stages if s["first_layer"] <= layer < s["first_layer"] + s["num_layers"]
        ]
        assert len({worker.split("/")[0] for s in holders for worker in s["workers"]}) == 2
    (case / "job.yaml").write_text(JOB + "parallelism: {min_pipelines: 3}\n")
    assert _run(case) == 2
    said = capsys.readouterr().err
    assert "parallelism.min_pipelines is 3" in said
    assert "the cluster has 2, 1 too few" in said


BF16_JOB = """
name: small
model: {config: {model_type: gpt2, n_layer: 4, n_embd: 512, n_head: 8, vocab_size: 4096, n_positions: 512}}
training: {global_batch_sequences: 16, sequence_length: 512}
parallelism: {compute_formats: auto, microbatch_sequences: 2, max_tp_degree: 1, min_pipelines: 2}
"""  # noqa: E501
V100_AND_A10G = """
cluster_name: c
available_node_types:
  p3: {node_config: {InstanceType: p3.2xlarge}, max_workers: 2}
  g5: {node_config: {InstanceType: g5.xlarge}, max_workers: 1}
"""


def test_types_without_bf16_compute_in_fp16_and_the_plan_says_so(case, capsys):
    """Two nodes must hold each layer, so one of the two V100s is needed."""
    (case / "job.yaml").write_text(BF16_JOB)
    (case / "cluster.yaml").write_text(V100_AND_A10G)
    assert _run(case, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["formats"] == {"V100-16": "fp16"}
    for stage in (s for p in document["plan"]["pipelines"] for s in p["stages"]):
        assert ("compute" in stage) == stage["workers"][0].startswith("p3")
    assert document["rates"]["V100-16"]["precision"] == "fp16"
    assert _run(case) == 0
    said = capsys.readouterr().out
    assert "on V100-16, computes in fp16" in said
    assert "V100-16 in fp16 are needed: no plan fits without" in said.replace("\n", " ")


def test_other_frameworks_have_one_format(case, capsys, caplog):
    (case / "job.yaml").write_text(BF16_JOB.replace(", min_pipelines: 2", ""))
    (case / "cluster.yaml").write_text(V100_AND_A10G)
    assert _run(case, "--framework", "megatron", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "formats" not in document
    assert "compute" not in json.dumps(document["plan"])
    assert "p3 (V100-16) cannot compute" in caplog.text


def test_a_given_plan_names_formats_that_its_workers_have(case, capsys):
    (case / "job.yaml").write_text(BF16_JOB)
    given = _plan_document(sequence_length=512, global_batch_sequences=8)
    seconds = {}
    for compute in ("fp32", "fp16", "bf16"):
        given["pipelines"][0]["stages"][0]["compute"] = compute
        (case / "a.json").write_text(json.dumps(given))
        code = _run(case, "--evaluate", str(case / "a.json"), "--framework", "autohet", "--json")
        assert code == (2 if compute == "bf16" else 0)
        captured = capsys.readouterr()
        if code == 0:
            seconds[compute] = json.loads(captured.out)["predicted"]["step_time_s"]
    assert "computes bf16, for which its worker t4-0/0 (T4) has no units" in captured.err
    assert seconds["fp16"] < seconds["fp32"]


LAUNCHED = """
cluster_name: c
max_workers: 4
provider: {type: aws, region: us-east-1}
available_node_types:
  ray.head.default: {node_config: {InstanceType: g5.xlarge}}
  p4d: {node_config: {InstanceType: p4d.24xlarge}, max_workers: 2}
  p4de: {node_config: {InstanceType: p4de.24xlarge}, max_workers: 2}
"""


def test_a_plan_says_what_ray_launches_and_refuses_what_train_would(case, capsys):
    """EC2 calls the GPUs of both machines A100, so Ray cannot be asked for the second alone."""
    (case / "cluster.yaml").write_text(LAUNCHED)
    for wish, launched, usd_per_hour in (("{}", {}, 1.006), ("{p4d: 1}", {"p4d": 1}, 22.963642)):
        (case / "job.yaml").write_text(f"{JOB}elastic: {{request_nodes: {wish}}}\n")
        assert _run(case, "--json") == 0
        launch = json.loads(capsys.readouterr().out)["launch"]
        assert launch["head"] == "ray.head.default"
        assert launch["launched"] == launched
        assert launch["usd_per_hour"] == pytest.approx(usd_per_hour)
    assert _run(case) == 0
    assert "Ray launches 1 p4d: $22.96 an hour" in " ".join(capsys.readouterr().out.split())

    (case / "job.yaml").write_text(f"{JOB}elastic: {{request_nodes: {{p4de: 2}}}}\n")
    assert _run(case) == 2
    assert "where 2 p4de (54.89 $/h) is meant" in capsys.readouterr().err
    (case / "job.yaml").write_text(f"{JOB}elastic: {{request_nodes: {{p5: 1}}}}\n")
    assert _run(case) == 2
    assert "names 'p5'" in capsys.readouterr().err
    # a part of a file is planned on and launched by nobody
    (case / "cluster.yaml").write_text(CLUSTER)
    (case / "job.yaml").write_text(JOB)
    assert _run(case, "--json") == 0
    assert json.loads(capsys.readouterr().out)["launch"] is None
