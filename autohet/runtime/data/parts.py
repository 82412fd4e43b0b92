"""Parts of a corpus: each is tokenized separately, by any builder, and committed by one rename.

Parts make preparation resumable (parts that a killed builder has committed stay) and let nodes that
share a directory or a storage share the work. No builder claims a part. Each builder walks the
parts in its own order, so two builders seldom do the same part. If they do, they write the same
bytes under the same name.

A part's file holds its tokens in the dataset's dtype; the end token follows each document. Its name
holds the number of tokens and of documents, their xxh3-64, and what was skipped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from autohet.runtime.data.documents import (
    FileRange,
    TextPiece,
    is_divisible,
    read_documents,
    read_pieces,
)
from autohet.runtime.data.examples import Example, ExampleKind, begun
from autohet.runtime.data.marks import mark
from autohet.runtime.data.records import BrokenLines
from autohet.runtime.data.selection import SourceFile
from autohet.runtime.data.sources import S3_SCHEME, local_copy
from autohet.runtime.data.tokenization import Tokenizer
from recovery.storage.errors import ObjectExists, StorageError
from recovery.storage.payload import BytesPayload
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet.data")
PART_BYTES = 64 << 20
"""Bytes of source text in a part.

A part takes seconds, so little work is lost with a builder; a terabyte still gives few enough
files.
"""
TOKENS_PER_READ = 1 << 22
TEXTS_PER_CALL = 1024
CHARACTERS_PER_CALL = 1 << 20
EXAMPLES_PER_CALL = 256
READING_VERSION = 7
"""Version of the way records are read; it changes whenever equal files could give other tokens."""
KEYS_FILE = "keys.json"
FAILED_FILE = "failed"
"""Marker file in the parts directory of a build that failed because a source was wrong."""
_NAME = re.compile(r"(\d{6})-(\d+)-(\d+)-([0-9a-f]{16})(?:-(\d+)-(\d+)(?:-(\d+))?)?\.tokens")


class DatasetSlice(NamedTuple):
    """Lines of a divisible file that begin in the bytes [start, stop); stop None: to its end."""

    file: SourceFile
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Part:
    """Slices that are tokenized together, in order."""

    index: int
    slices: tuple[DatasetSlice, ...]
    num_bytes: int


@dataclass(frozen=True)
class Reading:
    """Rules for turning sources into tokens."""

    tokenizer: Tokenizer
    text_field: str
    skip_broken: bool = False
    examples: ExampleKind | None = None
    """Conversion of records into examples; None: the records hold text."""
    begin_tokens: tuple[int, ...] = ()
    """Tokens to insert before each document that does not begin with them."""
    marked: bool = False
    """True if tokens carry their marks (`marks.py`)."""

    @property
    def additions(self) -> list[object]:
        """Key entries for each rule that differs from plain text, joined and cut; else empty."""
        found: list[object] = []
        if self.skip_broken:
            found.append("skip_broken_lines")
        if self.examples is not None:
            found.append(self.examples.identity)
        if self.begin_tokens:
            found.append(f"begin {self.begin_tokens}")
        if self.marked:
            found.append("marked")
        return found

    def key(self, part: Part) -> str:
        """Return a key of the part's files, their versions and these rules.

        It changes whenever the part's tokens could change. Equal parts of two datasets have equal
        keys.
        """
        slices = [[each.file[:4], each.start, each.stop] for each in part.slices]
        reading = [
            READING_VERSION,
            self.tokenizer.identity,
            self.text_field,
            *self.additions,
        ]
        document = json.dumps([slices, reading])
        return hashlib.sha256(document.encode()).hexdigest()


@dataclass(frozen=True)
class Finished:
    """A committed part, described by its file's name."""

    index: int
    num_tokens: int
    num_documents: int
    digest: str
    num_broken: int = 0
    """Number of skipped broken lines."""
    num_untargeted: int = 0
    """Number of dropped documents, which have no target."""
    num_broken_bytes: int = 0
    """Bytes of the skipped lines."""

    @classmethod
    def from_name(cls, name: str) -> Finished | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        index, num_tokens, num_documents, digest, *left_out = match.groups()
        counts = [int(each or 0) for each in left_out]
        return cls(int(index), int(num_tokens), int(num_documents), digest, *counts)

    @property
    def name(self) -> str:
        counts = f"{self.num_tokens}-{self.num_documents}"
        left_out = ""
        if self.num_broken or self.num_untargeted:
            left_out = f"-{self.num_broken}-{self.num_untargeted}-{self.num_broken_bytes}"
        return f"{self.index:06d}-{counts}-{self.digest}{left_out}.tokens"


def divide(files: Sequence[SourceFile], part_bytes: int | None = None) -> list[Part]:
    """Divide a corpus into parts of about `part_bytes`.

    The result depends on the files alone, so it is the same on every node that has them.
    """
    limit = part_bytes or PART_BYTES
    parts: list[Part] = []
    open_slices: list[DatasetSlice] = []
    open_bytes = 0
    for file_slice, size in _slices(files, limit):
        if open_slices and open_bytes + size > limit:
            parts.append(Part(len(parts), tuple(open_slices), open_bytes))
            open_slices = []
            open_bytes = 0
        open_slices.append(file_slice)
        open_bytes += size
    parts.append(Part(len(parts), tuple(open_slices), open_bytes))
    return parts


def _slices(files: Iterable[SourceFile], limit: int) -> Iterator[tuple[DatasetSlice, int]]:
    for file in files:
        if file.size_bytes <= limit or not _is_divisible(file):
            yield DatasetSlice(file), file.size_bytes
            continue
        starts = range(0, file.size_bytes, limit)
        for start in starts:
            stop = None if start == starts[-1] else start + limit
            yield DatasetSlice(file, start, stop), min(limit, file.size_bytes - start)


def _is_divisible(file: SourceFile) -> bool:
    # Each slice of an S3 object would download the whole of it.
    is_local = not file.name.startswith(S3_SCHEME)
    return is_local and file.compression is None and is_divisible(file.name, file.format)


class PartCorrupt(Exception):
    """A part's file does not hold the tokens that its name promises."""


class PartsStore:
    """Committed parts of one dataset: a directory, and optionally a storage shared by nodes."""

    def __init__(
        self, directory: Path, dtype: np.dtype[Any], shared: Storage | None = None
    ) -> None:
        self.directory = directory
        self.dtype = dtype
        self._shared = shared
        self.trouble: str | None = None
        """Error that ended the use of the shared storage; None: no error so far."""
        self._adopted: set[Path] = set()
        directory.mkdir(exist_ok=True)

    def adopt(self, parts: Sequence[Part], reading: Reading) -> None:
        """Copy the parts of unchanged files from builds of other versions of these sources."""
        (self.directory / FAILED_FILE).unlink(missing_ok=True)
        keys = [reading.key(part) for part in parts]
        self._commit(KEYS_FILE, lambda path: path.write_text(json.dumps(keys)))
        for other in sorted(self.directory.parent.glob("tokens-*.parts")):
            if other != self.directory:
                self._adopt_from(other, keys)

    def _adopt_from(self, other: Path, keys: Sequence[str]) -> None:
        """Copy the parts of `other` that have these keys.

        Parts that vanish meanwhile are tokenized here instead.
        """
        with suppress(OSError, ValueError):
            their_keys = json.loads((other / KEYS_FILE).read_text())
            index_by_key = {key: index for index, key in enumerate(their_keys)}
            theirs = PartsStore(other, self.dtype).finished()
            here = self.finished()
            for index, key in enumerate(keys):
                found = theirs.get(index_by_key.get(key, -1))
                if found is None or index in here:
                    continue
                part = replace(found, index=index)
                source = other / found.name
                self._commit(part.name, lambda path, source=source: shutil.copy(source, path))  # type: ignore[misc]
                self._publish(part)
                self._adopted.add(other)

    def end(self, *, failed: bool) -> None:
        """Remove the parts, and the directories of failed builds from which parts were copied.

        If this build has `failed`, keep its parts for the next version of the sources.
        """
        if failed and self.finished():
            (self.directory / FAILED_FILE).touch()
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        if failed:
            return
        for other in self._adopted:
            if (other / FAILED_FILE).exists():
                shutil.rmtree(other, ignore_errors=True)

    def finished(self) -> dict[int, Finished]:
        """Return the finished parts in this directory, by index."""
        found: dict[int, Finished] = {}
        for name in os.listdir(self.directory):
            part = Finished.from_name(name)
            if part is not None:
                found[part.index] = part
        return found

    def fetch(self) -> None:
        """Download the parts that other nodes have published.

        Skips a part whose content does not match its name; this node then tokenizes it.
        """
        here = self.finished()
        published = self._ask(lambda storage: list(storage.list()))
        for info in published or ():
            part = Finished.from_name(info.name)
            if part is None or part.index in here:
                continue
            content = self._ask(lambda storage, name=info.name: storage.get(name))  # type: ignore[misc]
            if content is None:
                continue
            digest = f"{xxh3_64_intdigest(content):016x}"
            if digest == part.digest:
                self._commit(part.name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]
                here[part.index] = part

    def write(self, part: Part, reading: Reading, check: Callable[[], None]) -> Finished:
        """Tokenize a part and commit it.

        Calls `check` about once a second; an exception that it raises ends the work.
        """
        broken = BrokenLines(reading.skip_broken)
        temporary = self._temporary()
        digest = xxh3_64()
        num_tokens = 0
        num_documents = 0
        try:
            with open(temporary, "wb") as output:
                for tokens, ended in _tokens_of(part, reading, broken, self.directory, check):
                    stored = np.ascontiguousarray(tokens, self.dtype)
                    digest.update(stored.data)
                    output.write(stored.data)
                    num_tokens += len(stored)
                    if ended:
                        num_documents += 1
                output.flush()
                os.fsync(output.fileno())
            finished = Finished(
                part.index,
                num_tokens,
                num_documents,
                digest.hexdigest(),
                broken.num_skipped,
                broken.num_untargeted,
                broken.num_bytes,
            )
            os.rename(temporary, self.directory / finished.name)
        finally:
            temporary.unlink(missing_ok=True)
        if broken.num_skipped:
            logger.warning(
                "data: %d broken lines are skipped (%d bytes of lines); the first: %s",
                broken.num_skipped,
                broken.num_bytes,
                broken.first,
            )
        self._publish(finished)
        return finished

    def _publish(self, part: Finished) -> None:
        if self._shared is None:
            return
        payload = BytesPayload((self.directory / part.name).read_bytes())
        # If another node was as fast, its bytes are the same.
        with suppress(ObjectExists):
            self._ask(lambda storage: storage.put(part.name, payload, if_none_match=True))

    def _ask(self, question: Callable[[Storage], Any]) -> Any:
        """Ask the shared storage, best effort; return None after its first error.

        A dataset can be built without the shared storage, so its errors must not stop a job from
        starting.
        """
        if self._shared is None or self.trouble is not None:
            return None
        try:
            return question(self._shared)
        except ObjectExists:
            raise
        except StorageError as error:
            self.trouble = str(error)
            return None

    def _temporary(self) -> Path:
        return self.directory / f"{os.getpid()}-{secrets.token_hex(4)}.writing"

    def _commit(self, name: str, write: Callable[[Path], object]) -> None:
        temporary = self._temporary()
        write(temporary)
        os.rename(temporary, self.directory / name)

    def read(self, part: Finished) -> Iterator[NDArray[Any]]:
        """Yield a part's tokens in order, shape [any].

        Raises:
            PartCorrupt: the file does not hold the committed tokens; it is removed.
        """
        digest = xxh3_64()
        num_tokens = 0
        with open(self.directory / part.name, "rb") as file:
            while True:
                block = np.fromfile(file, self.dtype, TOKENS_PER_READ)
                if not len(block):
                    break
                digest.update(block.data)
                num_tokens += len(block)
                yield block
        if (num_tokens, digest.hexdigest()) != (part.num_tokens, part.digest):
            (self.directory / part.name).unlink(missing_ok=True)
            raise PartCorrupt(f"part {part.index} is corrupt")


def _tokens_of(
    part: Part, reading: Reading, broken: BrokenLines, scratch: Path, check: Callable[[], None]
) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield tokens of the part's documents in order, and True if a document ends with them.

    The last token is then the end token. Tokens carry marks if `reading.marked`.
    """
    read = _text_tokens if reading.examples is None else _example_tokens
    for file_slice in part.slices:
        with local_copy(file_slice.file, scratch) as path:
            yield from read(path, file_slice, reading, broken, check)


def _text_tokens(
    path: Path,
    file_slice: DatasetSlice,
    reading: Reading,
    broken: BrokenLines,
    check: Callable[[], None],
) -> Iterator[tuple[NDArray[Any], bool]]:
    tokenizer = reading.tokenizer
    end = np.array([tokenizer.end_token], np.int64)
    file = file_slice.file
    source = FileRange(path, file.name, file.format, file_slice.start, file_slice.stop)
    pieces = read_pieces(source, reading.text_field, broken)
    # A slice from the middle of a text file goes on with the document of the slice before.
    begins = file_slice.start == 0 or file.format != "text"
    for group in _grouped(pieces):
        check()
        encoded = tokenizer.encode([piece.text for piece in group])
        for piece, tokens in zip(group, encoded, strict=True):
            if begins:
                tokens = begun(tokens, reading.begin_tokens)
            # Text may hold its own end, to which TRL adds no other.
            is_ended = piece.ends_document and bool(len(tokens)) and tokens[-1] == end[0]
            yield mark(tokens, True, begins=begins) if reading.marked else tokens, is_ended
            # An empty document begins with its end.
            begins = (begins and not len(tokens)) or is_ended
            if piece.ends_document and not is_ended:
                yield mark(end, True, begins=begins) if reading.marked else end, True
                begins = True


def _example_tokens(
    path: Path,
    file_slice: DatasetSlice,
    reading: Reading,
    broken: BrokenLines,
    check: Callable[[], None],
) -> Iterator[tuple[NDArray[Any], bool]]:
    kind = reading.examples
    assert kind is not None
    file = file_slice.file
    source = FileRange(path, file.name, file.format, file_slice.start, file_slice.stop)
    records = read_documents(source, kind.columns, kind.extract, broken)
    while True:
        group = list(islice(records, EXAMPLES_PER_CALL))
        if not group:
            return
        check()
        for example in kind.encode(group):
            pieces = [_begun_example(example, reading.begin_tokens)]
            if example.rejected is not None:
                pieces.append(_begun_example(example.rejected, reading.begin_tokens))
            if not reading.marked:
                yield pieces[0].ids, True
            elif all(piece.counts[1:].any() for piece in pieces):
                marked = [mark(piece.ids, piece.counts, begins=True) for piece in pieces]
                yield np.concatenate(marked), True
            else:
                broken.num_untargeted += 1


def _begun_example(example: Example, begin_tokens: tuple[int, ...]) -> Example:
    """Prepend the tokens that begin a document, which are no targets."""
    ids = begun(example.ids, begin_tokens).astype(np.int64)
    added = np.zeros(len(ids) - len(example.ids), np.bool_)
    return Example(ids, np.concatenate([added, example.counts]))


def _grouped(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Group pieces so that each group is worth one call of a tokenizer that works in parallel."""
    group: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if len(group) == TEXTS_PER_CALL or characters >= CHARACTERS_PER_CALL:
            yield group
            group = []
            characters = 0
    if group:
        yield group
