"""Merging of the worker reports that arrive in one round of observing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autohet.control.values.observation import Loss
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
    fresh_by_worker: dict[str, list[WorkerReport]] = {}
    for report in fresh:
        fresh_by_worker.setdefault(report.worker, []).append(report)

    reports: dict[str, WorkerReport] = {}
    for worker, last in newest.items():
        if last is None:
            continue
        words = fresh_by_worker.get(worker)
        loss = losses.get(worker)
        if loss is not None and not (words and loss.seen_at > last_round):
            continue
        reports[worker] = _with_news(last, words) if words else last
    return reports


def _with_news(last: WorkerReport, words: Sequence[WorkerReport]) -> WorkerReport:
    """Return the last report with the news of all of a worker's fresh reports."""
    news: dict[str, Any] = {}
    for part in DRAINED_FIELDS:
        entries: list[Any] = []
        for report in words:
            entries += getattr(report, part)
        news[part] = tuple(entries)
    return replace(last, **news)
