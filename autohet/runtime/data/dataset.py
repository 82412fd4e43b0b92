"""A built token dataset: rows of tokens in an Arrow IPC file, and the facts about them beside it.

A dataset is a directory, committed by one rename: `tokens.arrow` (one column, a fixed-size list of
uint16 or uint32, every record batch but the last of equal size) and `dataset.json` (DatasetFacts).
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from autohet.runtime.data.marks import row_bytes, unpack_marks
from autohet.runtime.data.sample_order import mixed_rows, sample_rows
from planner.errors import ConfigError
from recovery.local.descriptor import Descriptor

FORMAT_VERSION = 1
TOKENS_FILE = "tokens.arrow"
MARKS_FILE = "marks.bin"
FACTS_FILE = "dataset.json"


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What is known of a built dataset without reading its tokens."""

    version: int
    fingerprint: str
    """Of the sources, the tokenizer and the row length: what the dataset was built from, on this
    machine.
    """
    content_sha256: str
    """Of the tokens of all rows, in order: equal on every node that trains on equal data."""
    num_rows: int
    row_tokens: int
    """sequence_length + 1: inputs are row[:-1], targets row[1:]."""
    rows_per_batch: int
    token_dtype: str
    vocab_size: int
    """The tokenizer's."""
    max_token: int
    """The largest token id that occurs."""
    num_documents: int
    num_files: int
    file_bytes: int
    """The size of the token file."""
    tokenizer: str
    sources: tuple[str, ...]
    num_broken: int = 0
    """Lines that were skipped."""
    num_left_tokens: int = 0
    """Tokens at the end that fill no row."""
    num_untargeted: int = 0
    """Documents without a target, which are left out."""
    num_cut: int = 0
    """Documents that are longer than a row."""
    num_cut_tokens: int = 0
    """Tokens of theirs that are in no row."""
    num_dropped_rows: int = 0
    """Rows without a target, which are left out."""
    num_padding_tokens: int = 0
    marks_bytes: int = 0
    """Size of the file of marks; 0: every token counts, and rows are one piece each."""
    isolated: bool = False
    """Pieces of a row do not see each other, and each begins at position 0."""
    num_targets: int | None = None
    """Targets of all rows; None: all of them count."""
    rows_by_source: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    """Of sources that are mixed, whose rows lie one after another; empty: all rows are alike."""
    mean_squared_length: float | None = None
    """Mean over the rows of the sum of their pieces' squared lengths; None: rows are one piece."""


class TokenDataset:
    """Read access to a built dataset. Opening maps the file and reads its footer; rows are read as
    they are asked for.

    Rows are read by descriptor: a page fault of the mapping would keep the interpreter, and with it
    the worker's signs of life, for as long as the disk takes. Pickles as its path. Not safe for
    several threads at once.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError when `path` holds no complete dataset of this version."""
        self.path = Path(path)
        self.facts = _read_facts(self.path)
        self.summary = ""
        """What was read of the sources and what was left out; known to whoever prepared it."""
        self._file = pa.memory_map(str(self.path / TOKENS_FILE))
        self._reader = pa.ipc.open_file(self._file)
        self._dtype = np.dtype(self.facts.token_dtype)
        self._begins: dict[int, int] = {}
        self._descriptor = Descriptor(os.open(self.path / TOKENS_FILE, os.O_RDONLY))
        self._marks = (
            Descriptor(os.open(self.path / MARKS_FILE, os.O_RDONLY))
            if self.facts.marks_bytes
            else None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenDataset, (self.path,)

    def __len__(self) -> int:
        return self.facts.num_rows

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def sequence_length(self) -> int:
        return self.facts.row_tokens - 1

    def sample(self, seed: int, first_position: int, count: int) -> NDArray[np.int64]:
        """Rows (indices) of a run's samples from `first_position` on; a function of the seed and
        the positions alone.
        """
        facts = self.facts
        if not facts.weights:
            return sample_rows(seed, facts.num_rows, first_position, count)
        return mixed_rows(seed, facts.rows_by_source, facts.weights, first_position, count)

    def row(self, index: int) -> NDArray[np.int64]:
        """Row `index` as int64, shape [sequence_length + 1]."""
        if not 0 <= index < self.facts.num_rows:
            raise IndexError(f"row {index} of a dataset of {self.facts.num_rows} rows")
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows in the order of `indices`, int64, shape [len(indices), sequence_length + 1]."""
        wanted = np.asarray(indices, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.facts.num_rows)]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a dataset of {self.facts.num_rows} rows")
        rows = np.empty((len(wanted), self.facts.row_tokens), self._dtype)
        try:
            for row, batch, place in zip(
                rows, *np.divmod(wanted, self.facts.rows_per_batch), strict=True
            ):
                self._descriptor.fill(
                    memoryview(row).cast("B"), self._begin(int(batch)) + int(place) * row.nbytes
                )
        except EOFError as error:
            raise OSError(
                f"the token file of {self.path} has been cut off since it was opened"
            ) from error
        return rows.astype(np.int64)

    @property
    def is_marked(self) -> bool:
        """Whether rows carry marks of targets and pieces."""
        return self._marks is not None

    def marks(
        self, indices: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(counts, begins) of these rows' tokens, each [len(indices), sequence_length + 1]: the
        token is a target; it begins a piece. Of a marked data set.
        """
        assert self._marks is not None
        wanted = np.asarray(indices, np.int64)
        packed: NDArray[Any] = np.empty((len(wanted), row_bytes(self.facts.row_tokens)), np.uint8)
        try:
            for row, index in zip(packed, wanted.tolist(), strict=True):
                self._marks.fill(memoryview(row).cast("B"), index * row.nbytes)
        except EOFError as error:
            raise OSError(
                f"the file of marks of {self.path} has been cut off since it was opened"
            ) from error
        return unpack_marks(packed, self.facts.row_tokens)

    def _tokens(self, batch: int) -> NDArray[Any]:
        """A record batch's tokens as a view of the mapped file."""
        tokens = self._reader.get_batch(batch).column(0).flatten()
        # Not `to_numpy`: it imports pandas, a second of a worker's first step.
        _, data = tokens.buffers()
        return np.frombuffer(data, self._dtype, len(tokens), tokens.offset * self._dtype.itemsize)

    def _begin(self, batch: int) -> int:
        """Where in the file a record batch's tokens begin."""
        if batch not in self._begins:
            self._file.seek(0)
            self._begins[batch] = (
                self._tokens(batch).ctypes.data - self._file.read_buffer(1).address
            )
        return self._begins[batch]

    def verify(self) -> None:
        """Reads every token; raises ConfigError unless they are those that were written."""
        digest = hashlib.sha256()
        for index in range(self._reader.num_record_batches):
            digest.update(self._tokens(index).data)
        marks = hashlib.sha256()
        if self.is_marked:
            marks.update((self.path / MARKS_FILE).read_bytes())
        mix = (self.facts.rows_by_source, self.facts.weights)
        found = content_digest(digest, marks if self.is_marked else None, mix)
        if found != self.facts.content_sha256:
            raise ConfigError(
                f"the token dataset {self.path} is corrupt (checksum differs); delete it to"
                " rebuild it"
            )

    def check(self, *, vocab_size: int, global_batch_sequences: int) -> None:
        """Raises ConfigError unless a model of `vocab_size` can train on this, one global batch at
        least.
        """
        if self.facts.max_token >= vocab_size:
            raise ConfigError(
                f"the data holds token id {self.facts.max_token}, but the model's vocab_size is"
                f" {vocab_size}; use the tokenizer that belongs to the model, or a vocab_size of at"
                f" least {self.facts.vocab_size}"
            )
        if len(self) < global_batch_sequences:
            raise ConfigError(
                f"the data gives {len(self)} rows of {self.sequence_length} tokens, fewer than the"
                f" {global_batch_sequences} of one global batch; add data, or lower sequence_length"
                " or global_batch_sequences"
            )


class Digest(Protocol):
    """A hash of hashlib."""

    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


def content_digest(
    tokens: Digest, marks: Digest | None, mix: tuple[tuple[int, ...], tuple[float, ...]]
) -> str:
    """Content of a data set: of its tokens, with its marks and how its sources are mixed where it
    has such.
    """
    content = tokens.hexdigest()
    if marks is not None:
        content = hashlib.sha256(content.encode() + marks.digest()).hexdigest()
    if mix[1]:
        content = hashlib.sha256(f"{content} {mix}".encode()).hexdigest()
    return content


def write_facts(directory: Path, facts: DatasetFacts) -> None:
    (directory / FACTS_FILE).write_bytes(
        msgspec.json.format(msgspec.json.encode(asdict(facts)), indent=2)
    )


def _read_facts(directory: Path) -> DatasetFacts:
    try:
        facts = msgspec.json.decode((directory / FACTS_FILE).read_bytes(), type=DatasetFacts)
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
