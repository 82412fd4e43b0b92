"""`autohet bench recovery`, small: real processes restore the right bytes from the right tiers; and
the step benchmark.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autohet.bench.recovery.bare import flows_of
from autohet.bench.recovery.cases import SCENARIOS, config_of_size, policy_schedule
from autohet.bench.recovery.object_server import ObjectServer
from autohet.bench.recovery.simulated import PAPER
from autohet.bench.recovery.storage import point_s3_clients_at
from autohet.bench.step.report import pipelining_document
from autohet.cli.main import main
from autohet.emulate.namespaces import why_no_namespaces
from autohet.runtime.job import Job
from recovery.storage.claims import CLAIMS
from recovery.storage.errors import ObjectExists, ObjectMissing
from recovery.storage.open import open_storage
from recovery.transfer.links import LinkRates
from scripts.benchmarks.recovery import sweep

PARTS = {"detect", "replan", "rebuild", "restore", "first_step", "total"}
NOTHING_FROM_S3 = ("a", "b_notice", "c", "e", "f")


def _real(capsys, scenarios, scale="20"):
    arguments = [
        "bench",
        "recovery",
        "--quick",
        "--no-simulation",
        "--json",
        "--state-mb",
        "3",
        "--scale",
        scale,
    ]
    code = main([*arguments, "--scenarios", ",".join(scenarios)])
    document = json.loads(capsys.readouterr().out)
    return code, {entry["scenario"]: entry for entry in document["scenarios"]}


@pytest.mark.multiprocess
@pytest.mark.parametrize("others", ["f", pytest.param("ae", marks=pytest.mark.slow)])
def test_real_restores_are_right_and_read_s3_for_missing_shards_only(capsys, others):
    code, found = _real(capsys, ("b", *others))
    assert code == 0
    for name, entry in found.items():
        assert entry["simulated"] is False
        assert set(entry["policies"]) == {"local_first", "s3_only", "restart_local"}
        for result in entry["policies"].values():
            assert result["verified"] is True
            assert set(result["seconds"]) == PARTS
            assert result["seconds"]["detect"] is None
        ours, theirs = entry["policies"]["local_first"], entry["policies"]["s3_only"]
        if name in NOTHING_FROM_S3:
            assert (ours["bytes_by_tier"]["s3"], ours["steps_lost"]) == (0, 0)
        assert theirs["bytes_by_tier"]["s3"] == sum(theirs["bytes_by_tier"].values()) > 0
        assert entry["ratio_vs_limit"] >= 1.0
    # Four stages of three layers: the lost one's quarter of the layers and the head, read once.
    lost = found["b"]
    assert lost["s3_shards_are_the_missing"] is True
    assert (
        lost["policies"]["local_first"]["bytes_by_tier"]["s3"]
        == lost["missing_bytes"]
        > lost["state_bytes"] // 4
    )
    assert lost["policies"]["local_first"]["steps_lost"] == 4


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.skipif(why_no_namespaces() is not None, reason=f"{why_no_namespaces()}")
def test_a_signal_leaves_no_namespace_and_no_shared_memory(number):
    """Sent twice, to all of its processes, as a terminal does, while a policy of a scenario
    runs.
    """
    options = ["--quick", "--no-simulation", "--state-mb", "3", "--scale", "1", "--scenarios", "a"]
    command = [sys.executable, "-m", "autohet.cli.main", "bench", "recovery", *options]
    before = _left_behind()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert any("scenario a, local_first" in line for line in process.stderr)
        assert len(_left_behind() - before) == 6, "five namespaces, and what the S3 server serves"
        for _ in range(2):
            os.killpg(process.pid, number)
        process.stderr.read()
        assert process.wait(60) == 130
    assert _left_behind() <= before


def _left_behind():
    return {
        path.name
        for pattern in ("/run/netns/ah*", "/dev/shm/autohet-bench-*")
        for path in Path("/").glob(pattern[1:])
    }


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(why_no_namespaces() is not None, reason=f"{why_no_namespaces()}")
def test_restores_between_namespaces_are_right_and_beside_bare_copies(capsys):
    code, found = _real(capsys, ("b",), scale="1")
    assert code == 0
    policies = found["b"]["policies"]
    assert set(policies) == {"local_first", "s3_only", "restart_local"}
    for result in policies.values():
        assert result["verified"] is True
        assert result["copy_s"] > 0
        assert result["lost_work_s"] == 4.0
    ours = policies["local_first"]["bytes_by_tier"]
    assert ours["s3"] == found["b"]["missing_bytes"]
    assert ours["disk"] > 0
    assert ours["peer"] > 0


def test_the_benchmarks_object_server_is_a_storage(tmp_path):
    """What a restore asks of S3: conditional puts, ranges, lists, deletes."""
    with (
        closing(ObjectServer(tmp_path, "127.0.0.1")) as server,
        point_s3_clients_at(server.endpoint),
        closing(open_storage("s3://any/prefix")) as storage,
    ):
        storage.put("a/one", b"0123456789")
        with pytest.raises(ObjectExists):
            storage.put("a/one", b"other", if_none_match=True)
        part = bytearray(4)
        storage.get_into("a/one", 3, memoryview(part))
        assert (bytes(part), storage.get("a/one"), storage.size("a/two")) == (
            b"3456",
            b"0123456789",
            None,
        )
        assert [(item.name, item.size) for item in storage.list("a/")] == [("a/one", 10)]
        storage.delete(["a/one", "a/two"])
        left = [item.name for item in storage.list()]
        assert left == [f"{CLAIMS}probe"], (
            "the first conditional put's probe stays, and nothing else"
        )
        with pytest.raises(ObjectMissing):
            storage.get("a/one")


def test_flows_of_a_worker_are_all_its_bytes():
    config = config_of_size(3e6)
    for name, policy in [("b", "local_first"), ("f", "local_first"), ("a", "restart_local")]:
        before, after, plan = policy_schedule(policy, SCENARIOS[name], config, LinkRates())
        flows = [flow for worker in after.workers for flow in flows_of(worker, plan, before, after)]
        kept = sum(flow.num_bytes for flow in flows if flow.kind == "kept")
        assert (kept > 0) == (name == "f"), "halves of tensors become parts of whole ones"
        assert sum(flow.num_bytes for flow in flows) - kept == sum(plan.bytes_by_tier.values())
        assert (
            sum(flow.num_bytes for flow in flows if flow.source == "s3") == plan.bytes_by_tier["s3"]
        )


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_move_what_they_say(name):
    config = config_of_size(3e6)
    before, after, ours = policy_schedule("local_first", SCENARIOS[name], config, LinkRates())
    _, _, theirs = policy_schedule("s3_only", SCENARIOS[name], config, LinkRates())
    assert theirs.bytes_by_tier["s3"] == sum(after.bytes_of(worker) for worker in after.workers)
    if name in NOTHING_FROM_S3:
        assert ours.bytes_by_tier["s3"] == 0
        assert sum(ours.bytes_by_tier.values()) > 0
    if name == "d":
        assert ours.bytes_by_tier["s3"] == before.num_bytes


def test_the_state_has_the_size_that_was_asked_for():
    layout, _, _ = policy_schedule("local_first", SCENARIOS["a"], config_of_size(1e9), LinkRates())
    assert layout.num_bytes == pytest.approx(1e9, rel=0.1)
    assert PAPER == (1.49, 4.38)


def test_an_unknown_scenario_is_the_users_mistake(capsys):
    assert main(["bench", "recovery", "--scenarios", "z"]) == 2
    assert "'z'" in capsys.readouterr().err


def test_step_benchmark_compares_the_same_training(tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: tiny\nmodel: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64,"
        " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4, vocab_size: 64,"
        " max_position_embeddings: 32}}\ntraining: {global_batch_sequences: 4, sequence_length: 16,"
        " steps: 10, precision: fp32, device: cpu}\n"
    )
    assert (
        main(["bench", "step", "--json", "--job", str(job), "--steps", "2", "--no-pipelining"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["precision"] == {"autohet": "fp32", "plain": "fp32"}
    assert document["max_abs_loss_difference"] < 1e-4
    assert document["mfu"] == {"autohet": None, "plain": None}
    assert document["ratio_vs_plain"] == document["step_s"]["autohet"] / document["step_s"]["plain"]


@pytest.mark.parametrize(
    ("option", "name"),
    [("--out", "absent/x.json"), ("--picture", "x.gif"), ("--picture", "absent/x.png")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_benchmark(
    tmp_path, capsys, monkeypatch, option, name
):
    monkeypatch.setattr(
        "autohet.bench.recovery.report.benchmark", lambda *_: pytest.fail("it ran first")
    )
    assert main(["bench", "recovery", option, str(tmp_path / name)]) == 2
    assert f"{option} is" in capsys.readouterr().err


def test_the_gain_over_s3_ends_with_the_network(monkeypatch):
    """At 25 Gb/s: a ratio of links as long as S3 is the slower one, and no better for an S3 that
    the card does not let through.
    """
    monkeypatch.setattr(sweep, "S3_BYTES_PER_S", (0.25e9, 0.5e9, 4e9, 25e9))
    ratios = {}
    for entry in sweep.s3_sweep(LinkRates(network_bytes_per_s=25e9 / 8), ["a", "e"]):
        ratios.setdefault(entry["scenario"], {})[entry["s3_bytes_per_s"]] = entry["bound_ratio"]
    assert ratios["e"][0.25e9] == pytest.approx(25e9 / 8 / 0.25e9)
    assert ratios["a"][0.5e9] == pytest.approx(ratios["a"][0.25e9] / 2), (
        "twice the speed, half the gain"
    )
    for of_scenario in ratios.values():
        assert of_scenario[4e9] == of_scenario[25e9]
    assert ratios["e"][25e9] == pytest.approx(1.0)


def test_the_predicted_gain_ends_too_and_fixed_costs_count_for_small_states(monkeypatch):
    monkeypatch.setattr(sweep, "S3_BYTES_PER_S", (0.25e9, 1e9, 4e9, 25e9))
    found = sweep.predicted_sweep(LinkRates(network_bytes_per_s=25e9 / 8), ["e"])
    ratios = {(entry["state_bytes"], entry["s3_bytes_per_s"]): entry["ratio"] for entry in found}
    for size in (1e9, 8e9):
        assert (
            ratios[size, 0.25e9] > ratios[size, 1e9] > 1.0 > ratios[size, 4e9] == ratios[size, 25e9]
        )
    assert ratios[8e9, 0.25e9] > ratios[1e9, 0.25e9]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_stock_pipelining_and_this_package_train_alike_on_an_equal_plan():
    """Wrong: the baseline divides or clips its gradients otherwise, or trains on other rows, and
    its time says nothing.
    """
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    training = {
        "global_batch_sequences": 8,
        "sequence_length": 16,
        "steps": 10,
        "precision": "fp32",
        "device": "cpu",
        "clip_norm": 0.2,
    }
    document = pipelining_document(
        Job.from_document(
            {"model": {"config": config}, "training": {**training, "learning_rate": 1e-2}}
        ),
        5,
    )
    assert document["max_abs_loss_difference"] < 2e-5
    assert document["step_s"].keys() == document["cpu_s"].keys() == {"autohet", "pipelining"}
