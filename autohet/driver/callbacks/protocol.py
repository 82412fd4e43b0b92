"""Protocol of everything that follows a run: trackers, metrics, reports, a user's own callbacks."""

from collections.abc import Mapping
from typing import Any, Protocol


class Callback(Protocol):
    """Receives every event of a run, in order, as `events.jsonl` has it.

    An event has `time`, `generation`, `kind`, and the fields of its kind. Both methods are called
    on one thread that is not the driver's, so they may wait for a network. A callback that raises
    receives no further events; the run continues.
    """

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Handle one event."""
        ...

    def close(self) -> None:
        """Handle the end of the run, successful or not: no event follows."""
        ...
