"""Reaction to workers and devices that compute wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autohet.control.values.effects import Deciding, event
from autohet.control.values.observation import Notice
from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation

SOURCE = "audit"
"""Source of the notice of a node that is drained."""


def answer_corruption(memory: JobMemory, seen: Observation) -> Deciding[Observation]:
    """Decide on workers that were found to compute wrongly, as `elastic.on_corruption` says.

    Returns the observation with a notice for each node that is drained, as if it were to leave.
    """
    known = memory.nodes
    wrong = dict(memory.ledger.audits.wrong)
    for worker, report in seen.reports.items():
        if report.has_faulty_device:
            wrong.setdefault(worker, report.error or "its device is faulty")
    known.wrong &= wrong.keys()
    for worker in sorted(wrong.keys() - known.wrong):
        known.wrong.add(worker)
        node = node_of(worker)
        answer = memory.job.elastic.on_corruption
        if answer == "drain":
            known.corrupt[node] = Notice(node, SOURCE, seen.now)
            deed = f"drain {node}"
        elif answer == "stop":
            memory.end.reason = f"the arithmetic of {worker} is wrong: {wrong[worker]}"
            deed = "stop with a checkpoint"
        else:
            deed = f"go on with {worker}"
        sentence = f"Deciding to {deed} (elastic.on_corruption), since {wrong[worker]}"
        yield event("decision", memory.generation, sentence, worker=worker)
    drained = {name: notice for name, notice in known.corrupt.items() if name in seen.nodes}
    return replace(seen, notices={**drained, **seen.notices})
