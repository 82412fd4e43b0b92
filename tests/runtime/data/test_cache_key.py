"""Whatever changes the rows of a dataset is in its key: each input is changed in turn."""

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from autohet.runtime.data.recipe import Recipe
from autohet.runtime.job import DataSection
from autohet.runtime.job.data import SourceEntry
from tests.harness.chat_tokenizer import CHATML, MARKED, save_chat_tokenizer
from tests.runtime.data.test_containers import write_jsonl
from tests.runtime.data.test_shapes import beginning_tokenizer

RECORD = {
    "text": "Paris",
    "body": "Paris",
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "prompt": "Why?",
    "completion": "So.",
    "chosen": "So.",
    "rejected": "No.",
}
Change = Callable[[Path, dict[str, Any]], dict[str, Any]]


def keys(**changed: Any) -> Change:
    return lambda root, given: {**given, **changed}


def file_of_equal_size_and_time(root: Path, given: dict[str, Any]) -> dict[str, Any]:
    path = root / "a.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("Paris", "Sofia"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return given


def begin_of_the_tokenizer(root: Path, given: dict[str, Any]) -> dict[str, Any]:
    beginning_tokenizer(root / "tokenizer", "<s>")
    return given


def template_of_the_tokenizer(root: Path, given: dict[str, Any]) -> dict[str, Any]:
    save_chat_tokenizer(root / "tokenizer", CHATML)
    return given


def vocabulary(root: Path, given: dict[str, Any]) -> dict[str, Any]:
    file = root / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    return given


def weights(*shares: float) -> Change:
    def change(root: Path, given: dict[str, Any]) -> dict[str, Any]:
        path = str(root / "a.jsonl")
        entries = tuple(SourceEntry(path=path, weight=share) for share in shares)
        return {**given, "source": entries}

    return change


TEXT: dict[str, Change] = {
    "file": file_of_equal_size_and_time,
    "text_field": keys(text_field="body"),
    "fields": keys(fields={"text": "body"}),
    "tokens_field": keys(tokens_field="ids"),
    "format": keys(format="text"),
    "skip": keys(skip_broken_lines=True),
    "isolate": keys(isolate_documents=True),
    "packing": keys(packing="best_fit"),
    "end": keys(end_of_document="<|im_end|>"),
    "begin": keys(begin_of_document="<s>"),
    "own begin": begin_of_the_tokenizer,
    "vocabulary": vocabulary,
    "bytes": keys(tokenizer="bytes"),
    "weights": weights(1, 2),
    "other weights": weights(1, 3),
    "kind": keys(kind="prompt_completion"),
    "length": lambda root, given: {**given, "length": 31},
}
DATED = CHATML + "{{ strftime_now('%d %b %Y') }}"
CHAT: dict[str, Change] = {
    "system": keys(fields={"system": "prompt"}),
    "messages_field": keys(messages_field="dialog"),
    "fields": keys(fields={"tools": "functions"}),
    "sharegpt": keys(kind="sharegpt", messages_field="messages_"),
    "train_on": keys(train_on="all"),
    "last": keys(train_on="completion"),
    "template": keys(chat_template=CHATML),
    "own template": template_of_the_tokenizer,
    "concat": keys(packing="concat"),
    "together": keys(isolate_documents=False),
}
PAIRS: dict[str, Change] = {
    "fields": keys(fields={"completion": "text"}),
    "joined": keys(fields={"prompt": ("prompt", "text")}),
    "train_on": keys(train_on="all"),
    "template": keys(chat_template=CHATML),
    "own begin": begin_of_the_tokenizer,
    "begin": keys(begin_of_document=""),
    "preference": keys(kind="preference"),
}


def fingerprint(given: dict[str, Any]) -> str:
    length = given.pop("length", 15)
    return Recipe.of(DataSection(**given), length).fingerprint


@pytest.mark.parametrize(
    ("kind", "changes"), [("text", TEXT), ("chat", CHAT), ("prompt_completion", PAIRS)]
)
def test_each_input_that_changes_rows_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Change]
) -> None:
    for name, change in {"nothing": keys(), **changes}.items():
        root = tmp_path / name
        write_jsonl(root / "a.jsonl", [RECORD])
        os.utime(root / "a.jsonl", ns=(0, 0))
        if name == "begin" and kind != "text":
            beginning_tokenizer(root / "tokenizer", "<s>")
        else:
            save_chat_tokenizer(root / "tokenizer", MARKED)
        monkeypatch.chdir(root)
        given = {"source": "a.jsonl", "tokenizer": "tokenizer", "kind": kind}
        first = fingerprint(dict(given))
        assert fingerprint(dict(given)) == first, "the key depends on its inputs alone"
        found = fingerprint(change(Path("."), given))
        assert (found == first) == (name == "nothing"), name


def test_a_file_changed_beyond_its_first_bytes_with_equal_size_and_time_changes_the_key(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("rose " * 40_000 + "Paris")
    os.utime(path, ns=(0, 0))
    given = {"source": str(path), "tokenizer": "bytes"}
    first = fingerprint(dict(given))
    with path.open("r+") as stream:
        stream.seek(200_000)
        stream.write("Sofia")
    os.utime(path, ns=(0, 0))
    assert fingerprint(dict(given)) != first


@pytest.mark.parametrize("template", [DATED, {"default": CHATML, "tool_use": DATED}])
def test_the_date_that_a_template_prints_is_in_the_key_and_is_the_jobs(
    tmp_path: Path, template: str | dict[str, str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{**RECORD, "tools": [{"name": "f"}]}])
    save_chat_tokenizer(tmp_path / "tokenizer", template)
    given = {
        "source": str(tmp_path / "a.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer"),
        "kind": "chat",
        "template_date": "2026-11-29",
    }
    first = fingerprint(dict(given))
    assert fingerprint({**given, "template_date": "2026-11-30"}) != first
    recipe = Recipe.of(DataSection(**given), 15)  # type: ignore[arg-type]
    assert recipe.reading.examples is not None
    record = {**RECORD, "tools": [{"name": "f"}]}
    (rendered,) = recipe.reading.examples.extract(record)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    expected = loaded.apply_chat_template(RECORD["messages"], tools=[{"name": "f"}], tokenize=False)
    today = datetime.date.today().strftime("%d %b %Y")
    assert rendered.text == expected.replace(today, "29 Nov 2026")
    save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    first = fingerprint(dict(given))
    assert fingerprint({**given, "template_date": "2026-11-30"}) == first, "it prints none"
