"""`autohet train` and a user's mistakes: exit code 2, one clear message on standard error, and
nothing started or printed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from autohet.cli.main import main
from autohet.cli.train import describe_summary
from tests.harness.local_fleet import cluster_document, write_documents
from tests.harness.s3_server import s3_server

Documents = Callable[..., tuple[Path, Path]]


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Documents:
    """Writes a good job and a good cluster, with the sections of the job that a test spoils."""
    monkeypatch.chdir(tmp_path)
    return lambda **sections: write_documents(
        tmp_path, cluster_document(big=1, small=1), **sections
    )


def complaint(
    job: Path, cluster: Path | None, capsys: pytest.CaptureFixture[str], *more: str
) -> str:
    """What standard error says of a command that ends with exit code 2 before Ray is started."""
    arguments = [
        "train",
        "--job",
        str(job),
        *(["--cluster", str(cluster)] if cluster else []),
        *more,
        "--json",
    ]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    messages = [line for line in captured.err.splitlines() if line.startswith("autohet train: ")]
    assert len(messages) == 1, captured.err
    assert not ray.is_initialized()
    return messages[0]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"training": {"stepz": 3}}, ("stepz", "steps")),
        ({"data": {"source": "nowhere.txt"}}, ("nowhere.txt",)),
        (
            {"training": {"global_batch_sequences": 9}, "parallelism": {"microbatch_sequences": 2}},
            ("9", "2", "multiple"),
        ),
        ({"emulation": {"relative_speed_by_gpu_type": {"H100": 1.0}}}, ("A100-40",)),
        ({"emulation": {"memory_scale": 1e-9}}, ("GiB too little",)),
        ({"model": {"config": {"model_type": "nonesuch"}}}, ("nonesuch", "llama")),
        ({"checkpoint": {"storage": "ftp://host/path"}}, ("ftp",)),
        ({"training": {"steps": None}}, ("training.steps",)),
        ({"elastic": {"min_workers": 50}}, ("elastic.min_workers is 50", "16 GPUs", "max_workers")),
        (
            {"elastic": {"script": [{"at_step": 3, "event": "death", "node_type": "smal"}]}},
            ("death at step 3", "'smal'", "small"),
        ),
        (
            {
                "model": {
                    "config": {
                        "model_type": "gpt2",
                        "n_layer": 2,
                        "n_embd": 32,
                        "n_head": 2,
                        "vocab_size": 256,
                        "n_positions": 4,
                    }
                }
            },
            ("sequence_length", "4 learned positions"),
        ),
    ],
    ids=[
        "unknown key",
        "no data",
        "batch",
        "no pace",
        "does not fit",
        "model type",
        "storage scheme",
        "no steps",
        "workers for ever",
        "scripted node",
        "too long",
    ],
)
def test_mistakes_in_the_job(
    documents: Documents,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    message = complaint(*documents(**sections), capsys)
    assert all(word in message for word in words), message


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("config", "shares", "said"),
    [
        (
            {"num_experts_per_tok": 7},
            None,
            "num_experts_per_tok is 7, but the model has 6 experts; give 1 to 6",
        ),
        (
            {},
            None,
            "8 parts, but its 6 experts allow 1 or 2 or 4: change its workers or its tp_shares",
        ),
        ({}, [5, 3], "8 parts, but its 6 experts allow 1 or 2 or 4"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            None,
            "8 parts, but its heads allow 1 or 2 or 4",
        ),
    ],
    ids=["top-k", "parts", "shares", "heads first"],
)
def test_mistakes_with_experts(
    documents: Documents,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: dict[str, Any],
    shares: list[int] | None,
    said: str,
) -> None:
    count = 8 if shares is None else len(shares)
    workers = [f"big-{index}/0" for index in range(count)]
    stage: dict[str, Any] = {"first_layer": 0, "num_layers": 2, "workers": workers}
    if shares is not None:
        stage["tp_shares"] = shares
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 8,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [{"num_microbatches": 8, "stages": [stage]}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    job = documents(model={"config": {**MIXTRAL, **config}}, parallelism={"plan": "plan.json"})
    assert said in complaint(*job, capsys)


def test_unknown_key_in_the_cluster(
    documents: Documents, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cluster = documents()
    cluster.write_text(cluster.read_text() + "max_wokers: 3\n")
    message = complaint(job, cluster, capsys)
    assert "max_wokers" in message


def test_missing_files(
    documents: Documents, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, cluster = documents()
    assert "none.yaml" in complaint(tmp_path / "none.yaml", cluster, capsys)
    assert "none.yaml" in complaint(job, tmp_path / "none.yaml", capsys)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda plan: plan.update(pipelynes=[]), ("pipelynes",)),
        (
            lambda plan: plan["pipelines"][0]["stages"][1].update(workers=["big-0/0"]),
            ("big-0/0", "2 times"),
        ),
        (lambda plan: plan["pipelines"][0].update(num_microbatches=7), ("7", "8")),
        (lambda plan: plan["pipelines"][0]["stages"][1].update(first_layer=3), ("layer",)),
    ],
    ids=["unknown key", "worker twice", "batch", "layers"],
)
def test_mistakes_in_the_plan(
    documents: Documents,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], None],
    words: tuple[str, ...],
) -> None:
    stages = [
        {"first_layer": 2 * i, "num_layers": 2, "workers": [f"{kind}-0/0"]}
        for i, kind in enumerate(("big", "small"))
    ]
    plan: dict[str, Any] = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 8,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [{"num_microbatches": 8, "stages": stages}],
    }
    spoil(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    message = complaint(*documents(parallelism={"plan": "plan.json"}), capsys)
    assert all(word in message for word in words), message


def test_mistakes_with_the_storage(
    documents: Documents, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with s3_server():
        message = complaint(*documents(checkpoint={"storage": "s3://no-such-bucket/run"}), capsys)
    assert "no-such-bucket" in message
    (tmp_path / "file").write_text("in the way")
    assert "file" in complaint(*documents(checkpoint={"storage": str(tmp_path / "file")}), capsys)


def test_storage_without_permission(
    documents: Documents, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.client import BaseClient
    from botocore.exceptions import ClientError

    def refuse(self: BaseClient, operation: str, parameters: dict[str, Any]) -> None:
        raise ClientError(
            {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}, operation
        )

    with s3_server() as server:
        uri = server.create_bucket("closed") + "/run"
        monkeypatch.setattr(BaseClient, "_make_api_call", refuse)
        message = complaint(*documents(checkpoint={"storage": uri}), capsys)
    assert "closed" in message
    assert "AccessDenied" in message or "permission" in message


def test_no_cluster_at_the_address(
    documents: Documents, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint(documents()[0], None, capsys, "--address", "127.0.0.1:1")
    assert "127.0.0.1:1" in message


def test_events_that_cannot_be_written_are_refused_before_a_fleet_starts(
    documents: Documents, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    message = complaint(*documents(), capsys, "--events", str(tmp_path / "file" / "events.jsonl"))
    assert "cannot write events" in message
    assert "--events" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_this_machine_has_not_is_found_before_an_emulated_fleet_starts(
    documents: Documents, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint(*documents(training={"device": "cuda"}), capsys)
    assert "training.device is cuda" in message


def test_the_storage_of_the_command_line_comes_before_the_jobs(
    documents: Documents, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in complaint(
        *documents(), capsys, "--storage", str(tmp_path / "file")
    )


@pytest.mark.parametrize(
    ("in_time", "said"),
    [(True, "USD, before the deadline"), (False, "USD, after the deadline"), (None, "USD")],
)
def test_a_summary_says_whether_the_deadline_was_kept(in_time: bool | None, said: str) -> None:
    summary: dict[str, Any] = {
        **dict.fromkeys(("final_loss", "goodput", "checkpoint", "events")),
        **dict.fromkeys(("reason", "steps", "generations", "steps_lost"), 0),
        "reconfigurations": [],
        "goal": {"spent_usd": 1.5, "budget_usd": 2.0, "in_time": in_time},
    }
    lines = describe_summary(summary).splitlines()
    assert f"nodes: 1.50 of 2.00 {said}" in lines
