"""Scripted events of a rehearsal: at known steps a notice is given, a node is killed or frozen, or one joins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from autohet.driver.emulation import EmulatedFleet
from autohet.driver.observation import Notice, Observation
from autohet.driver.ray_workforce import RayWorkforce
from autohet.runtime.job import ScriptedEvent
from planner.errors import ConfigError

logger = logging.getLogger("autohet")


class Rehearsal:
    """Makes the events of `elastic.script` happen, each once. `fleet` None: a real cluster, where only notices and
    deaths of workers can be rehearsed (deaths and freezes kill or stop processes, they take no machine away)."""

    def __init__(
        self,
        script: Sequence[ScriptedEvent],
        workforce: RayWorkforce,
        fleet: EmulatedFleet | None,
        clock: Callable[[], float],
    ) -> None:
        self._left = sorted(script, key=lambda event: event.at_step)
        self._workforce, self._fleet, self._clock = workforce, fleet, clock

    def play(self, step: int, seen: Observation, members: Sequence[str], training: bool) -> None:
        """Start what is due: one event at a time, and only while training stands on a whole fleet."""
        if self._fleet is not None:
            self._fleet.reap(self._clock())
        if training and self._left and step >= self._left[0].at_step:
            self._happen(self._left.pop(0), seen, members)

    def _happen(self, event: ScriptedEvent, seen: Observation, members: Sequence[str]) -> None:
        if event.event == "arrival":
            if self._fleet is None:
                raise ConfigError("elastic.script: an arrival can be rehearsed on an emulated fleet only")
            node = self._fleet.add(event.node_type or "", event.node)
            logger.info("Rehearsal: %s joins", node.name)
            return
        name = event.node or self._pick(event, seen, members)
        logger.info("Rehearsal: %s of %s", event.event, name)
        if event.event == "notice":
            now = self._clock()
            self._workforce.scripted_notices[name] = Notice(name, "scripted notice", now, now + event.deadline_s)
            if self._fleet is not None:
                self._fleet.doom(name, now + event.deadline_s)
        elif event.event == "death" and self._fleet is not None:
            self._fleet.kill(name)
        else:
            self._strike(event, name, seen)

    def _strike(self, event: ScriptedEvent, name: str, seen: Observation) -> None:
        workers = [worker for worker in seen.reports if seen.node_of(worker) == name]
        if event.event == "freeze":
            if self._fleet is None:
                raise ConfigError("elastic.script: a freeze can be rehearsed on an emulated fleet only")
            for worker in workers:
                self._fleet.freeze(seen.reports[worker].process_id)
        else:
            self._workforce.kill_processes(workers)

    def _pick(self, event: ScriptedEvent, seen: Observation, members: Sequence[str]) -> str:
        """A node of the type that trains now; the last by name, so that a rehearsal repeats."""
        trains = {seen.node_of(worker) for worker in members}
        fitting = [
            n
            for n, v in seen.nodes.items()
            if v.node.node_type.name == event.node_type and n in trains and n not in seen.notices
        ]
        if not fitting:
            raise ConfigError(f"elastic.script: no node of type '{event.node_type}' trains at step {event.at_step}")
        return max(fitting)
