"""Readers of records in JSON, CSV, Parquet and Arrow files, and the handling of broken records."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from planner.errors import ConfigError
from planner.inputs.documents import Document

BLOCK_BYTES = 1 << 20
BATCH_ROWS = 1024
MAX_JSON_BYTES = 1 << 29
"""Upper limit on a file that is one JSON value, which is parsed whole."""
SKIP_REMEDY = "set data.skip_broken_lines: true to leave such lines out and count them"
READINGS = {
    frozenset({"chosen", "rejected"}): "kind: preference",
    frozenset({"prompt", "completion"}): "kind: prompt_completion",
    frozenset({"messages"}): "kind: chat",
    frozenset({"conversations"}): "kind: sharegpt",
    frozenset({"input_ids"}): "tokens_field: input_ids",
    frozenset({"preferred_output"}): (
        "fields: {prompt: input, chosen: preferred_output, rejected: non_preferred_output}"
    ),
}
"""Keys of `data` for records with fields of these names."""
PROMPT_COLUMNS = (
    *("system", "instruction", "context", "input", "inputs", "question", "query", "problem"),
    *("prompt", "user", "article", "document"),
)
ANSWER_COLUMNS = (
    *("completion", "answer", "response", "output", "target", "targets", "solution", "assistant"),
    "summary",
)
"""Columns of prompts and completions in many data sets, for values of `data.fields`."""
TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")
TEXT_MEMBERS = ("content", "value", "text")
"""Members of a message that are text where a table of mixed types stores `4` for them."""
LIST_TYPES = (
    pa.ListType,
    pa.LargeListType,
    pa.FixedSizeListType,
    pa.ListViewType,
    pa.LargeListViewType,
)
SEPARATORS = (",", "\t", ";", "|")
MAX_CELL_CHARACTERS = 1 << 30
MAX_SHARE_GARBLED = 0.5
"""Largest share of a file's bytes in lines that are not JSON, if broken records are skipped."""
MIN_SHARE_READ = 0.1
"""Smallest share of a file's records that give a document, in files of MIN_RECORDS_JUDGED."""
MIN_RECORDS_JUDGED = 10

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
    num_bytes: int = 0
    """Bytes of the skipped lines; skipped rows of tables have none."""
    num_untargeted: int = 0
    """Number of dropped documents, which have no target."""
    first: str = ""
    """Place and reason of the first skipped record."""

    def report(self, place: str, reason: str, num_bytes: int = 0) -> None:
        """Count a broken record, if broken records are skipped.

        Raises:
            ConfigError: broken records are not skipped.
        """
        if not self.skip:
            raise ConfigError(f"{place}: {reason}")
        self.num_skipped += 1
        self.num_bytes += num_bytes
        self.first = self.first or f"{place}: {reason}"

    def add_file(
        self, name: str, found: BrokenLines, num_documents: int, share_garbled: float = 0.0
    ) -> None:
        """Add the counts of one file, or of a slice of it.

        share_garbled: share of its bytes in lines that are not JSON.

        Raises:
            ConfigError: little of the file could be read.
        """
        num_records = num_documents + found.num_skipped
        is_little = num_documents < MIN_SHARE_READ * num_records
        if share_garbled > MAX_SHARE_GARBLED or (is_little and num_records >= MIN_RECORDS_JUDGED):
            raise ConfigError(
                f"{name}: {found.num_skipped} of {num_records} lines or rows are broken, too many"
                f" to leave out (the first: {found.first}); fix the file, or leave it out of"
                " data.source"
            )
        self.num_skipped += found.num_skipped
        self.num_bytes += found.num_bytes
        self.first = self.first or found.first


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
        key = "set data.text_field or data.fields"
        return f"no text in field {field!r} (found: {names}); {remedy_for(record, key)}"
    value = record[field]
    if value is None:
        return f"field {field!r} is null, no text; remove the line, or {SKIP_REMEDY}"
    if is_conversation(value):
        return (
            f"field {field!r} holds a conversation of {len(value)} messages, not text;"
            f" {remedy_for({field: value}, 'name another field')}"
        )
    return (
        f"no text in field {field!r} (found: {names}), which holds {type(value).__name__}, not"
        f" text; name a field of text in data.text_field or data.fields, or {SKIP_REMEDY}"
    )


def is_conversation(value: Any) -> bool:
    """Return True if a value is a list of messages, each an object."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def remedy_for(record: Document, otherwise: str) -> str:
    """Return the keys of `data` by which a record can be read; `otherwise` for unknown fields."""
    for columns, key in READINGS.items():
        if columns <= record.keys():
            return f"set data.{key}"
    names = {str(name).lower(): name for name in record}
    prompts = [names[each] for each in PROMPT_COLUMNS if each in names]
    answers = [names[each] for each in ANSWER_COLUMNS if each in names]
    if prompts and answers:
        prompt = prompts[0] if len(prompts) == 1 else f"[{', '.join(prompts)}]"
        fields = f"{{prompt: {prompt}, completion: {answers[0]}}}"
        return f"set data.kind: prompt_completion, and data.fields: {fields}"
    for name, value in record.items():
        if is_conversation(value):
            kind = "chat" if "role" in value[0] else "sharegpt"
            if "role" in value[0] or "from" in value[0]:
                return f"set data.kind: {kind}, and data.messages_field: {name}"
            return f"write the records in {name!r} one a line (jq -c '.{name}[]')"
    return otherwise


def read_lines(
    stream: Readable,
    name: str,
    extract: Extract[T],
    broken: BrokenLines,
    lines_before: Callable[[], int] = lambda: 0,
) -> Iterator[T]:
    """Yield the result of `extract` for each JSON line, skipping empty lines.

    `lines_before` counts the lines of the file before the stream's first line, for error messages.

    Raises:
        ConfigError: a line is broken, or too many are.
    """
    found = BrokenLines(broken.skip)
    num_documents = 0
    num_bytes = 0
    num_garbled = 0
    for number, line in enumerate(_lines(stream), start=1):
        if not line.strip():
            continue
        num_bytes += len(line)
        record = None
        try:
            record = _parsed(line)
            document = extract(record)
        except BrokenRecord as error:
            found.report(f"{name}, line {lines_before() + number}", str(error), len(line))
            num_garbled += len(line) if record is None else 0
            continue
        num_documents += 1
        yield document
    broken.add_file(name, found, num_documents, num_garbled / max(1, num_bytes))


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
    """Yield the result of `extract` for each object of a JSON array, or of objects in a row.

    Raises:
        ConfigError: the file is no JSON value, or larger than MAX_JSON_BYTES.
    """
    content = _read_whole(stream, name)
    records: list[Any] = []
    try:
        for value in _values(content.decode(json.detect_encoding(content))):
            records += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} is neither JSON lines nor one JSON value ({error}); fix it, or set data.format"
        ) from error
    yield from _extracted(records, name, "record", extract, broken)


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, with white space between them."""
    decoder = json.JSONDecoder()
    visible = re.compile(r"\S")
    place = 0
    while rest := visible.search(text, place):
        value, place = decoder.raw_decode(text, rest.start())
        yield value


def _extracted(
    records: Iterable[Any], name: str, what: str, extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    """Yield the result of `extract` for each record; `what` names one in messages."""
    found = BrokenLines(broken.skip)
    num_documents = 0
    for number, record in enumerate(records, start=1):
        try:
            document = extract(record)
        except BrokenRecord as error:
            found.report(f"{name}, {what} {number}", str(error))
            continue
        num_documents += 1
        yield document
    broken.add_file(name, found, num_documents)


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

    A row has those of `columns` that the file has, and null in its other columns.

    Raises:
        ConfigError: the file is no Parquet, or a page is not as its checksum says.
    """
    try:
        # Checksums that the writer gave are compared: pyarrow leaves them out by default.
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            chosen = _columns(table.schema_arrow.names, columns, name)
            batches = table.iter_batches(BATCH_ROWS, columns=chosen)
            rows = _rows(batches, table.schema_arrow.names)
            yield from _extracted(rows, name, "row", extract, broken)
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
            names, batches = _arrow_batches(file)
            chosen = _columns(names, columns, name)
            rows = _rows((batch.select(chosen) for batch in batches), names)
            yield from _extracted(rows, name, "row", extract, broken)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cannot read {name} as Arrow: {error}") from error


def _arrow_batches(file: pa.NativeFile) -> tuple[list[str], Iterable[pa.RecordBatch]]:
    """Return the columns of an Arrow file or stream, and its batches."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        stream = pa.ipc.open_stream(file)
        return stream.schema.names, stream
    reader = pa.ipc.open_file(file)
    batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    return reader.schema.names, batches


def _columns(names: Sequence[str], columns: tuple[str, ...], name: str) -> list[str]:
    """Return those of the wanted columns that the table has.

    Raises:
        ConfigError: the table has none of them.
    """
    found = [column for column in columns if column in names]
    if not found:
        wanted = " or ".join(repr(column) for column in columns)
        known = ", ".join(names[:8])
        remedy = remedy_for(dict.fromkeys(names), "set data.text_field or data.fields")
        raise ConfigError(f"{name} has no column {wanted} (found: {known}); {remedy}")
    return found


def _rows(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[Document]:
    """Yield the rows of a table as plain values, with those of Arrow's JSON type parsed.

    They have null in the columns of `names` that the batches leave out. Numbers of the classes of
    `datasets.ClassLabel` become the classes' names.
    """
    nulls = dict.fromkeys(names)
    for batch in batches:
        columns = batch.schema
        features: Document = {}
        with suppress(ValueError, TypeError, KeyError):
            features = json.loads(columns.metadata[b"huggingface"])["info"]["features"] or {}
        parse = _members_parser(columns, features, TEXT_COLUMNS)
        for record in batch.to_pylist(maps_as_pydicts="lossy"):
            yield nulls | (record if parse is None else parse(record))


Parser = Callable[[Any], Any]


def _parser(kind: pa.DataType, feature: Any, is_text: bool) -> Parser | None:
    """Return a function that parses values of an Arrow type; None if they stay as they are.

    The `datasets` library stores values of mixed types as JSON text (`datasets.Json`). `is_text`: a
    number among them is a text. A text that is JSON by itself, such as 3.10, is stored as it is.
    `feature`: the library's description of the type, if it wrote the table.
    """
    if isinstance(kind, pa.JsonType):

        def parse(value: str | None) -> Any:
            try:
                found = None if value is None else json.loads(value)
            except ValueError:
                return value
            return value if is_text and not isinstance(found, str | list | dict) else found

        return parse
    if isinstance(feature, list):
        (feature,) = feature
    elif isinstance(feature, dict) and isinstance(feature.get("_type"), str):
        names = feature.get("names")
        if pa.types.is_integer(kind) and names:
            # The library has null or -1 for no class, which is none here.
            found: dict[int | None, str] = dict(enumerate(names))
            return found.get
        feature = feature.get("feature", feature)
    if pa.types.is_struct(kind):
        return _members_parser(kind, feature or {}, TEXT_MEMBERS)
    if isinstance(kind, LIST_TYPES):
        parse_one = _parser(kind.value_type, feature, is_text)
        if parse_one is not None:
            return lambda values: None if values is None else [parse_one(each) for each in values]
    return None


def _is_mark(feature: Any) -> bool:
    """Return True for classes of a mark (`train: false`), whose number says the same."""
    names = (feature.get("names") or ()) if isinstance(feature, dict) else ()
    return bool(names) and {*map(str.lower, names)} <= {"false", "true", "no", "yes", "0", "1"}


def _members_parser(
    members: Iterable[pa.Field], features: Document, texts: Sequence[str]
) -> Parser | None:
    """Return a function that parses those members of an object that have a parser.

    `texts`: names of the members that are texts.
    """
    parsers: dict[str, Parser] = {}
    for member in members:
        is_text = member.name in texts
        feature = features.get(member.name)
        if texts is TEXT_MEMBERS and not is_text and _is_mark(feature):
            continue
        found = _parser(member.type, feature, is_text)
        if found is not None:
            parsers[member.name] = found

    def parse(value: Document | None) -> Any:
        if value is None:
            return None
        return value | {name: parse_one(value[name]) for name, parse_one in parsers.items()}

    return parse if parsers else None


def without_nulls(value: Any) -> Any:
    """Return a value without the null members of its objects, at any depth.

    A table has null where a row lacks a member that another row has, so a null says nothing.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def read_csv(
    stream: IO[bytes], name: str, columns: tuple[str, ...], extract: Extract[T], broken: BrokenLines
) -> Iterator[T]:
    """Yield the result of `extract` for each row of a CSV file, whose first line names the columns.

    Cells are texts; an empty one is null. The separator is the one that gives the wanted columns.

    Raises:
        ConfigError: the file has none of the columns, or is no CSV in UTF-8.
    """
    lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    try:
        header = read_header(lines)
        separator, names = split_header(header, columns)
        _columns(names, columns, name)
        # Of columns with one name the first has it, as for `datasets`.
        unlike = [f"{n}.{at}" if n in names[:at] else n for at, n in enumerate(names)]
        rows = csv.DictReader(lines, unlike, delimiter=separator)
        records = ({key: cell or None for key, cell in row.items()} for row in rows)

        def extract_row(record: dict[str | None, Any]) -> T:
            if any(record.pop(None, None) or ()):
                raise BrokenRecord(
                    f"more cells than the {len(names)} of the first line; quote a text that holds"
                    f" {separator!r}, or {SKIP_REMEDY}"
                )
            return extract(record)

        yield from _extracted(records, name, "row", extract_row, broken)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name} as CSV in UTF-8: {error}") from error


def read_header(lines: Iterable[str]) -> str:
    """Return a table's first row: a column's name in quotes may go on in the next line."""
    header = ""
    for line in lines:
        header += line
        if header.count('"') % 2 == 0:
            break
    return header


def split_header(header: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    """Return the separator that finds most of `columns` in a table's header, and its columns."""
    found = {
        separator: next(csv.reader(io.StringIO(header, newline=""), delimiter=separator), [])
        for separator in SEPARATORS
    }
    best = max(SEPARATORS, key=lambda each: len({*columns} & {*found[each]}))
    return best, found[best]
