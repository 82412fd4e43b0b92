"""What is found in the checkpoint storage before a fleet starts: a run that is done, another job's,
another model's, a wreck.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from autohet.cli.main import main
from autohet.driver.control.decisions import Untold
from autohet.driver.control.ledger import Ledger
from autohet.runtime.job import Job
from autohet.runtime.layout import tensor_specs
from autohet.runtime.models import load_config
from recovery.checkpoint.commit import commit_checkpoint
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.open import open_storage
from tests.harness.checkpoint_cases import write_all
from tests.harness.fake_job import fake_job
from tests.harness.local_fleet import cluster_document, write_documents

STEPS = 12
CONTRACT = {
    "steps",
    "final_loss",
    "losses",
    "generations",
    "steps_lost",
    "reconfigurations",
    "checkpoint",
    "events",
}
Train = Callable[..., tuple[int, str, str]]


def commit(job: Job, step: int) -> None:
    """A checkpoint of zeros, as one worker would leave it."""
    config = load_config(job.model)
    specs = tensor_specs(config)
    layout = Layout(
        specs, {"big-0/0": frozenset(shard for spec in specs.values() for shard in spec.shards)}
    )
    storage = open_storage(job.checkpoint_storage)
    receipts = write_all(
        storage, step, layout, {name: torch.zeros(spec.shape) for name, spec in specs.items()}
    )
    commit_checkpoint(
        storage, step, layout, receipts, {"seed": 3, "step": step}, config.to_dict(), job=job.name
    )
    storage.close()


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """Writes the documents, commits a checkpoint of `step`, spoils what is to be spoilt, and
    trains, where no Ray may start.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("a fleet was started"))
    monkeypatch.setattr(
        "autohet.driver.emulate.fleet.LocalCluster", lambda **_: pytest.fail("a fleet was started")
    )

    def run(step: int, spoil: Callable[[Path], None] = lambda job: None) -> tuple[int, str, str]:
        job, cluster = write_documents(
            tmp_path, cluster_document(big=1, small=1), training={"steps": STEPS}
        )
        commit(Job.from_yaml(job), step)
        spoil(job)
        code = main(
            [
                "train",
                "--job",
                str(job),
                "--cluster",
                str(cluster),
                "--events",
                "events.jsonl",
                "--json",
            ]
        )
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("step", [STEPS, STEPS + 5])
def test_a_job_that_is_done_says_so_and_starts_nothing(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    code, out, _ = train(step)
    summary = json.loads(out)
    assert code == 0
    assert f"already at step {step} of {STEPS}" in caplog.text
    assert summary.keys() >= CONTRACT
    assert (summary["steps"], summary["first_step"], summary["losses"], summary["generations"]) == (
        0,
        step,
        [],
        0,
    )
    assert summary["checkpoint"] == f"{tmp_path}/checkpoints/step-{step:08d}"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["started", "finished"]
    assert events[-1]["step"] == step
    assert events[-1]["ok"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda job: job.write_text(
                job.read_text().replace("hidden_size: 32", "hidden_size: 64")
            ),
            ("(256, 32)", "(256, 64)"),
        ),
        (
            lambda job: job.write_text(job.read_text().replace("layers: 4", "layers: 3")),
            ("layers.3", "not there in the job"),
        ),
        (
            lambda job: job.write_text(job.read_text().replace("name: tiny", "name: other")),
            ("'tiny'", "'other'"),
        ),
        (
            lambda job: (job.parent / "checkpoints/step-00000005/manifest.json").write_text("{"),
            ("manifest.json", "remove"),
        ),
    ],
    ids=["shape", "layers", "job", "damaged"],
)
def test_a_checkpoint_that_cannot_be_gone_on_from_is_refused_with_the_remedy(
    train: Train, spoil: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    code, out, err = train(5, spoil)
    messages = [line for line in err.splitlines() if line.startswith("autohet train: ")]
    assert (code, out, len(messages)) == (2, "", 1)
    assert all(word in messages[0] for word in (*words, "checkpoint.storage")), messages


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    ledger = Ledger(fake_job(), Untold())
    ledger.go_on_from(20)
    assert ledger.committed_steps == 20
    assert ledger.summary(0, [], None)["first_step"] == 20


def test_a_checkpoint_cut_into_other_units_is_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are what state is stored by: the same shapes cut otherwise would be read wrongly, or
    not at all.
    """

    def halves(config: object) -> dict[str, TensorSpec]:
        specs = tensor_specs(config)  # type: ignore[arg-type]
        return {
            name: spec
            if spec.split_dim is None
            else replace(spec, cuts=(0, spec.shape[spec.split_dim]))
            for name, spec in specs.items()
        }

    monkeypatch.setattr("autohet.driver.control.resumption.tensor_specs", halves)
    code, _, errors = train(6)
    assert code == 2
    assert "units" in errors
    assert "autohet checkpoint export" in errors
