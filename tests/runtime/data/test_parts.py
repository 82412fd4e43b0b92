"""A dataset made in parts: by one builder or many, killed or not, it is the dataset that one
uninterrupted builder makes.
"""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autohet.runtime.data import build, parts, prepare_dataset
from autohet.runtime.data.documents import FileRange, read_pieces
from autohet.runtime.data.parts import Finished, PartsStore, divide
from autohet.runtime.data.sources import list_sources
from autohet.runtime.data.tokenization import ByteTokenizer
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from tests.runtime.data.test_dataset import all_rows, expected_rows, write_jsonl

MakeData = Callable[..., DataSection]
TEXTS = [f"document {number} " + "x" * (number * 37 % 211) + "\nend\n" for number in range(200)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that are tokenized from now on."""
    seen: list[str] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, texts: seen.extend(texts) or encode(self, texts)
    )
    return seen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_stretches_of_a_file_are_its_lines_once(tmp_path: Path, kind: str, seed: int) -> None:
    """Wrong: a line that begins at a border is read twice or never; a document's end comes with no
    stretch, or with two.
    """
    draw = random.Random(seed)
    lines = ["".join(draw.choices("ab ü\r", k=draw.choice([0, 1, 5, 40, 300]))) for _ in range(60)]
    path = tmp_path / "a"
    text = "\n".join(lines) + draw.choice(["", "\n", "\n\n"])
    path.write_bytes(
        text.encode()
        if kind == "text"
        else "".join(json.dumps({"text": t}) + "\n" for t in lines).encode()
    )
    size = path.stat().st_size
    borders = sorted({draw.randrange(1, size) for _ in range(12)})
    pieces = [
        piece
        for start, stop in zip([0, *borders], [*borders, None], strict=True)
        for piece in read_pieces(FileRange(path, "a", kind, start, stop), "text")
    ]
    whole = list(read_pieces(FileRange(path, "a", kind), "text"))
    if kind == "jsonl":
        assert pieces == whole
    else:
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_parts_make_the_same_rows_as_one_stream(tmp_path: Path, make_data: MakeData) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:150])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[150:152])
    write_jsonl(tmp_path / "c.jsonl", TEXTS[152:])
    data = make_data(tmp_path / "*.jsonl")
    assert len(divide(list_sources(data))) > 20
    told: list[tuple[int, int]] = []
    dataset = prepare_dataset(data, 15, progress=lambda done, total: told.append((done, total)))
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(TEXTS, 16))
    assert dataset.facts.num_documents == len(TEXTS)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert not list((tmp_path / "cache" / "datasets").glob("*.parts"))


def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path, make_data: MakeData) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with path.open("a") as file:
        file.write('{"text": "fine"}\n{"body": 1}\n')
    with pytest.raises(ConfigError, match=f"line {len(TEXTS) + 2}:"):
        prepare_dataset(make_data(path), 15)


SLOW_BUILDER = """
import sys, time
from autohet.runtime.data import parts, prepare_dataset
from autohet.runtime.data.tokenization import ByteTokenizer
from autohet.runtime.job import DataSection
parts.PART_BYTES = 1000
encode = ByteTokenizer.encode
ByteTokenizer.encode = lambda self, texts: time.sleep(0.05) or encode(self, texts)
prepare_dataset(DataSection(source=sys.argv[1], cache=sys.argv[2]), 15)
"""


def test_a_kill_in_the_middle_is_gone_on_from(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: the next builder deletes what the killed one had tokenized."""
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILDER, str(path), str(tmp_path / "cache")]
    )
    deadline = time.monotonic() + 60
    while len(done := list((tmp_path / "cache" / "datasets").glob("*.parts/*.tokens"))) < 5:
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    seen = count_encodings(monkeypatch)
    dataset = prepare_dataset(make_data(path), 15)
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(TEXTS, 16))
    kept = sum(Finished.from_name(file.name).num_documents for file in done)  # type: ignore[union-attr]
    assert 0 < len(seen) <= len(TEXTS) - kept


def test_a_damaged_part_is_made_anew(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    write = PartsStore.write
    damaged: list[Path] = []

    def write_and_damage(self, part, *arguments):  # type: ignore[no-untyped-def]
        finished = write(self, part, *arguments)
        if part.index == 3 and not damaged:
            damaged.append(self.directory / finished.name)
            content = bytearray(damaged[0].read_bytes())
            content[10] ^= 1
            damaged[0].write_bytes(content)
        return finished

    monkeypatch.setattr(PartsStore, "write", write_and_damage)
    np.testing.assert_array_equal(all_rows(prepare_dataset(data, 15)), expected_rows(TEXTS, 16))
    assert damaged


def test_nodes_of_one_directory_share_the_work(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts, as two threads: the lock of one does not hold up the other, and together they
    tokenize little twice.
    """
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    host = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: host.name)
    seen = count_encodings(monkeypatch)
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, texts: time.sleep(0.02) or encode(self, texts)
    )
    found: dict[str, str] = {}
    by_host: dict[str, int] = {}
    write, both_begin = PartsStore.write, threading.Barrier(2)

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        if host.name not in by_host:
            both_begin.wait(30)
        by_host[host.name] = by_host.get(host.name, 0) + 1
        return write(self, *arguments)

    monkeypatch.setattr(PartsStore, "write", counted)

    def build(name: str) -> None:
        host.name = name
        found[name] = prepare_dataset(data, 15).facts.content_sha256

    threads = [threading.Thread(target=build, args=(name,)) for name in ("node-a", "node-b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert len(set(found.values())) == 1
    num_parts = len(divide(list_sources(data)))
    assert min(by_host.values()) >= 3
    assert sum(by_host.values()) <= 1.5 * num_parts  # each by itself: twice
    assert len(seen) <= 1.5 * len(TEXTS)


@pytest.mark.parametrize("other_is_done", [True, False])
def test_parts_that_another_node_removes_after_the_last_are_no_error(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, other_is_done: bool
) -> None:
    """The other has made the dataset and is amid removing its parts, or has found one corrupt.

    Wrong: KeyError, since a listing of the parts is believed to have them all.
    """
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    tokenize, calls = build._Build._tokenize, list[int]()

    def lossy(self, store):  # type: ignore[no-untyped-def]
        finished = dict(tokenize(self, store))
        calls.append(len(finished))
        if len(calls) == 1:
            if other_is_done:
                self._assemble(store, finished)
            (store.directory / finished.pop(5).name).unlink()
        return finished

    monkeypatch.setattr(build._Build, "_tokenize", lossy)
    np.testing.assert_array_equal(all_rows(prepare_dataset(data, 15)), expected_rows(TEXTS, 16))
    assert len(calls) == (1 if other_is_done else 2)


def test_what_a_node_published_no_other_tokenizes(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of their own, one storage; a published part that is not as its name says is not
    believed.
    """
    path, shared = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "shared"
    first = prepare_dataset(make_data(path, cache=str(tmp_path / "one")), 15, shared=str(shared))
    published = sorted(shared.glob("tokens-*/*.tokens"))
    assert len(published) == len(divide(list_sources(make_data(path))))
    bad = Finished.from_name(published[4].name)
    assert bad is not None
    published[4].write_bytes(bytes(published[4].stat().st_size))
    seen = count_encodings(monkeypatch)
    second = prepare_dataset(make_data(path, cache=str(tmp_path / "two")), 15, shared=str(shared))
    assert second.facts.content_sha256 == first.facts.content_sha256
    assert len(seen) == bad.num_documents


def test_a_shared_storage_that_fails_is_done_without(tmp_path: Path, make_data: MakeData) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "shared").write_text("no directory")
    dataset = prepare_dataset(make_data(path), 15, shared=str(tmp_path / "shared"))
    np.testing.assert_array_equal(all_rows(dataset), expected_rows(TEXTS, 16))


def test_progress_can_end_the_preparation(tmp_path: Path, make_data: MakeData) -> None:
    """An agent that closes does not wait for the corpus; what was done stays."""
    data = make_data(write_jsonl(tmp_path / "a.jsonl", TEXTS))

    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_dataset(data, 15, progress=stop)
    assert len(list((tmp_path / "cache" / "datasets").glob("*.parts/*.tokens"))) >= 5
