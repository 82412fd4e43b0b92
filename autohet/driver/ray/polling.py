"""Asks many actors the same question, over and over, without ever waiting for one that does not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

logger = logging.getLogger("autohet")


@dataclass
class Answer:
    """The newest answer of one actor. `heard_at` is when it came; `error` is set once the actor is known to be
    dead.
    """

    asked_at: float
    heard_at: float | None = None
    value: Any = None
    error: str | None = None


@dataclass
class Poller:
    """One outstanding question per actor. Owned by the workforce; called from its thread alone."""

    ask: Callable[[Any], ray.ObjectRef]
    answers: dict[str, Answer] = field(default_factory=dict)
    _handles: dict[str, Any] = field(default_factory=dict)
    _pending: dict[ray.ObjectRef, str] = field(default_factory=dict)

    def add(self, key: str, handle: Any, now: float) -> None:
        self._handles[key] = handle
        self.answers[key] = Answer(asked_at=now)
        self._pending[self.ask(handle)] = key

    def remove(self, key: str) -> None:
        self._handles.pop(key, None)
        self.answers.pop(key, None)
        self._pending = {ref: k for ref, k in self._pending.items() if k != key}

    def poll(self, wait_s: float, clock: Callable[[], float]) -> list[Any]:
        """Take every answer that is there (waiting up to `wait_s` for a first one) and ask again; returns the new
        values.
        """
        if not self._pending:
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        if not ready and wait_s > 0:
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        return [value for ref in ready if (value := self._take(ref, clock())) is not None]

    def _take(self, ref: ray.ObjectRef, now: float) -> Any:
        key = self._pending.pop(ref)
        answer = self.answers[key]
        try:
            answer.value = ray.get(ref, timeout=5)
        except GetTimeoutError:
            self._pending[ref] = key
            return None
        except RayError as error:
            answer.error = describe(error)
            return None
        answer.heard_at = now
        self._pending[self.ask(self._handles[key])] = key
        answer.asked_at = now
        return answer.value


class RayCalls:
    """Implements `AgentCalls` for actors."""

    def ask(self, agent: Any, method: str, *arguments: Any) -> ray.ObjectRef:
        ref: ray.ObjectRef = getattr(agent, method).remote(*arguments)
        return ref

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        found = []
        for ref in ready:
            node = asked.pop(ref)
            try:
                found.append((node, ray.get(ref, timeout=5)))
            except RayError as error:
                logger.warning("The agent of %s does not answer: %s", node, describe(error))
        return found


def describe(error: RayError) -> str:
    """One line of what Ray says of a dead actor: the first, and the last too where its constructor raised."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not text:
        return type(error).__name__
    cause = f" {text[-1][:300]}" if "creation task" in text[0] and len(text) > 1 else ""
    return f"{type(error).__name__}: {text[0][:200]}{cause}"
