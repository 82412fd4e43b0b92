"""Which state descends from which: every generation names the one whose history it goes on from,
and the step that it restored.

State is known by the generation that wrote it and by its step. Two copies may meet in one restore
only if both lie on one line of descent: of each generation on it only what was written up to the
step from which the next one went on. Neither steps nor the order of generations say that: a run
that goes back, or that another driver takes up, writes other bytes under the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec


class Descent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One generation's entry: it began at `first_step` with state of `parent`'s history (None:
    drawn anew, or of a checkpoint that no entry knows). `driver` is the identity of the process
    that directs it.
    """

    generation: int
    parent: int | None
    first_step: int
    driver: str = ""


@dataclass(frozen=True)
class Ancestry:
    """All generations that are known, by number."""

    entries: Mapping[int, Descent] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """The generation begun last: numbers are claimed one after the other, whoever drives."""
        return max(self.entries, default=None)

    def followed_by(self, *entries: Descent) -> Ancestry:
        return Ancestry({**self.entries, **{entry.generation: entry for entry in entries}})

    def line(self, tip: int) -> Iterator[tuple[Descent, float]]:
        """From `tip` back through its parents: each entry, and the last step of its that the line
        goes through.
        """
        last: float = math.inf
        entry = self.entries.get(tip)
        while entry is not None:
            yield entry, last
            last = min(last, entry.first_step)
            # A parent is older than its child: a damaged entry leads into no circle.
            older = entry.parent is not None and entry.parent < entry.generation
            entry = self.entries.get(entry.parent) if older and entry.parent is not None else None

    def contains(self, tip: int, generation: int, step: int) -> bool:
        """Whether state of `step` that `generation` wrote is of the history that `tip` goes on
        from.
        """
        return any(
            entry.generation == generation and step <= last for entry, last in self.line(tip)
        )

    def begins_after(self, tip: int, step: int) -> bool:
        """Whether `tip`'s whole line starts from `step` or later: then state that is older than all
        entries is not contradicted by it.
        """
        return all(step <= min(last, entry.first_step) for entry, last in self.line(tip))


NOTHING_KNOWN = Ancestry()
