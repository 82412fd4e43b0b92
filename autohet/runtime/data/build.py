"""Builds token datasets into a cache directory: once per node, atomically, in bounded memory."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from autohet.runtime.data.dataset import (
    FORMAT_VERSION,
    TOKENS_FILE,
    DatasetFacts,
    TokenDataset,
    write_facts,
)
from autohet.runtime.data.documents import Piece, read_pieces
from autohet.runtime.data.sources import SourceFile, list_sources, local_copy
from autohet.runtime.data.tokenization import Tokenizer, Tokens, load_tokenizer
from autohet.runtime.job import DataSection
from planner.errors import ConfigError

TOKENS_PER_BATCH = 1 << 22
TEXTS_PER_CALL = 1024
CHARACTERS_PER_CALL = 1 << 20
LOCK_POLL_S = 0.05


def prepare_dataset(data: DataSection, sequence_length: int) -> TokenDataset:
    """The token dataset of `data`, from the cache when it is there and current, else built now.

    Called by any number of processes of a node; one builds and the others wait, at most `data.build_timeout_s`.
    ConfigError for sources that are missing, empty, unreadable or too short for one row.
    """
    files = list_sources(data)
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    fingerprint = _fingerprint(data, files, tokenizer, sequence_length)
    target = _cache_directory(data) / f"tokens-{fingerprint[:24]}"
    dataset = _open_complete(target)
    if dataset is not None:
        return dataset
    with _space_errors(target.parent), _lock(target.with_suffix(".lock"), data.build_timeout_s):
        dataset = _open_complete(target)
        if dataset is not None:
            return dataset
        return _build(target, data, files, tokenizer, sequence_length, fingerprint)


def _fingerprint(data: DataSection, files: list[SourceFile], tokenizer: Tokenizer, sequence_length: int) -> str:
    """Changes when any file's version, the way to read it, the tokenizer or the row length does."""
    parts = [FORMAT_VERSION, files, data.text_field, tokenizer.identity, sequence_length]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _cache_directory(data: DataSection) -> Path:
    chosen = data.cache or os.environ.get("AUTOHET_CACHE") or "~/.cache/autohet"
    directory = Path(chosen).expanduser() / "datasets"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create data.cache {directory}: {error.strerror}; name a directory there") from error
    return directory


def _open_complete(target: Path) -> TokenDataset | None:
    if not target.exists():
        return None
    with contextlib.suppress(ConfigError, pa.ArrowInvalid):
        return TokenDataset(target)
    return None


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the file lock, which the kernel drops with its process; ConfigError when it is not free in time."""
    deadline = time.monotonic() + timeout_s
    with open(path, "w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been building the dataset {path.stem} for {timeout_s:.0f} s;"
                        " raise data.build_timeout_s, or stop it"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


@contextlib.contextmanager
def _space_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise ConfigError(
            f"cannot build the token dataset in {directory}: {error.strerror}; point data.cache to a directory"
            " with room and permission"
        ) from error


def _build(
    target: Path,
    data: DataSection,
    files: list[SourceFile],
    tokenizer: Tokenizer,
    sequence_length: int,
    fingerprint: str,
) -> TokenDataset:
    """Called under the lock: what an earlier builder left unfinished is nobody's."""
    for leftover in target.parent.glob(f"{target.name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    building = target.with_name(f"{target.name}.building-{os.getpid()}")
    building.mkdir()
    try:
        writer = _RowWriter(building / TOKENS_FILE, tokenizer.vocab_size, sequence_length + 1)
        with writer:
            for tokens in _token_stream(data, files, tokenizer, building, writer):
                writer.write(tokens)
        _require_rows(writer, data, sequence_length)
        write_facts(building, writer.facts(fingerprint, data, tokenizer, len(files)))
        _sync(building)
        shutil.rmtree(target, ignore_errors=True)  # incomplete or corrupt, or _open_complete would have taken it
        os.rename(building, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return TokenDataset(target)


def _require_rows(writer: "_RowWriter", data: DataSection, sequence_length: int) -> None:
    if writer.num_rows == 0:
        raise ConfigError(
            f"data.source {', '.join(data.sources)} gives {writer.num_tokens} tokens, fewer than one row of"
            f" sequence_length + 1 = {sequence_length + 1}; add data or lower training.sequence_length"
        )


def _token_stream(
    data: DataSection, files: list[SourceFile], tokenizer: Tokenizer, scratch: Path, writer: "_RowWriter"
) -> Iterator[Tokens]:
    """The tokens of all documents in order, each followed by the end token."""
    end = np.array([tokenizer.end_token], np.int64)
    for file in files:
        with local_copy(file, scratch) as path:
            for pieces in _grouped(read_pieces(path, file.name, file.format, data.text_field)):
                for piece, tokens in zip(pieces, tokenizer.encode([piece.text for piece in pieces]), strict=True):
                    yield tokens
                    if piece.ends_document:
                        writer.num_documents += 1
                        yield end


def _grouped(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that are worth one call of a tokenizer that works in parallel."""
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if len(group) == TEXTS_PER_CALL or characters >= CHARACTERS_PER_CALL:
            yield group
            group, characters = [], 0
    if group:
        yield group


class _RowWriter:
    """Packs a stream of tokens into rows, and rows into record batches; holds one batch in memory.

    The last tokens, too few for a row, are left out.
    """

    def __init__(self, path: Path, vocab_size: int, row_tokens: int) -> None:
        self._path = path
        self._row_tokens = row_tokens
        self._rows_per_batch = max(1, TOKENS_PER_BATCH // row_tokens)
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._buffer = np.empty(self._rows_per_batch * row_tokens, self._dtype)
        self._filled = 0
        self._digest = hashlib.sha256()
        self._max_token = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.num_documents = 0

    def __enter__(self) -> None:
        token = pa.field("token", pa.from_numpy_dtype(self._dtype), nullable=False)
        self._type = pa.list_(token, self._row_tokens)
        self._schema = pa.schema([pa.field("row", self._type, nullable=False)])
        self._writer = pa.ipc.new_file(str(self._path), self._schema)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, tokens: Tokens) -> None:
        """Appends tokens, shape [any]."""
        self.num_tokens += len(tokens)
        while len(tokens):
            part = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        rows = self._filled // self._row_tokens
        if rows:
            tokens = self._buffer[: rows * self._row_tokens]
            self._digest.update(tokens.data)
            self._max_token = max(self._max_token, int(tokens.max()))
            column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), type=self._type)
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))
        self.num_rows += rows
        self._filled = 0

    def facts(self, fingerprint: str, data: DataSection, tokenizer: Tokenizer, num_files: int) -> DatasetFacts:
        """What to commit beside the tokens; after the writer is closed."""
        return DatasetFacts(
            version=FORMAT_VERSION,
            fingerprint=fingerprint,
            content_sha256=self._digest.hexdigest(),
            num_rows=self.num_rows,
            row_tokens=self._row_tokens,
            rows_per_batch=self._rows_per_batch,
            token_dtype=self._dtype.name,
            vocab_size=tokenizer.vocab_size,
            max_token=self._max_token,
            num_documents=self.num_documents,
            num_files=num_files,
            file_bytes=self._path.stat().st_size,
            tokenizer=tokenizer.identity,
            sources=data.sources,
        )


def _sync(directory: Path) -> None:
    """Flushes a directory and its files to disk, so that a rename makes nothing durable that is not there."""
    for path in [*(file for file in directory.iterdir() if file.is_file()), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
