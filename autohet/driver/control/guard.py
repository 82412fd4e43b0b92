"""Keeps the driver alive when a tick raises.

The next tick sees the failure and decides what to do about it (`policy.answer_failures`). This
module decides one thing alone: the end of a job whose ticks do not even come to a decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from autohet.driver.control.controller import Controller
from autohet.driver.control.observation import Failures, Observation
from autohet.driver.control.policy import MOST_FAILURES, RETRIES

logger = logging.getLogger("autohet")
PAUSE_S = 0.5


class Guard:
    """Wrapper of the run's own tick, to be called in its place. Owns nothing."""

    def __init__(
        self,
        controller: Controller,
        tick: Callable[[], Observation],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._controller, self._tick, self._pause = controller, tick, pause

    def tick(self) -> Observation | None:
        """Run one tick. Returns its observation, or None if the tick failed."""
        try:
            seen = self._tick()
        except Exception as error:  # noqa: BLE001
            self._count(error)
            return None
        self._controller.failures = None
        return seen

    def _count(self, error: Exception) -> None:
        logger.warning("A tick of the driver failed", exc_info=error)
        cause = f"an error in the driver: {type(error).__name__}: {str(error).strip()[:500]}"
        before = self._controller.failures
        failures = self._controller.failures = Failures(
            1 if before is None else before.in_a_row + 1, cause
        )
        if (
            failures.in_a_row > MOST_FAILURES + 1 and not self._controller.ended
        ):  # a tick that saw as many would have decided on them
            self._controller.give_up(
                f"{cause}; its newest step is not in durable storage: no decision is possible"
            )
        else:
            self._pause(PAUSE_S * min(failures.in_a_row, RETRIES))
