"""Marks that a row carries beside its token ids: which tokens are targets, and which begin a piece.

While a dataset is built, both marks are the two highest bits of each token (uint32). A built
dataset stores them in `marks.bin`: for each row, one bitmap after the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COUNTS = np.uint32(1 << 31)
"""Mark of a target: the loss includes the token's prediction."""
BEGINS = np.uint32(1 << 30)
"""Mark of the first token of a document."""
IDS = np.uint32((1 << 30) - 1)
MAX_TOKEN = (1 << 30) - 1
IGNORED = -100
"""Target that the loss ignores."""

Marked = NDArray[np.uint32]


def mark(ids: NDArray[np.integer], counts: NDArray[np.bool_] | bool, *, begins: bool) -> Marked:
    """Return tokens [n] with their marks; `begins`: the first token begins a document."""
    marked = ids.astype(np.uint32)
    count_marks = np.where(counts, COUNTS, np.uint32(0))
    marked |= count_marks
    if begins and len(marked):
        marked[0] |= BEGINS
    return marked


def row_bytes(row_tokens: int) -> int:
    """Return the bytes of one row's two bitmaps."""
    return 2 * ((row_tokens + 7) // 8)


def pack_marks(rows: Marked) -> NDArray[np.uint8]:
    """Return the bitmaps [n, row_bytes] of marked rows [n, row_tokens]."""
    is_target = (rows & COUNTS) != 0
    is_begin = (rows & BEGINS) != 0
    counts = np.packbits(is_target, axis=1)
    begins = np.packbits(is_begin, axis=1)
    return np.concatenate([counts, begins], axis=1)


def unpack_marks(
    packed: NDArray[np.uint8], row_tokens: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (counts, begins), each [n, row_tokens], of bitmaps [n, row_bytes]."""
    counts, begins = np.split(packed, 2, axis=1)
    is_target = np.unpackbits(counts, axis=1, count=row_tokens)
    is_begin = np.unpackbits(begins, axis=1, count=row_tokens)
    return is_target.astype(np.bool_), is_begin.astype(np.bool_)
