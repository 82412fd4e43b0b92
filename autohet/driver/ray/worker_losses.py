"""Losses of workers: processes that died, fell silent, froze, or never came up."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autohet.control.values.observation import Loss
from autohet.driver.ray.agents.agent_calls import AgentCalls
from autohet.driver.ray.recent_failures import RecentFailures
from autohet.driver.ray.reports.newest_reports import LatestReport, Reports
from autohet.driver.ray.reports.silence import FreezeDetector, Heard
from autohet.runtime.groups.errors import PeerLost
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.messages import Phase
from planner.inputs.fleet import node_of

MAX_WORKER_STARTS = 3
"""Starts of a worker that dies each time before its first word."""
TOGETHER_S = 0.5
"""Seconds between two signs of one death: the end of a connection, and its peers' reports."""


class WorkerLosses:
    """Judges the workers by their newest `reports`; owned by the observer.

    `by_worker`: the workers that are lost and have not been started again.
    """

    def __init__(self, timeouts: Timeouts, calls: AgentCalls, reports: Reports) -> None:
        self.by_worker: dict[str, Loss] = {}
        self.busy: Mapping[str, str] = {}
        """Nodes whose GPUs others use, and who: workers there wait for Ray to start them."""
        self.freezes = FreezeDetector(timeouts, calls)
        self._timeouts = timeouts
        self._reports = reports
        self._failed_starts = RecentFailures(MAX_WORKER_STARTS)

    def find(self, agents: Mapping[str, Any], now: float) -> None:
        """Find the workers that are lost; `agents`: by node, for what they see of silent ones."""
        for worker, loss in self.by_worker.items():
            if loss.for_good and not self._failed_starts.is_excluded(worker, now):
                self.by_worker[worker] = replace(loss, for_good=False)

        heard = []
        for worker, answer in self._reports.answers.items():
            if worker not in self.by_worker:
                self._check(worker, answer, now)
                if answer.broke_off_at is not None:
                    self._check_connection(worker, answer.broke_off_at, now)
            if answer.heard_at is not None and worker not in self.by_worker:
                is_connected = answer.broke_off_at is None
                process_id = answer.value.process_id
                heard.append(Heard(worker, process_id, answer.heard_at, is_connected))
        for worker, reason in self.freezes.frozen(heard, agents, now).items():
            self.lose(worker, reason, now)

    def _check(self, worker: str, answer: LatestReport, now: float) -> None:
        """Lose a worker that has died, or has been silent for too long."""
        never_heard = answer.heard_at is None
        if never_heard and answer.error is None and node_of(worker) in self.busy:
            return
        if answer.error is not None:
            if never_heard:
                self._failed_starts.add(worker, now)
            self.lose(worker, answer.error, now)
            return

        # A new process may take longer to its first word than a running one between two.
        limit_s = self._timeouts.worker_start_s if never_heard else self._timeouts.heartbeat_s
        heard_at = answer.asked_at if answer.heard_at is None else answer.heard_at
        silent_s = now - heard_at
        if silent_s > limit_s:
            self.lose(worker, f"said nothing for {silent_s:.1f} s", now)

    def _check_connection(self, worker: str, broke_off_at: float, now: float) -> None:
        """Lose a worker whose connection ended when others lost contact with a peer.

        Ray may name the dead process a second later. Either sign alone may be the network's.
        """
        for answer in self._reports.answers.values():
            halted_at = _peer_lost_at(answer)
            if halted_at is not None and abs(broke_off_at - halted_at) <= TOGETHER_S:
                self.lose(worker, "its connection ended as others lost contact with a peer", now)
                return

    def lose(self, worker: str, reason: str, now: float) -> None:
        heard_at = now
        answer = self._reports.answers.get(worker)
        if answer is not None and answer.heard_at is not None:
            heard_at = answer.heard_at
        for_good = self._failed_starts.is_excluded(worker, now)
        if for_good:
            reason = f"it died in each of {MAX_WORKER_STARTS} starts: {reason}"
        # The first reason stays: later ones are often its consequences.
        self.by_worker.setdefault(worker, Loss(worker, reason, now, heard_at, for_good))

    def forget_node(self, workers: Iterable[str]) -> None:
        """Forget that starts on a node failed, which the next node of its name may do better."""
        self._failed_starts.forget(workers)
        for worker in workers:
            if worker in self.by_worker and self.by_worker[worker].for_good:
                del self.by_worker[worker]


def _peer_lost_at(answer: LatestReport) -> float | None:
    """Return the time at which a worker reported that it lost a peer; None if it has not."""
    report = answer.value
    if report is None or report.phase is not Phase.HALTED:
        return None
    has_lost_a_peer = (report.error or "").startswith(PeerLost.__name__)
    return answer.told_at if has_lost_a_peer else None
