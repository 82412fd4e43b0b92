"""Records as other people's data sets have them: names of fields, ShareGPT, preferences, files."""

import gzip
import json
import logging
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl.data_utils import common_prefix_length, maybe_extract_prompt

from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.data.tokenization import load_tokenizer
from autohet.runtime.job import DataSection, Job
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import CHATML, save_chat_tokenizer
from tests.runtime.data.test_chat import documents_of
from tests.runtime.data.test_containers import rows_of, write_jsonl

MakeData = Callable[..., DataSection]
DIALOG = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "That."},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    return save_chat_tokenizer(tmp_path / "tokenizer", CHATML)


def same_rows(make: MakeData, root: Path, given: Any, plain: Any, **keys: Any) -> None:
    """Check that `given`, read by `keys`, gives the rows of `plain`, read by its kind alone."""
    kind = {"sharegpt": "chat"}.get(keys["kind"], keys["kind"])
    one = write_jsonl(root / "given.jsonl", given)
    other = write_jsonl(root / "plain.jsonl", plain)
    tokenizer = str(root / "tokenizer")
    found = prepare_dataset(make(one, tokenizer=tokenizer, **keys), 255)
    wanted = prepare_dataset(make(other, tokenizer=tokenizer, kind=kind), 255)
    np.testing.assert_array_equal(rows_of(found), rows_of(wanted))
    for mine, others in zip(found.marks(range(len(found))), wanted.marks(range(len(wanted)))):
        np.testing.assert_array_equal(mine, others)


def test_fields_have_the_names_that_the_job_gives(
    tmp_path: Path, make_data: MakeData, tokenizer: Any
) -> None:
    question = [{"question": f"Why {n}?", "answer": f"So {n}."} for n in range(9)]
    plain = [{"prompt": each["question"], "completion": each["answer"]} for each in question]
    keys: dict[str, Any] = {"kind": "prompt_completion"}
    names: dict[str, Any] = {"prompt": "question", "completion": "answer"}
    same_rows(make_data, tmp_path, question, plain, fields=names, **keys)

    alpaca = [{"instruction": "Add.", "input": x, "output": "3"} for x in ("1 2", "", None)]
    wanted = [{"prompt": p, "completion": "3"} for p in ("Add.\n1 2", "Add.", "Add.")]
    names = {"prompt": ("instruction", "input"), "completion": "output"}
    same_rows(make_data, tmp_path, alpaca, wanted, fields=names, **keys)

    given = [{"dialog": [*DIALOG[:2]]}]
    names = {"messages": "dialog"}
    wanted_chat = [{"messages": DIALOG[:2]}]
    for more in ({}, {"tools": "functions"}):
        same_rows(make_data, tmp_path, given, wanted_chat, fields=names | more, kind="chat")
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": f"text {n}"} for n in range(9)])
    named = prepare_dataset(make_data(path, fields={"text": "body"}), 15)
    np.testing.assert_array_equal(
        rows_of(named), rows_of(prepare_dataset(make_data(path, text_field="body"), 15))
    )
    with pytest.raises(ConfigError, match=r"line 1: .*'completion'.*body.*data\.fields"):
        prepare_dataset(make_data(path, **keys), 15)


TURNS = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
QUESTION = {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize("container", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("record", "remedy", "keys"),
    [
        ({"messages": DIALOG[:2]}, "kind: chat", {"kind": "chat"}),
        ({"conversations": TURNS}, "kind: sharegpt", {"kind": "sharegpt"}),
        ({"prompt": "Why?", "completion": "So."}, "kind: prompt_completion", {}),
        (PAIR, "kind: preference", {}),
        ({**PAIR, "messages": DIALOG[:2]}, "kind: preference", {}),
        ({"input_ids": [1, 2, 3]}, "tokens_field: input_ids", {"tokens_field": "input_ids"}),
        (
            {"question": "Why?", "answer": "So."},
            "kind: prompt_completion, and data.fields: {prompt: question, completion: answer}",
            {"fields": QUESTION},
        ),
        (
            {"Instruction": "Why?", "Context": "", "Response": "So."},
            "kind: prompt_completion, and data.fields:"
            " {prompt: [Instruction, Context], completion: Response}",
            {"fields": {"prompt": ("Instruction", "Context"), "completion": "Response"}},
        ),
        ({"dialog": DIALOG[:2]}, "kind: chat, and data.messages_field: dialog", {}),
        ({"turns": TURNS}, "kind: sharegpt, and data.messages_field: turns", {}),
    ],
)
def test_a_record_of_another_kind_is_told_its_own(
    tmp_path: Path,
    make_data: MakeData,
    tokenizer: Any,
    record: dict[str, Any],
    remedy: str,
    keys: dict[str, Any],
    container: str,
) -> None:
    """Wrong: advice that leads to the next error, such as writing conversations as text."""
    path = tmp_path / container
    if path.suffix == ".jsonl":
        write_jsonl(path, [record] * 9)
    else:
        pq.write_table(pa.Table.from_pylist([record] * 9), path)
        if "messages_field" in remedy:
            remedy = "text_field or data.fields"  # Columns alone have no values to tell by.
    kind, *more = remedy.removeprefix("kind: ").split(", and data.messages_field: ")
    kinds = {"text", "chat", "prompt_completion", "preference"}
    for other in kinds - {kind} - ({"chat"} if "messages" in record else set()):
        data = make_data(path, kind=other, tokenizer=str(tmp_path / "tokenizer"))
        with pytest.raises(ConfigError, match=re.escape(f"; set data.{remedy}")):
            prepare_dataset(data, 15)
    if "text_field" in remedy:
        return
    if "kind" in remedy:
        keys = {
            **keys,
            "kind": kind.split(",")[0],
            **dict.fromkeys(["messages_field"][: len(more)], *more),
        }
    assert len(prepare_dataset(make_data(path, tokenizer=str(tmp_path / "tokenizer"), **keys), 15))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "chat", "fields": {"prompt": "a"}}, ["'prompt'", "messages, tools"]),
        ({"kind": "chat", "fields": {"messages": ("a", "b")}}, ["data.fields.messages"]),
        ({"fields": {"text": "a"}, "text_field": "b"}, ["data.text_field"]),
        ({"kind": "preference", "fields": {"chosen": ""}}, ["data.fields.chosen"]),
    ],
)
def test_fields_that_no_record_is_read_by(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataSection(source="x", **keys)
    assert [word for word in words if word not in str(caught.value)] == []


def test_sharegpt_is_read_as_the_chat_that_it_is(
    tmp_path: Path, make_data: MakeData, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        CHATML.replace("message['content']", "(message['content'] or message['tool_calls']|tojson)")
    )
    turns = [
        {"from": "human", "value": "How warm is it?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"unit": "C"}}'},
        {"from": "observation", "value": "20"},
        {"from": "gpt", "value": "It is 20 C."},
    ]
    function = {"name": "f", "arguments": {"unit": "C"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "It is 20 C."},
    ]
    given = [{"conversations": turns, "system": "Be brief."}]
    same_rows(make_data, tmp_path, given, [{"messages": messages}], kind="sharegpt")
    named = [{"turns": turns, "prompt": "Be brief."}]
    names = {"messages": "turns", "system": "prompt"}
    same_rows(make_data, tmp_path, named, [{"messages": messages}], kind="sharegpt", fields=names)
    odd = [
        {"role": "system", "text": "Be brief."},
        {"from": "Human", "content": "How warm is it?"},
        {"from": "tool_call", "value": {"name": "f", "arguments": {"unit": "C"}}},
        {"from": "tool_response", "value": "20"},
        {"from": "bing", "text": "It is 20 C."},
    ]
    given = [{"conversations": odd}]
    same_rows(make_data, tmp_path, given, [{"messages": messages}], kind="sharegpt")


@pytest.mark.parametrize("num_shared", [0, 1, 3])
def test_a_preference_whose_prompt_is_a_text(
    tmp_path: Path, make_data: MakeData, tokenizer: Any, num_shared: int
) -> None:
    """`ultrafeedback_binarized`: TRL takes the prompt from the messages that the answers share."""
    answers = [{"role": "assistant", "content": text} for text in ("Thus.", "No idea.")]
    shared = DIALOG[-num_shared:] if num_shared else []
    record = {"prompt": "Why?", "chosen": [*shared, answers[0]], "rejected": [*shared, answers[1]]}
    if num_shared:
        plain = maybe_extract_prompt(record)
    else:
        plain = {**record, "prompt": DIALOG[-1:]}
    assert plain["prompt"][-1]["content"] == "Why?"
    same_rows(make_data, tmp_path, [record], [plain], kind="preference")


def test_openais_preferences_are_pairs_with_tools(
    tmp_path: Path, make_data: MakeData, tokenizer: Any
) -> None:
    """Wrong: the prompt inside an object is none, or its tools are left out."""
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Thus.", "No."))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt = {"messages": DIALOG, "tools": tools, "parallel_tool_calls": True}
    given = [{"input": prompt, "preferred_output": chosen, "non_preferred_output": rejected}]
    plain = [{"prompt": DIALOG, "chosen": chosen, "rejected": rejected, "tools": tools}]
    fields = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    same_rows(make_data, tmp_path, given, plain, kind="preference", fields=fields)
    remedy = str(fields).replace("'", "")
    with pytest.raises(ConfigError, match=re.escape(f"set data.fields: {remedy}")):
        same_rows(make_data, tmp_path, given, plain, kind="preference")


def test_a_text_beside_messages_is_one_of_them(
    tmp_path: Path, make_data: MakeData, tokenizer: Any
) -> None:
    given = [
        {"prompt": DIALOG, "completion": "Thus."},
        {"prompt": "Why?", "completion": [{"role": "assistant", "content": "Thus."}]},
    ]
    answer = [{"role": "assistant", "content": "Thus."}]
    plain = [{"prompt": DIALOG, "completion": answer}]
    plain.append({"prompt": DIALOG[-1:], "completion": answer})
    same_rows(make_data, tmp_path, given, plain, kind="prompt_completion")


@pytest.mark.parametrize("kind", ["prompt_completion", "preference"])
def test_messages_in_a_text_are_messages(
    tmp_path: Path, make_data: MakeData, tokenizer: Any, kind: str
) -> None:
    """Wrong: JSON, as a cell of a CSV file has it, is trained on; so is Python's form of a list."""
    answer = [{"role": "assistant", "content": "Thus."}]
    plain = {"prompt": DIALOG, "completion": answer}
    if kind == "preference":
        other = [{"role": "assistant", "content": "No."}]
        plain = {"prompt": DIALOG, "chosen": answer, "rejected": other}
    given = {name: json.dumps(value) for name, value in plain.items()}
    same_rows(make_data, tmp_path, [given], [plain], kind=kind)
    single = {name: value if name == "prompt" else value[0] for name, value in plain.items()}
    same_rows(make_data, tmp_path, [single], [plain], kind=kind)
    spoken = json.loads(json.dumps(single).replace("role", "from").replace("content", "value"))
    same_rows(make_data, tmp_path, [spoken], [plain], kind=kind)
    # Answers that repeat their prompt.
    whole = {name: value if name == "prompt" else DIALOG + value for name, value in plain.items()}
    same_rows(make_data, tmp_path, [whole], [plain], kind=kind)
    data = [{name: str(value) for name, value in plain.items()}]
    path = write_jsonl(tmp_path / "python.jsonl", data)
    with pytest.raises(ConfigError, match="no JSON, which has double quotes"):
        prepare_dataset(make_data(path, tokenizer=str(tmp_path / "tokenizer"), kind=kind), 255)


# the model's own tokenizer, and what it puts before a text ---------------------------------------


def beginning_tokenizer(directory: Path, *before: str) -> PreTrainedTokenizerFast:
    """Save a tokenizer whose post-processor puts special tokens before a text."""
    library = save_chat_tokenizer(directory)
    backend = library.backend_tokenizer
    special = [(token, library.convert_tokens_to_ids(token)) for token in before]
    template = " ".join([*before, "$A"])
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    library.save_pretrained(directory)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
    return loaded


@pytest.mark.parametrize("before", [(), ("<s>",), ("<|im_start|>", "<s>")])
def test_the_tokenizer_s_post_processor_begins_each_text_once(
    tmp_path: Path, make_data: MakeData, before: tuple[str, ...]
) -> None:
    library = beginning_tokenizer(tmp_path / "tokenizer", *before)
    keys: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "isolate_documents": True}
    texts = ["Paris", "".join(before) + "France"]
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    end = library.eos_token_id
    wanted = [library(text)["input_ids"] + [end] for text in ("Paris", "France")]
    assert wanted[0][: len(before)] == library.convert_tokens_to_ids(list(before))
    found = documents_of(prepare_dataset(make_data(path, packing="best_fit", **keys), 31))
    assert sorted(ids for ids, _ in found) == sorted(wanted)
    plain = make_data(path, packing="best_fit", begin_of_document="", **keys)
    kept = [ids for ids, _ in documents_of(prepare_dataset(plain, 31))]
    assert [*library("Paris", add_special_tokens=False)["input_ids"], end] in kept

    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "Why? ", "completion": "So."}])
    pair = make_data(path, kind="prompt_completion", tokenizer=keys["tokenizer"])
    prompt = library("Why? ")["input_ids"]
    completion = library("So.", add_special_tokens=False)["input_ids"]
    (ids, counts), *_ = documents_of(prepare_dataset(pair, 31))
    assert ids == [*prompt, *completion, end]
    assert counts == [place >= len(prompt) for place in range(len(ids))]

    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": DIALOG[:2]}])
    chat = make_data(path, kind="chat", tokenizer=keys["tokenizer"])
    (ids, _), *_ = documents_of(prepare_dataset(chat, 63))
    assert ids == library.apply_chat_template(DIALOG[:2], return_dict=True)["input_ids"]


def sentence_pieces(directory: Path) -> PreTrainedTokenizerFast:
    """Save a tokenizer as Llama 2 has it: a space before each text, bytes for unknown words."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["Why? Paris is so. yes no"] * 9, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    library.save_pretrained(directory)
    return library


def test_a_completion_begins_where_its_prompt_alone_ends(
    tmp_path: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong: encoded by itself, each answer begins with a second space, which no prompt has."""
    library = sentence_pieces(tmp_path / "tokenizer")
    keys: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer")}
    pairs = [
        ("Why?", " Paris"),
        ("Why? ", "Paris"),
        ("Why?", "é so."),
        ("", "yes"),
        ("Why?", " no"),
    ]
    records = [{"prompt": p, "completion": c, "chosen": c, "rejected": "so."} for p, c in pairs]
    path = write_jsonl(tmp_path / "a.jsonl", records)

    def by_trl(prompt: str, *answers: str) -> list[tuple[list[int], list[bool]]]:
        before = library(prompt)["input_ids"]
        wholes = [library(prompt + answer + "</s>")["input_ids"] for answer in answers]
        first = min(common_prefix_length(before, whole) for whole in wholes)
        return [(ids, [place >= max(first, 1) for place in range(len(ids))]) for ids in wholes]

    data = make_data(path, kind="prompt_completion", **keys)
    with caplog.at_level(logging.WARNING):
        found = documents_of(prepare_dataset(data, 31))
    assert sorted(found) == sorted(by_trl(*pair)[0] for pair in pairs)
    assert "merge with their completions" in caplog.text
    data = make_data(path, kind="preference", **keys)
    wanted = [each for prompt, answer in pairs for each in by_trl(prompt, answer, "so.")]
    assert sorted(documents_of(prepare_dataset(data, 63))) == sorted(wanted)


def test_a_tokenizer_that_refuses_unknown_words_has_its_begin_too(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "rose": 2}))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.save(str(tmp_path / "words.json"))
    assert load_tokenizer(str(tmp_path / "words.json")).begin_tokens == (0,)


def job_of(model: dict[str, Any], **data: Any) -> Job:
    return Job.from_document(
        {
            "model": model,
            "training": {"global_batch_sequences": 1, "sequence_length": 15},
            "data": data,
        }
    )


def test_the_model_s_own_tokenizer_is_the_default(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"Paris {n}"} for n in range(20)])
    data: dict[str, Any] = {"source": str(path), "cache": str(tmp_path / "cache")}
    own = {"pretrained": str(tmp_path / "tokenizer")}
    config = {"config": {"model_type": "llama"}}
    rows = []
    for job in (job_of(own, **data), job_of(config, **data, tokenizer=own["pretrained"])):
        assert job.data is not None
        assert job.data.tokenizer == own["pretrained"]
        rows.append(rows_of(prepare_dataset(job.data, 15)))
    np.testing.assert_array_equal(*rows)
    by_config = job_of(config, **data)
    assert by_config.data is not None
    assert by_config.identity()["data.tokenizer"] == "bytes", "as in earlier runs"
    without = job_of(config, **data, begin_of_document="").identity()
    assert without == by_config.identity()
    assert "UTF-8 byte" in prepare_dataset(by_config.data, 15).summary
    hub = job_of({"pretrained": "org/name", "revision": "v2"}, **data)
    assert hub.data is not None
    assert hub.data.tokenizer == "org/name@v2"


@pytest.mark.parametrize(("vocabulary", "is_bytes"), [(256, True), (300, False)])
def test_a_model_without_a_tokenizer_is_of_bytes_or_refused(
    tmp_path: Path, vocabulary: int, is_bytes: bool
) -> None:
    """The library itself makes an empty tokenizer of a config alone, which encodes nothing."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "qwen3", "vocab_size": vocabulary}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"Paris {n}"} for n in range(20)])
    job = job_of(
        {"pretrained": str(tmp_path / "model")}, source=str(path), cache=str(tmp_path / "cache")
    )
    assert job.data is not None
    if is_bytes:
        assert bytes(rows_of(prepare_dataset(job.data, 6))[0].tolist()) == b"Paris 0"
        return
    with pytest.raises(ConfigError, match=r"holds no tokenizer; name in data\.tokenizer"):
        prepare_dataset(job.data, 15)


# rows that are held out ---------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_a_split_holds_rows_out(tmp_path: Path, weights: tuple[float, ...]) -> None:
    entries: list[dict[str, Any]] = []
    for number, count in enumerate((300, 60)):
        path = tmp_path / f"{number}.jsonl"
        write_jsonl(path, [{"text": f"{number}: {n:4} words"} for n in range(count)])
        entries.append({"path": str(path)})
        if weights:
            entries[-1]["weight"] = weights[number]
    document = job_of(
        {"config": {"model_type": "llama"}}, source=entries, cache=str(tmp_path / "cache")
    ).to_document()
    job = Job.from_document({**document, "evaluation": {"split": 0.05}})
    assert job.data is not None
    assert job.evaluation_data is not None
    whole = prepare_dataset(replace(job.data, held_out=0.0), 15)
    kept, held_out = prepare_dataset(job.data, 15), prepare_dataset(job.evaluation_data, 15)
    everything = sorted(map(bytes, rows_of(whole).astype(np.uint8)))
    parts = [sorted(map(bytes, rows_of(each).astype(np.uint8))) for each in (kept, held_out)]
    assert sorted(parts[0] + parts[1]) == everything
    assert not set(parts[0]) & set(parts[1])
    assert len(held_out) == sum(round(0.05 * n) for n in whole.facts.rows_by_source or [len(whole)])
    digests = {each.facts.content_sha256 for each in (whole, kept, held_out)}
    assert len(digests) == 3
    kept.verify()
    assert parts[1] != everything[: len(held_out)], "rows are drawn, not the first"
    if weights:
        rows = kept.sample(0, 0, 4000)
        assert abs((rows < kept.facts.rows_by_source[0]).mean() - 0.75) < 0.03
    again = TokenDataset(*held_out.__reduce__()[1])
    np.testing.assert_array_equal(rows_of(again), rows_of(held_out))


def test_a_split_needs_rows_and_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("sixteen letters.")
    document = job_of({"config": {"model_type": "llama"}}, source=str(path)).to_document()
    with pytest.raises(ConfigError, match=r"evaluation needs one of source .* and split"):
        Job.from_document({**document, "evaluation": {"split": 0.1, "source": "b"}})
    with pytest.raises(ConfigError, match=r"evaluation\.split is 2"):
        Job.from_document({**document, "evaluation": {"split": 2}})
    document["data"]["cache"] = str(tmp_path / "cache")
    job = Job.from_document({**document, "evaluation": {"split": 0.5}})
    assert job.data is not None
    with pytest.raises(ConfigError, match=r"evaluation\.split is 0\.5, which leaves no row"):
        prepare_dataset(job.data, 15)


# files that begin otherwise, and files of which little can be read --------------------------------


def frame(codec: str, content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("size", [4, 200_000])
def test_a_compressed_file_may_begin_with_a_frame_without_data(
    tmp_path: Path, make_data: MakeData, codec: str, size: int
) -> None:
    """`pzstd` writes one before each frame (RFC 8878, section 3.1.2)."""
    if codec == "lz4" and size > 4:
        pytest.skip("a file that shows no more than such a frame is taken as zstd")
    records = [{"text": f"document {n}"} for n in range(3000)]
    lines = write_jsonl(tmp_path / "a.jsonl", records).read_bytes()
    empty = struct.pack("<II", 0x184D2A50, size) + b"x" * size
    middle = lines.index(b"\n", len(lines) // 2) + 1
    halves = [frame(codec, half) for half in (lines[:middle], lines[middle:])]
    packed = tmp_path / f"b.jsonl.{'zst' if codec == 'zstd' else 'lz4'}"
    packed.write_bytes(b"".join(empty + half for half in halves))
    for name in (packed, packed.rename(tmp_path / "c.jsonl")):
        if not name.exists():
            continue
        found = prepare_dataset(make_data(name), 15)
        np.testing.assert_array_equal(
            rows_of(found), rows_of(prepare_dataset(make_data(tmp_path / "a.jsonl"), 15))
        )


def test_what_is_left_out_has_its_bytes(tmp_path: Path, make_data: MakeData) -> None:
    lines = [json.dumps({"text": f"document {n}"}) for n in range(100)]
    lines[50] = '{"text": "cut' + "x" * 100
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    dataset = prepare_dataset(make_data(path, skip_broken_lines=True), 15)
    assert "1 broken lines (113 bytes)" in dataset.summary


@pytest.mark.parametrize("name", ["garbled", "fieldless", "table"])
def test_a_file_of_which_little_can_be_read_is_an_error(
    tmp_path: Path, make_data: MakeData, name: str
) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps({"text": "good " * 9999}) + "\n")
    good = '{"text": "good"}\n'
    if name == "garbled":
        garbage = bytes(gzip.compress(np.random.default_rng(0).bytes(20_000)))[10:]
        path = tmp_path / "b.jsonl"
        path.write_bytes(good.encode() + garbage.replace(b"\0", b"\n"))
    elif name == "fieldless":
        path = tmp_path / "b.jsonl"
        path.write_text(good + '{"body": "other"}\n' * 30)
    else:
        path = tmp_path / "b.jsonl"
        path.write_text("\n".join(json.dumps({"text": None}) for _ in range(30)))
    data = make_data(tmp_path, skip_broken_lines=True)
    with pytest.raises(ConfigError, match=r"b\.jsonl.*too many to leave out \(the first: .*line"):
        prepare_dataset(data, 15)
