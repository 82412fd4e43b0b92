"""Scripted events of a rehearsal: when they are due and which nodes they hit (pure)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from autohet.control.values.actions import Rehearse

if TYPE_CHECKING:
    from autohet.control.values.observation import Observation
    from autohet.runtime.job import Job, ScriptedEvent


class Script:
    """Scripted events that have not happened yet. Owned by the controller, as part of its state."""

    def __init__(self, job: Job) -> None:
        script = job.elastic.script if "script" in job.elastic.notice_sources else ()
        self.left = sorted(script, key=lambda event: event.at_step)
        """Events that have not happened yet, the next one first."""

    def due(self, step: int, seen: Observation, members: Collection[str]) -> list[Rehearse]:
        """Return the next event if it is due: at most one, once `step` steps are committed.

        Called only while training stands on a whole fleet.
        """
        if not self.left or step < self.left[0].at_step:
            return []
        event = self.left.pop(0)
        name = event.node
        if not name and event.event != "arrival":
            name = _pick(event, seen, members)

        processes = {}
        for worker, report in seen.reports.items():
            if seen.node_of(worker) == name:
                processes[worker] = report.process_id
        return [Rehearse(event, name, name in seen.nodes, processes)]


def _pick(event: ScriptedEvent, seen: Observation, members: Collection[str]) -> str | None:
    """Return a node of the event's type that trains now.

    The last by name is chosen, so that a rehearsal repeats.
    """
    training = {seen.node_of(worker) for worker in members}
    fitting = []
    for name, view in seen.nodes.items():
        has_type = view.node.node_type.name == event.node_type
        if has_type and name in training and name not in seen.notices:
            fitting.append(name)
    return max(fitting, default=None)
