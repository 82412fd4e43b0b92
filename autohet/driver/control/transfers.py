"""Finished copies of the state that are not logged yet.

Uploads and spills are counted by worker, copies on other nodes by node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autohet.driver.control.observation import Observation
from autohet.runtime.messages import Transfer
from planner.cluster import node_of


@dataclass
class _Span:
    """Copies by one source of one step; times are on the controller's clock."""

    began_at: float
    ended_at: float
    num_bytes: int = 0


class EndedTransfers:
    """Spans of finished copies: one for each tier, source and step.

    It is one span, however many workers of a node took part. Owned by the ledger.
    """

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str, int, int], _Span] = {}
        self._now = 0.0

    def take(self, seen: Observation) -> None:
        """Add the new transfers of an observation."""
        self._now = seen.now
        for report in seen.reports.values():
            for transfer in report.transfers:
                self._add(
                    transfer,
                    node_of(transfer.source) if transfer.tier == "peer" else transfer.source,
                )
        for transfer in seen.transfers:
            self._add(transfer, transfer.source)

    def _add(self, transfer: Transfer, source: str) -> None:
        ended_at = self._now - transfer.ended_ago_s
        began_at = ended_at - transfer.seconds
        key = (transfer.tier, source, transfer.generation, transfer.step)
        span = self._spans.setdefault(key, _Span(began_at, ended_at))
        span.began_at, span.ended_at = min(span.began_at, began_at), max(span.ended_at, ended_at)
        span.num_bytes += transfer.num_bytes

    def told(self) -> list[dict[str, Any]]:
        """Return the spans for an event that is written now, and forget them."""
        spans, self._spans = self._spans, {}
        return [
            {
                "tier": tier,
                "source": source,
                "step": step,
                "bytes": span.num_bytes,
                "seconds": round(span.ended_at - span.began_at, 4),
                "ended_ago_s": round(self._now - span.ended_at, 4),
            }
            for (tier, source, _, step), span in spans.items()
        ]
