"""Source files to pieces of text, in one fixed order and in bounded memory.

A text file is one document, a JSONL line is one, a Parquet row is one. Files that end in .gz, .bz2,
.zst or .lz4 are decompressed. A long text comes in pieces that are cut at line ends.
"""

import codecs
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from planner.errors import ConfigError

PIECE_CHARACTERS = 1 << 20
PARQUET_BATCH_ROWS = 1024
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
FORMAT_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}


class Readable(Protocol):
    """What pieces are read from."""

    def read(self, size: int, /) -> bytes: ...


class Piece(NamedTuple):
    """Some text; `ends_document` when the next piece belongs to another document."""

    text: str
    ends_document: bool


def format_of(name: str) -> str | None:
    """text, jsonl or parquet by a file's ending, compression aside; None for other endings."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSION_BY_SUFFIX:
        path = path.with_suffix("")
    return FORMAT_BY_SUFFIX.get(path.suffix.lower())


def is_divisible(name: str, file_format: str) -> bool:
    """Whether the file can be read from the middle: lines that nothing compresses."""
    return file_format != "parquet" and Path(name).suffix.lower() not in COMPRESSION_BY_SUFFIX


def read_pieces(
    path: Path,
    name: str,
    file_format: str,
    text_field: str,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Piece]:
    """The text of one local file; `name` is what the user called it. ConfigError, with the place,
    for bad content.

    start, stop: of a divisible file only the lines that begin in these bytes. A text file's
    document ends with the lines at its end.
    """
    if file_format == "parquet":
        yield from _parquet_pieces(path, name, text_field)
        return
    with _open(path, name) as stream:
        lines = stream if (start, stop) == (0, None) else _LineRange(stream, start, stop)
        if file_format == "jsonl":
            yield from _jsonl_pieces(lines, name, text_field, lambda: _lines_before(path, start))
        else:
            yield from _text_pieces(lines, name, start, ends=stop is None)


class _LineRange:
    """The lines of a seekable stream that begin in the bytes [start, stop), as a stream of its
    own.
    """

    def __init__(self, stream: IO[bytes], start: int, stop: int | None) -> None:
        self._stream = stream
        end = None if stop is None else _line_start(stream, stop)
        position = _line_start(stream, start)
        self._left = None if end is None else end - position

    def read(self, size: int) -> bytes:
        block = self._stream.read(size if self._left is None else min(size, self._left))
        if self._left is not None:
            self._left -= len(block)
        return block


def _line_start(stream: IO[bytes], position: int) -> int:
    """Seeks to the first line that begins at `position` or after it, or to the end of the stream;
    returns where that is.
    """
    stream.seek(max(0, position - 1))
    if position > 0:
        while (block := stream.readline(PIECE_CHARACTERS)) and not block.endswith(b"\n"):
            pass
    return stream.tell()


def _lines_before(path: Path, start: int) -> int:
    """Lines before the first that begins at `start` or after it; of a file that is read from its
    beginning none.
    """
    if start == 0:
        return 0
    with path.open("rb") as stream:
        left, lines = _line_start(stream, start), 0
        stream.seek(0)
        while left and (block := stream.read(min(left, PIECE_CHARACTERS))):
            left, lines = left - len(block), lines + block.count(b"\n")
    return lines


@contextlib.contextmanager
def _open(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The file, decompressed; ConfigError when it cannot be opened, read or decompressed inside the
    block.
    """
    compression = COMPRESSION_BY_SUFFIX.get(path.suffix.lower())
    try:
        with (
            pa.input_stream(str(path), compression=compression) if compression else path.open("rb")
        ) as stream:
            yield stream
    except OSError as error:
        raise ConfigError(f"cannot read the data file {name}: {error}") from error


def _text_pieces(
    stream: Readable, name: str, start: int = 0, *, ends: bool = True
) -> Iterator[Piece]:
    """`ends`: whether the document ends with the stream, which begins at byte `start` of the file
    or soon after it.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")()
    position, rest = start, ""
    while True:
        block = stream.read(PIECE_CHARACTERS)
        try:
            rest += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"the data file {name} is not UTF-8 text (near byte {position + error.start});"
                " convert it, or say data.format if it is not text"
            ) from error
        if not block:
            break
        position += len(block)
        cut = rest.rfind("\n") + 1
        if cut == 0 and len(rest) > 4 * PIECE_CHARACTERS:  # a line of megabytes is cut anywhere
            cut = PIECE_CHARACTERS
        if cut:
            yield Piece(rest[:cut], ends_document=False)
            rest = rest[cut:]
    if rest or (position and ends):
        yield Piece(rest, ends_document=ends)


def _jsonl_pieces(
    stream: Readable, name: str, text_field: str, lines_before: Callable[[], int] = lambda: 0
) -> Iterator[Piece]:
    """`lines_before` counts the file's lines before the stream's first, for whoever is told of a
    line.
    """
    for number, line in enumerate(_lines(stream), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            place = f"{name}, line {lines_before() + number}"
            raise ConfigError(
                f"{place}: not valid JSON ({error}); mend or remove the line"
            ) from error
        text = value.get(text_field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            known = (
                ", ".join(sorted(value)[:8])
                if isinstance(value, dict)
                else f"a {type(value).__name__}"
            )
            place = f"{name}, line {lines_before() + number}"
            raise ConfigError(
                f"{place}: no text in field {text_field!r} (found: {known}); set data.text_field"
            )
        yield Piece(text, ends_document=True)


def _lines(stream: Readable) -> Iterator[bytes]:
    """Lines of a binary stream; Arrow's decompressing streams cannot iterate over lines
    themselves.
    """
    rest: list[bytes] = []
    while block := stream.read(PIECE_CHARACTERS):
        *complete, last = block.split(b"\n")
        if complete:
            yield b"".join([*rest, complete[0]])
            yield from complete[1:]
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


def _parquet_pieces(path: Path, name: str, text_field: str) -> Iterator[Piece]:
    try:
        with pq.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names[:8])
                raise ConfigError(
                    f"{name} has no column {text_field!r} (found: {columns}); set data.text_field"
                )
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise ConfigError(
                            f"{name}: column {text_field!r} holds {type(text).__name__}, not text"
                        )
                    yield Piece(text or "", ends_document=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot read {name} as Parquet: {error}") from error
