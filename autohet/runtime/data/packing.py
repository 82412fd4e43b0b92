"""Pack marked documents into rows: joined and cut (`concat`), or fitted whole (`best_fit`).

`best_fit` is best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", 2024)
within windows of documents, which bounds memory. It places the longest document first, each into
the fullest row with enough room. The rest of a row is padding: a piece of its own without targets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from autohet.runtime.data.marks import BEGINS, COUNTS, Marked

WINDOW_TOKENS = 1 << 22
WINDOW_DOCUMENTS = 1 << 15
ROWS_AT_ONCE = 256


@dataclass
class PackedCounts:
    """Counts of documents, tokens and rows that packing cut, dropped or padded."""

    num_cut: int = 0
    """Documents that are longer than a row."""
    num_cut_tokens: int = 0
    """Tokens cut off these documents, which are in no row."""
    num_dropped_rows: int = 0
    """Dropped rows, which have no target."""
    num_untargeted: int = 0
    """Dropped documents, whose targets were all cut off."""
    num_padding_tokens: int = 0
    num_left_tokens: int = 0
    """Dropped tokens at the end, which do not fill a row."""


class Packer(Protocol):
    """Converter of a stream of marked tokens into rows [n, row_tokens]."""

    counts: PackedCounts

    def pack(self, stream: Iterable[Marked]) -> Iterator[Marked]: ...


@dataclass
class Concat:
    """Packer that joins documents and cuts them into rows.

    `isolate`: the first token of each row begins a piece. `pad`: fill up the last row; else drop
    its tokens.
    """

    row_tokens: int
    padding: int
    isolate: bool
    pad: bool
    counts: PackedCounts = field(default_factory=PackedCounts)

    def pack(self, stream: Iterable[Marked]) -> Iterator[Marked]:
        rest = np.empty(0, np.uint32)
        for tokens in stream:
            rest = np.concatenate([rest, tokens])
            whole = len(rest) // self.row_tokens * self.row_tokens
            if whole >= ROWS_AT_ONCE * self.row_tokens:
                yield from self._finished(rest[:whole])
                rest = rest[whole:]
        whole = len(rest) // self.row_tokens * self.row_tokens
        yield from self._finished(rest[:whole])
        rest = rest[whole:]
        if len(rest) and self.pad:
            last = _filled(rest, self.row_tokens, self.padding, self.counts)
            yield from self._finished(last)
        else:
            self.counts.num_left_tokens += len(rest)

    def _finished(self, tokens: Marked) -> Iterator[Marked]:
        if len(tokens):
            rows = tokens.reshape(-1, self.row_tokens)
            yield _with_targets(rows, self.isolate, self.counts)


@dataclass
class BestFit:
    """Packer of whole documents, each in one row.

    It keeps the first row's worth of tokens of a longer document. `split`: the other tokens become
    pieces of their own; else it drops them.
    """

    row_tokens: int
    padding: int
    isolate: bool
    split: bool
    counts: PackedCounts = field(default_factory=PackedCounts)

    def pack(self, stream: Iterable[Marked]) -> Iterator[Marked]:
        window: list[Marked] = []
        size = 0
        for document in _documents(stream):
            for piece in self._pieces(document):
                window.append(piece)
                size += len(piece)
            if size >= WINDOW_TOKENS or len(window) >= WINDOW_DOCUMENTS:
                yield from self._fit(window)
                window = []
                size = 0
        yield from self._fit(window)

    def _pieces(self, document: Marked) -> list[Marked]:
        if len(document) <= self.row_tokens:
            return [document]
        self.counts.num_cut += 1
        starts = range(0, len(document), self.row_tokens)
        pieces = [document[start : start + self.row_tokens].copy() for start in starts]
        if self.split:
            for piece in pieces:
                piece[0] |= BEGINS
            return pieces
        self.counts.num_cut_tokens += len(document) - self.row_tokens
        kept = pieces[0]
        if not _has_target(kept):
            self.counts.num_untargeted += 1
            return []
        return [kept]

    def _fit(self, pieces: list[Marked]) -> Iterator[Marked]:
        bins = _best_fit([len(piece) for piece in pieces], self.row_tokens)
        for first in range(0, len(bins), ROWS_AT_ONCE):
            rows = []
            for chosen in bins[first : first + ROWS_AT_ONCE]:
                tokens = np.concatenate([pieces[index] for index in chosen])
                rows.append(_filled(tokens, self.row_tokens, self.padding, self.counts))
            yield _with_targets(np.stack(rows), self.isolate, self.counts)


@dataclass
class Pairs:
    """Packer of preferences: one row holds a chosen answer, the rejected one, and padding.

    Each answer keeps the first half row's worth of tokens, its prompt among them. A pair with an
    answer that is cut off whole is dropped.
    """

    row_tokens: int
    padding: int
    counts: PackedCounts = field(default_factory=PackedCounts)

    def pack(self, stream: Iterable[Marked]) -> Iterator[Marked]:
        rows: list[Marked] = []
        documents = _documents(stream)
        for chosen in documents:
            # A rejected answer follows each chosen one.
            rejected = next(documents)
            pair = [self._cut(chosen), self._cut(rejected)]
            if not all(_has_target(answer) for answer in pair):
                self.counts.num_untargeted += 1
                continue
            joined = np.concatenate(pair)
            rows.append(_filled(joined, self.row_tokens, self.padding, self.counts))
            if len(rows) == ROWS_AT_ONCE:
                yield _with_targets(np.stack(rows), True, self.counts)
                rows = []
        if rows:
            yield _with_targets(np.stack(rows), True, self.counts)

    def _cut(self, document: Marked) -> Marked:
        limit = self.row_tokens // 2
        if len(document) > limit:
            self.counts.num_cut += 1
            self.counts.num_cut_tokens += len(document) - limit
        return document[:limit]


def _has_target(document: Marked) -> bool:
    """Return True if a token other than the first, which nothing predicts, is a target."""
    return bool((document[1:] & COUNTS).any())


def _documents(stream: Iterable[Marked]) -> Iterator[Marked]:
    """Yield the whole documents of a stream that is cut at arbitrary places."""
    parts: list[Marked] = []
    for tokens in stream:
        starts = np.flatnonzero(tokens & BEGINS)
        borders = [0, *starts.tolist(), len(tokens)]
        for begin, end in pairwise(borders):
            if begin == end:
                continue
            if tokens[begin] & BEGINS and parts:
                yield np.concatenate(parts)
                parts = []
            parts.append(tokens[begin:end])
    if parts:
        yield np.concatenate(parts)


def _best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return bins of indices of `lengths`, each bin of at most `capacity`; every length fits a bin.

    Indices in a bin are in the order of the documents; bins are in the order of their first
    document.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}
    # Spaces of the bins that are not full, sorted, each once.
    spaces: list[int] = []
    longest_first = sorted(range(len(lengths)), key=lambda each: (-lengths[each], each))
    for index in longest_first:
        length = lengths[index]
        # The fullest bin with room is that with the least space of at least this length.
        place = bisect_left(spaces, length)
        if place == len(spaces):
            bins.append([])
            chosen = len(bins) - 1
            space = capacity
        else:
            space = spaces[place]
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                del bins_by_space[space]
                spaces.pop(place)
        bins[chosen].append(index)
        left = space - length
        if left:
            if left not in bins_by_space:
                insort(spaces, left)
            bins_by_space.setdefault(left, []).append(chosen)
    return sorted(sorted(chosen) for chosen in bins)


def _filled(tokens: Marked, row_tokens: int, padding: int, counts: PackedCounts) -> Marked:
    """Fill up a row of at most `row_tokens` tokens with padding."""
    missing = row_tokens - len(tokens)
    if not missing:
        return tokens
    counts.num_padding_tokens += missing
    row = np.full(row_tokens, padding, np.uint32)
    row[: len(tokens)] = tokens
    row[len(tokens)] |= BEGINS
    return row


def _with_targets(rows: Marked, isolate: bool, counts: PackedCounts) -> Marked:
    """Clear the targets that nothing predicts, and return the rows that still have a target.

    Rows are [n, row_tokens]. Nothing predicts the first token of a row; if pieces are isolated,
    nothing predicts the first token of each piece.
    """
    rows = rows.copy()
    rows[:, 0] &= ~COUNTS
    if isolate:
        rows[:, 0] |= BEGINS
        rows[(rows & BEGINS) != 0] &= ~COUNTS
    else:
        rows &= ~BEGINS
    has_target = (rows & COUNTS).any(axis=1)
    counts.num_dropped_rows += int((~has_target).sum())
    return rows[has_target]
