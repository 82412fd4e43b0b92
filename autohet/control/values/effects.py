"""Effects of a decision, as values: actions to execute, events to log, remarks for the log.

Deciding functions are generators. They yield each effect as it is decided and return their result
(`Deciding`), so that the caller has what was decided before an error. Call them with `yield from`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autohet.control.values.actions import Action

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """Entry of `events.jsonl`: a decision or an occurrence, and its cause.

    A `sentence` goes to the log, too.
    """

    kind: str
    generation: int
    sentence: str | None
    fields: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        """Return the entry without its time.

        `sentence` is its `reason` unless the fields have one.
        """
        found = {"generation": self.generation, "kind": self.kind, **self.fields}
        if self.sentence is not None:
            found.setdefault("reason", self.sentence)
        return found


@dataclass(frozen=True)
class Remark:
    """Sentence for the log alone."""

    sentence: str
    warning: bool = False


@dataclass(frozen=True)
class Supersede:
    """Execute `action` first, and drop pending actions of earlier ticks except commits.

    One of the pending actions may be what makes every tick fail.
    """

    action: Action


Effect = Action | Decision | Remark | Supersede
Effects = Iterator[Effect]
"""Effects of a function that returns nothing else."""
Deciding = Generator[Effect, None, T]
"""Effects of a function, and its result."""


def event(kind: str, generation: int, sentence: str | None = None, **fields: Any) -> Decision:
    """Create an event with these fields."""
    return Decision(kind=kind, generation=generation, sentence=sentence, fields=fields)


@dataclass
class Round:
    """Effects of one tick, in the order in which they were decided."""

    effects: list[Effect] = field(default_factory=list)
    error: Exception | None = None
    """Error that ended the tick."""

    def collect(self, effects: Iterable[Effect]) -> None:
        """Take each effect as it is decided. After an error, keep those before it and raise."""
        try:
            for effect in effects:
                self.effects.append(effect)
        except Exception as error:
            self.error = error
            raise

    @property
    def events(self) -> list[Decision | Remark]:
        """Events and remarks, in order."""
        return [each for each in self.effects if isinstance(each, Decision | Remark)]

    @property
    def actions(self) -> list[Action]:
        """Actions of this tick alone."""
        found: list[Action] = []
        for each in self.effects:
            if isinstance(each, Supersede):
                found.append(each.action)
            elif not isinstance(each, Decision | Remark):
                found.append(each)
        return found
