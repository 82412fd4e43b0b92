"""Readers of records in JSON, Parquet and Arrow files, and the handling of broken records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from planner.errors import ConfigError

BLOCK_BYTES = 1 << 20
BATCH_ROWS = 1024
MAX_JSON_BYTES = 1 << 29
"""Upper limit on a file that is one JSON value, which is parsed whole."""
SKIP_REMEDY = "set data.skip_broken_lines: true to leave such lines out and count them"
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")

T = TypeVar("T")
Extract = Callable[[Any], T]
"""Function from a record's value to the wanted content; raises BrokenRecord if that is missing."""


class Readable(Protocol):
    """Binary stream that records and pieces are read from."""

    def read(self, size: int, /) -> bytes: ...


class BrokenRecord(Exception):
    """A record that holds no document: the reason and, after a semicolon, the remedy."""


@dataclass
class BrokenLines:
    """Policy for broken records: refuse them, or count and skip them if the job says so."""

    skip: bool = False
    num_skipped: int = 0
    num_untargeted: int = 0
    """Number of dropped documents, which have no target."""
    first: str = ""
    """Place and reason of the first skipped record."""

    def report(self, place: str, reason: str) -> None:
        """Count a broken record, if broken records are skipped.

        Raises:
            ConfigError: broken records are not skipped.
        """
        if not self.skip:
            raise ConfigError(f"{place}: {reason}")
        self.num_skipped += 1
        self.first = self.first or f"{place}: {reason}"


def text_of(record: Any, field: str) -> str:
    """Return the text in `field`.

    Raises:
        BrokenRecord: there is no text in it.
    """
    if isinstance(record, dict):
        text = record.get(field)
        if isinstance(text, str):
            return text
    raise BrokenRecord(_no_text(record, field))


def _no_text(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return (
            f"no text in field {field!r} (found: a {type(record).__name__}); remove"
            f" the line, or {SKIP_REMEDY}"
        )
    names = ", ".join(sorted(record)[:8])
    if field not in record:
        hint = _conversation_hint(record)
        return f"no text in field {field!r} (found: {names}); set data.text_field{hint}"
    value = record[field]
    if value is None:
        return f"field {field!r} is null, no text; remove the line, or {SKIP_REMEDY}"
    if is_conversation(value):
        return (
            f"field {field!r} holds a conversation of {len(value)} messages, not text; write each"
            " conversation as one text, by the model's chat template"
        )
    return (
        f"no text in field {field!r} (found: {names}), which holds {type(value).__name__}, not"
        f" text; name a field of text in data.text_field, or {SKIP_REMEDY}"
    )


def is_conversation(value: Any) -> bool:
    """Return True if a value is a list of messages, each an object."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def _conversation_hint(record: dict[str, Any]) -> str:
    for name in CONVERSATION_FIELDS:
        if is_conversation(record.get(name)):
            return f", or write the conversations of {name!r} as text, by the model's chat template"
    return ""


def read_lines(
    stream: Readable,
    name: str,
    extract: Extract[T],
    broken: BrokenLines,
    lines_before: Callable[[], int] = lambda: 0,
) -> Iterator[T]:
    """Yield the result of `extract` for each JSON line, skipping empty lines.

    `lines_before` counts the lines of the file before the stream's first line, for error messages.
    """
    for number, line in enumerate(_lines(stream), start=1):
        if not line.strip():
            continue
        try:
            yield extract(_parsed(line))
        except BrokenRecord as error:
            broken.report(f"{name}, line {lines_before() + number}", str(error))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"not valid JSON ({error}); fix or remove the line, or {SKIP_REMEDY}"
        raise BrokenRecord(reason) from error


def _lines(stream: Readable) -> Iterator[bytes]:
    """Yield the lines of a binary stream.

    Arrow's decompressing streams cannot iterate over lines themselves.
    """
    rest: list[bytes] = []
    while True:
        block = stream.read(BLOCK_BYTES)
        if not block:
            break
        *complete, last = block.split(b"\n")
        if complete:
            yield b"".join([*rest, complete[0]])
            yield from complete[1:]
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


def read_json(stream: Readable, name: str, extract: Extract[T], broken: BrokenLines) -> Iterator[T]:
    """Yield the result of `extract` for each object of a JSON array, or for the file's one object.

    Raises:
        ConfigError: the file is no JSON value, or larger than MAX_JSON_BYTES.
    """
    content = _read_whole(stream, name)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} is neither JSON lines nor one JSON value ({error}); fix it, or set data.format"
        ) from error
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, start=1):
        try:
            yield extract(record)
        except BrokenRecord as error:
            broken.report(f"{name}, record {number}", str(error))


def _read_whole(stream: Readable, name: str) -> bytes:
    blocks: list[bytes] = []
    size = 0
    while True:
        block = stream.read(BLOCK_BYTES)
        if not block:
            return b"".join(blocks)
        blocks.append(block)
        size += len(block)
        if size > MAX_JSON_BYTES:
            raise ConfigError(
                f"{name} is one JSON value of more than {MAX_JSON_BYTES >> 20} MiB, which is parsed"
                " whole; write its records one a line (jq -c '.[]')"
            )


def read_parquet(
    path: Path, name: str, columns: tuple[str, ...], extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    """Yield the result of `extract` for each row of a Parquet file.

    A row has those of `columns` that the file has.

    Raises:
        ConfigError: the file is no Parquet.
    """
    try:
        with pq.ParquetFile(path) as table:
            chosen = _columns(table.schema_arrow, columns, name)
            batches = table.iter_batches(BATCH_ROWS, columns=chosen)
            yield from _rows(batches, name, extract, broken)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot read {name} as Parquet: {error}") from error


def read_arrow(
    path: Path, name: str, columns: tuple[str, ...], extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    """Yield the result of `extract` for each row of an Arrow IPC file or stream.

    `datasets` saves this format to disk. Columns and errors are those of `read_parquet`.
    """
    try:
        with pa.memory_map(str(path)) as file:
            batches = _arrow_batches(file)
            chosen = (batch.select(_columns(batch.schema, columns, name)) for batch in batches)
            yield from _rows(chosen, name, extract, broken)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot read {name} as Arrow: {error}") from error


def _arrow_batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _columns(schema: pa.Schema, columns: tuple[str, ...], name: str) -> list[str]:
    """Return those of the wanted columns that the schema has.

    Raises:
        ConfigError: the schema has none of them.
    """
    found = [column for column in columns if column in schema.names]
    if not found:
        wanted = " or ".join(repr(column) for column in columns)
        known = ", ".join(schema.names[:8])
        raise ConfigError(f"{name} has no column {wanted} (found: {known}); set data.text_field")
    return found


def _rows(
    batches: Iterator[pa.RecordBatch], name: str, extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            try:
                yield extract(record)
            except BrokenRecord as error:
                broken.report(f"{name}, row {number}", str(error))
