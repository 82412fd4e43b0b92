"""Strict documents: convert a YAML file to a frozen dataclass.

A ConfigError names the key that is wrong and says why.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from autohet.runtime.job.other_names import (
    KEY_BY_OTHER_NAME,
    OTHER_VALUES,
    reason_without_key,
)
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json, read_text

T = TypeVar("T")


class _StrictLoader(yaml.SafeLoader):
    """YAML loader for hand-written documents.

    `1e-4` is a number (YAML 1.1 reads a string); a key given twice is an error.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            # `<<` merges another mapping, whose keys may be given here again.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool | None):
                raise ConfigError(f"line {line}: a key must be a plain word, not {key!r}")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} is given twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def read_yaml(path: str | Path, what: str) -> Document:
    """Return the mapping in a YAML file; `what` names the kind of document in errors ("job")."""
    text = read_text(path, what)
    try:
        # Safe, since the loader is a SafeLoader.
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the {what} file {str(path)!r} is not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"the {what} file {str(path)!r}, {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"the {what} file {str(path)!r} holds {type(document).__name__}, not a mapping of"
            " sections"
        )
    return document


def to_dataclass(document: Json, cls: type[T], what: str) -> T:
    """Convert `document` to the frozen dataclass `cls`.

    Raises:
        ConfigError: unknown or missing keys, wrong types or values.
    """
    document = plain_values(document)
    unknown = list(_unknown_keys(document, cls, what, cls))
    if unknown:
        raise ConfigError("\n".join(unknown))
    document = _as_fields(document, cls)
    try:
        return msgspec.convert(document, cls, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(error, document, cls, what)) from error


def plain_values(value: Any) -> Any:
    """Convert Python values to those that YAML would give.

    Scalars and arrays of numpy and torch become numbers and lists; paths and dtypes become text;
    transformers' configs become mappings. Other values stay, to be refused by their type.
    """
    if isinstance(getattr(value, "model_type", None), str) and hasattr(value, "to_dict"):
        return {**plain_values(value.to_dict()), "model_type": value.model_type}
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {plain_values(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(each) for each in value]
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return plain_values(value.value)
    if isinstance(value, str):
        # Also a numpy.str_, which is a class of its own.
        return str(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    return value


def _unknown_keys(
    document: Json, cls: type, what: str, root: type, where: str = ""
) -> Iterator[str]:
    """Yield a line for each key of `document`, at any depth, that `cls` has not.

    A line suggests the key that was probably meant. root: dataclass of the whole document.
    """
    hints = typing.get_type_hints(cls)
    known = {key_of(field.name): hints[field.name] for field in dataclasses.fields(cls)}
    for key, value in document.items():
        if key in known:
            yield from _unknown_in_value(value, known[key], what, root, f"{where}{key}")
        else:
            yield _unknown_key(key, known, what, root, where)


def _unknown_in_value(value: Any, hint: Any, what: str, root: type, where: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        nested = _dataclass_in(hint)
        if nested is not None:
            yield from _unknown_keys(value, nested, what, root, where + ".")
    elif isinstance(value, list | tuple):
        element = _element_of(hint)
        for index, item in enumerate(value):
            if element is not None:
                yield from _unknown_in_value(item, element, what, root, f"{where}[{index}]")


def _paths_by_key(cls: type, where: str = "") -> dict[str, str]:
    """Return the path of each key in a document's sections, and of each name that others use."""
    paths = dict(KEY_BY_OTHER_NAME) if not where else {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        nested = _dataclass_in(hints[field.name])
        if nested is not None:
            paths = _paths_by_key(nested, f"{where}{field.name}.") | paths
        elif where:
            paths[key_of(field.name)] = where + key_of(field.name)
    return paths


def key_of(field: str) -> str:
    """Return the key of a dataclass field: `from` of `from_`, since Python reserves the word."""
    return field.rstrip("_")


def _as_fields(document: Json, cls: type) -> Document:
    """Return the document by names of fields.

    It has `off` where a key takes that word and YAML 1.1 read false.
    """
    hints = typing.get_type_hints(cls)
    fields = {key_of(field.name): field.name for field in dataclasses.fields(cls)}
    found: Document = {}
    for key, value in document.items():
        hint = hints[fields[key]]
        nested = _dataclass_in(hint)
        if isinstance(value, Mapping) and nested is not None:
            value = _as_fields(value, nested)
        elif value is False and "off" in _words_of(hint):
            value = "off"
        found[fields[key]] = value
    return found


def _words_of(hint: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, also of one in a union; empty if there is none."""
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    words: tuple[Any, ...] = ()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for member in typing.get_args(hint):
            words += _words_of(member)
    return words


def _element_of(hint: Any) -> Any:
    """Return the element type of a sequence, also of one in a union; None if there is none."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for member in typing.get_args(hint):
            element = _element_of(member)
            if element is not None:
                return element
        return None
    arguments = [each for each in typing.get_args(hint) if each is not Ellipsis]
    return arguments[0] if arguments else None


def _dataclass_in(hint: Any) -> type | None:
    """Return the dataclass that `hint` is or, in a union with None, contains."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for argument in typing.get_args(hint):
            if isinstance(argument, type) and dataclasses.is_dataclass(argument):
                return argument
    return None


def _unknown_key(key: object, known: Iterable[str], what: str, root: type, where: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.75)
    hint = reason_without_key(str(key))
    paths = _paths_by_key(root)
    if str(key) in paths:
        hint = f"did you mean {paths[str(key)]}?"
    elif hint is None:
        hint = f"known here: {', '.join(names)}"
        if near:
            hint = f"did you mean {where}{near[0]}?"
    return f"unknown key {where}{key} in the {what}; {hint}"


def _readable(error: msgspec.ValidationError, document: Json, cls: type, what: str) -> str:
    """Return msgspec's error as a message that names the key and its value.

    "Expected `int`, got `str` - at `$.training.steps`" becomes "training.steps is 'ten' ...:
    expected int".
    """
    # A section's own check has failed, which names its key itself.
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    text, _, path = str(error).partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        prefix = f"{place}." if place else ""
        return f"the {what} lacks {prefix}{missing.group(1)}; add it"
    text = text.replace("`", "")
    text = text.replace("Expected", "expected")
    text = text.replace("object", "a mapping of keys").replace("array", "a list")
    choices = _choices(cls, place)
    others = text.replace(" | null", "").replace(" | bool", "")
    if "a mapping of keys" in text:
        text = text.replace("keys", f"keys ({', '.join(choices[:4])}, ...)" if choices else "keys")
    elif choices and "|" not in others:
        text = f"use one of {', '.join(map(str, choices))}"
    shown = ""
    value = _value_at(document, place)
    ours = OTHER_VALUES.get(str(value))
    if ours in choices:
        text += f"; {value} is {ours} here"
    if not isinstance(value, Mapping) and value is not _ABSENT:
        shown = f" is {value!r}"
    return f"{key_of(place) or 'the document'}{shown} in the {what}: {text}"


_ABSENT = object()


def _value_at(document: Any, place: str) -> Any:
    """Return the value at a path such as "training.betas[1]".

    It is _ABSENT if the path has no definite index (msgspec writes `[...]`).
    """
    for key in re.findall(r"[^.\[\]]+|\[[^\]]*\]", place):
        try:
            if key.startswith("["):
                document = document[int(key[1:-1])]
            else:
                document = document[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return _ABSENT
    return document


def _choices(cls: Any, place: str) -> tuple[Any, ...]:
    """Return the values of the Literal at `place`, or the keys of the section; else empty."""
    words: tuple[Any, ...] = ()
    for key, index in re.findall(r"([A-Za-z_]\w*)(\[)?", place):
        hint = typing.get_type_hints(cls).get(key)
        hint = _element_of(hint) if index else hint
        words = _words_of(hint)
        cls = _dataclass_in(hint)
        if cls is None:
            return words
    return words or tuple(key_of(field.name) for field in dataclasses.fields(cls))
