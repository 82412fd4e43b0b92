"""Rows of a matrix, some at a time, where all at once would take too much memory."""

from __future__ import annotations


def row_chunks(count: int, width: int, elements: int) -> list[slice]:
    """Return slices of `count` rows of at most `elements` elements; none for rows without columns.

    A row that is wider is a slice of its own.
    """
    if not width:
        return []
    size = max(1, elements // width)
    return [slice(first, first + size) for first in range(0, count, size)]
