"""`autohet rows`: what a job's data trains on, before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.cli.main import main


def write_job(folder: Path, records: list[dict[str, Any]], **data: Any) -> str:
    source = folder / "data.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    job = {
        "model": {"config": {"model_type": "gpt2", "vocab_size": 256}},
        "training": {"global_batch_sequences": 8, "sequence_length": 24},
        "data": {"source": str(source), "cache": str(folder), **data},
        "evaluation": {"split": 0.5} if not data else None,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return str(folder / "job.yaml")


def test_targets_documents_and_padding_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    """Wrong: marks of another row, padding as text, or a document that is not begun."""
    records = [{"prompt": "2+2=", "completion": "four"}, {"prompt": "1+", "completion": "2\x1b"}]
    job = write_job(tmp_path, records, kind="prompt_completion")
    assert main(["rows", job, "--json", "--count", "9"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row == [
        ["=", ""],
        ["-", "2+2="],
        ["+", "four\0"],
        ["=", ""],
        ["-", "1+"],
        ["+", "2\x1b\0"],
        ["=", ""],
        ["-", "11 tokens of padding"],
    ]
    assert main(["rows", job]) == 0
    shown = capsys.readouterr().out
    assert '+ "four\\u0000"' in shown
    assert "\x1b" not in shown


def test_a_text_is_trained_on_and_rows_held_out_are_shown_apart(
    tmp_path: Path, capsys: Any
) -> None:
    job = write_job(tmp_path, [{"text": "abcdefgh" * 20}])
    found = []
    for option in ([], ["--evaluation"]):
        assert main(["rows", job, "--json", "--count", "9", *option]) == 0
        found.append(json.loads(capsys.readouterr().out)["rows"])
    assert [len(rows) for rows in found] == [3, 3]
    assert [[sign for sign, _ in row] for row in found[0]] == [["-", "+"]] * 3
    texts = [[first[1] + rest[1] for first, rest in rows] for rows in found]
    assert sorted(texts[0] + texts[1]) == sorted(
        ("abcdefgh" * 20)[at : at + 25] for at in range(0, 150, 25)
    )


@pytest.mark.parametrize(("given", "words"), [("data", "give it `data`"), ("evaluation", "eval")])
def test_what_the_job_lacks_is_said(tmp_path: Path, capsys: Any, given: str, words: str) -> None:
    path = Path(write_job(tmp_path, [{"text": "a" * 99}]))
    job = yaml.safe_load(path.read_text())
    del job[given]
    path.write_text(yaml.safe_dump({**job, "evaluation": None}))
    assert main(["rows", str(path), *["--evaluation"] * (given != "data")]) == 2
    assert words in capsys.readouterr().err
