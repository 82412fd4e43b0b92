"""Keeps the standing request to Ray's autoscaler what the job wants: other types where one is refused, spares, no idle nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ray.exceptions import RayError

from autohet.driver.control.buying import Idle, Refusals, Wanted, fallback, releasable, with_spares
from autohet.driver.control.events import EventLog
from autohet.driver.control.observation import Observation
from autohet.driver.control.planning import Planning
from autohet.driver.ray.launches import failed_launches, newest_cause, read_monitor_log
from autohet.driver.ray.scaling import FleetRequest
from autohet.runtime.background_process import BackgroundCall, run_in_background
from autohet.runtime.job import Job

logger = logging.getLogger("autohet")
LOOK_S = 5.0


class Buyer:
    """Called from the driver's one thread; searches go on in another process. `release`: end the node of this name."""

    def __init__(
        self, job: Job, planning: Planning, request: FleetRequest, events: EventLog, release: Callable[[str], None],
        failures: Callable[[], Mapping[str, int]] = failed_launches, log: Callable[[], str] = read_monitor_log,
    ) -> None:  # fmt: skip
        self._job, self._planning, self._request, self._events = job, planning, request, events
        self._release, self._failures, self._log = release, failures, log
        self._refusals, self._idle = Refusals(), Idle(job.elastic.patience * job.elastic.idle_release_s)
        self._refused: frozenset[str] = frozenset()
        self._released: set[str] = set()
        self._base = dict(request.counts)
        self._search: BackgroundCall[Wanted] | None = None
        self._why = ""
        self._looked_at = -LOOK_S

    def look(self, seen: Observation, members: Collection[str], *, training: bool, generation: int) -> None:
        """One round, every LOOK_S. What Ray does not answer is asked again the next time."""
        if not self._request.bundles or seen.now - self._looked_at < LOOK_S:
            return
        self._looked_at = seen.now
        used = {seen.node_of(worker) for worker in members}
        alive = Counter(view.node.node_type.name for name, view in seen.nodes.items() if name not in self._released)
        try:
            self._heed_refusals(alive, seen.now, generation)
        except (RayError, RuntimeError, OSError) as error:
            logger.debug("the autoscaler's failed launches are not known: %s", error)
        self._let_go(seen, used, training, generation)
        bound = self._job.parallelism.max_usd_per_hour
        wanted = with_spares(self._base, seen, used, self._request.cluster, bound)
        if wanted != self._request.counts:
            self._request.change(wanted)

    def _heed_refusals(self, alive: Mapping[str, int], now: float, generation: int) -> None:
        refused = self._refusals.look(self._failures(), alive, now)
        if refused != self._refused:
            self._refused = refused
            if self._search is not None:
                self._search.drop()
            cause = newest_cause(self._log())
            names = ", ".join(sorted(refused))
            self._why = (
                f"no {names} can be had{': ' + cause if cause else ''}" if refused else "all types are tried again"
            )
            self._search = run_in_background(_find, self._question(refused, alive))
        if self._search is None or not self._search.ended:
            return
        found = self._search() or _find(self._question(refused, alive))
        self._search = None
        if found.counts is None:
            self._say(generation, f"Deciding to ask for the same nodes still, since {self._why}, and {found.reason}")
        elif found.counts != self._base:
            self._base = dict(found.counts)
            what = ", ".join(f"{count} {name}" for name, count in sorted(self._base.items()) if count)
            self._say(generation, f"Deciding to ask for {what}, since {self._why}")

    def _question(self, refused: Collection[str], alive: Mapping[str, int]) -> Question:
        return (self._planning, self._request, frozenset(refused), dict(alive))

    def _let_go(self, seen: Observation, used: Collection[str], training: bool, generation: int) -> None:
        self._released &= seen.nodes.keys()
        idle = [name for name in self._idle.look(seen, used, training=training) if name not in self._released]
        for name in releasable(idle, seen, self._request.standing):
            kind = seen.nodes[name].node.node_type.name
            self._released.add(name)
            left = sum(v.node.node_type.name == kind for n, v in seen.nodes.items() if n not in self._released)
            self._base[kind] = min(self._base.get(kind, 0), left)
            self._request.change(self._base)  # before it goes, or it would be replaced
            minutes = self._job.elastic.patience * self._job.elastic.idle_release_s / 60
            self._say(generation, f"Deciding to give {name} back, since no plan has used it for {minutes:.0f} minutes")
            self._release(name)

    def _say(self, generation: int, sentence: str) -> None:
        self._events.emit("decision", generation, sentence)


Question = tuple[Planning, FleetRequest, frozenset[str], dict[str, int]]


def _find(question: Question) -> Wanted:
    planning, request, refused, alive = question
    return fallback(planning, request.cluster, refused, alive, request.standing, request.complete)
