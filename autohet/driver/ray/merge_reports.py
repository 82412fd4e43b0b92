"""Merging of the worker reports that arrive in one round of observing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autohet.driver.control.observation import Loss
from autohet.runtime.messages import DRAINED_FIELDS, WorkerReport


def merge_reports(
    newest: Mapping[str, WorkerReport | None],
    fresh: Iterable[WorkerReport],
    losses: Mapping[str, Loss],
    last_round: float,
) -> dict[str, WorkerReport]:
    """Merge each worker's reports of one round.

    A living worker has its last report, and so has a worker found lost since `last_round`, as its
    last words. Fields in `DRAINED_FIELDS` are concatenated over all `fresh` reports. `newest`: each
    worker's last report, `without_news` if none of it is fresh.
    """
    said: dict[str, list[WorkerReport]] = {}
    for report in fresh:
        said.setdefault(report.worker, []).append(report)
    reports: dict[str, WorkerReport] = {}
    for worker, last in newest.items():
        loss = losses.get(worker)
        words = said.get(worker, [])
        if last is None or (loss is not None and not (words and loss.seen_at > last_round)):
            continue
        news: dict[str, Any] = {
            part: sum((getattr(report, part) for report in words), ()) for part in DRAINED_FIELDS
        }
        reports[worker] = replace(last, **news) if words else last
    return reports
