"""Marks of tokens that a row carries beside its ids: which ones count as targets, and which begin a
piece of their own.

While a data set is built both are the two highest bits of each token (uint32); a built one keeps
them as bitmaps, one after the other, for each row (`marks.bin`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COUNTS = np.uint32(1 << 31)
"""The token is a target: its prediction is in the loss."""
BEGINS = np.uint32(1 << 30)
"""The token is the first one of its document."""
IDS = np.uint32((1 << 30) - 1)
MAX_TOKEN = (1 << 30) - 1
IGNORED = -100
"""Target that is in no loss."""

Marked = NDArray[np.uint32]


def mark(ids: NDArray[np.integer], counts: NDArray[np.bool_] | bool, *, begins: bool) -> Marked:
    """Tokens [n] with their marks; `begins`: the first one begins a document."""
    marked = ids.astype(np.uint32)
    marked |= np.where(counts, COUNTS, np.uint32(0))
    if begins and len(marked):
        marked[0] |= BEGINS
    return marked


def row_bytes(row_tokens: int) -> int:
    """Bytes of one row's two bitmaps."""
    return 2 * ((row_tokens + 7) // 8)


def pack_marks(rows: Marked) -> NDArray[np.uint8]:
    """Bitmaps [n, row_bytes] of marked rows [n, row_tokens]."""
    counts = np.packbits((rows & COUNTS) != 0, axis=1)
    begins = np.packbits((rows & BEGINS) != 0, axis=1)
    return np.concatenate([counts, begins], axis=1)


def unpack_marks(
    packed: NDArray[np.uint8], row_tokens: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(counts, begins), each [n, row_tokens], of bitmaps [n, row_bytes]."""
    counts, begins = np.split(packed, 2, axis=1)
    return (
        np.unpackbits(counts, axis=1, count=row_tokens).astype(np.bool_),
        np.unpackbits(begins, axis=1, count=row_tokens).astype(np.bool_),
    )
