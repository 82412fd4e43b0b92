"""The journal of a job's generations, `generations/<n>.json`: each entry is put before the
generation's orders go out, if there is none.

So a number belongs to one driver, a driver that was replaced finds its next number taken, and
whoever reads the journal knows which state descends from which (`recovery.state.ancestry`). What no
entry names was written by a driver that could not reach the storage: it is never taken for
anybody's history.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import msgspec

from recovery.checkpoint.errors import Superseded
from recovery.state.ancestry import Ancestry, Descent
from recovery.storage.errors import ObjectExists, ObjectMissing
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)

PREFIX = "generations/"
_ENTRY = re.compile(r"^generations/(\d{8,})\.json$")


def entry_name(generation: int) -> str:
    return f"{PREFIX}{generation:08d}.json"


class Journal:
    """One driver's view of it.

    Owned by one thread; entries that were read are not read again, since none is ever changed.
    """

    def __init__(self, storage: Storage, driver: str) -> None:
        self._storage, self._driver = storage, driver
        self._known: dict[int, Descent] = {}
        self._unwritten: dict[int, Descent] = {}
        self._mine: int | None = None

    def read(self) -> Ancestry:
        """All entries that are there now."""
        self._known = read_entries(self._storage, self._known)
        return Ancestry(self._known)

    def claim(self, entry: Descent) -> None:
        """Put the entry of a generation that is about to begin; returns once it is durable.

        Raises:
            Superseded: another driver has that number, or a newer one. StorageError: it is not
            known; `check` tries again.
        """
        self._unwritten[entry.generation] = entry
        self._mine = entry.generation
        self.check()

    def check(self) -> Ancestry:
        """Put what is not there yet, and see that no other driver has begun a newer generation; all
        entries.

        Raises:
            Superseded: one has.
        """
        for generation, entry in sorted(self._unwritten.items()):
            self._put(entry)
            del self._unwritten[generation]
        found = self.read()
        newest = None if found.newest is None else found.entries[found.newest]
        if newest is not None and self._mine is not None and newest.driver != self._driver:
            raise Superseded(self._storage.uri, newest.generation, newest.driver)
        return found

    def _put(self, entry: Descent) -> None:
        name = entry_name(entry.generation)
        try:
            self._storage.put(name, msgspec.json.encode(entry), if_none_match=True)
        except ObjectExists:
            there = _read(self._storage, name)
            if there is None or there.driver != self._driver:
                raise Superseded(
                    self._storage.uri,
                    entry.generation,
                    "unknown" if there is None else there.driver,
                ) from None

    def forget_before(self, generation: int) -> None:
        """Entries before `generation` are of no use: no state of theirs is wanted any more."""
        old = [number for number in self._known if number < generation]
        self._storage.delete([entry_name(number) for number in old])
        self._known = {
            number: entry for number, entry in self._known.items() if number >= generation
        }


def read_ancestry(storage: Storage) -> Ancestry:
    """What the journal of a storage says; empty where there is none."""
    return Ancestry(read_entries(storage, {}))


def read_entries(storage: Storage, known: dict[int, Descent]) -> dict[int, Descent]:
    """Those that are there; read are only those that are not `known`."""
    numbers = [int(match[1]) for info in storage.list(PREFIX) if (match := _ENTRY.match(info.name))]
    return {
        number: entry
        for number in numbers
        if (entry := known.get(number) or _entry(storage, number)) is not None
    }


def _entry(storage: Storage, number: int) -> Descent | None:
    entry = _read(storage, entry_name(number))
    return entry if entry is not None and entry.generation == number else None


def _read(storage: Storage, name: str) -> Descent | None:
    """The entry; None where it has gone or is damaged: what it told of counts for nobody's history
    then.
    """
    try:
        return msgspec.json.decode(storage.get(name), type=Descent)
    except ObjectMissing:
        return None
    except msgspec.DecodeError as error:
        logger.warning("%s/%s is not a journal entry: %s", storage.uri, name, error)
        return None


def oldest_needed(generations: Iterable[int], ancestry: Ancestry) -> int:
    """The oldest generation whose entry still says something of the state that these wrote."""
    return min([*generations, *([] if ancestry.newest is None else [ancestry.newest])], default=0)
