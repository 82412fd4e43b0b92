"""Reaction to ticks that fail."""

from __future__ import annotations

from enum import StrEnum

RETRIES = 3
"""Ticks in a row that may fail before the job is asked to stop with a checkpoint.

After as many again all workers are told to stop, whatever the state is. After as many again the job
is given up.
"""


MOST_FAILURES = 3 * RETRIES


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
