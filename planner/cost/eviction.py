"""Bounded caches."""

from typing import Any


def evict_oldest(known: dict[Any, Any], most: int) -> None:
    """Remove the entries that were added first until at most `most` are left."""
    while len(known) > most:
        del known[next(iter(known))]
