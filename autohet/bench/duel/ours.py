"""AutoHet in the duel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autohet.bench.duel.machines import DOCUMENT
from autohet.bench.duel.task import DuelTask, job_of, record_step
from autohet.bench.recovery.emulated_fleet import silent
from autohet.driver.job.job_run import Machines
from autohet.driver.job.run import connection, train_on
from planner.inputs.cluster import cluster_from_document


def run(task: DuelTask, log: Path) -> None:
    """Train the task, whose machines leave by the job's own script.

    Raises:
        RuntimeError: the run did not reach its end.
    """
    job = job_of(task)
    machines = cluster_from_document(DOCUMENT)
    with connection(job, DOCUMENT, None) as fleet:
        events = log.with_name("autohet-events.jsonl")
        outcome = train_on(job, Machines(machines, fleet), events, silent, [_StepLog(log)])
    if not outcome.ok:
        raise RuntimeError(outcome.reason)


class _StepLog:
    """Callback that records each step of each generation."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def on_event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "step":
            record_step(self._log, event["step"], event["loss"], at=event["time"])

    def close(self) -> None:
        """Nothing stays open between two steps."""
