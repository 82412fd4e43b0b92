"""Traffic of a run between zones, and its price, from the run's events.

A step carries the bytes that its plan names (`transfers` of the event `plan`). Copies to other
nodes carry the bytes that the event `transfers` reports as sent. The share of these between zones
is that of a round of their generation (`replication` of the event `plan`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from planner.inputs.documents import Json
from planner.inputs.zones import GB, ZonePair

Use = Literal["training", "copies"]


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes between two zones, and their price; use: kind of traffic."""

    zones: ZonePair
    use: Use
    num_bytes: float
    usd: float

    @property
    def name(self) -> str:
        """Name of the pair, for tables and metrics."""
        return " - ".join(self.zones)


@dataclass
class ZoneBill:
    """Bill that follows one run's events; `total` sums up their traffic."""

    total: dict[tuple[ZonePair, Use], tuple[float, float]] = field(default_factory=dict)
    _plan: Json = field(default_factory=dict)

    def take(self, event: Json) -> list[Carried]:
        """Read the next event; return its traffic."""
        found: list[Carried] = []
        match event["kind"]:
            case "plan":
                self._plan = event
            case "step":
                found = list(self._of_step())
            case "transfers":
                sent = 0
                for part in event["transfers"]:
                    if part["tier"] == "peer":
                        sent += part["bytes"]
                found = list(self._of_copies(sent))
        self._add(found)
        return found

    def take_many(self, steps: int, rounds: int) -> None:
        """Count this many steps and rounds of copies under the newest plan."""
        replication = self._plan.get("replication") or {}
        sent = rounds * replication.get("bytes", 0)
        self._add([*self._of_step(steps), *self._of_copies(sent)])

    def _add(self, found: Iterable[Carried]) -> None:
        for each in found:
            key = (each.zones, each.use)
            num_bytes, usd = self.total.get(key, (0.0, 0.0))
            self.total[key] = (num_bytes + each.num_bytes, usd + each.usd)

    @property
    def usd(self) -> float:
        """Price of all traffic, in dollars."""
        return sum(usd for _, usd in self.total.values())

    def rows(self) -> list[Carried]:
        """Return the sums, dearest first."""
        rows = [
            Carried(zones, use, num_bytes, usd)
            for (zones, use), (num_bytes, usd) in self.total.items()
        ]
        return sorted(rows, key=lambda row: (-row.usd, row.zones, row.use))

    def _of_step(self, number: int = 1) -> Iterator[Carried]:
        if not number:
            return
        for part in self._plan.get("transfers") or ():
            yield _make_carried(part, "training", number * part["bytes_per_step"])

    def _of_copies(self, sent: float) -> Iterator[Carried]:
        if not sent:
            return
        replication = self._plan.get("replication") or {}
        for part in replication.get("by_zones") or ():
            # Only bytes in all are known: each pair of zones has the share that it has of a round.
            num_bytes = sent * part["bytes"] / replication["bytes"]
            yield _make_carried(part, "copies", num_bytes)


def _make_carried(part: Json, use: Use, num_bytes: float) -> Carried:
    one, other = part["zones"]
    return Carried((one, other), use, num_bytes, num_bytes / GB * part["usd_per_gb"])
