"""Read source files as pieces of text, in one fixed order and in bounded memory.

A text file is one document; so is a JSON record, and so is a row of CSV, Parquet or
Arrow. Files with the magic bytes of gzip, bz2, zstd, lz4 or xz are decompressed. A long text is
split into pieces at line ends.
"""

import codecs
import contextlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, NamedTuple

from autohet.runtime.data.content import (
    COMPRESSION_BY_SUFFIX,
    RAW_SAMPLE_BYTES,
    compression_by_magic,
    open_compressed,
)
from autohet.runtime.data.records import (
    BrokenLines,
    Extract,
    Readable,
    T,
    read_arrow,
    read_csv,
    read_json,
    read_lines,
    read_parquet,
    text_of,
)
from planner.errors import ConfigError

PIECE_CHARACTERS = 1 << 20
UNZIP_REMEDIES = {
    "requires too much memory": (
        "it was compressed with a long window (zstd --long or --ultra); write it again with"
        " zstd -d --long=31 -c FILE | zstd -o NEW"
    ),
    **dict.fromkeys(
        ("Truncated", "file ended before"), "the file is cut off; copy or download it again"
    ),
}


class TextPiece(NamedTuple):
    """Piece of text; `ends_document`: it is the last piece of its document."""

    text: str
    ends_document: bool


class FileRange(NamedTuple):
    """A local file of records, or those of its records that begin in the bytes [start, stop).

    `name` is the user's name for the file.
    """

    path: Path
    name: str
    format: str
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


def is_divisible(name: str, file_format: str) -> bool:
    """Return True if the file can be read from the middle: uncompressed text or JSON lines."""
    is_compressed = Path(name).suffix.lower() in COMPRESSION_BY_SUFFIX
    return file_format in ("text", "jsonl") and not is_compressed


def read_pieces(
    file: FileRange, text_field: str, broken: BrokenLines | None = None
) -> Iterator[TextPiece]:
    """Yield the text of one local file, or of the lines in a range of it.

    Only the range that reaches the end of a text file ends its document. `broken`: skip or refuse
    broken records.

    Raises:
        ConfigError: the content is bad; the message names the place.
    """
    if file.format == "text":
        with _open(file.path, file.name) as stream:
            lines = stream if file.is_whole else _LineRange(stream, file.start, file.stop)
            yield from _text_pieces(lines, file.name, file.start, ends=file.stop is None)
        return

    def piece(record: Any) -> TextPiece:
        return TextPiece(text_of(record, text_field), ends_document=True)

    yield from read_documents(file, (text_field,), piece, broken or BrokenLines())


def read_documents(
    file: FileRange, columns: tuple[str, ...], extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    """Yield the result of `extract` for each record; `columns`: the fields that `extract` reads."""
    path, name, file_format, start, stop = file
    if file_format == "parquet":
        yield from read_parquet(path, name, columns, extract, broken)
        return
    if file_format == "arrow":
        yield from read_arrow(path, name, columns, extract, broken)
        return
    with _open(path, name) as stream:
        if file_format == "json":
            yield from read_json(stream, name, extract, broken)
            return
        if file_format == "csv":
            yield from read_csv(stream, name, columns, extract, broken)
            return
        lines = stream if file.is_whole else _LineRange(stream, start, stop)
        yield from read_lines(lines, name, extract, broken, lambda: _lines_before(path, start))


class _LineRange:
    """Stream of the lines of a seekable stream that begin in the bytes [start, stop)."""

    def __init__(self, stream: IO[bytes], start: int, stop: int | None) -> None:
        self._stream = stream
        end = None if stop is None else _line_start(stream, stop)
        # Last, since it leaves the stream at the first line to read.
        position = _line_start(stream, start)
        self._left = None if end is None else end - position

    def read(self, size: int) -> bytes:
        if self._left is None:
            return self._stream.read(size)
        block = self._stream.read(min(size, self._left))
        self._left -= len(block)
        return block


def _line_start(stream: IO[bytes], position: int) -> int:
    """Seek to the first line that begins at or after `position`; return its offset.

    Without such a line, seek to the end of the stream and return that offset.
    """
    if position == 0:
        stream.seek(0)
        return 0
    # From the byte before: if it ends a line, the line at `position` is read.
    stream.seek(position - 1)
    while True:
        block = stream.readline(PIECE_CHARACTERS)
        if not block or block.endswith(b"\n"):
            return stream.tell()


def _lines_before(path: Path, start: int) -> int:
    """Count the lines before the first that begins at or after byte `start`; 0 if `start` is 0."""
    if start == 0:
        return 0
    with path.open("rb") as stream:
        left = _line_start(stream, start)
        lines = 0
        stream.seek(0)
        while left:
            block = stream.read(min(left, PIECE_CHARACTERS))
            if not block:
                break
            left -= len(block)
            lines += block.count(b"\n")
    return lines


@contextlib.contextmanager
def _open(path: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed.

    Raises:
        ConfigError: the file cannot be opened, or reading or decompressing it fails inside the
        block.
    """
    try:
        with path.open("rb") as file:
            compression = compression_by_magic(file.read(RAW_SAMPLE_BYTES))
        if compression:
            opened = open_compressed(path, compression)
        else:
            opened = path.open("rb")
        with opened as stream:
            yield stream
    except (OSError, EOFError, LZMAError) as error:
        reason = str(error)
        remedy = ""
        for sign, known in UNZIP_REMEDIES.items():
            if sign in reason:
                remedy = f"; {known}"
                break
        raise ConfigError(f"cannot read the data file {name}: {reason}{remedy}") from error


def _text_pieces(
    stream: Readable, name: str, start: int = 0, *, ends: bool = True
) -> Iterator[TextPiece]:
    """Yield the text of a stream in pieces cut at line ends.

    `ends`: the document ends with the stream. `start`: the stream begins at this byte of the file
    or soon after it.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")()
    position = start
    rest = ""
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
        # A line of megabytes is cut anywhere, which bounds memory.
        if cut == 0 and len(rest) > 4 * PIECE_CHARACTERS:
            cut = PIECE_CHARACTERS
        if cut:
            yield TextPiece(rest[:cut], ends_document=False)
            rest = rest[cut:]
    if rest or (position and ends):
        yield TextPiece(rest, ends_document=ends)
