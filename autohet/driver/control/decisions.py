"""Decisions and remarks of the controller, as values.

`EventLog` alone writes them, after the controller has decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        return (
            found
            if self.sentence is None
            else {**found, "reason": self.fields.get("reason", self.sentence)}
        )


@dataclass(frozen=True)
class Remark:
    """Sentence for the log alone."""

    sentence: str
    warning: bool = False


class Untold(deque[Decision | Remark]):
    """Events and remarks decided but not yet logged, in order."""

    def add(self, kind: str, generation: int, sentence: str | None = None, **fields: Any) -> None:
        self.append(Decision(kind, generation, sentence, fields))

    def remark(self, sentence: str, *, warning: bool = False) -> None:
        self.append(Remark(sentence, warning))
