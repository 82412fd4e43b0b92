"""What is found in the checkpoint storage before a fleet starts: a run that is done, another job's,
another model's, a wreck.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from autohet.cli.main import main
from autohet.control.ledger.ledger import Ledger
from autohet.control.ledger.run_summary import ledger_summary
from autohet.driver.checkpoints.resumption import identity_changes
from autohet.driver.job.preparation import as_continued, check_storage
from autohet.runtime.facts.layout import tensor_specs
from autohet.runtime.job import DataSection, Job, ModelSection
from autohet.runtime.job.identity import (
    DATA_DIGEST,
    DATA_PLACES,
    MAY_CHANGE,
    changes,
    check_changes,
    decides,
)
from autohet.runtime.models.config import load_config, saved_document
from autohet.runtime.models.pretrained import weights_identity
from planner.errors import ConfigError
from recovery.checkpoint.commit import CheckpointFacts, commit_checkpoint
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
PDROPS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
Train = Callable[..., tuple[int, str, str]]


def commit(job: Job, step: int, **scalars: object) -> None:
    """A checkpoint of zeros, as one worker and the driver would leave it."""
    weights = None
    if job.model.pretrained is not None:
        weights = weights_identity(job.model.pretrained)
    known = {"seed": job.training.seed, "step": step, **job.identity(weights), **scalars}
    config = load_config(job.model, job.training)
    specs = tensor_specs(config)
    layout = Layout(
        specs, {"big-0/0": frozenset(shard for spec in specs.values() for shard in spec.shards)}
    )
    storage = open_storage(job.checkpoint_storage)
    receipts = write_all(
        storage, step, layout, {name: torch.zeros(spec.shape) for name, spec in specs.items()}
    )
    document = saved_document(job.model)
    commit_checkpoint(
        storage, step, layout, receipts, CheckpointFacts(known, document, job=job.name)
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
        "autohet.driver.emulated.fleet.LocalCluster", lambda **_: pytest.fail("a fleet was started")
    )

    def run(
        step: int, spoil: Callable[[Path], None] = lambda job: None, **scalars: object
    ) -> tuple[int, str, str]:
        job, cluster = write_documents(
            tmp_path, cluster_document(big=1, small=1), training={"steps": STEPS}
        )
        commit(Job.from_yaml(job), step, **scalars)
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
    ledger = Ledger(fake_job())
    ledger.go_on_from(20)
    assert ledger.committed_steps == 20
    assert ledger_summary(ledger, [], None)["first_step"] == 20


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
            else msgspec.structs.replace(spec, cuts=(0, spec.shape[spec.split_dim]))
            for name, spec in specs.items()
        }

    monkeypatch.setattr("autohet.driver.checkpoints.resumption.tensor_specs", halves)
    code, _, errors = train(6)
    assert code == 2
    assert "units" in errors
    assert "autohet checkpoint export" in errors


def changed(job: Path, section: str, **values: object) -> None:
    document = yaml.safe_load(job.read_text())
    document.setdefault(section, {}).update(values)
    job.write_text(yaml.safe_dump(document))


OTHER_MATHEMATICS: list[tuple[str, str, object]] = [
    ("training", "eps", 1e-6),
    ("training", "betas", [0.8, 0.99]),
    ("training", "weight_decay", 0.0),
    ("training", "clip_norm", None),
    ("training", "seed", 17),
    ("training", "precision", "bf16"),
    ("training", "global_batch_sequences", 4),
    ("training", "sequence_length", 8),
    ("data", "source", "elsewhere.txt"),
    ("data", "text_field", "content"),
    ("data", "tokenizer", "other"),
]


@pytest.mark.parametrize("step", [5, STEPS])
@pytest.mark.parametrize(("section", "key", "value"), OTHER_MATHEMATICS)
def test_a_run_of_other_mathematics_neither_goes_on_nor_is_done(
    train: Train, section: str, key: str, value: object, step: int
) -> None:
    code, out, err = train(step, lambda job: changed(job, section, **{key: value}))
    message = next(line for line in err.splitlines() if line.startswith("autohet train: "))
    assert (code, out) == (2, "")
    assert f"{section}.{key} was " in message
    assert f"add {section}.{key} to checkpoint.allow_changes" in message


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("rms_norm_eps", 1e-3)])
def test_a_model_of_the_same_shapes_is_told_from_the_runs(
    train: Train, key: str, value: object
) -> None:
    def other_model(job: Path) -> None:
        config = yaml.safe_load(job.read_text())["model"]["config"]
        changed(job, "model", config=config | {key: value})

    code, _, err = train(STEPS, other_model)
    assert code == 2
    assert f"model.config.{key} was " in err


@pytest.mark.parametrize(("section", "key", "value"), OTHER_MATHEMATICS[:6])
def test_a_change_that_is_allowed_is_said(
    train: Train, caplog: pytest.LogCaptureFixture, section: str, key: str, value: object
) -> None:
    def allow(job: Path) -> None:
        changed(job, section, **{key: value})
        changed(job, "checkpoint", allow_changes=[f"{section}.{key}"])

    code, out, _ = train(STEPS, allow)
    assert (code, json.loads(out)["first_step"]) == (0, STEPS)
    assert f"{section}.{key} was " in caplog.text


def test_steps_learning_rate_and_checkpoint_keys_may_change_and_are_said(
    train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    def later(job: Path) -> None:
        changed(job, "training", steps=STEPS - 2, learning_rate=1e-5, warmup_steps=2)
        changed(job, "checkpoint", every_steps=77)

    code, _, _ = train(STEPS, later)
    assert code == 0
    for key in ("training.steps", "training.learning_rate", "checkpoint.every_steps"):
        assert f"{key} was " in caplog.text


def test_every_key_of_training_and_data_is_in_the_identity() -> None:
    """A key that a later version adds decides the mathematics unless it is listed."""
    job = fake_job()
    keys = {f"training.{field.name}" for field in fields(job.training)}
    keys |= {f"data.{field.name}" for field in fields(DataSection)}
    with_data = replace(job, data=DataSection(source="text"))
    assert keys <= with_data.identity().keys()
    free = {key for key in keys if not decides(key)}
    assert free <= MAY_CHANGE
    assert {"training.eps", "training.seed", "data.source"} & free == set()


def test_each_form_of_a_source_has_an_identity_of_its_own() -> None:
    """Wrong: entries with weights, splits or subsets, that no scalar of a checkpoint can be."""
    forms: list[Any] = ["a", ["a", "b"], {"path": "a"}, {"path": "hf://a", "split": "test"}]
    forms += [[{"path": "a", "weight": 1}, {"path": "b", "weight": each}] for each in (1, 2)]
    found = []
    for source in forms:
        job = Job.from_document(fake_job().to_document() | {"data": {"source": source}})
        found.append(job.identity()["data.source"])
    assert all(isinstance(each, str) for each in found)
    assert len(set(found)) == len(forms)


def test_pretrained_weights_of_the_same_shapes_are_told_apart(tmp_path: Path) -> None:
    names = ("one", "copy", "other")
    one, copy, other = (tmp_path / name for name in names)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=16)
    )
    model.save_pretrained(one)
    shutil.copytree(one, copy)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[3] = 1.0
    model.save_pretrained(other, max_shard_size="20KB")
    assert weights_identity(str(one)) == weights_identity(str(copy))
    assert weights_identity(str(one)) != weights_identity(str(other))
    assert weights_identity(str(tmp_path)) is None
    jobs = [replace(fake_job(), model=ModelSection(pretrained=str(p))) for p in (one, other)]
    then, now = (job.identity(weights_identity(job.model.pretrained or "")) for job in jobs)
    with pytest.raises(ConfigError, match=r"model\.pretrained was sha256:"):
        check_changes(changes(then, now), DATA_PLACES, "there")
    then, now = (job.identity(weights_identity(str(one))) for job in jobs)
    assert {change.key for change in changes(then, now)} == {"data.tokenizer"}


@pytest.mark.parametrize(
    ("section", "key", "value", "then"),
    [
        ("training", "no_decay", "norms_and_biases", "none"),
        ("training", "label_smoothing", 0.1, "0.0"),
        ("training", "z_loss", 1e-4, "0.0"),
        ("data", "isolate_documents", True, "null"),
        ("data", "skip_broken_lines", True, "false"),
    ],
)
def test_a_key_that_the_checkpoints_release_lacked_is_what_that_release_did(
    tmp_path: Path, section: str, key: str, value: object, then: str
) -> None:
    """Wrong: the decay of norms and biases ends without a word. Its manifests had seed and step."""
    plain = {"steps": STEPS, "no_decay": "none"}
    path, _ = write_documents(tmp_path, cluster_document(big=1), training=plain)
    job = Job.from_yaml(path)
    old: Any = SimpleNamespace(
        scalars={"seed": job.training.seed, "step": 5}, model_config=saved_document(job.model)
    )
    assert identity_changes(job, "there", old) == []
    changed(path, section, **{key: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{key} was {then} "):
        identity_changes(Job.from_yaml(path), "there", old)


@pytest.mark.parametrize("source", ["./moved/corpus.txt", "file:///moved/corpus.txt"])
def test_the_same_data_elsewhere_is_taken_with_a_line(
    train: Train, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    """Its SHA-256 is recorded, and the nodes compare it with that of what they read."""

    def move(job: Path) -> None:
        changed(job, "data", source=source)

    code, out, _ = train(STEPS, move, **{DATA_DIGEST: "ab12"})
    assert (code, json.loads(out)["first_step"]) == (0, STEPS)
    assert "although data.source was " in caplog.text


def test_how_new_weights_are_drawn_may_change(train: Train) -> None:
    def other_model(job: Path) -> None:
        config = yaml.safe_load(job.read_text())["model"]["config"]
        changed(job, "model", config=config | {"initializer_range": 0.5})

    code, _, _ = train(STEPS, other_model)
    assert code == 0


def test_an_older_checkpoint_knows_fewer_keys_and_its_seed(tmp_path: Path) -> None:
    training = {"steps": STEPS, "no_decay": "none"}
    job, _ = write_documents(tmp_path, cluster_document(big=1), training=training)
    document = saved_document(Job.from_yaml(job).model)
    old = SimpleNamespace(scalars={"seed": 99, "step": 5}, model_config=document)
    with pytest.raises(ConfigError, match=r"training\.seed was 99"):
        identity_changes(Job.from_yaml(job), "there", old)  # type: ignore[arg-type]
    old.scalars["seed"] = Job.from_yaml(job).training.seed
    assert identity_changes(Job.from_yaml(job), "there", old) == []  # type: ignore[arg-type]


def test_a_run_keeps_the_dropout_that_it_began_with(tmp_path: Path) -> None:
    """An older version trained without; a model without dropout does not mind."""
    job, _ = write_documents(tmp_path, cluster_document(big=1), training={"steps": STEPS})
    gpt2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    with_, without = (
        replace(Job.from_yaml(job), model=ModelSection(config=gpt2, dropout=drops))
        for drops in (True, False)
    )
    document = saved_document(with_.model)
    old = {"training.seed": with_.training.seed}
    for run in (old, without.identity()):
        manifest: Any = SimpleNamespace(scalars=run, model_config=document)
        assert identity_changes(without, "there", manifest) == []
        with pytest.raises(ConfigError, match=r"model\.dropout was false .* and is true"):
            identity_changes(with_, "there", manifest)
    less: Any = SimpleNamespace(
        scalars=with_.identity(), model_config={**document, "resid_pdrop": 0.2}
    )
    with pytest.raises(ConfigError, match=r"model\.config\.resid_pdrop was 0\.2"):
        identity_changes(with_, "there", less)
    plain = replace(with_, model=ModelSection(config=gpt2 | dict.fromkeys(PDROPS, 0.0)))
    bare: Any = SimpleNamespace(scalars=old, model_config=saved_document(plain.model))
    assert identity_changes(plain, "there", bare) == []


@pytest.mark.parametrize("first", [0, STEPS - 5])
def test_a_run_whose_last_steps_changed_no_weights_is_not_done(
    train: Train, tmp_path: Path, first: int
) -> None:
    def spoil(job: Path) -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        commit(Job.from_yaml(job), STEPS, skipped_from=first)

    code, out, err = train(STEPS, spoil)
    assert (code, out) == (2, "")
    assert f"its last {STEPS - first} steps changed no weights" in err


def test_a_run_that_ends_with_a_skip_or_two_is_done(train: Train, tmp_path: Path) -> None:
    def spoil(job: Path) -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        commit(Job.from_yaml(job), STEPS, skipped_from=STEPS - 2)

    assert train(STEPS, spoil)[0] == 0


@pytest.mark.parametrize(
    ("then", "training"),
    [
        ({"training.router_balance_weight": 0.01}, {}),
        ({"training.router_bias_speed": 0.5}, {}),
        ({"data.messages_field": "dialog"}, {}),
        (
            {"training.no_decay": "norms_and_biases", "training.weight_decay": 0.0},
            {"weight_decay": 0.0, "no_decay": "none"},
        ),
        ({"data.text_field": "body", "data.kind": "chat"}, None),
    ],
)
def test_a_key_that_had_no_effect_may_be_left_out(
    then: dict[str, object], training: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Earlier releases took and recorded such keys; the job that names one is refused now."""
    job = fake_job(training=training or {}, data={"kind": "chat"} if training is None else {})
    old: Any = SimpleNamespace(
        scalars={**job.identity(), **then}, model_config=saved_document(job.model)
    )
    assert identity_changes(job, "there", old) == []


def test_a_key_that_has_an_effect_in_one_of_two_runs_is_compared() -> None:
    job = fake_job(training={"router_balance": "sequence"})
    then = {**job.identity(), "training.router_balance_weight": 0.01}
    old: Any = SimpleNamespace(scalars=then, model_config=saved_document(job.model))
    with pytest.raises(ConfigError, match=r"router_balance_weight was 0\.01"):
        identity_changes(job, "there", old)


def test_the_day_that_a_template_prints_is_the_runs(tmp_path: Path) -> None:
    job = fake_job(data={"kind": "chat"}, checkpoint={"storage": str(tmp_path)})
    began = replace(job, data=replace(job.data, template_date="2026-01-02"))  # type: ignore[type-var]
    commit(began, 4)
    found = check_storage(job, load_config(job.model, job.training))
    assert found is not None
    resumed = as_continued(job, found).data
    assert resumed is not None
    assert resumed.template_date == "2026-01-02"
    fresh = as_continued(job, None).data
    assert fresh is not None
    assert fresh.template_date == date.today().isoformat()
    assert as_continued(fake_job(), found) == fake_job(), "text has no template"


def test_another_global_batch_goes_on_at_the_row_that_the_run_came_to(tmp_path: Path) -> None:
    """Wrong: rows are skipped or trained on again, also after a second change or a restart."""
    uri = {"storage": str(tmp_path), "allow_changes": ["training.global_batch_sequences"]}
    begun = 0
    step = 0
    for batch, steps in ((8, 3), (2, 5), (16, 1), (16, 2)):
        job = fake_job(training={"global_batch_sequences": batch}, checkpoint=uri)
        found = check_storage(job, load_config(job.model, job.training))
        job = as_continued(job, found)
        assert job.training.first_row(step) == begun
        step += steps
        begun += steps * batch
        assert job.training.first_row(step) == begun
        commit(job, step)
    # Two epochs of 100 rows; 106 are done.
    two = replace(job.training, steps=None, max_epochs=2.0)
    assert two.last_step(100) == step + -(-(200 - begun) // 16)
    with pytest.raises(ConfigError, match="a new run begins at row 0 or later"):
        as_continued(fake_job(training={"row_offset": -1}), None)
