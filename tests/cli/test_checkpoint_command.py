"""`autohet checkpoint`: exit codes, one document with --json, one line for a mistake."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from autohet.cli.main import main
from autohet.runtime.messages import EVALUATIONS
from autohet.runtime.process.terminal import visible
from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    open_checkpoint,
    write_shards,
)
from recovery.checkpoint.manifest import DataFile, encode_manifest
from recovery.state.layout import Layout, TensorSpec, assign_writers
from recovery.storage.open import open_storage


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Two committed checkpoints of a one-tensor GPT-2 (its values do not matter to the command)."""
    storage = open_storage(str(tmp_path / "durable"))
    spec = TensorSpec("param/transformer.wte.weight", (67, 8), "float32", 0, (0, 30, 67))
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    for step in (10, 20):
        state = {spec.name: torch.full(spec.shape, float(step))}
        receipt = write_shards(
            CheckpointPart(storage, step, "a/0"), state, layout, assign_writers(layout)["a/0"]
        )
        commit_checkpoint(
            storage,
            step,
            layout,
            [receipt],
            CheckpointFacts({"seed": 1}, {"model_type": "gpt2"}, job="tiny"),
        )
    return storage.uri


def _document(capsys: pytest.CaptureFixture[str]) -> dict:
    captured = capsys.readouterr()
    return json.loads(captured.out)


def test_list(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", "--storage", uri, "--json"]) == 0
    rows = _document(capsys)["checkpoints"]
    assert [(row["step"], row["job"], row["num_bytes"]) for row in rows] == [
        (10, "tiny", 2144),
        (20, "tiny", 2144),
    ]
    assert main(["checkpoint", "list", "--storage", uri]) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown
    assert "2.1 KiB" in shown


def test_the_best_is_marked_copied_and_exported(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["checkpoint", "export", "--storage", uri, "--out", str(out), "--best"]
    assert main(arguments) == 2
    assert "no checkpoint" in capsys.readouterr().err
    # The step of the lowest loss has no checkpoint any more.
    losses = {"losses": {"5": 0.5, "10": 1.25, "20": 1.5, "25": 0.1}, "rows": None}
    (tmp_path / "durable" / EVALUATIONS).write_text(json.dumps(losses))
    other = str(tmp_path / "other")
    assert main(["checkpoint", "copy", "--storage", uri, "--to", other]) == 0
    capsys.readouterr()
    for place, expected in ((uri, [(1.25, True), (1.5, False)]), (other, [(1.5, True)])):
        assert main(["checkpoint", "list", "--storage", place, "--json"]) == 0
        rows = _document(capsys)["checkpoints"]
        assert [(row["evaluation_loss"], row["is_best"]) for row in rows] == expected
    assert main(["checkpoint", "list", "--storage", uri]) == 0
    assert "best 1.2500" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert _document(capsys)["step"] == 10


def test_list_of_nothing_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", "--storage", str(tmp_path / "none"), "--json"]) == 0
    assert _document(capsys)["checkpoints"] == []


def test_verify_tells_good_from_damaged(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "--storage", uri, "--json"]) == 0
    assert [report["ok"] for report in _document(capsys)["checkpoints"]] == [True, True]
    file = next(Path(uri, "step-00000010").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "verify", "--storage", uri, "--step", "20", "--json"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", "--storage", uri, "--json"]) == 1
    assert [report["ok"] for report in _document(capsys)["checkpoints"]] == [False, True]
    assert main(["checkpoint", "verify", "--storage", uri]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_export_writes_the_newest_or_the_step_asked_for(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    for step, options, scheme in ((20, [], ""), (10, ["--step", "10"], "file://")):
        out = tmp_path / f"out-{step}"
        command = ["checkpoint", "export", "--storage", uri, "--out", f"{scheme}{out}", "--json"]
        assert main([*command, *options]) == 0
        document = _document(capsys)
        assert (document["step"], document["directory"]) == (step, str(out))
        assert torch.equal(
            load_file(out / "model.safetensors")["transformer.wte.weight"],
            torch.full((67, 8), float(step)),
        )
    assert not list(Path(uri).rglob("*.lease"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--step", "15"], "committed steps: 10, 20"),
        (["export", "--step", "15", "--out", "x"], "committed steps: 10, 20"),
        (["export", "--out", "/proc"], "not an empty directory"),
        (["export", "--out", "s3://bucket/x"], "--out is s3://bucket/x"),
        (["export", "--out", "x", "--dtype", "int3"], "float32, float16, bfloat16"),
        (["list", "--storage", "ftp://x/y"], "ftp"),
    ],
)
def test_the_users_mistake_is_one_line_and_exit_code_2(
    uri: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "x") if argument == "x" else argument for argument in arguments]
    assert main(["checkpoint", arguments[0], "--storage", uri, *arguments[1:]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "x").exists()


def test_a_damaged_manifest_is_exit_code_1_and_hides_no_other(
    uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(uri, "step-00000010", "manifest.json").write_text("{")
    assert main(["checkpoint", "list", "--storage", uri, "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert "not a valid manifest" in printed.err
    assert [row["step"] for row in document["checkpoints"]] == [20]
    assert [row["step"] for row in document["damaged"]] == [10]
    assert main(["checkpoint", "verify", "--storage", uri, "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(report["step"], report["ok"]) for report in reports] == [(10, False), (20, True)]
    assert "not a valid manifest" in reports[0]["problems"][0]


def test_the_list_fits_80_columns(
    uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["checkpoint", "list", "--storage", uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"Committed checkpoints in {uri}" in lines
    assert sum("tiny" in line and "2.1 KiB" in line for line in lines) == 2
    assert (
        len([line for line in lines if line.strip()]) == 5
    )  # title, heading, rule, one line a checkpoint
    assert all(len(line) <= 80 for line in lines[1:])


def test_a_place_that_cannot_hold_what_is_asked_is_a_mistake(
    uri: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["checkpoint", "list", "--storage", str(tmp_path / "file")]) == 2
    assert "a file; name the directory" in capsys.readouterr().err
    assert (
        main(["checkpoint", "export", "--storage", uri, "--out", str(tmp_path / "file" / "out")])
        == 2
    )
    assert "cannot make the export directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["[/bold]x", "[red", "a\x1b[2Jb", ":bomb:"])
def test_a_jobs_name_is_shown_as_it_is(
    uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Markup of rich's in a name ended the command in a MarkupError."""
    monkeypatch.setenv("COLUMNS", "200")
    storage = open_storage(uri)
    manifest = open_checkpoint(storage, 20)
    data = encode_manifest(msgspec.structs.replace(manifest, job=name))
    storage.delete([f"step-{20:08d}/manifest.json"])
    storage.put(f"step-{20:08d}/manifest.json", data)
    assert main(["checkpoint", "list", "--storage", uri]) == 0
    out = capsys.readouterr().out
    assert visible(name) in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("action", ["verify", "export"])
def test_a_shape_of_4_terabytes_is_a_sentence(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """A manifest that agrees with itself, and claims more than any memory holds."""
    storage = open_storage(uri)
    manifest = open_checkpoint(storage, 20)
    size = 4 << 40
    (tensor,) = manifest.tensors
    rows = 30 + size // 32
    huge = msgspec.structs.replace(tensor, shape=(rows, 8), cuts=(0, 30, rows))
    files = tuple(grown(file, size) for file in manifest.files)
    forged = msgspec.structs.replace(manifest, tensors=(huge,), files=files)
    storage.delete([f"step-{20:08d}/manifest.json"])
    storage.put(f"step-{20:08d}/manifest.json", encode_manifest(forged))
    out = ["--out", str(tmp_path / "out")] if action == "export" else []
    assert main(["checkpoint", action, "--storage", uri, "--step", "20", *out]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err or said.out


def grown(file: DataFile, num_bytes: int) -> DataFile:
    """The file's entry where the second shard has `num_bytes`, at the file's end."""
    shards = []
    for stored in file.shards:
        if stored.unit == 1:
            end = file.num_bytes
            stored = msgspec.structs.replace(
                stored,
                num_bytes=num_bytes,
                offset=end,
                item_offset=end,
                item_bytes=num_bytes,
            )
        shards.append(stored)
    return msgspec.structs.replace(file, shards=tuple(shards), num_bytes=file.num_bytes + num_bytes)


def test_copy_takes_the_newest_checkpoint_to_another_storage(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other")
    assert main(["checkpoint", "copy", "--storage", uri, "--to", other, "--json"]) == 0
    document = _document(capsys)
    assert (document["step"], document["num_bytes"]) == (20, 2144)
    assert main(["checkpoint", "verify", "--storage", other, "--json"]) == 0
    assert [row["step"] for row in _document(capsys)["checkpoints"]] == [20]
    none = str(tmp_path / "none")
    assert main(["checkpoint", "copy", "--storage", none, "--to", other]) == 2
