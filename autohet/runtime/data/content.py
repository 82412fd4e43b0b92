"""Format and compression of a file, from its first bytes; its name decides where they do not."""

from __future__ import annotations

import io
import json
import lzma
import re
from contextlib import suppress
from pathlib import PurePath
from typing import IO, Any, NamedTuple

import pyarrow as pa

from autohet.runtime.data.records import read_header, split_header

RAW_SAMPLE_BYTES = 1 << 16
SAMPLE_BYTES = 1 << 16
"""Upper limit on the decompressed bytes that are inspected."""
COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ\x00": "xz",
}
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""Magic of a frame without data, in zstd and lz4 files (RFC 8878, section 3.1.2)."""
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".xz": "xz"}
FORMAT_BY_SUFFIX = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    ".arrow": "arrow",
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
}
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
PROBLEM_BY_MAGIC = {
    b"PK\x03\x04": "a ZIP archive; unpack it, or save a workbook's sheet as CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"Rar!\x1a\x07": "a RAR archive; unpack it",
    b"%PDF-": "the binary data of a PDF document; extract its text",
    b"\x93NUMPY": "a NumPy array; write rows of token ids as JSON lines or Parquet",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file; convert it to JSON lines or Parquet",
    b"SQLite format 3\x00": "an SQLite database; convert it to JSON lines or Parquet",
    b"Obj\x01": "an Avro file; convert it to JSON lines or Parquet",
}
"""What no reader here reads, by first bytes, with the remedy."""
TAR_MAGIC = b"ustar"
TAR_MAGIC_AT = 257
TAR = "a tar archive; unpack it"
BINARY = "binary data"
TABLE = "a table of separated values"
POINTER = "a pointer of Git LFS, without its content"
POINTER_BEGINS = b"version https://git-lfs.github.com/spec/"
ARROW_STREAM = b"\xff\xff\xff\xff"
_OBJECT = re.compile(r'\{\s*"')
_ARRAY_OF_OBJECTS = re.compile(r'\[\s*\{\s*"')
_ARRAY = re.compile(r'\[\s*([\[{"\]]|-?\d)')


class Content(NamedTuple):
    """Detected content of a file.

    `format` is text, jsonl, json, csv, parquet or arrow. It is empty if no reader can read the
    file; `problem` then names the content. `record` is the first JSON object that the sample holds
    whole; of a table of separated values, its columns with null.
    """

    format: str
    compression: str | None = None
    problem: str = ""
    record: dict[str, Any] | None = None


def compression_by_magic(raw: bytes) -> str | None:
    """Return the compression that a file's first bytes indicate; None if they indicate none."""
    place = 0
    while SKIPPABLE.match(raw, place):
        place += 8 + int.from_bytes(raw[place + 4 : place + 8], "little")
    for magic, compression in COMPRESSION_BY_MAGIC.items():
        if raw.startswith(magic, place):
            return compression
    # Of the formats with skippable frames, zstd's tools write them first.
    return "zstd" if place else None


def suffix_of(name: str) -> str:
    """Return a file name's suffix in lower case, ignoring a suffix of compression."""
    path = PurePath(name)
    if path.suffix.lower() in COMPRESSION_BY_SUFFIX:
        path = path.with_suffix("")
    return path.suffix.lower()


def text_format_of(name: str) -> str | None:
    """Return the format that a file's suffix stands for; None for unknown suffixes."""
    return FORMAT_BY_SUFFIX.get(suffix_of(name))


def inspect_content(name: str, raw: bytes, *, text_field: str, whole: bool) -> Content:
    """Detect the content of the file `name` from its first bytes `raw`.

    `whole`: `raw` is the whole file.
    """
    compression = compression_by_magic(raw)
    sample = raw
    if compression is not None:
        sample, whole = _decompressed(raw, compression, whole)
        if not sample:
            # Its first block is larger than the sample, or broken: reading the file will tell.
            return Content(text_format_of(name) or "text", compression)
    content = _inspect(name, sample, text_field, whole)
    return content._replace(compression=compression)


def _decompressed(raw: bytes, compression: str, whole: bool) -> tuple[bytes, bool]:
    """Decompress at most SAMPLE_BYTES; return them, and True if they are the whole content."""
    sample = b""
    # The compressed sample may end anywhere, which the decompressor reports as an error.
    with suppress(OSError, EOFError, lzma.LZMAError):
        stream = open_compressed(io.BytesIO(raw), compression)
        while len(sample) < SAMPLE_BYTES:
            block = stream.read(1 << 12)
            if not block:
                return sample, whole
            sample += block
    return sample, False


def open_compressed(file: PurePath | IO[bytes], compression: str) -> Any:
    """Return a binary stream of a file's decompressed content."""
    if compression == "xz":
        return lzma.open(file)
    return pa.input_stream(file, compression=compression)


def _inspect(name: str, sample: bytes, text_field: str, whole: bool) -> Content:
    if sample.startswith(POINTER_BEGINS):
        return Content("", problem=POINTER)
    problem = _unreadable_kind(sample)
    if problem is not None:
        return Content("", problem=problem)
    if sample.startswith(b"PAR1"):
        return Content("parquet")
    if sample.startswith((b"ARROW1", ARROW_STREAM)):
        return Content("arrow")
    known = text_format_of(name)
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Content("", problem="UTF-16 text; convert it (iconv -f UTF-16 -t UTF-8)")
    if known is None and b"\0" in sample:
        return Content("", problem=BINARY)
    if known in ("parquet", "arrow"):
        # It is not what its name says. Reading it as that gives the error that says so.
        return Content(known)
    text = sample.decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    structured = _json_format(known, text, whole, text_field)
    if structured is not None:
        return structured
    if suffix_of(name) in TABLE_SUFFIXES:
        columns = split_header(read_header(io.StringIO(text)), [text_field])[1]
        record = dict.fromkeys(columns)
        if text_field in columns:
            return Content("csv", record=record)
        return Content("", problem=TABLE, record=record)
    return Content(known or "text")


def _unreadable_kind(sample: bytes) -> str | None:
    """Name a well-known kind of file that has no reader; None for all others."""
    if sample[TAR_MAGIC_AT:].startswith(TAR_MAGIC) and b"\0" in sample[:TAR_MAGIC_AT]:
        return TAR
    for magic, problem in PROBLEM_BY_MAGIC.items():
        if sample.startswith(magic):
            return problem
    return None


def _json_format(known: str | None, text: str, whole: bool, text_field: str) -> Content | None:
    """Detect JSON lines (jsonl) or one JSON value (json); None if the text is neither."""
    by_name = known in ("json", "jsonl")
    array = _ARRAY if known == "json" else _ARRAY_OF_OBJECTS
    if array.match(text):
        return Content("json", record=_first_of_array(text))
    complete, rest = _lines(text, whole)
    values = [_parsed(line) for line in complete]
    records = [value for value in values if isinstance(value, dict)]
    opens_object = _OBJECT.match(text) is not None
    # One line that is longer than the sample.
    is_long_line = not complete and opens_object
    # An object that is spread over lines begins with its brace alone.
    is_spread = bool(complete) and complete[0].strip() == "{"
    if known == "text":
        # Prose may hold a line of JSON: in a text file all lines must be records with text.
        are_records = len(records) == len(values) and all(text_field in each for each in records)
        is_lines = bool(records) and are_records
        is_lines |= is_long_line and f'"{text_field}"' in rest
    else:
        is_lines = bool(records) and not is_spread and (by_name or opens_object)
        is_lines |= is_long_line
    if is_lines or (known == "jsonl" and not is_spread):
        return Content("jsonl", record=records[0] if records else None)
    if not by_name:
        return None
    value = _parsed(text) if whole else None
    return Content("json", record=value if isinstance(value, dict) else None)


def _lines(text: str, whole: bool) -> tuple[list[str], str]:
    """Split a sample into its complete lines without blank ones, and its unfinished last line."""
    *complete, rest = text.split("\n")
    if whole and rest.strip():
        complete = [*complete, rest]
        rest = ""
    return [line for line in complete if line.strip()], rest


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_of_array(text: str) -> dict[str, Any] | None:
    """Return the first object of an array of objects; None if the sample does not hold it whole."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        value = json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
