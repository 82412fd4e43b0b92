"""Failures that count against a node or a worker for a limited time."""

from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_S = 3600.0


@dataclass
class RecentFailures:
    """Excludes a node or worker after `limit` failures within `window_s`.

    The exclusion ends when the oldest of these failures is older than that. Times are on the
    caller's clock.
    """

    limit: int
    window_s: float = WINDOW_S
    _at: dict[str, list[float]] = field(default_factory=dict)

    @property
    def known(self) -> set[str]:
        """Nodes or workers that have failed, recently or not."""
        return set(self._at)

    def add(self, who: str, now: float) -> None:
        moments = self._recent(who, now)
        moments.append(now)
        self._at[who] = moments[-self.limit :]

    def is_excluded(self, who: str, now: float) -> bool:
        return len(self._recent(who, now)) >= self.limit

    def forget(self, who: Iterable[str]) -> None:
        """Discard the failures of those that will never return."""
        for each in who:
            self._at.pop(each, None)

    def _recent(self, who: str, now: float) -> list[float]:
        return [at for at in self._at.get(who, ()) if now - at < self.window_s]
