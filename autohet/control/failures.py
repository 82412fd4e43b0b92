"""Reaction to ticks that fail, and to devices that compute wrongly."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from autohet.control.values.effects import Deciding, event
from autohet.control.values.observation import Notice
from planner.inputs.fleet import node_of

if TYPE_CHECKING:
    from autohet.control.job_memory import JobMemory
    from autohet.control.values.observation import Observation

RETRIES = 3
"""Ticks in a row that may fail before the job is asked to stop with a checkpoint.

After as many again all workers are told to stop, whatever the state is. After as many again the job
is given up.
"""
MOST_FAILURES = 3 * RETRIES
SOURCE = "audit"
"""Source of the notice of a node that is drained."""


class FailureAnswer(StrEnum):
    """Reaction to ticks that fail, worded for a sentence."""

    RETRY = "try again"
    STOP = "stop with a checkpoint"
    SAVE = "tell all workers to stop with a checkpoint, and to do nothing else any more"
    GIVE_UP = "give up"


def answer_failures(in_a_row: int, *, stopping: bool, saving: bool) -> FailureAnswer:
    """Choose the reaction to this number of failed ticks in a row.

    stopping, saving: True if that was decided before because of failures.
    """
    if in_a_row > MOST_FAILURES:
        return FailureAnswer.GIVE_UP
    if in_a_row > 2 * RETRIES and not saving:
        return FailureAnswer.SAVE
    if in_a_row > RETRIES and not stopping:
        return FailureAnswer.STOP
    return FailureAnswer.RETRY


# Devices that compute wrongly
# --------------------------------------------------------------------------------------


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
