"""What is done where a tick raises: it is tried again; where that does not help, the newest step is made durable and the job ends with the
cause. The driver itself never dies of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from autohet.driver.control.controller import Controller
from autohet.driver.control.observation import Observation
from autohet.runtime.messages import QUIET

logger = logging.getLogger("autohet")
RETRIES = 3
"""Ticks in a row that may fail before the job is asked to stop with a checkpoint; and after that, before it is stopped from here."""
PAUSE_S = 0.5


class Stoppable(Protocol):
    """What the guard needs of a workforce beside the controller's calls."""

    stop_reason: str | None


class Guard:
    """Owns nothing; `tick` in place of the run's own."""

    def __init__(
        self,
        controller: Controller,
        workforce: Stoppable,
        tick: Callable[[], Observation],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._controller, self._workforce, self._tick, self._pause = controller, workforce, tick, pause
        self._failed = 0

    def tick(self) -> Observation | None:
        """What was seen; None where the tick failed."""
        try:
            seen = self._tick()
        except Exception as error:  # noqa: BLE001  (whatever it is: training goes on without its driver, and must be ended in order)
            self._answer(error)
            return None
        self._failed = 0
        return seen

    def _answer(self, error: Exception) -> None:
        self._failed += 1
        cause = f"an error in the driver: {type(error).__name__}: {str(error).strip()[:500]}"
        logger.warning("A tick of the driver failed", exc_info=error)
        if self._failed <= RETRIES:
            self._say(f"Deciding to try again, since there was {cause}")
            self._pause(PAUSE_S * self._failed)
        elif self._workforce.stop_reason is None:
            self._say(f"Deciding to stop with a checkpoint, since there was {cause}, {self._failed} times in a row")
            self._workforce.stop_reason = cause
            self._failed = 1
        else:
            self._end(cause)

    def _say(self, sentence: str) -> None:
        self._controller.events.emit("decision", self._controller.generation, sentence)

    def _end(self, cause: str) -> None:
        """The controller cannot even stop: the workers are told to, past it."""
        try:
            self._save()
        except Exception as error:  # noqa: BLE001  (what cannot be saved stays in the nodes' memory, and in the newest checkpoint)
            cause += f"; its newest step is not in durable storage: {type(error).__name__}: {str(error)[:300]}"
        self._controller.give_up(cause)

    def _save(self) -> None:
        """Stop all members after the same step, and see its checkpoint committed."""
        controller, timeouts = self._controller, self._controller.timeouts
        seen = controller.workforce.observe()
        until = seen.now + timeouts.step_s + timeouts.checkpoint_s
        controller.workforce.request_stop(controller.members, checkpoint=True)
        while seen.now < until:
            controller.workforce.wait()
            seen = controller.workforce.observe()
            controller.take(seen)
            controller.execute()
            reports = [seen.reports.get(worker) for worker in controller.members]
            steps = {report.step for report in reports if report is not None and report.phase in QUIET}
            if not reports or any(report is None for report in reports):
                raise RuntimeError("not all workers are there")
            if len(steps) == 1 and all(report is not None and report.phase in QUIET for report in reports):
                if seen.checkpoint.step == min(steps):
                    return
                error = seen.checkpoint.error if seen.checkpoint.error_step == min(steps) else None
                if error:
                    raise RuntimeError(error)
        raise TimeoutError("it was not finished in time")
