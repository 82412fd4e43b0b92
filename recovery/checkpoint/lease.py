"""Driver lease: one driver at a time holds `driver/<identity>.lease` in the storage.

The driver renews its lease while it lives, which keeps a second driver from starting beside it. The
lease fails if a driver stands still for longer than its lease lasts. The journal
(`recovery.checkpoint.journal`) then keeps the steps of both drivers apart.
"""

import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from recovery.checkpoint.errors import LeaseHeld
from recovery.documents import DocumentDamaged, decode_json
from recovery.process_identity import ProcessIdentity, boot_id, process_start
from recovery.storage.errors import ObjectMissing, StorageError
from recovery.storage.protocol import ObjectInfo, Storage

logger = logging.getLogger(__name__)

PREFIX = "driver/"
MARKER_CONTENT = b"autohet driver\n"
_LEASE = re.compile(r"^driver/[^/]+-\d+-[0-9a-f]{8}\.lease$")
_MARKER = re.compile(r"^(driver/[^/]+-\d+-[0-9a-f]{8})\.mark$")
LEASE_S = 15.0
RENEWALS = 4
"""Renewals within the time of a lease: three of them may fail."""


class Holder(ProcessIdentity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Process that holds a lease, or is about to take it (not `taken`)."""

    host: str
    taken: bool = True


def has_living_driver(storage: Storage, lease_s: float = LEASE_S) -> bool:
    """Return True if a driver has renewed a lease in this storage within `lease_s` seconds."""
    now = storage.now()
    for info in storage.list(PREFIX):
        is_fresh = now <= info.modified_s + lease_s
        if is_fresh and _LEASE.match(info.name):
            return True
    return False


class DriverLease:
    """Lease of one driver.

    Call order: `take` before anything is started, `renew` in a thread of the owner's every `LEASE_S
    / RENEWALS` seconds, `release` at the end.
    """

    def __init__(self, storage: Storage, lease_s: float = LEASE_S) -> None:
        self._storage = storage
        self.lease_s = lease_s
        self.holder = Holder(
            host=socket.gethostname(),
            process_id=os.getpid(),
            boot=boot_id(),
            started=process_start(os.getpid()),
            taken=False,
        )
        self.driver = f"{self.holder.host}-{self.holder.process_id}-{uuid.uuid4().hex[:8]}"

    @property
    def name(self) -> str:
        """Name of the lease object, visible to everyone who shares the storage with this driver."""
        return f"{PREFIX}{self.driver}.lease"

    def take(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Wait until no other driver is alive, then take the lease.

        Returns at once if there is no other, or if it has died on this machine; else after its
        lease has expired. If several drivers take the lease at once, the one whose name is first
        gets it.

        Raises:
            LeaseHeld: another is alive: it has renewed its lease meanwhile. StorageError: the
            storage does not answer.
        """
        self.renew()
        seen = {info.name: info for info in self.others()}
        until = time.monotonic() + self.lease_s
        while seen and time.monotonic() < until:
            pause(self.lease_s / RENEWALS / 2)
            now = {info.name: info for info in self.others()}
            for name in now.keys() & seen.keys():
                is_renewed = now[name].modified_s != seen[name].modified_s
                # Of drivers that wait, the first by name goes on; a holder stays.
                if is_renewed and (name < self.name or self._is_taken(name)):
                    self.release()
                    driver = name.removeprefix(PREFIX).removesuffix(".lease")
                    raise LeaseHeld(self._storage.uri, driver)

            seen = {name: info for name, info in seen.items() if name in now}
            self.renew()

        expired = [name for name in seen if self._holder(name) is not None]
        self._storage.delete(expired)
        self.holder = msgspec.structs.replace(self.holder, taken=True)
        self.renew()

    def renew(self) -> None:
        self._storage.put(self.name, msgspec.json.encode(self.holder))

    def release(self) -> None:
        # It expires by itself.
        with suppress(StorageError):
            self._storage.delete([self.name])

    def others(self) -> list[ObjectInfo]:
        """Return leases of drivers that may be alive; remove those of proven dead drivers.

        The markers of dead drivers are removed, too. Other objects there are not ours and stay.
        """
        # The clock before the list: nobody looks older than it was when it was seen.
        now = self._storage.now()
        there = list(self._storage.list(PREFIX))
        leases = [info for info in there if _LEASE.match(info.name) and info.name != self.name]
        holders = {info.name: self._holder(info.name) for info in leases}

        living = []
        dead = []
        for info in leases:
            holder = holders[info.name]
            is_old = now > info.modified_s + self.lease_s
            if holder is not None and (is_old or holder.is_dead):
                dead.append(info.name)
            elif not is_old:
                living.append(info)

        self._storage.delete([*dead, *self._left_markers(there, dead)])
        return living

    def _left_markers(self, there: Iterable[ObjectInfo], dead: Iterable[str]) -> list[str]:
        """Return the markers of drivers without a lease."""
        leases = {info.name for info in there}
        leases.difference_update(dead)
        leases.add(self.name)

        markers = []
        for info in there:
            match = _MARKER.match(info.name)
            if match is None or f"{match[1]}.lease" in leases:
                continue
            if self._is_marker(info.name):
                markers.append(info.name)
        return markers

    def _is_marker(self, name: str) -> bool:
        try:
            return self._storage.get(name) == MARKER_CONTENT
        except ObjectMissing:
            return False

    def _is_taken(self, name: str) -> bool:
        """Return True if the lease's driver has finished taking it.

        A damaged lease counts as taken. A lease that has gone since it was listed does not: its
        driver has given up. If it counted, of two drivers that start at once neither would start.
        """
        try:
            return decode_json(self._storage.get(name), Holder).taken
        except ObjectMissing:
            return False
        except DocumentDamaged:
            return True

    def _holder(self, name: str) -> Holder | None:
        """Return the holder of a lease; None if the object is gone or is not a valid lease."""
        try:
            return decode_json(self._storage.get(name), Holder)
        except (ObjectMissing, DocumentDamaged):
            return None


class LeaseKeeper:
    """Owns the thread that renews; `watch` is called after each renewal, in that thread."""

    def __init__(self, lease: DriverLease, watch: Callable[[], None]) -> None:
        self._lease = lease
        self._watch = watch
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="driver-lease", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._lease.lease_s / RENEWALS):
            try:
                self._lease.renew()
                self._watch()
            except Exception as error:  # noqa: BLE001
                logger.warning("The driver's lease is not renewed this time: %s", error)

    def close(self) -> None:
        """Join the thread, for as long as one request may take; the owner releases the lease."""
        self._done.set()
        self._thread.join(2.0)
