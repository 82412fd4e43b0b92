"""`autohet bench recovery`, small: real processes restore the right bytes from the right tiers; and the step benchmark."""

import json

import pytest

from autohet.bench.recovery.cases import SCENARIOS, config_of_size, policy_schedule
from autohet.bench.recovery.simulated import PAPER
from autohet.bench.recovery.sweep import s3_sweep
from autohet.cli.main import main
from recovery.transfer.links import Links

PARTS = {"detect", "replan", "rebuild", "restore", "first_step", "total"}
NOTHING_FROM_S3 = ("a", "b_notice", "c", "e", "f")


def _real(capsys, scenarios):
    arguments = ["bench", "recovery", "--quick", "--no-simulation", "--json", "--state-mb", "3", "--scale", "20"]
    code = main([*arguments, "--scenarios", ",".join(scenarios)])
    document = json.loads(capsys.readouterr().out)
    return code, {entry["scenario"]: entry for entry in document["scenarios"]}


@pytest.mark.multiprocess
def test_real_restores_are_right_and_read_s3_for_missing_shards_only(capsys):
    code, found = _real(capsys, ("a", "b", "e", "f"))
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
    assert lost["policies"]["local_first"]["bytes_by_tier"]["s3"] == lost["missing_bytes"] > lost["state_bytes"] // 4
    assert lost["policies"]["local_first"]["steps_lost"] == 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_move_what_they_say(name):
    config = config_of_size(3e6)
    before, after, ours = policy_schedule("local_first", SCENARIOS[name], config, Links())
    _, _, theirs = policy_schedule("s3_only", SCENARIOS[name], config, Links())
    assert theirs.bytes_by_tier["s3"] == sum(after.bytes_of(worker) for worker in after.workers)
    if name in NOTHING_FROM_S3:
        assert ours.bytes_by_tier["s3"] == 0
        assert sum(ours.bytes_by_tier.values()) > 0
    if name == "d":
        assert ours.bytes_by_tier["s3"] == before.num_bytes


def test_the_state_has_the_size_that_was_asked_for():
    layout, _, _ = policy_schedule("local_first", SCENARIOS["a"], config_of_size(1e9), Links())
    assert layout.num_bytes == pytest.approx(1e9, rel=0.1)
    assert PAPER == (1.49, 4.38)


def test_an_unknown_scenario_is_the_users_mistake(capsys):
    assert main(["bench", "recovery", "--scenarios", "z"]) == 2
    assert "'z'" in capsys.readouterr().err


def test_step_benchmark_compares_the_same_training(tmp_path, capsys):
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: tiny\n"
        "model: {config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
        " num_attention_heads: 4, num_key_value_heads: 4, vocab_size: 64, max_position_embeddings: 32}}\n"
        "training: {global_batch_sequences: 4, sequence_length: 16, steps: 10, precision: fp32, device: cpu}\n"
    )
    assert main(["bench", "step", "--json", "--job", str(job), "--steps", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["max_abs_loss_difference"] < 1e-4
    assert document["mfu"] == {"autohet": None, "plain": None}
    assert document["ratio_vs_plain"] == document["step_s"]["autohet"] / document["step_s"]["plain"]


@pytest.mark.parametrize(
    ("option", "name"), [("--out", "absent/x.json"), ("--picture", "x.gif"), ("--picture", "absent/x.png")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_benchmark(tmp_path, capsys, monkeypatch, option, name):
    monkeypatch.setattr("autohet.bench.recovery.report.benchmark", lambda options: pytest.fail("it ran first"))
    assert main(["bench", "recovery", option, str(tmp_path / name)]) == 2
    assert f"{option} is" in capsys.readouterr().err


def test_the_gain_over_s3_ends_with_the_network():
    """At 25 Gb/s: a ratio of links as long as S3 is the slower one, and no better for an S3 that the card does not let through."""
    ratios = {}
    for entry in s3_sweep(Links(network_bytes_per_s=25e9 / 8), ["a", "e"]):
        ratios.setdefault(entry["scenario"], {})[entry["s3_bytes_per_s"]] = entry["bound_ratio"]
    assert ratios["e"][0.25e9] == pytest.approx(25e9 / 8 / 0.25e9)
    assert ratios["a"][0.5e9] == pytest.approx(ratios["a"][0.25e9] / 2), "twice the speed, half the gain"
    for of_scenario in ratios.values():
        assert of_scenario[4e9] == of_scenario[25e9]
    assert ratios["e"][25e9] == pytest.approx(1.0)
