"""Chat, completions and token rows against the library's own masks; rows against plain packing."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from trl.data_utils import common_prefix_length

from autohet.runtime.data import TokenDataset, packing, parts, prepare_dataset
from autohet.runtime.job import DataSection
from autohet.runtime.step.batches import Batches
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import CHATML, GATHERED, MARKED, save_chat_tokenizer

MakeData = Callable[..., DataSection]
Messages = list[dict[str, Any]]
WORDS = [
    "Paris",
    "is",
    "the capital",
    "of France?",
    "Grüße,",
    "你好",
    "\n\n",
    "naïve",
    "a + b",
    "  ",
]


def conversations(count: int, seed: int = 0, *, begin: str = "So ") -> list[Messages]:
    """`begin`: of each text; without, one can begin with spaces, which tokens join to the header's
    end.
    """
    draw = random.Random(seed)

    def text() -> str:
        return begin + " ".join(draw.choices(WORDS, k=draw.randint(1, 12))) + "."

    made = []
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": text()})
            messages.append({"role": "assistant", "content": text()})
        made.append(messages)
    return made


def write_chat(path: Path, chats: list[Messages], field: str = "messages") -> Path:
    path.write_text("".join(json.dumps({field: chat}, ensure_ascii=False) + "\n" for chat in chats))
    return path


def documents_of(dataset: TokenDataset) -> list[tuple[list[int], list[bool]]]:
    """(ids, counts) of each piece of a best-fit data set, padding left out."""
    found = []
    indices = range(len(dataset))
    counts, begins = dataset.marks(indices)
    for row, counted, starts in zip(dataset.rows(indices), counts, begins, strict=True):
        borders = [*np.flatnonzero(starts).tolist(), len(row)]
        assert borders[0] == 0
        for begin, end in itertools.pairwise(borders):
            if counted[begin:end].any():
                found.append((row[begin:end].tolist(), counted[begin:end].tolist()))
    return found


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    return save_chat_tokenizer(tmp_path / "tokenizer")


def library_masks(
    tokenizer: PreTrainedTokenizerFast, chats: list[Messages]
) -> list[tuple[list[int], list[bool]]]:
    found = []
    for chat in chats:
        out = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        counts = [bool(each) for each in out["assistant_masks"]]
        assert any(counts)
        assert not all(counts)
        found.append((out["input_ids"], counts))
    return found


@pytest.mark.parametrize("form", ["jsonl", "parquet", "small parts"])
def test_masks_are_the_library_s(
    tmp_path: Path,
    make_data: MakeData,
    tokenizer: PreTrainedTokenizerFast,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chats = conversations(120, begin="")
    path = write_chat(tmp_path / "a.jsonl", chats)
    if form == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"messages": chats}), path)
    if form == "small parts":
        monkeypatch.setattr(parts, "PART_BYTES", 2000)
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    dataset = prepare_dataset(data, 511)
    assert sorted(documents_of(dataset)) == sorted(library_masks(tokenizer, chats))
    assert dataset.facts.num_documents == 120
    dataset.verify()


def test_prefixes_give_the_assistant_s_text(tmp_path: Path, make_data: MakeData) -> None:
    """A template without marks: what is masked in is each answer with its end, nothing else."""
    library = save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    chats = conversations(60)
    data = make_data(
        write_chat(tmp_path / "a.jsonl", chats), kind="chat", tokenizer=str(tmp_path / "tokenizer")
    )
    found = documents_of(prepare_dataset(data, 511))
    texts = sorted(
        library.decode([token for token, counted in zip(ids, counts) if counted])
        for ids, counts in found
    )
    wanted = sorted(
        "".join(each["content"] + "<|im_end|>\n" for each in chat if each["role"] == "assistant")
        for chat in chats
    )
    assert texts == wanted
    given = make_data(
        tmp_path / "a.jsonl",
        kind="chat",
        tokenizer=str(tmp_path / "tokenizer"),
        chat_template=MARKED,
    )
    library.chat_template = MARKED
    assert sorted(documents_of(prepare_dataset(given, 511))) == sorted(
        library_masks(library, chats)
    )


def test_the_last_turn_alone_or_all_of_it(
    tmp_path: Path, make_data: MakeData, tokenizer: PreTrainedTokenizerFast
) -> None:
    chats = conversations(30)
    path = write_chat(tmp_path / "a.jsonl", chats, "dialog")
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer"), "messages_field": "dialog"}
    last = documents_of(prepare_dataset(make_data(path, train_on="completion", **keys), 511))
    texts = sorted(
        tokenizer.decode([token for token, counted in zip(*each) if counted]) for each in last
    )
    assert texts == sorted(chat[-1]["content"] + "<|im_end|>" for chat in chats)
    whole = documents_of(prepare_dataset(make_data(path, train_on="all", **keys), 511))
    for ids, counts in whole:
        assert counts == [False] + [True] * (len(ids) - 1), "nothing predicts the first token"


def chat_line(*messages: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]})


BROKEN = {
    "unknown role": (chat_line(("usr", "a"), ("assistant", "b")), ["'usr'", "did you mean 'user'"]),
    "empty turn": (chat_line(("user", "a"), ("assistant", " ")), ["message 2", "empty turn"]),
    "null": ('{"messages": null}', ["'messages'", "null"]),
    "text": ('{"messages": "hello"}', ["'messages'", "no list of messages"]),
    "missing": ('{"dialog": []}', ["'messages'", "data.messages_field"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_conversation_is_named_by_its_line(
    tmp_path: Path, make_data: MakeData, tokenizer: Any, name: str
) -> None:
    line, words = BROKEN[name]
    good = chat_line(("user", "What?"), ("assistant", "That."))
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{line}\n{good}\n")
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(ConfigError) as caught:
        prepare_dataset(make_data(path, **keys), 63)
    for word in ["a.jsonl, line 2", *words]:
        assert word in str(caught.value)
    skipped = prepare_dataset(make_data(path, skip_broken_lines=True, **keys), 63)
    assert (skipped.facts.num_broken, skipped.facts.num_documents) == (1, 2)


def test_turns_that_cannot_be_told_apart_are_refused(tmp_path: Path, make_data: MakeData) -> None:
    """Wrong: a mask of all ones, or one that is shifted."""
    save_chat_tokenizer(tmp_path / "tokenizer", GATHERED)
    chat = [("user", "a"), ("assistant", "b")]
    path = tmp_path / "a.jsonl"
    path.write_text(chat_line(*chat) + "\n" + chat_line(*chat, *chat) + "\n")
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: the chat template prints.*marks"):
        prepare_dataset(data, 63)


def test_marks_that_hold_no_turn_are_refused(tmp_path: Path, make_data: MakeData) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", MARKED.replace("'assistant' %}", "'bot' %}"))
    path = tmp_path / "a.jsonl"
    path.write_text(chat_line(("user", "a"), ("assistant", "b")) + "\n")
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=r"line 1: the chat template's generation marks"):
        prepare_dataset(data, 63)


def test_no_template_is_said(tmp_path: Path, make_data: MakeData) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", None)
    path = write_chat(tmp_path / "a.jsonl", conversations(2))
    with pytest.raises(ConfigError, match=r"no chat template.*data\.chat_template"):
        prepare_dataset(make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer")), 63)
    with pytest.raises(ConfigError, match=r"chat template"):
        prepare_dataset(make_data(path, kind="chat"), 63)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"train_on": "assistant"}, "data.train_on"),
        ({"kind": "prompt_completion", "train_on": "assistant"}, "does not tell apart"),
        ({"kind": "chat", "tokens_field": "ids"}, "data.tokens_field"),
        ({"chat_template": "{{ x }}"}, "data.chat_template"),
        ({"kind": "chat", "format": "text"}, "data.format"),
    ],
)
def test_keys_that_contradict_each_other(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        DataSection(source="x", **keys)


def test_conversations_without_a_target_are_counted(
    tmp_path: Path, make_data: MakeData, tokenizer: Any
) -> None:
    path = tmp_path / "a.jsonl"
    long_question = "What is the capital of France? " * 60
    lines = [
        chat_line(("user", "What?"), ("assistant", "That.")),
        chat_line(("user", "Nobody answers")),
        chat_line(("user", long_question), ("assistant", "Paris.")),
        chat_line(("user", "What?"), ("assistant", long_question)),
    ]
    path.write_text("\n".join(lines))
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    facts = prepare_dataset(data, 63).facts
    assert (facts.num_documents, facts.num_untargeted, facts.num_cut) == (3, 2, 2)
    assert facts.num_cut_tokens > 100
    summary = prepare_dataset(data, 63).summary
    assert "2 documents without a target" in summary
    assert "documents longer than a row" in summary
    path.write_text(lines[1] + "\n" + lines[2])
    with pytest.raises(ConfigError, match=r"no document has a target"):
        prepare_dataset(data, 63)


def test_completions_end_once_and_count_alone(
    tmp_path: Path, make_data: MakeData, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [("What? ", "Paris."), ("Why?", "So.<|endoftext|>")]
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    keys = {"kind": "prompt_completion", "tokenizer": str(tmp_path / "tokenizer")}
    found = documents_of(prepare_dataset(make_data(path, **keys), 31))
    end = tokenizer.eos_token_id
    wanted = []
    for prompt, completion in pairs:
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        text = prompt + completion.removesuffix("<|endoftext|>")
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        first = common_prefix_length(before, ids)
        wanted.append((ids, [place >= first for place in range(len(ids))]))
    assert sorted(found) == sorted(wanted)
    begun = documents_of(prepare_dataset(make_data(path, begin_of_document="<s>", **keys), 31))
    start = tokenizer.convert_tokens_to_ids("<s>")
    assert sorted(begun) == sorted(([start, *ids], [False, *counts]) for ids, counts in wanted)
    path.write_text(json.dumps({"prompt": "a", "completion": " "}))
    with pytest.raises(ConfigError, match=r"line 1: the completion is empty"):
        prepare_dataset(make_data(path, **keys), 31)


def test_completions_of_messages(
    tmp_path: Path, make_data: MakeData, tokenizer: PreTrainedTokenizerFast
) -> None:
    chats = conversations(20)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": c[:-1], "completion": c[-1:]}) + "\n" for c in chats)
    )
    data = make_data(path, kind="prompt_completion", tokenizer=str(tmp_path / "tokenizer"))
    found = documents_of(prepare_dataset(data, 511))
    texts = [tokenizer.decode([t for t, counted in zip(*each) if counted]) for each in found]
    assert sorted(texts) == sorted(chat[-1]["content"] + "<|im_end|>\n" for chat in chats)


def test_a_token_before_documents_is_added_once(
    tmp_path: Path, make_data: MakeData, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Paris"}\n{"text": "<s>France"}\n')
    data = make_data(path, tokenizer=str(tmp_path / "tokenizer"), begin_of_document="<s>")
    rows = prepare_dataset(data, 4).rows([0])[0].tolist()
    joined = tokenizer("<s>Paris<|endoftext|><s>France<|endoftext|>", add_special_tokens=False)
    assert rows == joined["input_ids"][:5]
    with pytest.raises(ConfigError, match=r"begin_of_document is '<bos>'"):
        prepare_dataset(
            make_data(path, tokenizer=str(tmp_path / "tokenizer"), begin_of_document="<bos>"), 4
        )


def test_rows_that_are_tokenized_already(tmp_path: Path, make_data: MakeData) -> None:
    rows = [[5, 70_000, 3], [9], [1, 2, 3, 4]]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": rows}), path)
    dataset = prepare_dataset(make_data(path, tokens_field="input_ids"), 3)
    assert dataset.rows([0, 1]).tolist() == [[5, 70_000, 3, 9], [1, 2, 3, 4]]
    assert dataset.facts.num_documents == 3
    lines = tmp_path / "a.jsonl"
    for bad, word in [([1.5], "no token ids"), ([-1], "id -1"), ("x", "no list"), ([], "no list")]:
        lines.write_text(json.dumps({"input_ids": [1, 2]}) + "\n" + json.dumps({"input_ids": bad}))
        with pytest.raises(ConfigError, match=f"line 2.*{word}"):
            prepare_dataset(make_data(lines, tokens_field="input_ids"), 3)
    save_chat_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"70000, outside the 354"):
        prepare_dataset(
            make_data(path, tokens_field="input_ids", tokenizer=str(tmp_path / "tokenizer")), 3
        )


MASKS = {
    "labels": [-100, -100, 3, 4],
    "completion_mask": [0, 0, 1, 1],
    "assistant_masks": [0, 0, 1, 1],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_tokenized_rows_are_theirs(tmp_path: Path, make_data: MakeData, name: str) -> None:
    """Wrong: a prompt that `labels` or a mask leaves out is trained on."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3, 4], name: MASKS[name]}))
    marked = make_data(path, tokens_field="input_ids", packing="best_fit", isolate_documents=True)
    counts, _ = prepare_dataset(marked, 3).marks([0])
    assert counts.tolist() == [[False, False, True, True]]
    with pytest.raises(ConfigError, match=f"'{name}' leaves out 2 of 4.*data.packing: best_fit"):
        prepare_dataset(make_data(path, tokens_field="input_ids"), 3)
    for odd in (MASKS[name][1:], [[1], *MASKS[name][1:]], [None, *MASKS[name][1:]]):
        path.write_text(json.dumps({"input_ids": [1, 2, 3, 4], name: odd}))
        with pytest.raises(ConfigError, match=f"'{name}' holds 3 values for 4 tokens"):
            prepare_dataset(marked, 3)


def test_padding_of_tokenized_rows_is_left_out(tmp_path: Path, make_data: MakeData) -> None:
    """Wrong: rows that were padded to one length train on their padding."""
    path = tmp_path / "a.jsonl"
    padded = [{"input_ids": [7, 8, 9, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}]
    padded.append({"input_ids": [0, 5], "attention_mask": [0, 1]})
    path.write_text("\n".join(json.dumps(each) for each in padded))
    dataset = prepare_dataset(make_data(path, tokens_field="input_ids"), 3)
    assert dataset.rows([0]).tolist() == [[7, 8, 9, 5]]


# packing ------------------------------------------------------------------------------------------


def marked_documents(seed: int, count: int, longest: int) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    documents = []
    for number in range(count):
        length = int(draw.integers(1, longest))
        ids = np.arange(length) + 1000 * number
        documents.append(packing_mark(ids, draw.random(length) < 0.5))
    return documents


def packing_mark(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    from autohet.runtime.data.marks import mark

    return mark(ids, counts, begins=True)


@pytest.mark.parametrize("window", [40, 1 << 20])
@pytest.mark.parametrize("seed", range(5))
def test_best_fit_keeps_documents_whole(
    seed: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document once, whole, in one row; a stream that is cut anywhere gives the same rows."""
    monkeypatch.setattr(packing, "WINDOW_TOKENS", window)
    documents = marked_documents(seed, 60, 16)
    packer = packing.BestFit(16, 0, isolate=True, split=False)
    rows = np.concatenate(list(packer.pack(documents)))
    ids, begins = rows & packing_ids(), (rows & packing.BEGINS) != 0
    found = []
    for row, starts in zip(ids, begins, strict=True):
        borders = [*np.flatnonzero(starts).tolist(), 16]
        found += [row[a:b].tolist() for a, b in itertools.pairwise(borders)]
    kept = [each for each in found if any(each)]
    wanted = [(each & packing_ids()).tolist() for each in documents]
    counted = [each for each, doc in zip(wanted, documents) if (doc[1:] & packing.COUNTS).any()]
    assert [each for each in kept if each in counted] != []
    assert all(each in kept for each in counted)
    assert all(each in wanted for each in kept)
    assert not ((rows & packing.COUNTS != 0) & begins).any(), "no piece predicts another's begin"
    stream = np.concatenate(documents)
    cut = np.split(stream, [7, 8, 30, 100, 101])
    again = packing.BestFit(16, 0, isolate=True, split=False)
    np.testing.assert_array_equal(rows, np.concatenate(list(again.pack(cut))))
    if window > 40:
        full = sum(map(len, documents)) / (16 * (len(rows) + packer.counts.num_dropped_rows))
        assert full > 0.9


def packing_ids() -> np.uint32:
    from autohet.runtime.data.marks import IDS

    return IDS


def test_a_long_document_is_cut_and_counted() -> None:
    document = packing_mark(np.arange(40), np.ones(40, np.bool_))
    cut = packing.BestFit(16, 0, isolate=True, split=False)
    assert len(np.concatenate(list(cut.pack([document])))) == 1
    assert (cut.counts.num_cut, cut.counts.num_cut_tokens) == (1, 24)
    split = packing.BestFit(16, 0, isolate=True, split=True)
    rows = np.concatenate(list(split.pack([document])))
    assert (len(rows), split.counts.num_cut, split.counts.num_cut_tokens) == (3, 1, 0)
    assert split.counts.num_padding_tokens == 8


def test_isolated_text_has_the_rows_of_plain_text(tmp_path: Path, make_data: MakeData) -> None:
    """Only what attention and loss see changes: documents begin where they do in the text."""
    texts = [f"document {number}" * (number % 4) for number in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = prepare_dataset(make_data(path), 15)
    isolated = prepare_dataset(make_data(path, isolate_documents=True), 15)
    indices = range(len(plain))
    np.testing.assert_array_equal(plain.rows(indices), isolated.rows(indices))
    counts, begins = isolated.marks(indices)
    ends = np.cumsum([len(text.encode()) + 1 for text in texts])
    starts = {0, *ends.tolist(), *range(0, 10_000, 16)}
    wanted = np.isin(np.arange(len(plain) * 16), sorted(starts)).reshape(-1, 16)
    np.testing.assert_array_equal(begins, wanted)
    np.testing.assert_array_equal(counts, ~wanted)
    assert isolated.facts.content_sha256 != plain.facts.content_sha256
    assert not plain.is_marked


def test_batches_have_targets_that_do_not_count(
    tmp_path: Path, make_data: MakeData, tokenizer: Any
) -> None:
    path = write_chat(tmp_path / "a.jsonl", conversations(60))
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    dataset = prepare_dataset(data, 127)
    for prefetch in (False, True):
        batches = Batches(dataset, 3, 4, torch.device("cpu"), prefetch)
        tokens, targets = batches(2, range(1, 4))
        begins = batches.begins(2, range(1, 4))
        batches.close()
        assert tokens.shape == targets.shape == begins.shape == (3, 127)
        counted = targets >= 0
        assert set(targets[~counted].tolist()) == {-100}
        shifted = tokens[:, 1:]
        assert torch.equal(targets[:, :-1][counted[:, :-1]], shifted[counted[:, :-1]])
        assert not (counted[:, :-1] & begins[:, 1:]).any()
        assert begins[:, 0].all()


def test_changed_marks_are_found(tmp_path: Path, make_data: MakeData, tokenizer: Any) -> None:
    path = write_chat(tmp_path / "a.jsonl", conversations(60))
    data = make_data(path, kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    dataset = prepare_dataset(data, 127)
    file = dataset.path / "marks.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="corrupt"):
        TokenDataset(dataset.path).verify()
    file.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match="incomplete"):
        TokenDataset(dataset.path)
