"""Equal data gives equal rows in every container, and those of the `datasets` library."""

import json
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from trl.trainer.utils import remove_none_values

from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import save_chat_tokenizer, special_tokens_of, trl_template
from tests.runtime.data.test_chat import documents_of

datasets = pytest.importorskip("datasets")
NUM_RECORDS = 1100
"""More than are read, and written by the library, at once."""
MakeData = Callable[..., DataSection]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] }}"
    "{% if message['name'] is defined %} {{ message['name'] }}{% endif %}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['reasoning_content'] is defined %}{{ message['reasoning_content'] }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}\n"
    "{% else %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
)


def call(number: int) -> dict[str, Any]:
    arguments = {"city": f"town {number}"} if number % 2 else {"degrees": number, "unit": "C"}
    return {"type": "function", "function": {"name": f"f{number % 3}", "arguments": arguments}}


def tool(number: int) -> dict[str, Any]:
    names = ["city"] if number % 2 else ["degrees", "unit"]
    properties = {name: {"type": "string"} for name in names}
    return {"name": f"f{number % 3}", "parameters": {"type": "object", "properties": properties}}


def chat(number: int) -> dict[str, Any]:
    """A record with an oddity or two: optional members, parts, tools of different parameters."""
    asked: dict[str, Any] = {"role": "user", "content": f'What is "{number}" + 2?'}
    answer: dict[str, Any] = {"role": "assistant", "content": f"It is {number + 2}.\n\t\\u00e9é"}
    if number % 3 == 0:
        asked["name"] = "Ada"
    if number % 4 == 0:
        answer["reasoning_content"] = "Let me see. "
    if number % 5 == 0:
        answer = {"role": "assistant", "content": "", "tool_calls": [call(number)]}
    record: dict[str, Any] = {"messages": [asked, answer]}
    if number % 5 < 2:
        record["tools"] = [tool(number), tool(number + 1)]
    return record


def with_parts(record: dict[str, Any]) -> dict[str, Any]:
    """The same record with its texts as lists of parts."""
    messages = []
    for message in record["messages"]:
        messages.append({**message, "content": [{"type": "text", "text": message["content"]}]})
    return {**record, "messages": messages}


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_all(root: Path, records: list[dict[str, Any]]) -> tuple[Any, dict[str, str]]:
    """Write records in each container; return the library's data set of them, and the sources."""
    lines = write_jsonl(root / "lines.jsonl", records)
    write_jsonl(root / "hub" / "data" / "train.jsonl", records)
    keys = {"split": "train", "cache_dir": str(root / "cache-of-datasets")}
    found = datasets.load_dataset("json", data_files=str(lines), **keys)
    found.to_parquet(root / "table.parquet")
    found.save_to_disk(str(root / "saved"))
    (root / "stream.arrow").write_bytes(Path(found.cache_files[0]["filename"]).read_bytes())
    sources = {
        "jsonl": str(lines),
        "parquet": str(root / "table.parquet"),
        "arrow": str(root / "stream.arrow"),
        "saved": str(root / "saved"),
        "hub": f"hf://{root / 'hub'}",
    }
    return found, sources


def rows_of(dataset: TokenDataset) -> np.ndarray:
    return dataset.rows(range(len(dataset)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.mark.parametrize("parts", [False, True])
def test_conversations_of_each_container_are_the_library_s(
    tmp_path: Path, make_data: MakeData, parts: bool
) -> None:
    """Wrong: text of Arrow's JSON type with its quotes, nulls of a union, refused members."""
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    records = [chat(number) for number in range(NUM_RECORDS)]
    if parts:
        records = [with_parts(each) if n % 2 else each for n, each in enumerate(records)]
    found, sources = write_all(tmp_path / "data", records)
    if not parts:
        union = datasets.Dataset.from_list(records)
        assert union[1]["messages"][1]["tool_calls"] is None, "the union has nulls"
        union.to_parquet(tmp_path / "union.parquet")
        sources["union"] = str(tmp_path / "union.parquet")
        texts = [{name: json.dumps(value) for name, value in each.items()} for each in records]
        table = pa.Table.from_pylist(
            texts, pa.schema({"messages": pa.string(), "tools": pa.string()})
        )
        pyarrow.csv.write_csv(table, tmp_path / "texts.csv")
        sources["texts"] = str(tmp_path / "texts.csv")
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
    rows = {}
    for name, source in sources.items():
        dataset = prepare_dataset(make_data(source, **keys), 1023)
        rows[name] = (rows_of(dataset), *dataset.marks(range(len(dataset))))
    for name in sources:
        for one, other in zip(rows["jsonl"], rows[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    wanted = []
    for record in found.select(range(0, NUM_RECORDS, 23)):  # 23: all oddities come together
        record = remove_none_values(record)
        encoded = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        wanted.append((encoded["input_ids"], encoded["assistant_masks"]))
    documents = [(ids, [int(each) for each in mask]) for ids, mask in documents_of(dataset)]
    assert [each for each in wanted if each not in documents] == []


@pytest.mark.parametrize("kind", ["prompt_completion", "preference"])
def test_other_kinds_of_messages_too(tmp_path: Path, make_data: MakeData, kind: str) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    records = []
    for number in range(40):
        prompt, answer = chat(number)["messages"]
        if kind == "preference":
            other = {"role": "assistant", "content": "No idea."}
            records.append({"prompt": [prompt], "chosen": [answer], "rejected": [other]})
        else:
            records.append({"prompt": [prompt], "completion": [answer]})
    _, sources = write_all(tmp_path / "data", records)
    keys = {"kind": kind, "tokenizer": str(tmp_path / "tokenizer")}
    rows = [rows_of(prepare_dataset(make_data(each, **keys), 255)) for each in sources.values()]
    for each in rows[1:]:
        np.testing.assert_array_equal(rows[0], each)


def test_a_number_among_texts_leaves_the_others_as_they_are(
    tmp_path: Path, make_data: MakeData
) -> None:
    records: list[dict[str, Any]] = [{"text": f'say "{n}" \\ é'} for n in range(200)]
    records[77] = {"text": 77}
    found, sources = write_all(tmp_path / "data", records)
    assert found[77]["text"] == 77
    wanted = rows_of(prepare_dataset(make_data(sources["jsonl"], skip_broken_lines=True), 15))
    for source in sources.values():
        dataset = prepare_dataset(make_data(source, skip_broken_lines=True), 15)
        assert dataset.facts.num_broken == 1
        np.testing.assert_array_equal(rows_of(dataset), wanted)
    with pytest.raises(ConfigError, match=r"row 78: .*holds int, not text"):
        prepare_dataset(make_data(sources["parquet"]), 15)


def test_an_answer_that_is_a_number_is_text_among_lists(
    tmp_path: Path, make_data: MakeData
) -> None:
    """`datasets` stores the text 3.10 as it is, beside the JSON of lists."""
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    asked = {"role": "user", "content": "How much?"}
    records = [{"messages": [asked, {"role": "assistant", "content": "3.10"}]}] * 9
    records.append(with_parts(records[0]))
    _, sources = write_all(tmp_path / "data", records)
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
    rows = [rows_of(prepare_dataset(make_data(each, **keys), 63)) for each in sources.values()]
    for each in rows[1:]:
        np.testing.assert_array_equal(rows[0], each)


def test_answers_that_are_numbers_are_their_texts(tmp_path: Path, make_data: MakeData) -> None:
    """Wrong: the `72` that `datasets` stores for text and number alike is refused in a table."""
    save_chat_tokenizer(tmp_path / "tokenizer")
    answers: list[Any] = ["72", 72, "3.10", "so be it", "[1]x"]
    records = [{"prompt": f"What is {n}?", "completion": answers[n % 5]} for n in range(40)]
    _, sources = write_all(tmp_path / "data", records)
    texts = [{**each, "completion": str(each["completion"])} for each in records]
    sources["texts"] = str(write_jsonl(tmp_path / "texts.jsonl", texts))
    keys = {"kind": "prompt_completion", "tokenizer": str(tmp_path / "tokenizer")}
    rows = [rows_of(prepare_dataset(make_data(each, **keys), 63)) for each in sources.values()]
    for each in rows[1:]:
        np.testing.assert_array_equal(rows[0], each)


@pytest.mark.parametrize(("separator", "suffix"), [(",", "csv"), ("\t", "tsv"), (";", "csv")])
def test_a_csv_file_gives_the_rows_of_its_table(
    tmp_path: Path, make_data: MakeData, separator: str, suffix: str
) -> None:
    texts = [f'a, "quoted"; {n}\tline\nand another é' for n in range(50)]
    table = pa.table({"label\nof two, lines": list(range(50)), "text": texts})
    options = pyarrow.csv.WriteOptions(delimiter=separator)
    pyarrow.csv.write_csv(table, tmp_path / f"a.{suffix}", options)
    pq.write_table(table, tmp_path / "a.parquet")
    rows = [
        rows_of(prepare_dataset(make_data(tmp_path / name), 15))
        for name in (f"a.{suffix}", "a.parquet")
    ]
    np.testing.assert_array_equal(*rows)
    if separator == ",":
        keys = {"split": "train", "cache_dir": str(tmp_path / "c")}
        found = datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), **keys)
        assert found["text"][:] == texts


def test_of_columns_with_one_name_the_first_counts(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n,text\n" + "".join(f"document {n},1,other\n" for n in range(9)))
    keys = {"split": "train", "cache_dir": str(tmp_path / "c")}
    found = datasets.load_dataset("csv", data_files=str(path), **keys)
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": each} for each in found["text"]])
    one, other = (rows_of(prepare_dataset(make_data(each), 7)) for each in (path, lines))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "indent"), [("a.json", 2), ("a.jsonl", 2), ("a.json", None)])
def test_json_objects_in_a_row_are_records(
    tmp_path: Path, make_data: MakeData, name: str, indent: int | None
) -> None:
    """Spread over lines, or on one, which `datasets` reads."""
    records = [{"text": f"document {n}"} for n in range(40)]
    (tmp_path / name).write_text(" ".join(json.dumps(each, indent=indent) for each in records))
    keys = {"split": "train", "cache_dir": str(tmp_path / "c")}
    found = datasets.load_dataset("json", data_files=str(tmp_path / name), **keys)
    assert found.to_list() == records
    lines = write_jsonl(tmp_path / "lines.jsonl", records)
    one, other = (rows_of(prepare_dataset(make_data(each), 7)) for each in (tmp_path / name, lines))
    np.testing.assert_array_equal(one, other)


def test_arrow_maps_are_objects(tmp_path: Path, make_data: MakeData) -> None:
    """As Spark and DuckDB write them; `datasets` has no such type."""
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    texts = pa.map_(pa.string(), pa.string())
    message = {"role": "assistant", "content": "It is 4."}
    tool = {"name": "f", "parameters": {"type": "object"}}
    kinds = {
        "messages": pa.list_(texts),
        "tools": pa.list_(pa.struct({"name": pa.string(), "parameters": texts})),
    }
    record = {"messages": [message], "tools": [tool]}
    lines = write_jsonl(tmp_path / "a.jsonl", [record] * 9)
    pairs = {
        "messages": [list(message.items())],
        "tools": [tool | {"parameters": [("type", "object")]}],
    }
    pq.write_table(pa.Table.from_pylist([pairs] * 9, pa.schema(kinds)), tmp_path / "a.parquet")
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
    one, other = (
        rows_of(prepare_dataset(make_data(each, **keys), 63))
        for each in (tmp_path / "a.parquet", lines)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [datetime(2024, 1, 1), b"x", Decimal("1.5")])
@pytest.mark.parametrize("member", ["content", "arguments"])
def test_a_table_s_own_types_are_refused_in_messages(
    tmp_path: Path, make_data: MakeData, value: Any, member: str
) -> None:
    """Wrong: a traceback; `datasets` makes dates of texts (findings/datasets_dates_in_text.sh)."""
    template = trl_template("deepseek_r1_distill") if member == "arguments" else TEMPLATE
    save_chat_tokenizer(tmp_path / "tokenizer", template, special_tokens_of(template))
    message: dict[str, Any] = {"role": "assistant", "content": value}
    if member == "arguments":
        function = {"name": "f", "arguments": {"when": value}}
        message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    asked = {"role": "user", "content": value if member == "content" else "When?"}
    pq.write_table(
        pa.Table.from_pylist([{"messages": [asked, message]}] * 9), tmp_path / "a.parquet"
    )
    data = make_data(tmp_path / "a.parquet", kind="chat", tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=r"row 1: .*not JSON serializable.*store it as text"):
        prepare_dataset(data, 63)


def test_a_conversation_as_python_shows_it_is_no_json(tmp_path: Path, make_data: MakeData) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    table = pa.table({"messages": [str(chat(1)["messages"])]})
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="that is no JSON, which has double quotes"):
        prepare_dataset(
            make_data(tmp_path / "a.csv", kind="chat", tokenizer=str(tmp_path / "tokenizer")), 63
        )


def test_a_row_of_a_table_with_too_many_cells_is_broken_as_for_datasets(
    tmp_path: Path, make_data: MakeData
) -> None:
    """A text with a separator and no quotes would be cut at it."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,so it is\n2,so, it is not\n" + "3,well then\n" * 20)
    keys = {"split": "train", "cache_dir": str(tmp_path / "c")}
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        datasets.load_dataset("csv", data_files=str(path), **keys)
    with pytest.raises(ConfigError, match="row 2: more cells than the 2 of the first line"):
        prepare_dataset(make_data(path), 7)
    left_out = prepare_dataset(make_data(path, skip_broken_lines=True), 7)
    # An empty cell at the end is none.
    path.write_text("id,text\n1,so it is,\n" + "3,well then\n" * 20)
    np.testing.assert_array_equal(rows_of(left_out), rows_of(prepare_dataset(make_data(path), 7)))


def test_labels_of_classes_are_their_names(tmp_path: Path, make_data: MakeData) -> None:
    """Wrong: `datasets` stores the classes' numbers, which no template knows (user is 0)."""
    save_chat_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    text = datasets.Value("string")

    def classes(*names: str) -> Any:
        return datasets.ClassLabel(names=list(names))

    role = classes("system", "user", "assistant")
    call = {"type": classes("function"), "function": {"name": classes("f", "g"), "arguments": text}}
    mark = classes("false", "true")
    message = {"role": role, "content": text, "train": mark, "tool_calls": [call]}
    tools = [{"name": text, "parameters": {"type": classes("object", "array")}}]
    turns = {"from": classes("human", "gpt"), "value": classes("hello", "true", "false")}
    pair = {"prompt": [{"role": role, "content": text}], "label": classes("no", "True")}
    features = {
        "chat": {"messages": [message], "tools": tools},
        # The library's older form: one list for each member.
        "sharegpt": {"conversations": datasets.Sequence(turns)},
        "prompt_completion": pair,
    }
    asked = {"role": "user", "content": "Hello"}
    calls = [{"type": "function", "function": {"name": "g", "arguments": '{"a": 1}'}}]
    answers = [
        {"role": "assistant", "content": "", "train": "true", "tool_calls": calls},
        {"role": "assistant", "content": "No.", "train": "false"},
    ]
    spoken = {"from": ["human", "gpt", "gpt"], "value": ["hello", "true", "false"]}
    records = {
        "chat": {
            "messages": [asked, answers[0], asked, answers[1]],
            "tools": [{"name": "g", "parameters": {"type": "object"}}],
        },
        "sharegpt": {"conversations": spoken},
        "prompt_completion": {"prompt": [asked], "label": "True"},
    }
    for kind, record in records.items():
        named = json.loads(json.dumps(record).replace('"train": "true"', '"train": true'))
        named = json.loads(json.dumps(named).replace('"train": "false"', '"train": false'))
        if kind == "sharegpt":
            pairs = zip(spoken["from"], spoken["value"], strict=True)
            named = {"conversations": [{"from": one, "value": other} for one, other in pairs]}
        lines = write_jsonl(tmp_path / f"{kind}.jsonl", [named] * 9)
        found = datasets.Dataset.from_list([record] * 9, datasets.Features(features[kind]))
        found.to_parquet(tmp_path / f"{kind}.parquet")
        found.save_to_disk(str(tmp_path / kind))
        keys: dict[str, Any] = {"kind": kind, "tokenizer": str(tmp_path / "tokenizer")}
        if kind == "prompt_completion":
            keys["fields"] = {"completion": "label"}
        wanted = documents_of(prepare_dataset(make_data(lines, **keys), 255))
        for source in (tmp_path / f"{kind}.parquet", tmp_path / kind):
            assert documents_of(prepare_dataset(make_data(source, **keys), 255)) == wanted, source
    # The metadata of other writers.
    for number, content in enumerate(("no JSON", '{"info": null}', '{"info": {"features": null}}')):
        table = pq.read_table(tmp_path / "chat.parquet").replace_schema_metadata(
            {"huggingface": content}
        )
        pq.write_table(table, tmp_path / f"{number}.parquet")
        keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer")}
        with pytest.raises(ConfigError, match="unknown role 1; read a directory whose data card"):
            prepare_dataset(make_data(tmp_path / f"{number}.parquet", **keys), 255)
