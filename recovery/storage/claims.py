"""Conditional puts for stores that have none: one writer wins by claims.

Some stores answer 501 to `If-None-Match`, others ignore it, and two drivers would own one
generation. There a writer first puts a claim, an object with a name of its own, then lists all
claims for the name. If it sees another one, it withdraws its own and tries again after a random
pause. If it sees none, no other writer is between its claim and its end: each would have listed
this claim. Then it looks whether the name is taken, and if not, puts the object. The claim is
removed last. This is mutual exclusion by flags (Dijkstra 1965, CACM 8(9), without the turn), and
holds where a list shows every put that has ended, as S3 and its kin promise.

A writer that died leaves its claim behind; it counts for `STALE_S`, longer than any request of a
living writer takes.
"""

import contextlib
import random
import time
from uuid import uuid4

from recovery.cancellation import pause
from recovery.storage.errors import ObjectExists, StorageError, StorageTimeout
from recovery.storage.payload import Payload
from recovery.storage.protocol import Storage

CLAIMS = "claims/"
STALE_S = 900.0
HOLD_S = 300.0
"""Longest time between a claim and the start of its put."""
ROUNDS = 12
FIRST_PAUSE_S = 0.05


def put_by_claim(storage: Storage, name: str, payload: Payload) -> None:
    """Store the object if its name is free; exactly one of several concurrent writers wins.

    Raises:
        ObjectExists: the name is taken. StorageTimeout: others kept claiming it. StorageError.
    """
    window_s = FIRST_PAUSE_S
    for _ in range(ROUNDS):
        if storage.size(name) is not None:
            break
        if _try_once(storage, name, payload):
            return
        pause(None, random.uniform(0.0, window_s), name)
        window_s *= 2
    else:
        raise StorageTimeout(f"{storage.uri}/{name}", "other writers keep claiming this name")
    raise ObjectExists(f"{storage.uri}/{name}", "exists already")


def _try_once(storage: Storage, name: str, payload: Payload) -> bool:
    """Try once to put the object by a claim; return True if it was put.

    The claim stays only if the fate of the object is unknown: the put may still arrive.
    """
    claims = f"{CLAIMS}{name}/"
    own = claims + uuid4().hex
    begun = time.monotonic()
    unknown = False
    try:
        storage.put(own, b"claim")
        if _others(storage, claims, own) or storage.size(name) is not None:
            return False
        if time.monotonic() - begun > HOLD_S:
            return False
        unknown = True
        storage.put(name, payload)
        unknown = False
        return True
    finally:
        if not unknown:
            with contextlib.suppress(StorageError):
                storage.delete([own])


def _others(storage: Storage, claims: str, own: str) -> bool:
    """Return True if another writer claims the name; remove claims that are too old to count."""
    oldest = storage.now() - STALE_S
    there = [info for info in storage.list(claims) if info.name != own]
    stale = [info.name for info in there if info.modified_s < oldest]
    if stale:
        storage.delete(stale)
    return len(stale) < len(there)
