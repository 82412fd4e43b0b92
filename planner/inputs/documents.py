"""Strict reading of mappings that came from YAML or JSON: an unknown key is an error that names it
and the known ones.
"""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeGuard

from planner.errors import ConfigError


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


def read_mapping(document: object, what: str) -> Mapping[str, Any]:
    """`document` as a mapping with string keys, or ConfigError."""
    if not isinstance(document, Mapping) or not all(isinstance(key, str) for key in document):
        raise ConfigError(
            f"{what} must be a mapping with string keys, not {type(document).__name__}"
        )
    return document


def read_section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key; empty if it is absent or null.

    Raises:
        ConfigError: something else is there.
    """
    return read_mapping(document.get(key) or {}, key)


def read_sections(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the list of mappings under a key; empty if it is absent or null.

    Raises:
        ConfigError: something else is there.
    """
    found = document.get(key) or []
    if not isinstance(found, list):
        raise ConfigError(f"{key} must be a list, not {type(found).__name__}")
    return [read_mapping(item, f"an item of {key}") for item in found]


def check_keys(
    document: Mapping[str, Any],
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


def read_int(document: Mapping[str, Any], key: str, what: str, minimum: int) -> int:
    """An integer of at least `minimum`; true and false are no integers."""
    value = document[key]
    if not is_integer(value):
        raise ConfigError(f"'{key}' of {what} must be an integer, not {value!r}")
    if value < minimum:
        raise ConfigError(f"'{key}' of {what} is {value}; it must be at least {minimum}")
    return value


def read_bool(document: Mapping[str, Any], key: str, what: str) -> bool:
    """True or false, nothing else."""
    value = document[key]
    if not isinstance(value, bool):
        raise ConfigError(f"'{key}' of {what} must be true or false, not {value!r}")
    return value


def read_str(document: Mapping[str, Any], key: str, what: str) -> str:
    """A string that is not empty."""
    value = document[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"'{key}' of {what} must be a non-empty string, not {value!r}")
    return value


def read_list(document: Mapping[str, Any], key: str, what: str) -> list[Any]:
    """A list that is not empty."""
    value = document[key]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"'{key}' of {what} must be a non-empty list, not {value!r}")
    return value
