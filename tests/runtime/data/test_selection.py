"""Which files a source takes, how it reads them, and what it says of the rest."""

import bz2
import gzip
import io
import json
import logging
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from autohet.runtime.data import parts, prepare_dataset
from autohet.runtime.data.sources import select_sources
from autohet.runtime.data.tokenization import ByteTokenizer
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from tests.runtime.data.test_dataset import all_rows, expected_rows, write_jsonl

MakeData = Callable[..., DataSection]
DOCUMENTS = [f"document {number} about something" for number in range(40)]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue().to_pybytes())


def parquet(texts: list[str], column: str = "text") -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({column: texts}), sink)
    return bytes(sink.getvalue().to_pybytes())


def arrow_stream(texts: list[str]) -> bytes:
    """As `datasets.Dataset.save_to_disk` writes its shards."""
    table = pa.table({"text": texts})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return bytes(sink.getvalue().to_pybytes())


def arrow_file(texts: list[str]) -> bytes:
    table = pa.table({"text": texts})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return bytes(sink.getvalue().to_pybytes())


ARRAY = json.dumps([{"text": text} for text in DOCUMENTS])
SPREAD = json.dumps([{"text": text} for text in DOCUMENTS], indent=2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c4-train.00000-of-01024.json", json_lines(DOCUMENTS)),
        ("c4-train.00000-of-01024.json.gz", gzip.compress(json_lines(DOCUMENTS))),
        (
            "dolma.json.gz",
            gzip.compress(json_lines(DOCUMENTS[:9])) + gzip.compress(json_lines(DOCUMENTS[9:])),
        ),
        ("a.json.zst", zstd(json_lines(DOCUMENTS))),
        ("a.json.bz2", bz2.compress(json_lines(DOCUMENTS))),
        ("a.jsonl.xz", lzma.compress(json_lines(DOCUMENTS))),
        ("a.jsonl.gz", json_lines(DOCUMENTS)),  # unpacked, and still called so
        ("a.jsonl", gzip.compress(json_lines(DOCUMENTS))),
        ("a.txt", json_lines(DOCUMENTS)),
        ("part-00000", json_lines(DOCUMENTS)),
        ("bom.json", b"\xef\xbb\xbf" + json_lines(DOCUMENTS)),
        ("crlf.json", json_lines(DOCUMENTS).replace(b"\n", b"\r\n")),
        ("array.json", ARRAY.encode()),
        ("spread.json", SPREAD.encode()),
        ("array.jsonl", ARRAY.encode()),
        ("one-a-line.json", ARRAY.replace("}, {", "},\n{").encode()),
        ("a.parquet", parquet(DOCUMENTS)),
        ("a.json", parquet(DOCUMENTS)),
        ("0f3b7c", parquet(DOCUMENTS)),
        ("data-00000-of-00001.arrow", arrow_stream(DOCUMENTS)),
        ("file.arrow", arrow_file(DOCUMENTS)),
    ],
)
@pytest.mark.parametrize("by", ["name", "directory", "glob"])
def test_the_content_decides(
    tmp_path: Path, make_data: MakeData, name: str, content: bytes, by: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).write_bytes(content)
    source = {"name": folder / name, "directory": folder, "glob": folder / "*"}[by]
    dataset = prepare_dataset(make_data(source), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(DOCUMENTS, 16))
    assert dataset.facts.num_documents == 40


def test_a_first_line_longer_than_the_sample_is_a_line(tmp_path: Path, make_data: MakeData) -> None:
    texts = ["long " * 40_000, "short"]
    (tmp_path / "a.json").write_bytes(json_lines(texts))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json_lines(texts)))
    for name in ("a.json", "b.json.gz"):
        dataset = prepare_dataset(make_data(tmp_path / name), 15)
        np.testing.assert_array_equal(all_rows(dataset), expected_rows(texts, 16))


@pytest.mark.parametrize(
    "text",
    [
        "{% for x in y %}\n{{ x }}\n{% endfor %}\n" * 9,
        "[Verse 1]\nla la la la\n[Chorus]\nla la la\n" * 9,
        '{"key": "value"}\nis an example of JSON.\n' * 9,
        '{\n  "a": {},\n  "b": 2\n}\n' * 9,
        '["one", "two"]\n' * 9,
    ],
)
def test_text_that_only_looks_like_json_stays_text(
    tmp_path: Path, make_data: MakeData, text: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    dataset = prepare_dataset(make_data(tmp_path / "a.txt"), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows([text], 16))


def hub_clone(root: Path) -> Path:
    """What `git clone` of a hub's data set leaves."""
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "config").write_text("[core]\n" * 50)
    (root / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (root / "README.md").write_text("---\nlicense: mit\n---\n# A data set\n" * 500)
    (root / "LICENSE").write_text("Permission is hereby granted\n" * 500)
    (root / "LICENSE.txt").write_text("Permission is hereby granted\n" * 500)
    (root / "card_v2.md").write_text(
        "---\npretty_name: Data\ntask_categories: [x]\n---\n" + "words " * 5000
    )
    (root / "dataset_infos.json").write_text(json.dumps({"default": {"features": {}}}))
    (root / "notes.txt").write_text("some notes\n" * 5000)
    (root / "loader.py").write_text("import datasets\n" * 100)
    (root / "data").mkdir()
    return root


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl.gz"])
def test_a_clone_of_a_hub_data_set_is_its_data(
    tmp_path: Path, make_data: MakeData, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong: the card, the licence, notes or git's files are trained on, or it is refused."""
    root = hub_clone(tmp_path / "clone")
    make = {
        "parquet": parquet,
        "json": json_lines,
        "jsonl.gz": lambda texts: gzip.compress(json_lines(texts)),
    }[kind]
    (root / "data" / f"train-00000.{kind}").write_bytes(make(DOCUMENTS[:30]))
    (root / "data" / f"train-00001.{kind}").write_bytes(make(DOCUMENTS[30:]))
    with caplog.at_level(logging.INFO, "autohet.data"):
        dataset = prepare_dataset(make_data(root), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(DOCUMENTS, 16))
    [line] = [record.getMessage() for record in caplog.records]
    assert f"2 files ({'parquet' if kind == 'parquet' else 'jsonl'};" in line
    assert "40 documents" in line
    assert f"{len(dataset)} rows of 16 tokens" in line
    for name in ("README.md", "LICENSE", "notes.txt", "loader.py", ".git"):
        assert name in line
    assert line == f"Data: {dataset.summary}"
    with caplog.at_level(logging.INFO, "autohet.data"):
        prepare_dataset(make_data(root), 15)
    assert len(caplog.records) == 1, "said once"
    again = prepare_dataset(make_data(root / "data" / f"*.{kind}"), 15)
    assert f"/*.{kind}: 40 documents" in again.summary, "the source of this job, not the first one"


def test_cards_alone_are_no_data(tmp_path: Path, make_data: MakeData) -> None:
    root = hub_clone(tmp_path / "clone")
    for name in ("notes.txt", "loader.py"):
        (root / name).unlink()
    with pytest.raises(ConfigError, match=r"no text, JSONL or Parquet.*README\.md"):
        prepare_dataset(make_data(root), 15)
    with pytest.raises(ConfigError, match=r"README\.md"):
        prepare_dataset(make_data(root / "*.md", format="text"), 15)
    assert len(prepare_dataset(make_data(root / "README.md"), 15)) > 100, "named, it is taken"


def test_a_data_file_named_like_a_licence_is_data(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "c").mkdir()
    write_jsonl(tmp_path / "c" / "licenses.jsonl", DOCUMENTS)
    np.testing.assert_array_equal(
        all_rows(prepare_dataset(make_data(tmp_path / "c"), 15)), expected_rows(DOCUMENTS, 16)
    )


def test_metadata_beside_a_text_corpus_is_left_out(tmp_path: Path, make_data: MakeData) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "a.txt").write_text("a book " * 900)
    (root / "index.json").write_text(json.dumps({"books": ["a.txt"], "size": 1}))
    (root / "files.jsonl").write_text('{"name": "a.txt"}\n')
    dataset = prepare_dataset(make_data(root), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(["a book " * 900], 16))
    assert "index.json" in dataset.summary
    assert "files.jsonl" in dataset.summary


def test_records_without_the_field_are_not_replaced_by_notes(
    tmp_path: Path, make_data: MakeData
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.jsonl").write_text(json.dumps({"content": "x" * 3000}) + "\n")
    (tmp_path / "c" / "notes.txt").write_text("some notes " * 20)
    with pytest.raises(ConfigError, match=r"line 1: no text in field 'text'.*content.*text_field"):
        prepare_dataset(make_data(tmp_path / "c"), 15)


def test_links_to_folders_are_followed_once(tmp_path: Path, make_data: MakeData) -> None:
    """Wrong: half the documents are left out, or a loop of links is walked for ever."""
    outside = tmp_path / "disk" / "more"
    outside.mkdir(parents=True)
    write_jsonl(outside / "b.jsonl", DOCUMENTS[20:])
    root = tmp_path / "corpus"
    root.mkdir()
    write_jsonl(root / "a.jsonl", DOCUMENTS[:20])
    (root / "linked").symlink_to(outside)
    (outside / "back").symlink_to(root)
    (root / "twice").symlink_to(outside)
    (root / "broken").symlink_to(tmp_path / "nothing")
    dataset = prepare_dataset(make_data(root), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(DOCUMENTS, 16))
    assert "twice/" in dataset.summary
    assert "broken" in dataset.summary
    globbed = prepare_dataset(make_data(tmp_path / "corp*"), 15)
    np.testing.assert_array_equal(all_rows(globbed), all_rows(dataset))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("data_format", ["auto", "text"])
def test_a_clone_whose_content_was_not_fetched_is_no_data(
    tmp_path: Path, make_data: MakeData, data_format: str
) -> None:
    """Nothing is left out in silence: one of its two files is there."""
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:20])
    (tmp_path / "b.jsonl").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"1 of 2 files .*b\.jsonl.*git lfs pull"):
        prepare_dataset(make_data(tmp_path, format=data_format), 15)


def test_a_pointer_to_what_is_no_data_is_left_out(tmp_path: Path, make_data: MakeData) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:20])
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    dataset = prepare_dataset(make_data(tmp_path), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(DOCUMENTS[:20], 16))


def tar_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("where", ["file", "directory"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"body,label\nhello,1\n" * 50, ["separated values", "data.format: text"]),
        ("a.bin", bytes(range(256)) * 20, ["binary"]),
        ("a.pdf", b"%PDF-1.4\0\0\0" * 20, ["binary", "PDF", "extract"]),
        ("a.zip", b"PK\x03\x04\0\0" * 20, ["ZIP", "unpack"]),
        ("a.tar.gz", gzip.compress(tar_of(b'{"text": "a"}\n')), ["tar archive", "unpack"]),
        ("tokens.npy", b"\x93NUMPY\x01\0" * 20, ["NumPy", "token ids"]),
        ("a.txt", "text ".encode("utf-16") * 20, ["UTF-16", "iconv"]),
        ("a.txt", POINTER, ["pointer of Git LFS", "git lfs pull"]),
        ("a.jsonl", POINTER, ["pointer of Git LFS", "git lfs pull"]),
        ("a.parquet", POINTER, ["pointer of Git LFS", "git lfs pull"]),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_what_it_is(
    tmp_path: Path, make_data: MakeData, name: str, content: bytes, words: list[str], where: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare_dataset(make_data(folder / name if where == "file" else folder), 15)
    for word in [name, *words]:
        assert word in str(caught.value)
    offers_text = "data.format: text" in str(caught.value)
    assert offers_text == ("data.format: text" in words), "no remedy that does not help"


def test_a_directory_of_other_fields_names_them(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    with pytest.raises(ConfigError, match=r"it has instruction, output.*data\.text_field"):
        prepare_dataset(make_data(tmp_path), 15)


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        (["train.jsonl", "test.jsonl"], "test.jsonl"),
        (["data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"], "validation"),
        (["train/a.jsonl", "dev/a.jsonl"], "dev/a.jsonl"),
        (["train.jsonl", "holdout.jsonl"], "holdout"),
        (["data/train-00000-of-00001.jsonl", "data/more-00000-of-00001.jsonl"], "more"),
        (["data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"], "test_sft"),
        (["train-0.jsonl", "train-1.jsonl"], None),
        (["test.jsonl", "contest.jsonl"], None),
        (["train.jsonl", "latest.jsonl"], None),
    ],
)
def test_records_held_out_beside_those_of_training_are_not_trained_on(
    tmp_path: Path, make_data: MakeData, names: list[str], held_out: str | None
) -> None:
    texts: list[list[str]] = [[f"{name} {n}" for n in range(20)] for name in names]
    for name, of_file in zip(names, texts, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, of_file)
    dataset = prepare_dataset(make_data(tmp_path), 15)
    expected = (
        texts[0] if held_out else [text for _, of in sorted(zip(names, texts)) for text in of]
    )
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(expected, 16))
    assert held_out is None or held_out in dataset.summary


def subset(name: str, **keys: Any) -> dict[str, Any]:
    return {"config_name": name, **keys}


@pytest.mark.parametrize(
    "subsets",
    [
        [subset("default", data_files="en/train*")],
        [subset("all", data_files=["en/train.jsonl", "**/x.jsonl"])],
        [subset("de", data_dir="de"), subset("en", data_dir="en", default=True)],
        [subset("en", data_files=[{"split": "test", "path": "en/test*"}])],
        [subset("en", data_files="en/*.jsonl"), subset("de", data_files="de/train.jsonl")],
        [
            subset("en", data_files=[{"split": "train", "path": ["en/train.jsonl", "de/*"]}]),
            subset("default", data_files=[{"split": "train", "path": "de/train.jsonl"}]),
        ],
    ],
)
def test_the_card_of_a_clone_says_which_files_train(
    tmp_path: Path, make_data: MakeData, subsets: list[dict[str, Any]]
) -> None:
    """Wrong: another language or the test split is trained on, which `datasets` leaves out."""
    root = tmp_path / "clone"
    for name in ("en/train.jsonl", "en/test.jsonl", "de/train.jsonl", "de/x.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(root / name, [f"{name} {n}" for n in range(20)])
    card = yaml.safe_dump({"license": "mit", "configs": subsets})
    (root / "README.md").write_text(f"---\n{card}---\n# A data set\n")
    try:
        library = datasets.load_dataset(str(root), split="train", cache_dir=str(tmp_path / "hf"))
    except ValueError:
        names = "'train'|subsets de, en|splits test"
        with pytest.raises(ConfigError, match=rf"({names}).*hf://DIRECTORY"):
            prepare_dataset(make_data(root), 15)
        return
    dataset = prepare_dataset(make_data(root), 15)
    files = {Path(each.name).relative_to(root) for each in select_sources(make_data(root)).files}
    assert {str(name) for name in files} == {text.split()[0] for text in library["text"]}
    assert dataset.facts.num_documents == len(library)


def test_splits_of_equal_rank_are_not_mixed(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train_sft", "train_gen", "test_sft"):
        write_jsonl(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", DOCUMENTS)
    with pytest.raises(ConfigError, match="the splits train_gen, train_sft; name the files of one"):
        prepare_dataset(make_data(tmp_path), 15)
    assert len(prepare_dataset(make_data(tmp_path / "data" / "train_sft*"), 15))


def test_a_saved_dictionary_of_splits_is_its_train_split(
    tmp_path: Path, make_data: MakeData
) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(20)]})
        for name in ("test", "train", "validation")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    dataset = prepare_dataset(make_data(tmp_path / "saved"), 15)
    expected = datasets.load_from_disk(str(tmp_path / "saved"))["train"]["text"]
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(expected, 16))


def test_text_files_held_out_beside_those_of_training_are_named(
    tmp_path: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("wiki.train.txt", "wiki.test.txt"):
        (tmp_path / name).write_text("a text of some length" * 9)
    prepare_dataset(make_data(tmp_path), 15)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "wiki.test.txt" in warning


def long_window_zstd(content: bytes) -> bytes:
    """One raw block in a frame that asks for a window of 2 GiB (RFC 8878, section 3.1.1)."""
    block = ((len(content) << 3) | 1).to_bytes(3, "little") + content
    return b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + block


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": null}\n', ["line 1", "null", "skip_broken_lines"]),
        ("a.parquet", parquet(["fine", None]), ["row 2", "null", "skip_broken_lines"]),  # type: ignore[list-item]
        ("a.json", json.dumps([{"text": None}]).encode(), ["record 1", "null"]),
        (
            "a.jsonl",
            json.dumps({"text": MESSAGES}).encode(),
            ["2 messages, not text", "data.kind: chat"],
        ),
        (
            "a.jsonl",
            json.dumps({"messages": MESSAGES}).encode(),
            ["found: messages", "data.kind: chat"],
        ),
        ("a.jsonl", b'{"text": 5}\n', ["holds int, not text", "data.text_field"]),
        ("a.jsonl", b'["text"]\n', ["found: a list)"]),
        ("a.jsonl", b'{"text": "fi\n', ["line 1", "not valid JSON", "skip_broken_lines"]),
        ("a.json", b'{"text": "fi\n  \n]', ["neither JSON lines nor one JSON value"]),
        ("a.json", b"[1, 2", ["neither JSON lines nor one JSON value"]),
        ("a.jsonl.zst", long_window_zstd(b'{"text": "fine"}\n'), ["long window", "zstd -d --long"]),
        ("a.jsonl.gz", gzip.compress(json_lines(DOCUMENTS))[:-20], ["cut off", "copy or download"]),
        ("a.jsonl.xz", lzma.compress(json_lines(DOCUMENTS))[:-20], ["cut off", "copy or download"]),
        ("a.json", json.dumps({"data": [{"text": "x"}]}).encode(), ["jq -c '.data[]'"]),
        ("a.parquet", parquet(["x"], "body"), ["no column 'text'", "body", "data.text_field"]),
    ],
)
def test_the_true_reason_and_the_remedy(
    tmp_path: Path, make_data: MakeData, name: str, content: bytes, words: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare_dataset(make_data(tmp_path / name), 15)
    for word in [name, *words]:
        assert word in str(caught.value)


def test_broken_lines_are_skipped_and_counted(
    tmp_path: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    broken = [b'{"text": "cut', b'{"text": null}', b'{"other": 1}', b"[1]", b'{"text": "\xff"}']
    lines = json_lines(DOCUMENTS).splitlines()
    path.write_bytes(b"\n".join([*lines[:10], *broken, b"", *lines[10:]]))
    table = tmp_path / "b.parquet"
    table.write_bytes(parquet([None, "from a table"]))  # type: ignore[list-item]
    with caplog.at_level(logging.INFO, "autohet.data"):
        dataset = prepare_dataset(make_data((str(path), str(table)), skip_broken_lines=True), 15)
    np.testing.assert_array_equal(
        all_rows(dataset), expected_rows([*DOCUMENTS, "from a table"], 16)
    )
    assert (dataset.facts.num_broken, dataset.facts.num_documents) == (6, 41)
    assert "6 broken lines" in dataset.summary
    assert "line 11: not valid JSON" in caplog.text
    again = prepare_dataset(make_data((str(path), str(table)), skip_broken_lines=True), 15)
    assert "6 broken lines" in again.summary, "a data set from the cache says so, too"
    with pytest.raises(ConfigError, match="line 11"):
        prepare_dataset(make_data(path), 15)


def test_broken_lines_alone_are_no_data(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "words"}\n' * 9)
    with pytest.raises(ConfigError, match="all 9 lines are broken"):
        prepare_dataset(make_data(tmp_path / "a.jsonl", skip_broken_lines=True), 15)


def test_parts_of_good_files_are_kept(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a fixed line makes another data set, for which all is tokenized again; or what was
    kept stays on the disk for ever.
    """
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    monkeypatch.setattr(
        "autohet.runtime.data.build.xxh3_64_intdigest", lambda key: int(key.split()[-1])
    )
    root = tmp_path / "corpus"
    root.mkdir()
    for name in "abc":
        write_jsonl(root / f"{name}.jsonl", DOCUMENTS)
    good = (root / "c.jsonl").read_text()
    (root / "c.jsonl").write_text(good.replace('"text"', '"txet"', 1))
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 1"):
        prepare_dataset(make_data(root), 15)
    seen: list[str] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, texts: seen.extend(texts) or encode(self, texts)
    )
    (root / "c.jsonl").write_text(good)
    dataset = prepare_dataset(make_data(root), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(DOCUMENTS * 3, 16))
    assert len(seen) <= 60, "the 80 documents of a and b were there, but for a part of two files"
    assert not list((tmp_path / "cache" / "datasets").glob("*.parts"))


def test_files_with_a_compressed_content_are_not_divided(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a gzip file without the ending is cut at bytes that are no lines."""
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    random = np.random.default_rng(0)
    texts = [bytes(random.integers(97, 122, 300, np.uint8)).decode() for _ in range(20)]
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(json_lines(texts)))
    data = make_data(tmp_path / "a.jsonl")
    assert len(parts.divide(select_sources(data).files)) == 1
    np.testing.assert_array_equal(all_rows(prepare_dataset(data, 15)), expected_rows(texts, 16))
