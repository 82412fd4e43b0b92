"""A built token dataset: rows of tokens in an Arrow IPC file, and the facts about them beside it.

A dataset is a directory, committed by one rename: `tokens.arrow` (one column, a fixed-size list of
uint16 or uint32, every record batch but the last of equal size) and `dataset.json` (DatasetFacts).
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from autohet.runtime.data.marks import row_bytes, unpack_marks
from autohet.runtime.data.sample_order import RowShare, mixed_rows, sample_rows
from planner.errors import ConfigError
from recovery.local.descriptor import Descriptor

FORMAT_VERSION = 1
TOKENS_FILE = "tokens.arrow"
MARKS_FILE = "marks.bin"
FACTS_FILE = "dataset.json"


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """Facts about a built dataset, stored beside its tokens."""

    version: int
    fingerprint: str
    """Fingerprint of the sources on this machine, the tokenizer and the row length."""
    content_sha256: str
    """SHA-256 of the tokens of all rows in order; equal on all nodes that train on equal data."""
    num_rows: int
    row_tokens: int
    """Tokens per row, sequence_length + 1: inputs are row[:-1], targets row[1:]."""
    rows_per_batch: int
    token_dtype: str
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    max_token: int
    """Largest token id that occurs."""
    num_documents: int
    file_bytes: int
    """Size of the token file."""
    tokenizer: str
    num_broken: int = 0
    """Number of skipped broken lines."""
    num_broken_bytes: int = 0
    """Bytes of these lines; rows of tables have none."""
    num_left_tokens: int = 0
    """Number of dropped tokens at the end, which do not fill a row."""
    num_untargeted: int = 0
    """Number of dropped documents, which have no target."""
    num_cut: int = 0
    """Number of documents that are longer than a row."""
    num_cut_tokens: int = 0
    """Number of tokens cut off these documents, which are in no row."""
    num_dropped_rows: int = 0
    """Number of dropped rows, which have no target."""
    num_padding_tokens: int = 0
    marks_bytes: int = 0
    """Size of the file of marks; 0: no marks, every token is a target, each row is one piece."""
    isolated: bool = False
    """True if pieces of a row do not attend to each other, and each begins at position 0."""
    num_targets: int | None = None
    """Number of targets in all rows; None: every token is a target."""
    rows_by_source: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    """Weights of mixed sources, whose rows are stored source by source; empty: no mix."""
    mean_squared_length: float | None = None
    """Mean over rows of the sum of their pieces' squared lengths; None: each row is one piece."""


class TokenDataset:
    """Read access to a built dataset; opening it maps the file, and rows are read on demand.

    Rows are read through a file descriptor. A page fault of the mapping would hold the
    interpreter's lock, and so stop the worker's heartbeats, for as long as the disk takes. Pickles
    as its path. Not thread-safe.
    """

    def __init__(self, path: str | Path, share: float = 0.0, held_out: bool = False) -> None:
        """Open the dataset in `path`: its rows without the share held out, or these alone.

        Raises:
            ConfigError: `path` holds no complete dataset of this version, or too few rows to hold
            any out.
        """
        self.path = Path(path)
        self.held_out_share = share
        self.reads_held_out = held_out
        self._stored_facts = _read_facts(self.path)
        self.facts = self._stored_facts
        self._rows: RowShare | None = None
        if share:
            rows = RowShare(self.facts.rows_by_source or (self.facts.num_rows,), share, held_out)
            if min(rows.counts) < 1:
                raise ConfigError(
                    f"evaluation.split is {share}, which leaves no row of a source with"
                    f" {min(rows.rows_by_source)}; add data, or give evaluation.source"
                )
            self._rows = rows
            self.facts = _facts_of_share(self.facts, self._rows)
        self.summary = ""
        """Description of the sources and of the data left out, set by `prepare_dataset`."""
        self._file = pa.memory_map(str(self.path / TOKENS_FILE))
        self._reader = pa.ipc.open_file(self._file)
        self._dtype = np.dtype(self.facts.token_dtype)
        self._begins: dict[int, int] = {}
        self._descriptor = _open(self.path / TOKENS_FILE)
        self._marks: Descriptor | None = None
        if self.facts.marks_bytes:
            self._marks = _open(self.path / MARKS_FILE)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenDataset, (self.path, self.held_out_share, self.reads_held_out)

    def __len__(self) -> int:
        return self.facts.num_rows

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def sequence_length(self) -> int:
        return self.facts.row_tokens - 1

    def sample(self, seed: int, first_position: int, count: int) -> NDArray[np.int64]:
        """Return the row indices of a run's samples from `first_position` on.

        They depend on the seed and the positions alone.
        """
        facts = self.facts
        if not facts.weights:
            return sample_rows(seed, facts.num_rows, first_position, count)
        return mixed_rows(seed, facts.rows_by_source, facts.weights, first_position, count)

    def row(self, index: int) -> NDArray[np.int64]:
        """Return row `index` as int64, shape [sequence_length + 1]."""
        if not 0 <= index < self.facts.num_rows:
            raise IndexError(f"row {index} of a dataset of {self.facts.num_rows} rows")
        row: NDArray[np.int64] = self.rows([index])[0]
        return row

    def rows(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return rows, int64 [len(indices), sequence_length + 1], in the order of `indices`."""
        wanted = np.asarray(indices, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.facts.num_rows)]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a dataset of {self.facts.num_rows} rows")
        rows = np.empty((len(wanted), self.facts.row_tokens), self._dtype)
        wanted = self._stored(wanted)
        batches, places = np.divmod(wanted, self.facts.rows_per_batch)
        try:
            for row, batch, place in zip(rows, batches, places, strict=True):
                offset = self._begin(int(batch)) + int(place) * row.nbytes
                self._descriptor.fill(memoryview(row).cast("B"), offset)
        except EOFError as error:
            raise OSError(
                f"the token file of {self.path} has been cut off since it was opened"
            ) from error
        return rows.astype(np.int64)

    def _stored(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self._rows is None else self._rows.stored(rows)

    @property
    def is_marked(self) -> bool:
        """True if rows carry marks of targets and pieces."""
        return self._marks is not None

    def marks(
        self, indices: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the marks (counts, begins) of rows of a marked dataset.

        Each is [len(indices), sequence_length + 1]. `counts`: the token is a target; `begins`: the
        token begins a piece.
        """
        assert self._marks is not None
        wanted = self._stored(np.asarray(indices, np.int64))
        width = row_bytes(self.facts.row_tokens)
        packed: NDArray[Any] = np.empty((len(wanted), width), np.uint8)
        try:
            for row, index in zip(packed, wanted.tolist(), strict=True):
                self._marks.fill(memoryview(row).cast("B"), index * row.nbytes)
        except EOFError as error:
            raise OSError(
                f"the file of marks of {self.path} has been cut off since it was opened"
            ) from error
        return unpack_marks(packed, self.facts.row_tokens)

    def _tokens(self, batch: int) -> NDArray[Any]:
        """Return a record batch's tokens as a view of the mapped file."""
        tokens = self._reader.get_batch(batch).column(0).flatten()
        # Not `to_numpy`: it imports pandas, a second of a worker's first step.
        _, data = tokens.buffers()
        offset = tokens.offset * self._dtype.itemsize
        return np.frombuffer(data, self._dtype, len(tokens), offset)

    def _begin(self, batch: int) -> int:
        """Return the byte offset in the file where a record batch's tokens begin."""
        if batch not in self._begins:
            # Both are addresses in the mapped file; of the buffer that begins the file only the
            # address is read.
            self._file.seek(0)
            start_of_file = self._file.read_buffer(1).address
            self._begins[batch] = self._tokens(batch).ctypes.data - start_of_file
        return self._begins[batch]

    def verify(self) -> None:
        """Read every token and compare the checksum with the recorded one.

        Raises:
            ConfigError: the checksums differ.
        """
        digest = hashlib.sha256()
        for index in range(self._reader.num_record_batches):
            digest.update(self._tokens(index).data)
        marks = hashlib.sha256()
        if self.is_marked:
            marks.update((self.path / MARKS_FILE).read_bytes())
        stored = self._stored_facts
        mix = (stored.rows_by_source, stored.weights)
        found = content_digest(digest, marks if self.is_marked else None, mix)
        if found != stored.content_sha256:
            raise ConfigError(
                f"the token dataset {self.path} is corrupt (checksum differs); delete it to"
                " rebuild it"
            )

    def check(self, *, vocab_size: int, global_batch_sequences: int) -> None:
        """Check that a model of `vocab_size` can train on this data for at least one global batch.

        Raises:
            ConfigError: a token id is outside the vocabulary, or there are too few rows.
        """
        if self.facts.max_token >= vocab_size:
            raise ConfigError(
                f"the data holds token id {self.facts.max_token}, but the model's vocab_size is"
                f" {vocab_size}; use the tokenizer that belongs to the model, or a vocab_size"
                f" (model.vocabulary_size of a pretrained one) of at least {self.facts.vocab_size}"
            )
        if len(self) < global_batch_sequences:
            raise ConfigError(
                f"the data gives {len(self)} rows of {self.sequence_length} tokens, fewer than the"
                f" {global_batch_sequences} of one global batch; add data, or lower sequence_length"
                " or global_batch_sequences"
            )


def _facts_of_share(facts: DatasetFacts, rows: RowShare) -> DatasetFacts:
    digest = hashlib.sha256(f"{facts.content_sha256} {rows}".encode())
    num_rows = sum(rows.counts)
    num_targets = facts.num_targets
    if num_targets is not None:
        num_targets = round(num_targets * num_rows / facts.num_rows)
    return replace(
        facts,
        num_rows=num_rows,
        num_targets=num_targets,  # about: which rows have them is not known
        rows_by_source=rows.counts if facts.rows_by_source else (),
        content_sha256=digest.hexdigest(),
    )


def _open(path: Path) -> Descriptor:
    return Descriptor(os.open(path, os.O_RDONLY))


class Digest(Protocol):
    """Hash object of hashlib."""

    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


def content_digest(
    tokens: Digest, marks: Digest | None, mix: tuple[tuple[int, ...], tuple[float, ...]]
) -> str:
    """Return the digest of a dataset: its tokens, and its marks and source mix if it has any."""
    content = tokens.hexdigest()
    if marks is not None:
        with_marks = content.encode() + marks.digest()
        content = hashlib.sha256(with_marks).hexdigest()
    _, weights = mix
    if weights:
        with_mix = f"{content} {mix}".encode()
        content = hashlib.sha256(with_mix).hexdigest()
    return content


def write_facts(directory: Path, facts: DatasetFacts) -> None:
    document = msgspec.json.encode(asdict(facts))
    (directory / FACTS_FILE).write_bytes(msgspec.json.format(document, indent=2))


def _read_facts(directory: Path) -> DatasetFacts:
    try:
        document = (directory / FACTS_FILE).read_bytes()
        facts = msgspec.json.decode(document, type=DatasetFacts)
        size = (directory / TOKENS_FILE).stat().st_size
        marks = (directory / MARKS_FILE).stat().st_size if facts.marks_bytes else 0
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{directory} holds no token dataset: {error}") from error
    is_whole = (facts.file_bytes, facts.marks_bytes) == (size, marks)
    if facts.version != FORMAT_VERSION or not is_whole:
        raise ConfigError(
            f"the token dataset {directory} is incomplete or of another version; delete it to"
            " rebuild it"
        )
    return facts
