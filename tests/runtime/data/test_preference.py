"""Preferences as rows of two answers each; the keys and records that cannot be such."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.job import DataSection, Job
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import save_chat_tokenizer

LENGTH = 63
TEXTS = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "five, I think"},
    {"prompt": "Say hi. ", "chosen": "hi", "rejected": "no"},
]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(each) for each in records))
    return str(path)


def built(tmp_path: Path, records: list[dict[str, Any]], **keys: Any) -> TokenDataset:
    source = write(tmp_path / "pairs.jsonl", records)
    data = DataSection(source=source, kind="preference", cache=str(tmp_path / "cache"), **keys)
    return prepare_dataset(data, LENGTH)


def pieces(dataset: TokenDataset, row: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each piece of a row."""
    (tokens,), ((counts,), (begins,)) = dataset.rows([row]), dataset.marks([row])
    places = [*np.flatnonzero(begins).tolist(), len(tokens)]
    found = []
    for begin, end in itertools.pairwise(places):
        part = tokens[begin:end]
        found.append((part.tolist(), part[counts[begin:end]].tolist()))
    return found


def test_texts_give_a_row_for_each_pair(tmp_path: Path) -> None:
    dataset = built(tmp_path, TEXTS)
    assert len(dataset) == len(TEXTS)
    assert dataset.facts.isolated
    for row, record in enumerate(TEXTS):
        chosen, rejected, padding = pieces(dataset, row)
        for piece, field in ((chosen, "chosen"), (rejected, "rejected")):
            answer = [*record[field].encode(), 0]
            assert piece == ([*record["prompt"].encode(), *answer], answer)
        assert padding[1] == []


def test_answers_longer_than_half_a_row_are_cut_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "p" * 20, "chosen": "c" * 40, "rejected": "r"}
    lost = {"prompt": "p" * 40, "chosen": "c", "rejected": "r"}
    dataset = built(tmp_path, [long, *TEXTS, lost])
    assert len(dataset) == 3
    assert (dataset.facts.num_cut, dataset.facts.num_untargeted) == (3, 1)
    chosen, rejected = pieces(dataset, 0)[:2]
    assert len(chosen[0]) == (LENGTH + 1) // 2
    assert chosen[1] == list(b"c" * 12)
    assert rejected[1] == [*b"r", 0]


def test_messages_have_their_prompt_or_share_it(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer")
    prompt = [{"role": "user", "content": "So what?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("So this.", "So that.")]
    explicit = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    implicit = {"chosen": prompt + answers[0], "rejected": prompt + answers[1]}
    tokenizer = str(tmp_path / "tokenizer")
    dataset = built(tmp_path, [explicit, implicit], tokenizer=tokenizer)
    assert pieces(dataset, 0) == pieces(dataset, 1)
    chosen, rejected, _ = pieces(dataset, 0)
    assert chosen[1] != rejected[1]
    assert 0 < len(chosen[1]) < len(chosen[0])


def test_texts_without_a_prompt_share_whole_words(tmp_path: Path) -> None:
    """As TRL splits them, where answers begin with different letters. Wrong: within a word."""
    record = {"chosen": "Q: why A: great", "rejected": "Q: why A: good"}
    given = {"prompt": "Q: why A:", "chosen": " great", "rejected": " good"}
    dataset = built(tmp_path, [record, given], tokenizer="bytes")
    assert pieces(dataset, 0) == pieces(dataset, 1)


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"prompt": "a", "chosen": "b"}, "'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "no prompt"),
        ({"prompt": "a", "chosen": " ", "rejected": "c"}, "chosen is empty"),
        (
            {
                "chosen": [{"role": "assistant", "content": "x"}],
                "rejected": [{"role": "assistant", "content": "y"}],
            },
            "share 0 messages",
        ),
    ],
)
def test_a_record_that_is_no_preference_is_named_by_its_line(
    tmp_path: Path, record: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as raised:
        built(tmp_path, [*TEXTS, record])
    assert "pairs.jsonl:3" in str(raised.value) or "line 3" in str(raised.value)


def job(**sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, "adapter": {"rank": 4}},
        "training": {
            "global_batch_sequences": 8,
            "sequence_length": 64,
            "steps": 2,
            "objective": "dpo",
        },
        "data": {"source": "pairs.jsonl", "kind": "preference"},
    }
    for name, keys in sections.items():
        base[name] = {**base.get(name, {}), **keys}
    return base


def test_a_preference_job_has_a_beta() -> None:
    assert Job.from_document(job()).training.preference_beta == 0.1
    given = Job.from_document(job(training={"dpo_beta": 0.3}))
    assert given.training.preference_beta == 0.3


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"adapter": None}}, "model.adapter is missing"),
        ({"data": {"kind": "text"}}, "set data.kind: preference"),
        ({"training": {"objective": "cross_entropy"}}, "set training.objective: dpo"),
        ({"training": {"objective": "cross_entropy", "dpo_beta": 0.1}}, "leave dpo_beta out"),
        ({"training": {"dpo_beta": 0.0}}, "training.dpo_beta"),
        ({"training": {"label_smoothing": 0.1}}, "training.label_smoothing"),
        ({"training": {"router_balance": "sequence"}}, "training.router_balance"),
        ({"data": {"train_on": "all"}}, "data.train_on is all"),
        ({"data": {"isolate_documents": False}}, "data.isolate_documents is false"),
        ({"data": {"packing": "concat"}}, "data.packing is concat"),
        ({"parallelism": {"spmd": True}}, "parallelism.spmd"),
    ],
)
def test_a_job_that_cannot_train_on_preferences_is_one_sentence(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Job.from_document(job(**sections))
