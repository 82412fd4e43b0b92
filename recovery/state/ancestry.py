"""Descent of training state: each generation names its parent and the step that it restored.

State is identified by the generation that wrote it and by its step. Two copies may be used in one
restore only if both lie on one line of descent. Of each generation on the line counts only what was
written up to the step from which the next one continued. Neither steps nor the order of generations
show that: a run that goes back, or that another driver takes over, writes other bytes under the
same step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec


class Descent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Entry of one generation, which began at `first_step` with state of `parent`'s history.

    `parent` None: the state was newly initialized, or comes from a checkpoint that no entry knows.
    `driver` is the identity of the process that drives the generation, `run` that of the run, equal
    in all its generations. Both are empty in entries of versions that did not record them.

    `ahead`: the entry was written while the generation before trained. Either its workers began
    this generation at `first_step`, or they trained on and nobody began it: then later steps of
    theirs are on its line.
    """

    generation: int
    parent: int | None
    first_step: int
    driver: str = ""
    run: str = ""
    ahead: bool = False


@dataclass(frozen=True)
class Ancestry:
    """Known generations by number.

    `unknown` are generations that existed and whose entry is lost or damaged. Each of them has a
    placeholder in `entries` that contradicts nothing and proves nothing: no parent, first step 0.
    """

    entries: Mapping[int, Descent] = field(default_factory=dict)
    unknown: frozenset[int] = frozenset()

    @staticmethod
    def with_unknown(entries: Mapping[int, Descent], unknown: Collection[int]) -> Ancestry:
        """Return `entries` with placeholders for the `unknown` generations without an entry.

        A parent that is newer than the oldest entry and has no entry gets one, too.
        """
        oldest = min(entries, default=0)
        lost = set(unknown)
        for entry in entries.values():
            # Entries before the oldest were forgotten on purpose, those after it were lost.
            if entry.parent is not None and entry.parent > oldest:
                lost.add(entry.parent)
        lost -= entries.keys()

        known = {number: Descent(generation=number, parent=None, first_step=0) for number in lost}
        known.update(entries)
        return Ancestry(known, frozenset(lost))

    @property
    def newest(self) -> int | None:
        """Generation begun last: numbers are claimed one after the other by all drivers."""
        return max(self.entries, default=None)

    @property
    def run(self) -> str:
        """Identity of the run: that of most entries, of the oldest among equals; "" if unknown."""
        runs = [self.entries[number].run for number in sorted(self.entries)]
        return max(filter(None, runs), key=runs.count, default="")

    def followed_by(self, *entries: Descent) -> Ancestry:
        known = {entry.generation: entry for entry in entries}
        return Ancestry({**self.entries, **known}, self.unknown - known.keys())

    def joined(self, other: Ancestry) -> Ancestry:
        """Return the union of both; an entry takes precedence over a placeholder."""
        known = {}
        for ancestry in (self, other):
            for number, entry in ancestry.entries.items():
                if number not in ancestry.unknown:
                    known[number] = entry
        return Ancestry.with_unknown(known, self.unknown | other.unknown)

    def line(self, tip: int) -> Iterator[tuple[Descent, float]]:
        """Yield the entries from `tip` back through its parents.

        With each entry comes the last step of that generation that is on the line.
        """
        last: float = math.inf
        entry = self.entries.get(tip)
        while entry is not None:
            yield entry, last
            if not entry.ahead:
                last = min(last, entry.first_step)

            # A parent is older than its child: a damaged entry leads into no circle.
            if entry.parent is None or entry.parent >= entry.generation:
                return
            entry = self.entries.get(entry.parent)

    def contains(self, tip: int, generation: int, step: int) -> bool:
        """Return True if `tip`'s history includes the state of `step` that `generation` wrote."""
        return any(
            entry.generation == generation and step <= last for entry, last in self.line(tip)
        )

    def begins_after(self, tip: int, step: int) -> bool:
        """Return True if no generation on `tip`'s line starts before `step`.

        The line then does not contradict state that is older than all entries.
        """
        return all(step <= min(last, entry.first_step) for entry, last in self.line(tip))


NOTHING_KNOWN = Ancestry()
