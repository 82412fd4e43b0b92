"""Scripted events of a rehearsal: when they are due and which nodes they hit (pure).

A node that is to join starts on the machine that trains, which may be busy: the run does not end
before the node has been answered, by a plan with it or by the decision to stay.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autohet.control.values.actions import Rehearse

if TYPE_CHECKING:
    from autohet.control.values.observation import Observation
    from autohet.runtime.job import Job, ScriptedEvent


STEPS_AFTER = 4
"""A plan with a node that joins trains for this part of the steps that were left at its event."""


@dataclass(frozen=True)
class Joining:
    """Scripted arrival that is not answered.

    before: nodes that were there when it happened. steps_left: steps of the run that were left.
    """

    before: frozenset[str]
    steps_left: int


class Script:
    """Scripted events that have not happened yet. Owned by the controller, as part of its state."""

    def __init__(self, job: Job) -> None:
        script = job.elastic.script if "script" in job.elastic.notice_sources else ()
        self.left = sorted(script, key=lambda event: event.at_step)
        """Events that have not happened yet, the next one first."""
        self.joining: list[Joining] = []
        """Arrivals that have happened and are not answered."""
        self.waits_until: float | None = None
        """Time until which a run that is trained waits for an answer; None: it has not waited."""

    @property
    def steps_left(self) -> int:
        """Steps that were left when the first unanswered arrival happened."""
        return self.joining[0].steps_left

    @property
    def least_steps(self) -> int:
        """Least number of steps of a plan that answers an arrival."""
        return -(-self.steps_left // STEPS_AFTER)

    def answer(self, nodes: Collection[str]) -> None:
        """Count arrivals as answered one of whose nodes is in `nodes`."""
        self.joining = [each for each in self.joining if each.before.issuperset(nodes)]

    def awaits_answer(self, step: int) -> bool:
        """Return True if an arrival is unanswered after `step` steps, or has yet to happen."""
        if self.joining:
            return True
        return any(each.event == "arrival" and each.at_step < step for each in self.left)

    def due(
        self,
        step: int,
        seen: Observation,
        members: Collection[str],
        last_step: int | None = None,
    ) -> list[Rehearse]:
        """Return the next event if it is due: at most one, once `step` steps are committed.

        Called only while training stands on a whole fleet. last_step: steps of the run.
        """
        if not self.left or step < self.left[0].at_step:
            return []
        event = self.left.pop(0)
        if event.event == "arrival":
            steps_left = (last_step or step) - event.at_step
            self.joining.append(Joining(frozenset(seen.nodes), steps_left))
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
