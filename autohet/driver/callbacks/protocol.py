"""The one protocol of everything that follows a run: trackers, metrics, reports, a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Callback(Protocol):
    """Is told of every event of a run, in order, as `events.jsonl` has it (`time`, `generation`,
    `kind`, and what belongs to each).

    Both methods are called on one thread that is not the driver's, so they may wait for a network.
    A callback that raises is told nothing more; the run goes on.
    """

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Handle one event."""
        ...

    def close(self) -> None:
        """The run has ended, whichever way: nothing follows."""
        ...
