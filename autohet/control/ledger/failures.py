"""Failures by cause since the last committed step, and devices that compute wrongly.

A limit counts repetitions of one cause.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from autohet.control.values.effects import Effects, event
from autohet.runtime.messages import AuditCause, AuditMismatch, AuditRecord, Phase
from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.values.observation import Observation

MAX_ERROR_CHARACTERS = 120
LOST = "lost"
LOSSES_PER_ERROR = 4


@dataclass(frozen=True)
class Cause:
    """Cause that ended a generation: the kind of failure, and the worker.

    `worker` is empty where the cause is not one worker's. `joined_at` tells a node from a later one
    of the same name. `what` happened is for a sentence.
    """

    kind: str
    worker: str = ""
    joined_at: float = 0.0
    what: str = field(default="", compare=False)

    @property
    def sentence(self) -> str:
        what = self.what or self.kind
        if not self.worker:
            return what
        return f"{self.worker}: {what}"


def find_causes(
    seen: Observation, participants: Collection[str], joined: Mapping[str, float]
) -> dict[Cause, frozenset[str]]:
    """Return the causes that ended a generation with these participants, each with its nodes.

    All participants lived when it began. So a loss among them is a new one, and explains the errors
    of the others.
    """
    lost = {worker: _loss(seen, worker) for worker in participants if is_lost(seen, worker)}
    if lost:
        return _by_worker(LOST, lost, joined)

    failed = {}
    for worker in participants:
        report = seen.reports[worker]
        if report.phase is Phase.FAILED:
            failed[worker] = report.error or "it does not say why"
    if not failed:
        cause = Cause("its workers lost contact, or were not ready in time")
        return {cause: frozenset(map(node_of, participants))}

    # An error counts for its worker, and for all workers that have the same one.
    found = _by_worker("failed", failed, joined)
    for worker, error in failed.items():
        shared = Cause(general(error), what=error)
        nodes = found.get(shared, frozenset())
        found[shared] = nodes | {node_of(worker)}
    return found


def _by_worker(
    kind: str, what: Mapping[str, str], joined: Mapping[str, float]
) -> dict[Cause, frozenset[str]]:
    found = {}
    for worker, why in what.items():
        node = node_of(worker)
        cause = Cause(kind=kind, worker=worker, joined_at=joined.get(node, 0.0), what=why)
        found[cause] = frozenset({node})
    return found


def _loss(seen: Observation, worker: str) -> str:
    loss = seen.losses.get(worker)
    if loss is not None:
        return loss.reason
    if node_of(worker) not in seen.nodes:
        return "its node is gone"
    return "its process was ended"


def is_lost(seen: Observation, worker: str) -> bool:
    """Return True if this worker cannot be counted on any more; a dismissed one counts, too."""
    return seen.node_of(worker) not in seen.nodes or not seen.answers(worker)


def general(error: str) -> str:
    """Return the error without addresses and numbers.

    The same error on another worker or at another address, step or size then reads the same.
    """
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)[:MAX_ERROR_CHARACTERS]


@dataclass(frozen=True)
class Repeated:
    """Causes that have come too often: the most telling one as a sentence, and all their nodes."""

    reason: str
    nodes: frozenset[str]


@dataclass
class FailureCounts:
    """Number of times that each cause has ended a generation since the last committed step."""

    total: int = 0
    _times: Counter[Cause] = field(default_factory=Counter)
    _nodes: dict[Cause, set[str]] = field(default_factory=dict)

    def add(self, causes: Mapping[Cause, Collection[str]]) -> None:
        """Count one failure, with the nodes of each of its causes."""
        self.total += 1
        for cause, nodes in causes.items():
            self._times[cause] += 1
            self._nodes.setdefault(cause, set()).update(nodes)

    def repeated(self, limit: int, *, final: bool = False) -> Repeated | None:
        """Return the causes that were counted more than `limit` times; None without any.

        final: True if they are to end the job. A loss then counts less than an error
        (LOSSES_PER_ERROR), since whoever kills processes may stop doing so.
        """
        often = []
        for cause, times in self._times.items():
            most = limit
            if final and cause.kind == LOST:
                most = limit * LOSSES_PER_ERROR
            if times > most:
                often.append(cause)
        if not often:
            return None

        # A cause that several workers share tells more than any worker's own.
        first = max(often, key=lambda cause: (not cause.worker, self._times[cause]))
        reason = f"{first.sentence}, {self._times[first]} times and no step between"
        nodes: set[str] = set()
        for cause in often:
            nodes |= self._nodes[cause]
        return Repeated(reason, frozenset(nodes))

    def clear(self) -> None:
        """Reset the counts after a committed step."""
        self.total = 0
        self._times.clear()
        self._nodes.clear()


# Devices that compute wrongly
# --------------------------------------------------------------------------------------

AUDITS_TO_BELIEVE = 2
"""Audits that must name a worker before it is taken to be wrong; one bit may flip anywhere."""


class AuditLog:
    """Audits of a run. A mismatch that comes again is logged the first, 2nd, 4th, 8th ... time."""

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        """Workers whose arithmetic is wrong, each with the reason as a cause in a sentence."""
        self.agreed: dict[str, int] = {}
        """Step of the newest audit in which each worker agreed with those on equal devices."""
        self._named: Counter[str] = Counter()
        self._seen: Counter[tuple[str, ...]] = Counter()

    def log_audit(self, audit: AuditRecord, step: int, generation: int) -> Effects:
        """Take the audit of a step, and log what differed."""
        differing: set[str] = set()
        for mismatch in audit.mismatches:
            differing.update(mismatch.workers)
            yield from self._log_mismatch(mismatch, generation)
        for worker in audit.compared:
            if worker not in differing:
                self.agreed[worker] = step

    def _log_mismatch(self, mismatch: AuditMismatch, generation: int) -> Effects:
        since = {worker: self.agreed.get(worker) for worker in mismatch.named}
        reason = str(mismatch)
        for worker, step in since.items():
            if step is None:
                reason += f"; {worker} has agreed in no audit of this run"
            else:
                reason += f"; {worker} agreed last {mismatch.step - step} steps before"
            self._named[worker] += 1
            is_proved = mismatch.cause is AuditCause.PRODUCTS
            if is_proved or self._named[worker] >= AUDITS_TO_BELIEVE:
                self.wrong.setdefault(worker, reason)
        key = (mismatch.cause, *mismatch.workers, *mismatch.named)
        self._seen[key] += 1
        times = self._seen[key]
        if times & (times - 1) == 0:
            yield event(
                "audit",
                generation,
                f"An audit differs: {reason}",
                reason=reason,
                agreed_step=since,
                times=times,
                **asdict(mismatch),
            )

    def forget(self, node: str) -> None:
        """Forget the workers of a node that is gone."""
        for known in (self.wrong, self.agreed, self._named):
            for worker in [each for each in known if node_of(each) == node]:
                del known[worker]
