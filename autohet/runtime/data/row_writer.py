"""Rows of a token dataset, written to a file of record batches."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from autohet.runtime.data.dataset import FORMAT_VERSION, DatasetFacts, content_digest
from autohet.runtime.data.marks_file import MarksWriter
from autohet.runtime.data.packing import PackedCounts
from autohet.runtime.data.recipe import Recipe
from autohet.runtime.data.tokenization import NoTokenizer

TOKENS_PER_BATCH = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """Return the smallest stored dtype that holds every token id of the vocabulary."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


class RowWriter:
    """Packs a stream of tokens into rows, and rows into record batches; holds one batch in memory.

    Drops the last tokens if they do not fill a row.
    """

    def __init__(self, path: Path, vocab_size: int, row_tokens: int) -> None:
        self._path = path
        self._row_tokens = row_tokens
        self._rows_per_batch = max(1, TOKENS_PER_BATCH // row_tokens)
        self._dtype = token_dtype(vocab_size)
        self._buffer = np.empty(self._rows_per_batch * row_tokens, self._dtype)
        self._filled = 0
        self._digest = hashlib.sha256()
        self._max_token = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.num_documents = 0
        self.num_broken = 0
        self.num_broken_bytes = 0
        self.num_untargeted = 0
        self.marks: MarksWriter | None = None
        self.packed = PackedCounts()
        self.rows_by_source: list[int] = []

    def __enter__(self) -> None:
        token = pa.field("token", pa.from_numpy_dtype(self._dtype), nullable=False)
        self._type = pa.list_(token, self._row_tokens)
        self._schema = pa.schema([pa.field("row", self._type, nullable=False)])
        self._writer = pa.ipc.new_file(str(self._path), self._schema)

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, tokens: NDArray[Any]) -> None:
        """Append tokens, shape [any]."""
        self.num_tokens += len(tokens)
        while len(tokens):
            part = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == len(self._buffer):
                self._flush()

    def end_source(self) -> None:
        """End the rows of a source, dropping the tokens that do not fill a row."""
        self._filled -= self._filled % self._row_tokens
        rows = self.num_rows + self._filled // self._row_tokens
        self.rows_by_source.append(rows - sum(self.rows_by_source))

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

    def facts(self, recipe: Recipe) -> DatasetFacts:
        """Return the facts to commit with the tokens; call this after the writer is closed."""
        tokenizer = recipe.reading.tokenizer
        packed = self.packed
        marks = self.marks
        mix = (tuple(self.rows_by_source), recipe.data.weights)
        content = content_digest(self._digest, None if marks is None else marks.digest, mix)
        left = self.num_tokens - self.num_rows * self._row_tokens
        vocab_size = tokenizer.vocab_size
        if isinstance(tokenizer, NoTokenizer):
            vocab_size = self._max_token + 1
        isolated = marks is not None and recipe.data.isolates
        mean_squared_length = None
        if marks is not None and isolated:
            mean_squared_length = marks.mean_squared_length
        return DatasetFacts(
            version=FORMAT_VERSION,
            fingerprint=recipe.fingerprint,
            content_sha256=content,
            rows_by_source=mix[0],
            weights=mix[1],
            num_rows=self.num_rows,
            row_tokens=self._row_tokens,
            rows_per_batch=self._rows_per_batch,
            token_dtype=self._dtype.name,
            vocab_size=vocab_size,
            max_token=self._max_token,
            num_documents=self.num_documents,
            file_bytes=self._path.stat().st_size,
            tokenizer=tokenizer.identity,
            num_broken=self.num_broken,
            num_broken_bytes=self.num_broken_bytes,
            num_left_tokens=left + packed.num_left_tokens,
            num_untargeted=self.num_untargeted + packed.num_untargeted,
            num_cut=packed.num_cut,
            num_cut_tokens=packed.num_cut_tokens,
            num_dropped_rows=packed.num_dropped_rows,
            num_padding_tokens=packed.num_padding_tokens,
            marks_bytes=0 if marks is None else marks.num_bytes,
            isolated=isolated,
            num_targets=None if marks is None else marks.num_targets,
            mean_squared_length=mean_squared_length,
        )
