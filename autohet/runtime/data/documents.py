"""Source files to pieces of text, in one fixed order and in bounded memory.

A text file is one document, a JSONL line is one, a Parquet row is one. Files that end in .gz, .bz2, .zst or .lz4 are
decompressed. A long text comes in pieces that are cut at line ends.
"""

import codecs
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

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


def read_pieces(path: Path, name: str, file_format: str, text_field: str) -> Iterator[Piece]:
    """The text of one local file; `name` is what the user called it. ConfigError, with the place, for bad content."""
    if file_format == "parquet":
        yield from _parquet_pieces(path, name, text_field)
        return
    with _open(path, name) as stream:
        if file_format == "jsonl":
            yield from _jsonl_pieces(stream, name, text_field)
        else:
            yield from _text_pieces(stream, name)


@contextlib.contextmanager
def _open(path: Path, name: str) -> Iterator[IO[bytes]]:
    """The file, decompressed; ConfigError when it cannot be opened, read or decompressed inside the block."""
    compression = COMPRESSION_BY_SUFFIX.get(path.suffix.lower())
    try:
        with pa.input_stream(str(path), compression=compression) if compression else path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise ConfigError(f"cannot read the data file {name}: {error}") from error


def _text_pieces(stream: IO[bytes], name: str) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position, rest = 0, ""
    while True:
        block = stream.read(PIECE_CHARACTERS)
        try:
            rest += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"the data file {name} is not UTF-8 text (near byte {position + error.start}); convert it,"
                " or say data.format if it is not text"
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
    if rest or position:
        yield Piece(rest, ends_document=True)


def _jsonl_pieces(stream: IO[bytes], name: str, text_field: str) -> Iterator[Piece]:
    for number, line in enumerate(_lines(stream), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number}: not valid JSON ({error}); mend or remove the line") from error
        text = value.get(text_field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            known = ", ".join(sorted(value)[:8]) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ConfigError(
                f"{name}, line {number}: no text in field {text_field!r} (found: {known}); set data.text_field"
            )
        yield Piece(text, ends_document=True)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of a binary stream; Arrow's decompressing streams cannot iterate over lines themselves."""
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
                raise ConfigError(f"{name} has no column {text_field!r} (found: {columns}); set data.text_field")
            for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise ConfigError(f"{name}: column {text_field!r} holds {type(text).__name__}, not text")
                    yield Piece(text or "", ends_document=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot read {name} as Parquet: {error}") from error
