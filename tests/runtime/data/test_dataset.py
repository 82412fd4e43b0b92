"""Token datasets against what plain Python makes of the same files."""

import bz2
import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autohet.runtime.data import TokenDataset, build, documents, parts, prepare_dataset, row_writer
from autohet.runtime.job import DataSection
from planner.errors import ConfigError

MakeData = Callable[..., DataSection]
TEXTS = [
    "The first document.\n",
    "Zweites, mit Ümläuten: äöü\nund zwei Zeilen",
    "",
    "第三个文档\n" * 40,
]


def expected_rows(texts: list[str], row_tokens: int) -> np.ndarray:
    """Independent of the code under test: bytes joined by NUL, cut into rows, the rest dropped."""
    stream = b"".join(text.encode() + b"\0" for text in texts)
    num_rows = len(stream) // row_tokens
    return (
        np.frombuffer(stream[: num_rows * row_tokens], np.uint8)
        .reshape(num_rows, row_tokens)
        .astype(np.int64)
    )


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    return path


def all_rows(dataset: TokenDataset) -> np.ndarray:
    return dataset.rows(np.arange(len(dataset)))


def test_jsonl_rows_are_the_packed_documents(tmp_path: Path, make_data: MakeData) -> None:
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)
    rows = all_rows(dataset)
    np.testing.assert_array_equal(rows, expected_rows(TEXTS, 16))
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(dataset.row(3), rows[3])
    assert dataset.row(3).dtype == np.int64
    assert (dataset.sequence_length, dataset.vocab_size, dataset.facts.num_documents) == (
        15,
        256,
        4,
    )
    assert dataset.facts.max_token == rows.max()
    dataset.verify()


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.zst", ".parquet"])
def test_formats_and_compressions_give_the_same_content(
    tmp_path: Path, make_data: MakeData, ending: str
) -> None:
    path = write_jsonl(tmp_path / "plain.jsonl", TEXTS)
    target = tmp_path / f"other{ending}"
    raw = path.read_bytes()
    if ending == ".parquet":
        pq.write_table(pa.table({"text": TEXTS, "other": [1, 2, 3, 4]}), target)
    elif ending == ".jsonl.zst":
        with pa.output_stream(str(target), compression="zstd") as stream:
            stream.write(raw)
    else:
        target.write_bytes(
            {".gz": gzip.compress, ".bz2": bz2.compress}.get(target.suffix, bytes)(raw)
        )
    plain, other = prepare_dataset(make_data(path), 15), prepare_dataset(make_data(target), 15)
    assert other.facts.content_sha256 == plain.facts.content_sha256
    np.testing.assert_array_equal(all_rows(other), expected_rows(TEXTS, 16))


def test_rows_span_batches(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {number} " * (number % 7) for number in range(300)]
    monkeypatch.setattr(row_writer, "TOKENS_PER_BATCH", 100)
    monkeypatch.setattr(parts, "TEXTS_PER_CALL", 7)
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", texts)), 15)
    assert dataset.facts.rows_per_batch == 6
    rows = expected_rows(texts, 16)
    assert len(dataset) == len(rows) > 100
    np.testing.assert_array_equal(all_rows(dataset), rows)
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(dataset.rows(order), rows[order])
    dataset.verify()


def test_text_is_cut_into_pieces_without_loss(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "äöü line\n" * 50 + "x" * 500 + "\nlast"
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 37)
    pieces = list(
        documents.read_pieces(documents.FileRange(tmp_path / "a.txt", "a.txt", "text"), "text")
    )
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) < 6 * 37
    dataset = prepare_dataset(make_data(tmp_path / "a.txt"), 7)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows([text], 8))


def test_directory_takes_text_files_in_the_order_of_names(
    tmp_path: Path, make_data: MakeData
) -> None:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_text("bbbbbbbb")
    (root / "sub" / "c.md").write_text("cccccccc")
    (root / "a.text").write_text("aaaaaaaa")
    (root / "picture.png").write_bytes(b"\xff\xfe")
    (root / ".hidden.txt").write_text("hidden")
    dataset = prepare_dataset(make_data(root), 8)
    assert bytes(all_rows(dataset).astype(np.uint8).ravel()) == b"aaaaaaaa\0bbbbbbbb\0cccccccc\0"
    write_jsonl(root / "a.jsonl", ["aaaaaaaa"])
    globbed = prepare_dataset(make_data((str(root / "*.txt"), str(root / "*.jsonl"))), 8)
    assert bytes(all_rows(globbed).astype(np.uint8).ravel()) == b"bbbbbbbb\0aaaaaaaa\0"


def test_python_library_is_a_corpus_on_any_machine(make_data: MakeData) -> None:
    dataset = prepare_dataset(make_data("builtin:python-stdlib"), 128)
    assert len(dataset) > 20_000
    assert b"def " in b"".join(bytes(dataset.row(index).astype(np.uint8)) for index in range(100))


def test_library_tokenizer(tmp_path: Path, make_data: MakeData) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<|endoftext|>": 70_001, "first": 5, "second": 66_000}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "words.json"))
    # A text that holds its end gets no other, as in TRL.
    path = write_jsonl(tmp_path / "a.jsonl", ["first second<|endoftext|>", "second other"])
    dataset = prepare_dataset(make_data(path, tokenizer=str(tmp_path / "words.json")), 2)
    assert all_rows(dataset).tolist() == [[5, 66_000, 70_001], [66_000, 0, 70_001]]
    assert (dataset.facts.token_dtype, dataset.vocab_size) == ("uint32", 70_002)
    with pytest.raises(ConfigError, match=r"<none>.*end_of_document"):
        prepare_dataset(
            make_data(path, tokenizer=str(tmp_path / "words.json"), end_of_document="<none>"), 2
        )


def test_cache_is_used_and_a_stale_one_is_not(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = prepare_dataset(make_data(path), 15)
    with monkeypatch.context() as patch:
        patch.setattr(build, "_Build", lambda *arguments: pytest.fail("built again"))
        assert prepare_dataset(make_data(path), 15).path == first.path
    write_jsonl(path, [*TEXTS, "one more document of some length"])
    second = prepare_dataset(make_data(path), 15)
    assert second.facts.content_sha256 != first.facts.content_sha256
    assert len(second) == len(first) + 2
    assert prepare_dataset(make_data(path), 7).facts.row_tokens == 8


@pytest.mark.parametrize("damage", ["truncate", "no facts", "bad facts"])
def test_an_incomplete_cache_is_rebuilt(tmp_path: Path, make_data: MakeData, damage: str) -> None:
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    built = prepare_dataset(data, 15).path
    if damage == "truncate":
        (built / "tokens.arrow").write_bytes((built / "tokens.arrow").read_bytes()[:-10])
    elif damage == "no facts":
        (built / "dataset.json").unlink()
    else:
        (built / "dataset.json").write_text('{"version": 1}')
    with pytest.raises(ConfigError, match=r"delete it|holds no token dataset"):
        TokenDataset(built)
    np.testing.assert_array_equal(all_rows(prepare_dataset(data, 15)), expected_rows(TEXTS, 16))


def test_changed_tokens_are_found(tmp_path: Path, make_data: MakeData) -> None:
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)
    file = dataset.path / "tokens.arrow"
    content = bytearray(file.read_bytes())
    place = content.index("first".encode("utf-16-le"))
    content[place] += 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="corrupt"):
        TokenDataset(dataset.path).verify()


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "x" * 100 + '"}\n{"body": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        prepare_dataset(make_data(path), 15)
    assert [file.suffix for file in (tmp_path / "cache" / "datasets").iterdir()] == [".lock"]


def test_threads_build_once(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    builds = []
    monkeypatch.setattr(build, "_sync", lambda directory: builds.append(directory.name))
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(prepare_dataset(data, 15).facts.content_sha256)
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert len([name for name in builds if "building" in name]) == 1


def test_the_wait_for_another_builder_ends(tmp_path: Path, make_data: MakeData) -> None:
    """Another process holds the lock; when it dies, the kernel gives the lock to the next."""
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS), build_timeout_s=0.2)
    target = prepare_dataset(data, 15).path
    (target / "dataset.json").unlink()
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held', flush=True)"
    )
    program += "; sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(next(target.parent.glob("*.lock")))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="build_timeout_s"):
            prepare_dataset(data, 15)
    finally:
        holder.kill()
        holder.communicate()
    assert len(prepare_dataset(data, 15)) == len(expected_rows(TEXTS, 16))


def test_no_row_is_read_by_a_page_fault(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One keeps the interpreter for as long as the disk takes, and with it the worker's signs of
    life.
    """
    monkeypatch.setattr(row_writer, "TOKENS_PER_BATCH", 1 << 18)
    dataset = prepare_dataset(
        make_data(write_jsonl(tmp_path / "a.jsonl", ["the quick brown fox " * (1 << 18)])), 1023
    )

    def resident_bytes() -> int:
        """Of the mapped token file, as the kernel counts its pages."""
        entries = Path("/proc/self/smaps").read_text().split(str(dataset.path / "tokens.arrow"))[1:]
        return sum(1024 * int(entry.split("Rss:")[1].split()[0]) for entry in entries)

    dataset.rows(range(len(dataset)))
    assert resident_bytes() < dataset.facts.file_bytes / 2, (
        "headers, with the pages that the kernel maps around them"
    )
    dataset.verify()
    assert resident_bytes() > dataset.facts.file_bytes / 2, "what is looked at is that mapping"


def test_a_token_file_that_is_cut_off_under_its_reader_is_said(
    tmp_path: Path, make_data: MakeData
) -> None:
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS * 50)), 15)
    dataset.rows(range(len(dataset)))
    os.truncate(dataset.path / "tokens.arrow", 4096)
    with pytest.raises(OSError, match="cut off"):
        dataset.rows(range(len(dataset)))


def test_reading_a_batch_imports_no_pandas(tmp_path: Path, make_data: MakeData) -> None:
    """Its import would be paid by every worker's first step; only a process of its own can tell."""
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)
    program = (
        "import sys, torch; from autohet.runtime.step.batches import Batches;"
        " from autohet.runtime.data import TokenDataset"
    )
    program += (
        "; tokens, _ = Batches(TokenDataset(sys.argv[1]), 0, 2, torch.device('cpu'))(0, range(2))"
    )
    program += "; print(tuple(tokens.shape), 'pandas' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(dataset.path)], stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.decode().split("\n")[0] == "(2, 15) False"


def test_disk_full_is_said(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_sync", full)
    with pytest.raises(ConfigError, match=r"No space left on device; point data\.cache"):
        prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)


def test_a_dataset_pickles_as_its_path(tmp_path: Path, make_data: MakeData) -> None:
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(dataset)).row(2), dataset.row(2))
    with pytest.raises(IndexError, match="row -1"):
        dataset.row(-1)
    with pytest.raises(IndexError, match=str(len(dataset))):
        dataset.rows([0, len(dataset)])


def test_check_against_the_model(tmp_path: Path, make_data: MakeData) -> None:
    dataset = prepare_dataset(make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS)), 15)
    dataset.check(vocab_size=dataset.facts.max_token + 1, global_batch_sequences=len(dataset))
    with pytest.raises(ConfigError, match=r"token id \d+.*vocab_size is 128"):
        dataset.check(vocab_size=128, global_batch_sequences=1)
    with pytest.raises(ConfigError, match=r"fewer than the 10000 of one global batch"):
        dataset.check(vocab_size=256, global_batch_sequences=10_000)


def bad_sources(root: Path) -> dict[str, tuple[DataSection, str]]:
    files = {
        "empty.txt": b"",
        "short.txt": b"short",
        "latin.txt": "Grüße".encode("latin-1") * 20,
        "broken.jsonl": b'{"text": "fine"}\n{"text": \n',
        "list.jsonl": b"[1]\n",
        "number.jsonl": b'{"text": 5}\n',
        "not.parquet": b"PAR1 no",
        "broken.jsonl.gz": b"\x1f\x8b no",
        "other.bin": b"\0",
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    (root / "void").mkdir()
    (root / "binary").mkdir()
    (root / "binary" / "a.bin").write_bytes(b"1")
    (root / "binary" / "b.bin").write_bytes(b"2")
    pq.write_table(pa.table({"body": ["x"], "text": [1]}), root / "columns.parquet")
    changed = root / "changed.parquet"
    pq.write_table(pa.table({"text": ["word"]}), changed, write_page_checksum=True)
    changed.write_bytes(changed.read_bytes().replace(b"word", b"ward", 1))
    words = {
        "nowhere.txt": "does not exist",
        "void": "without files",
        "binary": "no text, JSONL or Parquet",
        "empty.txt": "empty",
        "short.txt": "6 tokens, fewer than one row",
        "latin.txt": "not UTF-8 text (near byte 2)",
        "broken.jsonl": "line 2: not valid JSON",
        "list.jsonl": "line 1: no text in field 'text' (found: a list)",
        "number.jsonl": "line 1: no text in field 'text' (found: text)",
        "not.parquet": "as Parquet",
        "changed.parquet": "CRC checksum verification failed",
        "broken.jsonl.gz": "broken.jsonl.gz",
        "columns.parquet": "holds int, not text",
    }
    cases = {name: (DataSection(source=str(root / name)), word) for name, word in words.items()}
    cases["field"] = (
        DataSection(source=str(root / "columns.parquet"), text_field="zzz"),
        "no column 'zzz' (found: body",
    )
    cases["builtin"] = (DataSection(source="builtin:shakespeare"), "builtin:python-stdlib")
    cases["tokenizer"] = (
        DataSection(source=str(root / "short.txt"), tokenizer=str(root / "short.txt")),
        "tokenizers JSON",
    )
    cases["no tokenizer"] = (
        DataSection(source=str(root / "short.txt"), tokenizer="./no/such"),
        "cannot load './no/such'",
    )
    return cases


def test_bad_sources_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = tmp_path / "root"
    root.mkdir()
    for name, (data, word) in bad_sources(root).items():
        with pytest.raises(ConfigError) as caught:
            prepare_dataset(data, 63)
        assert word in str(caught.value), name


def test_a_dataset_that_another_node_commits_meanwhile_is_taken_and_not_replaced(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    whole = prepare_dataset(data, 15).path
    theirs, rename = tmp_path / "theirs", os.rename
    shutil.move(whole, theirs)

    def late(source: Path, target: Path) -> None:
        if Path(target) == whole and not whole.exists():
            shutil.copytree(theirs, whole)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    dataset = prepare_dataset(data, 15)
    assert dataset.path == whole
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(TEXTS, 16))
    assert [path.name for path in whole.parent.glob("*building*")] == []
