"""Records in the form that their kind wants, whatever their container and their fields' names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from autohet.runtime.data.conversations import ROLES, messages_of
from autohet.runtime.data.examples import Example, ExampleKind
from autohet.runtime.data.records import (
    SKIP_REMEDY,
    TEXT_COLUMNS,
    BrokenRecord,
    is_conversation,
    without_nulls,
)
from autohet.runtime.job import DataSection
from planner.inputs.documents import Document

OPTIONAL_FIELDS = ("tools", "system")
_ROLE = re.compile(rf"""["']role["']\s*:\s*["']({"|".join(ROLES)})["']""")
TOOL_CALLERS = ("function_call", "tool_call")
TOOL_SPEAKERS = ("observation", "function_response", "tool_response")
"""ShareGPT's names of the speakers of calls and of their results."""


class PlainExamples:
    """Examples of `kind`, from records as files and tables have them.

    Fields get the names of the kind (`data.fields`) and ShareGPT's turns its messages. Nulls inside
    a field are left out, and a number is its text.
    """

    def __init__(self, kind: ExampleKind, data: DataSection) -> None:
        self._kind = kind
        self._data = data
        begins = data.begin_of_document is None
        rules = json.dumps([data.fields, data.kind == "sharegpt", begins])
        self.identity = f"{kind.identity} of records {rules}"

    @property
    def columns(self) -> tuple[str, ...]:
        found: list[str] = []
        for column in self._kind.columns:
            found += _listed(self._data.field_of(column))
        return tuple(dict.fromkeys(found))

    def extract(self, record: Any) -> Any:
        if not isinstance(record, dict):
            return self._kind.extract(record)
        record = {name: _worded(without_nulls(_listed_turns(v))) for name, v in record.items()}
        renamed = dict(record)
        for name, field in (self._data.fields or {}).items():
            if name in OPTIONAL_FIELDS:
                renamed[name] = record.get(str(field))
            elif name != "messages":
                renamed[name] = _joined(record, _listed(field))
        prompt = renamed.get("prompt")
        if isinstance(prompt, dict) and is_conversation(prompt.get("messages")):
            # OpenAI's files of preferences: an object of messages and their tools.
            renamed = {**prompt, **renamed, "prompt": prompt["messages"]}
        for name in TEXT_COLUMNS:
            if name in renamed:
                renamed[name] = _messages_in(renamed[name], name)
        turns = str(self._data.field_of("messages"))
        if turns in renamed:
            renamed[turns] = _chat_messages(renamed[turns])
        return self._kind.extract(renamed)

    def encode(self, extracted: Sequence[Any]) -> list[Example]:
        return self._kind.encode(extracted)


def _listed_turns(value: Any) -> Any:
    """Return turns as a list; `datasets.Sequence` gives one list for each of their members."""
    if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
        return value
    if not all(isinstance(member, list) for member in value.values()):
        return value
    rows = zip_longest(*value.values())
    return [dict(zip(value, row, strict=True)) for row in rows]


def _worded(value: Any) -> Any:
    """Return a number, such as an answer of 72, as its text, and all else as it is."""
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    return str(value) if is_number else value


def _messages_in(value: Any, field: str) -> Any:
    """Return the messages of a JSON text, or a message alone as a list; else the value.

    Raises:
        BrokenRecord: the text is a list of messages as Python shows it.
    """
    if isinstance(value, dict) and value.keys() & {"role", "from"}:
        return [value]
    if not isinstance(value, str) or not value.lstrip().startswith("[{") or not _ROLE.search(value):
        return value
    try:
        found = without_nulls(json.loads(value))
    except ValueError:
        return messages_of(value, field)
    return found if is_conversation(found) else value


def _listed(field: str | tuple[str, ...]) -> list[str]:
    return [field] if isinstance(field, str) else list(field)


def _joined(record: Document, fields: list[str]) -> Any:
    """Return the value of one field, or the texts of several, each on its line."""
    missing = [field for field in fields if field not in record]
    if len(missing) == len(fields):
        found = ", ".join(sorted(record)[:8])
        raise BrokenRecord(f"no field {missing[0]!r} (found: {found}); set data.fields")
    if len(fields) == 1:
        return record[fields[0]]
    given = [record.get(field) for field in fields]
    texts = [each for each in given if isinstance(each, str) and each.strip()]
    if len(texts) < sum(each not in (None, "") for each in given):
        raise BrokenRecord(
            f"fields {', '.join(fields)} hold more than text; name one of them in data.fields, or"
            f" {SKIP_REMEDY}"
        )
    return "\n".join(texts) or None


def _chat_messages(turns: Any) -> Any:
    """Return turns as messages; a cell of a CSV file holds them as JSON text."""
    if isinstance(turns, str):
        with suppress(ValueError):
            turns = without_nulls(json.loads(turns))
    if not is_conversation(turns):
        return turns
    return [_message(turn) for turn in turns]


def _message(turn: Document) -> Document:
    speaker = turn.get("from")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker in TOOL_SPEAKERS:
        return {"role": "tool", "content": turn.get("value"), **rest}
    if speaker not in TOOL_CALLERS:
        return turn
    given = turn.get("value")
    with suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    calls = given if isinstance(given, list) else [given]
    if not is_conversation(calls):
        raise BrokenRecord(
            f"a turn of {speaker} holds {str(given)[:40]!r}, no call as JSON; fix it, or"
            f" {SKIP_REMEDY}"
        )
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "tool_calls": tool_calls, **rest}
