"""Follows the nodes while they prepare their data.

Logs their progress, and reports an error where a node's data differs from the run's.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from autohet.runtime.job import Job
from autohet.runtime.messages import DataState

logger = logging.getLogger("autohet")
TELL_EVERY_S = 10.0


class DataWatch:
    """Reference data of a run: the data that the first ready node had.

    `states`: the nodes' states, as judged last.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.states: dict[str, DataState] = {}
        self._reference: tuple[str, DataState] | None = None
        self.expected: str | None = None
        """Digest of the data that the run's checkpoint was trained on; None accepts any."""
        self._since: dict[str, float] = {}
        self._told_at = -math.inf

    @property
    def reference(self) -> DataState | None:
        """Data of the run; None until a node has it."""
        return None if self._reference is None else self._reference[1]

    def judge(self, states: Mapping[str, DataState], now: float) -> None:
        """Set an `error` sentence on each node whose data differs from the run's.

        Logs progress at intervals.
        """
        for name, state in sorted(states.items()):
            if self._reference is None and state.digest is not None:
                self._reference = (name, state)
                if state.summary:
                    logger.info("Data of this run, on %s: %s", name, state.summary)

        preparing = {}
        for name, state in states.items():
            if not state.ready and state.error is None:
                preparing[name] = state
        self._tell(preparing, now)
        self.states = {name: self._compare(state) for name, state in states.items()}

    def _compare(self, state: DataState) -> DataState:
        if self.expected is not None and state.digest not in (None, self.expected):
            source = ", ".join(self._job.require_training().sources)
            error = (
                f"the tokens of data.source {source} are not those of the checkpoint's run (SHA-256"
                f" {str(state.digest)[:12]}, not {str(self.expected)[:12]}); restore the files,"
                " name another checkpoint.storage, or add data.source to checkpoint.allow_changes"
            )
            return replace(state, error=error)
        if self._reference is None or state.digest is None:
            return state
        first, other = self._reference
        if state.digest == other.digest:
            if state.evaluation_digest == other.evaluation_digest:
                return state
            return replace(
                state,
                error=(
                    f"its evaluation rows are not {first}'s; give every node the same files of"
                    " evaluation.source"
                ),
            )
        source = ", ".join(self._job.require_training().sources)
        return replace(
            state,
            error=(
                f"its data is not {first}'s: {state.num_rows} rows (SHA-256 {state.digest[:12]})"
                f" where {first} has {other.num_rows} ({str(other.digest)[:12]}), both from"
                f" data.source {source}; give every node the same files, or name an s3:// prefix or"
                " a file system that all share"
            ),
        )

    def _tell(self, preparing: Mapping[str, DataState], now: float) -> None:
        self._since = {name: self._since.get(name, now) for name in preparing}
        if not preparing or now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        for name, state in sorted(preparing.items()):
            progress = describe_preparation(state, now - self._since[name])
            logger.info("Preparing the data on %s: %s", name, progress)


def describe_preparation(state: DataState, seconds: float) -> str:
    """Describe the progress of a preparation, with the time left at its pace so far."""
    if not state.total_bytes:
        return "looking at its files"
    done = state.done_bytes / state.total_bytes
    left = ""
    if 0 < done < 1 and seconds > 0:
        left_s = seconds * (1 - done) / done
        left = f", about {left_s:.0f} s left"
    return f"{100 * done:.0f}% of {state.total_bytes / 1e6:.1f} MB{left}"
