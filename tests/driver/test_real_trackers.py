"""MLflow with a local store and Weights & Biases offline, if they are installed: what their own
readers find after a run that was resumed.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autohet.driver.callbacks.trackers import make_callbacks
from autohet.runtime.job import Job, TrackerEntry
from tests.harness.fake_job import fake_job

FIELDS: dict[str, Any] = {"project": "p", "name": "n", "group": "g", "tags": ("a", "b")}


def job_with(kind: str) -> Job:
    return replace(fake_job(), name="toy", trackers=(TrackerEntry(kind=kind, **FIELDS),))


def train(job: Job, directory: Path, steps: range, known: Mapping[str, str]) -> dict[str, str]:
    """Pass the events of some steps to the job's tracker; return its ids."""
    (callback,), ids = make_callbacks(job, directory, known)
    for step in steps:
        event = {"kind": "step", "step": step, "loss": 5.0 - step, "seconds": 2.0, "tokens": 8}
        callback.on_event(event)
    callback.close()
    return ids


def test_mlflow_has_one_run_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a restart begins another run, or steps since the checkpoint are logged twice."""
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for variable in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"):
        monkeypatch.setenv(variable, "")  # mlflow sets them; they go after the test
        monkeypatch.delenv(variable)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    job = job_with("mlflow")
    ids = train(job, tmp_path, range(4), {})
    assert train(job, tmp_path, range(2, 6), ids) == ids
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_id, run.info.run_name) == (ids["mlflow"], "n")
    assert {key: run.data.tags[key] for key in ("a", "b", "group")} == {
        "a": "true",
        "b": "true",
        "group": "g",
    }
    history = client.get_metric_history(ids["mlflow"], "loss")
    assert [(each.step, each.value) for each in history] == [(s, 5.0 - s) for s in range(6)]
    document = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/job.json")
    assert document["name"] == "toy"
    assert document == json.loads(json.dumps(job.to_document()))


def test_weights_and_biases_has_one_run_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline files of both parts carry one id, the job's names, and rising steps."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    job = job_with("wandb")
    ids = train(job, tmp_path, range(4), {})
    assert train(job, tmp_path, range(4, 6), ids) == ids
    parts = [read_offline(path) for path in sorted(tmp_path.rglob("*.wandb"))]
    assert len(parts) == 2
    for run, _ in parts:
        assert (run.run_id, run.project, run.display_name) == (ids["wandb"], "p", "n")
        assert (run.run_group, list(run.tags)) == ("g", ["a", "b"])
        assert {item.key for item in run.config.update} >= set(job.to_document())
    assert [step for _, steps in parts for step in steps] == list(range(6))


def read_offline(path: Path) -> tuple[Any, list[int]]:
    """Return the run's record and the steps of its history, in the library's own messages."""
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    run, steps = None, []
    for data in records_of(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
        if record.HasField("history"):
            steps.append(record.history.step.num)
    return run, steps


def records_of(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind a header of 7 bytes.

    A fragment is a checksum, a length and a kind (whole, first, middle, last); none crosses a
    block of 32 KiB.
    """
    assert content[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += 7
        parts += content[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts
            parts = b""
