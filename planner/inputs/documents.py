"""Strict reading of users' files, and of mappings that came from YAML or JSON: an unknown key is an
error that names it and the known ones.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from planner.errors import ConfigError

Json = Mapping[str, Any]
"""Object of a JSON or YAML document that is only read."""
Document = dict[str, Any]
"""Object of a JSON document in the making."""


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a user's file; `what` names the kind of file in errors ("plan").

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} '{path}': {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} '{path}' is not UTF-8 text (near byte {error.start}); is it a {what} at all?"
        ) from None


def parse_csv(text: str, what: str) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Return the columns and rows of a CSV; lines that begin with '#' are comments.

    Raises:
        ConfigError: the text is no CSV.
    """
    lines = (line for line in io.StringIO(text) if not line.startswith("#"))
    reader = csv.DictReader(lines)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{what} is no CSV text: {error}") from None
    return tuple(reader.fieldnames or ()), rows


@contextmanager
def refuse_unwritable(path: str | Path, what: str = "") -> Iterator[None]:
    """Raise ConfigError where the block cannot write the user's file `path`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {what}'{path}': {error.strerror}") from None


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an integer; true and false are none in a document."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for an integer or a float; true and false are none in a document."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_number(value: Any) -> float:
    """Return a number that a table or label has as text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_mapping(document: object, what: str) -> Json:
    """`document` as a mapping with string keys, or ConfigError."""
    if not isinstance(document, Mapping) or not all(isinstance(key, str) for key in document):
        raise ConfigError(
            f"{what} must be a mapping with string keys, not {type(document).__name__}"
        )
    return document


def read_section(document: Json, key: str) -> Json:
    """Return the mapping under a key; empty if it is absent or null.

    Raises:
        ConfigError: something else is there.
    """
    return read_mapping(document.get(key) or {}, key)


def read_sections(document: Json, key: str) -> list[Json]:
    """Return the list of mappings under a key; empty if it is absent or null.

    Raises:
        ConfigError: something else is there.
    """
    found = document.get(key) or []
    if not isinstance(found, list):
        raise ConfigError(f"{key} must be a list, not {type(found).__name__}")
    return [read_mapping(item, f"an item of {key}") for item in found]


def check_keys(
    document: Json,
    what: str,
    known: frozenset[str],
    required: frozenset[str] = frozenset(),
) -> None:
    """ConfigError for a key that is not in `known`, or for one of `required` that is absent."""
    for key in document:
        if key not in known:
            close = get_close_matches(key, sorted(known), n=1)
            hint = f"; known: {', '.join(sorted(known))}"
            if close:
                hint = f"; did you mean '{close[0]}'?"
            raise ConfigError(f"unknown key '{key}' in {what}{hint}")
    missing = sorted(required - set(document))
    if missing:
        raise ConfigError(f"{what} lacks '{missing[0]}'")


def read_int(document: Json, key: str, what: str, minimum: int) -> int:
    """An integer of at least `minimum`; true and false are no integers."""
    value = document[key]
    if not is_integer(value):
        raise ConfigError(f"'{key}' of {what} must be an integer, not {value!r}")
    if value < minimum:
        raise ConfigError(f"'{key}' of {what} is {value}; it must be at least {minimum}")
    return value


def read_bool(document: Json, key: str, what: str) -> bool:
    """True or false, nothing else."""
    value = document[key]
    if not isinstance(value, bool):
        raise ConfigError(f"'{key}' of {what} must be true or false, not {value!r}")
    return value


def read_str(document: Json, key: str, what: str) -> str:
    """A string that is not empty."""
    value = document[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"'{key}' of {what} must be a non-empty string, not {value!r}")
    return value


def read_list(document: Json, key: str, what: str) -> list[Any]:
    """A list that is not empty."""
    value = document[key]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"'{key}' of {what} must be a non-empty list, not {value!r}")
    return value


_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([numkKMGTPE])(i?)|[eE]([+-]?\d+))?")
_SMALL = {"n": 1e-9, "u": 1e-6, "m": 1e-3}


def quantity(value: object) -> float | None:
    """Kubernetes' quantity (`500m`, `1.5Gi`, `1e3`) as a number; None where it is none."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        return None
    number, unit, binary, exponent = match.groups()
    if exponent:
        return float(number) * 10.0 ** int(exponent)
    if not unit:
        return float(number)
    if unit in _SMALL:
        return None if binary else float(number) * _SMALL[unit]
    base = 1024.0 if binary else 1000.0
    power = " KMGTPE".index(unit.upper())
    return float(number) * base**power
