"""Ray's calls to agents without waiting, and descriptions of Ray's errors on dead actors."""

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

logger = logging.getLogger("autohet")


OBSERVING = ("process_states",)
"""Calls that change nothing, and that an agent answers whatever else it does."""


class RayCalls:
    """Implements `AgentCalls` for Ray actors.

    `epoch`: that of this driver. wake: called by a thread of Ray's once an observing call is
    answered.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.epoch = 0
        self._wake = wake

    def ask(self, agent: Any, method: str, *arguments: Any) -> ray.ObjectRef[Any]:
        ref: ray.ObjectRef[Any]
        if method in OBSERVING:
            ref = getattr(agent, method).remote(*arguments)
            ref.future().add_done_callback(lambda _: self._wake())
        else:
            ref = agent.command.remote(self.epoch, method, *arguments)
        return ref

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        if not asked:
            return []
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        found = []
        for ref in ready:
            node = asked.pop(ref)
            try:
                found.append((node, ray.get(ref, timeout=5)))
            except RayError as error:
                # A death is an event of its own, and what is asked about it may meet it.
                level = logging.DEBUG if isinstance(error, ActorDiedError) else logging.WARNING
                why = describe_death(error)
                logger.log(level, "The agent of %s does not answer: %s", node, why)
        return found


def describe_death(error: RayError) -> str:
    """Return one line of Ray's message on a dead actor.

    It is the first line, followed by the last one if the actor's constructor raised.
    """
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return name

    description = f"{name}: {lines[0][:200]}"
    if "creation task" in lines[0] and len(lines) > 1:
        # The last line is the constructor's own error; those between are its traceback.
        description += f" {lines[-1][:300]}"
    return description
