"""Journal of a job's generations: one object `generations/<n>.json` each.

An entry is put, if there is none, before the generation's orders go out. So a number belongs to one
driver, and a driver that was replaced finds its next number taken. The journal's readers know which
state descends from which (`recovery.state.ancestry`). State that no entry names was written by a
driver that could not reach the storage, and is never taken as part of any history.
"""

from __future__ import annotations

import logging
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from recovery.checkpoint.errors import VERSION, LaterRelease, Superseded
from recovery.checkpoint.lease import MARKER_CONTENT
from recovery.documents import DocumentDamaged, decode_json
from recovery.release import RELEASE
from recovery.state.ancestry import Ancestry, Descent
from recovery.storage.errors import ObjectExists, ObjectMissing, StorageError, StorageMisplaced
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)

PREFIX = "generations/"
_ENTRY = re.compile(r"^generations/(\d{8,})\.json$")


def entry_name(generation: int) -> str:
    return f"{PREFIX}{generation:08d}.json"


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stored form of an entry.

    `checksum` is the CRC-32 of this JSON without a checksum (version 1: of the descent's first four
    fields; None: written by a version that had none). `release` wrote it. `ahead` is in the
    checksum only if it is true, since earlier releases of this version did not have it.
    """

    generation: int
    parent: int | None
    first_step: int
    driver: str = ""
    checksum: int | None = None
    run: str = ""
    version: int = 1
    release: str = ""
    ahead: bool = False


class JournalUnreachable(StorageMisplaced):
    """Raised when what this driver has written is gone: another file system lies at its place."""


class Journal:
    """View of the journal by one driver. Owned by one thread.

    Entries never change, so each entry is read only once. The driver checks again and again that
    its own entries are still there and puts a lost one again: one successful write does not prove
    that the entry stays.
    """

    def __init__(self, storage: Storage, driver: str) -> None:
        self._storage = storage
        self._driver = driver
        self._known: dict[int, Descent] = {}
        self._mine: dict[int, Descent] = {}
        """Entries of this driver that are to be there."""
        self._put_before: set[int] = set()
        self._run = ""
        self._marked = False

    @property
    def _marker(self) -> str:
        """Name of an object that this driver puts once, to recognize its storage.

        If it and all entries are gone, this is not the storage that they were put into.
        """
        return f"driver/{self._driver}.mark"

    def mark(self) -> None:
        """Put the marker into the storage, before anything else is written."""
        self._storage.put(self._marker, MARKER_CONTENT)
        self._marked = True

    def unmark(self) -> None:
        """Remove the marker, at the job's end. Best effort."""
        if self._marked:
            with suppress(StorageError):
                self._storage.delete([self._marker])

    def read(self) -> Ancestry:
        """Read the entries that are there now, and which ones are known to be lost or damaged.

        Raises:
            JournalUnreachable: neither the marker nor any entry that was there before is there.
        """
        found = read_entries(self._storage, self._known, self._run)
        self._require_storage(found)
        self._known = found.readable
        return found.ancestry()

    def _require_storage(self, found: Entries) -> None:
        if not self._marked or found.numbers & self._known.keys():
            return
        if self._storage.size(self._marker) is None:
            raise JournalUnreachable(
                self._storage.uri,
                "nothing of what this driver has written is there",
                "check that the file system is mounted",
            )

    def claim(self, entry: Descent) -> None:
        """Put the entry of a generation that is about to begin; returns once it is durable.

        Raises:
            Superseded: another driver has that number, or a newer one. StorageError: it is not
            known; `check` tries again.
        """
        self._mine[entry.generation] = entry
        self.check()

    def check(self) -> Ancestry:
        """Put this driver's missing entries, check for a newer generation, and return all entries.

        Raises:
            Superseded: another driver has begun a newer generation. JournalUnreachable: see `read`;
            nothing is put then.
        """
        for generation in sorted(self._mine.keys() - self._put_before):
            self._put(self._mine[generation])
        found = self._read_own()

        absent = sorted(self._mine.keys() - self._known.keys())
        if not absent:
            return found
        for generation in absent:
            self._put(self._mine[generation])
        return self._read_own()

    def _read_own(self) -> Ancestry:
        """Read the journal as `read` does, and check that this driver's generation is the newest.

        Raises:
            Superseded: another driver has the same generation as this one, or a newer one.
        """
        found = self.read()
        if found.newest is None or not self._mine:
            return found

        newest = found.entries[found.newest]
        if newest.driver == self._driver:
            return found
        if newest.generation in self._mine and newest.generation in found.unknown:
            # This driver's own entry, damaged.
            return found
        raise Superseded(self._storage.uri, newest.generation, newest.driver or "unknown")

    def adopt_run(self, run: str) -> None:
        """Use the run of the checkpoint that is gone on from, if the journal records none."""
        self._run = self._run or read_ancestry(self._storage).run or run

    def _put(self, entry: Descent) -> None:
        """Put an entry; one of this driver's that was damaged is written again."""
        self.adopt_run(uuid.uuid4().hex)
        entry = msgspec.structs.replace(entry, run=self._run)
        name = entry_name(entry.generation)
        data = encode_entry(entry)
        try:
            self._storage.put(name, data, if_none_match=True)
        except ObjectExists:
            there = _read(self._storage, name, entry.generation)
            if there is None and entry.generation in self._put_before:
                self._storage.put(name, data)
            elif there is None or there.driver != self._driver:
                driver = "unknown" if there is None else there.driver
                raise Superseded(self._storage.uri, entry.generation, driver) from None
        self._put_before.add(entry.generation)

    def forget_before(self, generation: int) -> None:
        """Delete the entries before `generation`: no state of theirs is needed any more."""
        old = sorted(number for number in self._known if number < generation)
        # Forgotten first: `check` would put them again.
        self._mine = _entries_from(self._mine, generation)
        # The oldest is deleted first: a deletion that is cut short leaves no gap.
        self._storage.delete([entry_name(number) for number in old])
        self._known = _entries_from(self._known, generation)


def _entries_from(entries: Mapping[int, Descent], generation: int) -> dict[int, Descent]:
    """Return the entries of `generation` and of later ones."""
    return {number: entry for number, entry in entries.items() if number >= generation}


def begin_fresh(storage: Storage) -> int:
    """Begin the journal anew, so that no copy on any node is of the run's history.

    Call while no driver of the job is alive. Returns the number of the one entry, whose state is
    newly initialized.
    """
    ancestry = read_ancestry(storage)
    first = (ancestry.newest or 0) + 1
    entry = Descent(generation=first, parent=None, first_step=0, run=uuid.uuid4().hex)
    storage.put(entry_name(first), encode_entry(entry), if_none_match=True)
    storage.delete([entry_name(number) for number in sorted(ancestry.entries)])
    return first


@dataclass(frozen=True)
class Entries:
    """The entries that were `readable`, and the numbers of all that are there."""

    readable: dict[int, Descent]
    numbers: frozenset[int]

    def ancestry(self) -> Ancestry:
        return Ancestry.with_unknown(self.readable, self.numbers)


def read_ancestry(storage: Storage) -> Ancestry:
    """Read the journal of a storage; empty if there is none."""
    return read_entries(storage, {}).ancestry()


def read_generation(storage: Storage, generation: int, driver: str) -> Ancestry:
    """Return the entry of one generation if it is that of `driver`, else the whole journal."""
    entry = _read(storage, entry_name(generation), generation)
    if entry is None or entry.driver != driver:
        return read_ancestry(storage)
    return Ancestry({generation: entry})


def read_entries(storage: Storage, known: Mapping[int, Descent], run: str = "") -> Entries:
    """List the journal's entries and read those that are not in `known`.

    An entry of another run than `run` (by default, that of most entries) is not readable.
    """
    numbers = set()
    for info in storage.list(PREFIX):
        match = _ENTRY.match(info.name)
        if match:
            numbers.add(int(match[1]))

    readable = {}
    for number in sorted(numbers):
        entry = known.get(number) or _read(storage, entry_name(number), number)
        if entry is not None:
            readable[number] = entry

    run = run or Ancestry(readable).run
    for number, entry in list(readable.items()):
        if entry.run not in ("", run):
            name = entry_name(number)
            logger.warning("%s/%s is of run %s, not of %s", storage.uri, name, entry.run, run)
            del readable[number]
    return Entries(readable, frozenset(numbers))


def encode_entry(entry: Descent) -> bytes:
    """Encode the entry as JSON, with its checksum."""
    stored = _Stored(**msgspec.structs.asdict(entry), version=VERSION, release=RELEASE)
    return msgspec.json.encode(msgspec.structs.replace(stored, checksum=_checksum(stored)))


def _checksum(stored: _Stored) -> int:
    fields = msgspec.structs.asdict(msgspec.structs.replace(stored, checksum=None))
    if stored.version != 1:
        if not stored.ahead:
            del fields["ahead"]
        return zlib.crc32(msgspec.json.encode(fields))
    first = {name: fields[name] for name in ("generation", "parent", "first_step", "driver")}
    return zlib.crc32(msgspec.json.encode(first))


def _require_readable(data: bytes, uri: str) -> None:
    class Head(msgspec.Struct):
        version: int = 1
        release: str = "unknown"

    head = decode_json(data, Head)
    if head.version > VERSION:
        reason = f"is of version {head.version}, written by autohet {head.release}"
        raise LaterRelease(uri, reason)


def _read(storage: Storage, name: str, generation: int) -> Descent | None:
    """Return the entry; None if it is gone or damaged: its content is then unknown.

    Raises:
        LaterRelease: it is of a later release.
    """
    try:
        data = storage.get(name)
        _require_readable(data, f"{storage.uri}/{name}")
        stored = decode_json(data, _Stored)
    except ObjectMissing:
        return None
    except DocumentDamaged as error:
        logger.warning("%s/%s is not a journal entry: %s", storage.uri, name, error)
        return None

    fields = msgspec.structs.asdict(stored)
    entry = Descent(**{field: fields[field] for field in Descent.__struct_fields__})
    if entry.generation != generation:
        logger.warning("%s/%s is of generation %d", storage.uri, name, entry.generation)
        return None
    if stored.checksum is not None and stored.checksum != _checksum(stored):
        logger.warning("%s/%s is damaged: its checksum is wrong", storage.uri, name)
        return None
    return entry


def oldest_needed(generations: Iterable[int], ancestry: Ancestry) -> int:
    """Return the oldest generation whose entry is still needed.

    It is the oldest of `generations`, which wrote the state that is kept, and of the newest one.
    """
    needed = list(generations)
    if ancestry.newest is not None:
        needed.append(ancestry.newest)
    return min(needed, default=0)
