"""Values of the driver as JSON and back.

These are dataclasses, msgspec structs, named tuples and enums of this distribution, and what they
hold.

`{"@": "module:Class", ...}` is an object (fields at their defaults left out, and secrets, which are
not in its `repr` either), `{"@": "tuple" | "set" | "map" | "bytes", "of": ...}` what JSON has no
word for. Floats are written so that they are read back to the bit. The same value always gives the
same text, whatever the order of its sets.
"""

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
        document = {"@": _name(type(value))}
        for name, default in fields:
            item = getattr(value, name)
            if not _is_default(item, default):
                document[name] = encode(item)
        return document
    if isinstance(value, tuple):
        items = [encode(item) for item in value]
        return {"@": "tuple", "of": items}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, AbstractSet):
        items = [encode(item) for item in value]
        return {"@": "set", "of": sorted(items, key=_text)}
    if isinstance(value, Mapping):
        # A list of pairs, since a key need not be a string, and the order counts.
        pairs = [[encode(key), encode(item)] for key, item in value.items()]
        return {"@": "map", "of": pairs}
    if isinstance(value, bytes):
        text = base64.b64encode(value).decode()
        return {"@": "bytes", "of": text}
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
    values = {name: decode(item) for name, item in document.items() if name != "@"}
    return found(**values)


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
    if isinstance(found, type) and _is_recordable(found):
        return found
    raise ValueError(f"'{name}' is no class of a recorded value")


def _is_recordable(kind: type) -> bool:
    return issubclass(kind, Enum) or fields_of(kind) is not None


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
        found = []
        for field in dataclasses.fields(kind):
            # A field that `repr` leaves out is a secret.
            if field.init and field.repr:
                has_default = field.default is not dataclasses.MISSING
                default = field.default if has_default else _NONE
                found.append((field.name, default))
        return tuple(found)
    if issubclass(kind, msgspec.Struct):
        found = []
        for member in msgspec.structs.fields(kind):
            has_default = member.default is not msgspec.NODEFAULT
            default = member.default if has_default else _NONE
            found.append((member.name, default))
        return tuple(found)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        defaults = kind._field_defaults
        return tuple((name, defaults.get(name, _NONE)) for name in kind._fields)
    return None


def _is_default(value: Any, default: Any) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str | tuple)
    # The types, too, since 1 == 1.0 == True.
    is_same_type = type(value) is type(default)
    return is_plain and is_same_type and value == default
