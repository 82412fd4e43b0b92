"""Store of derived values on disk: what planning once read from transformers and Ray.

Reading them takes seconds, since it imports torch or Ray. A value is a JSON document whose name is
a hash of everything that it depends on, so that it is never stale, only unused. It carries the
warnings that were logged when it was derived; a reader logs them again.

The store is a convenience: a document that is absent, damaged or cannot be written is derived anew.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

OFF = "off"
MAX_DOCUMENTS = 512
MAX_BYTES = 64 * 2**20
"""Limits on the store; the documents that were not written or read for longest are removed."""
MAX_REMEMBERED = 32
LIBRARIES = ("ray", "torch", "transformers")
SOURCES = ("autohet/control", "autohet/driver", "autohet/runtime", "planner")
"""Folders with the code that derives values; a change of any of its files makes them unused."""

T = TypeVar("T")
remembered: OrderedDict[str, "_Fact[Any]"] = OrderedDict()


@dataclass(frozen=True)
class _Warning:
    logger: str
    level: int
    message: str


@dataclass(frozen=True)
class _Fact(Generic[T]):
    value: T
    warnings: list[_Warning] = field(default_factory=list)


def directory() -> Path | None:
    """Return the store's directory: $AUTOHET_MODEL_CACHE or a folder of the user's cache.

    None: it is switched off.
    """
    given = os.environ.get("AUTOHET_MODEL_CACHE")
    if given == OFF:
        return None
    if given:
        return Path(given).expanduser()
    root = os.environ.get("AUTOHET_CACHE")
    if not root:
        user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.path.join(user_cache, "autohet")
    return Path(root).expanduser() / "models"


def recall(kind: type[T], depends_on: Mapping[str, Any], derive: Callable[[], T]) -> T:
    """Return a value of the store, or derive it and store it.

    kind: its type, of dataclasses and plain values. depends_on: everything that it depends on, but
    for the versions of the libraries and of this program. An error of `derive` is not stored.
    """
    place = directory()
    if place is None:
        return derive()
    document = {"kind": kind.__name__, "of": depends_on, "by": versions()}
    text = json.dumps(document, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()
    known = remembered.get(key) or _read(place / f"{key}.json", kind)
    if known is not None:
        _remember(key, known)
        for each in known.warnings:
            logging.getLogger(each.logger).log(each.level, each.message)
        found: T = known.value
        return found
    with _collect_warnings() as warnings:
        value = derive()
    fact = _Fact(value, warnings)
    _remember(key, fact)
    with suppress(OSError):
        _write(place, key, fact)
    return value


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries, and the digest of the deriving code."""
    # Here, since it is slow to import.
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return found | {"code": digest.hexdigest()}


def _remember(key: str, fact: _Fact[Any]) -> None:
    remembered[key] = fact
    remembered.move_to_end(key)
    if len(remembered) > MAX_REMEMBERED:
        remembered.popitem(last=False)


def _read(path: Path, kind: type[T]) -> _Fact[T] | None:
    """Return a document's content; None if there is none, or it is not as it was written."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
        if _digest(body) != digest:
            return None
        fact = msgspec.json.decode(body, type=_Fact[kind])  # type: ignore[valid-type]
        # Its time says when it was last of use: the oldest are removed first.
        os.utime(path)
    except (OSError, msgspec.MsgspecError):
        return None
    return fact


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _write(place: Path, key: str, fact: _Fact[Any]) -> None:
    """Write a document under a temporary name first, and keep the store within its limits."""
    body = msgspec.json.encode(fact)
    place.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=place, suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(body) + b"\n" + body)
        os.replace(name, place / f"{key}.json")
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
    _remove_oldest(place)


def _remove_oldest(place: Path) -> None:
    found = []
    for path in place.iterdir():
        with suppress(OSError):
            state = path.stat()
            found.append((state.st_mtime, state.st_size, path))
    found.sort(key=lambda each: each[0])
    num_bytes = sum(size for _, size, _ in found)
    count = len(found)
    for _, size, path in found:
        if count <= MAX_DOCUMENTS and num_bytes <= MAX_BYTES:
            return
        with suppress(OSError):
            path.unlink()
        count -= 1
        num_bytes -= size


@contextmanager
def _collect_warnings() -> Iterator[list[_Warning]]:
    """Collect the warnings that this program logs meanwhile."""
    warnings: list[_Warning] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(_Warning(record.name, record.levelno, record.getMessage()))

    collector = Collector(logging.WARNING)
    logger = logging.getLogger("autohet")
    logger.addHandler(collector)
    try:
        yield warnings
    finally:
        logger.removeHandler(collector)
