"""Epochs of a job's drivers: objects `driver/epoch-<n>`, of which the newest driver has the last.

A driver claims the next number by a conditional put before it commands a process or writes a
manifest. Whoever finds a higher number than its own has been replaced. The lease
(`recovery.checkpoint.lease`) keeps two drivers from running; the epoch makes what a replaced driver
still does count for nothing.
"""

import re
from contextlib import suppress

from recovery.checkpoint.errors import Replaced
from recovery.checkpoint.lease import PREFIX
from recovery.storage.errors import ObjectExists, StorageError
from recovery.storage.protocol import Storage

_EPOCH = re.compile(r"^" + PREFIX + r"epoch-(\d{8,})$")


def _name(epoch: int) -> str:
    return f"{PREFIX}epoch-{epoch:08d}"


def _epochs(storage: Storage) -> list[int]:
    matches = [_EPOCH.match(info.name) for info in storage.list(PREFIX)]
    return [int(match[1]) for match in matches if match]


def claim_epoch(storage: Storage, driver: str) -> int:
    """Claim the next epoch for `driver` and return it; earlier ones are removed.

    Raises:
        StorageError: the storage failed: no epoch is claimed.
    """
    known = _epochs(storage)
    epoch = max(known, default=0)
    while True:
        epoch += 1
        try:
            storage.put(_name(epoch), f"autohet driver {driver}\n".encode(), if_none_match=True)
            break
        except ObjectExists:
            continue
    # The highest number is never removed, so none is claimed twice.
    with suppress(StorageError):
        storage.delete([_name(each) for each in known])
    return epoch


def require_epoch(storage: Storage, epoch: int) -> None:
    """Check that no later driver has replaced the one of `epoch`; 0: it has claimed none yet.

    Raises:
        Replaced: one has. StorageError: it is not known.
    """
    if not epoch:
        return
    newest = max(_epochs(storage), default=0)
    if newest > epoch:
        driver = bytes(storage.get(_name(newest))).decode(errors="replace").split()[-1]
        raise Replaced(storage.uri, newest, driver)
