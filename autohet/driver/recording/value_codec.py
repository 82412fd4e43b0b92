"""Values of the driver as JSON and back.

These are dataclasses, msgspec structs, named tuples and enums of this distribution, and what they
hold.

`{"@": "module:Class", ...}` is an object (fields at their defaults left out, and secrets, which are
not in its `repr` either), `{"@": "tuple" | "set" | "map" | "bytes", "of": ...}` what JSON has no
word for. Floats are written so that they are read back to the bit. The same value always gives the
same text, whatever the order of its sets.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache
from typing import Any

import msgspec

PACKAGES = ("autohet", "planner", "recovery")


def encode(value: Any) -> Any:
    """Return the value as `json.dumps` takes it. Raises TypeError for any other type."""
    if isinstance(value, Enum):
        return {"@": _name(type(value)), "of": value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    fields = fields_of(type(value))
    if fields is not None:
        found = {name: getattr(value, name) for name, _ in fields}
        kept = {
            name: item for name, item in found.items() if not _is_default(item, dict(fields)[name])
        }
        return {"@": _name(type(value)), **{name: encode(item) for name, item in kept.items()}}
    if isinstance(value, tuple):
        return {"@": "tuple", "of": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, AbstractSet):
        return {"@": "set", "of": sorted((encode(item) for item in value), key=_text)}
    if isinstance(value, Mapping):
        return {"@": "map", "of": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"@": "bytes", "of": base64.b64encode(value).decode()}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be recorded")


def decode(document: Any) -> Any:
    """Return the value of a document from `encode`.

    Raises ValueError where the document names anything but a value's class of this distribution.
    """
    if isinstance(document, list):
        return [decode(item) for item in document]
    if not isinstance(document, dict):
        return document
    kind = document["@"]
    of: Any = document.get("of")
    if kind == "tuple":
        return tuple(decode(item) for item in of)
    if kind == "set":
        return frozenset(decode(item) for item in of)
    if kind == "map":
        return {decode(key): decode(item) for key, item in of}
    if kind == "bytes":
        return base64.b64decode(of)
    found = _class(kind)
    if issubclass(found, Enum):
        return found(of)
    return found(**{name: decode(item) for name, item in document.items() if name != "@"})


def _text(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


def _name(kind: type) -> str:
    if kind.__module__.partition(".")[0] not in PACKAGES:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be recorded")
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if module.partition(".")[0] not in PACKAGES or "." in qualified:
        raise ValueError(f"'{name}' is no class of a recorded value")
    found = getattr(importlib.import_module(module), qualified, None)
    if not isinstance(found, type) or not (issubclass(found, Enum) or fields_of(found) is not None):
        raise ValueError(f"'{name}' is no class of a recorded value")
    return found


_NONE = object()
Fields = tuple[tuple[str, Any], ...]
_fields_by_type: dict[Any, Fields | None] = {}


def fields_of(kind: Any) -> Fields | None:
    """Return the names and plain defaults of the fields of such a type; None for other types."""
    if kind not in _fields_by_type:
        _fields_by_type[kind] = _read_fields(kind)
    return _fields_by_type[kind]


def _read_fields(kind: Any) -> Fields | None:
    if dataclasses.is_dataclass(kind):
        made_from = [field for field in dataclasses.fields(kind) if field.init and field.repr]
        return tuple(
            (f.name, _NONE if f.default is dataclasses.MISSING else f.default) for f in made_from
        )
    if issubclass(kind, msgspec.Struct):
        found = msgspec.structs.fields(kind)
        return tuple(
            (f.name, _NONE if f.default is msgspec.NODEFAULT else f.default) for f in found
        )
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple((name, kind._field_defaults.get(name, _NONE)) for name in kind._fields)
    return None


def _is_default(value: Any, default: Any) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return plain and type(value) is type(default) and value == default
