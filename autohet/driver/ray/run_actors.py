"""Actors of a run: they outlive their driver, and the next driver takes them over.

They are detached actors in a namespace of the run. Every command to one carries the epoch of its
driver (`recovery.checkpoint.epoch`), and lower epochs are refused.
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.exceptions import RayError
from ray.util import list_named_actors

from autohet.driver.ray.cluster import ClusterMemory, epoch_in_charge

logger = logging.getLogger("autohet")
NAMESPACE = "autohet:"
"""Start of the namespace of each run; its id follows."""
WORKER = "worker"
AGENT = "agent"


def actor_options(run_id: str, kind: str, key: str, *, outlives: bool) -> dict[str, Any]:
    """Return Ray's options for an actor of a run; without `outlives` it ends with its driver."""
    if not outlives:
        return {}
    name = f"{run_id} {kind} {key} {secrets.token_hex(4)}"
    return {"name": name, "namespace": NAMESPACE + run_id, "lifetime": "detached"}


@dataclass(frozen=True)
class LivingActor:
    """Actor of a run: its kind, its key, its run and handle. is_up: it has started."""

    kind: str
    key: str
    run_id: str
    handle: Any
    is_up: bool


def living_actors(run_id: str | None = None) -> list[LivingActor]:
    """Return the actors of a run, or of all runs on this cluster."""
    found = []
    up = {actor["Name"] for actor in ray_state.actor_table(None, None, "ALIVE").values()}
    for entry in list_named_actors(all_namespaces=True):
        namespace = entry["namespace"]
        its_run = namespace.removeprefix(NAMESPACE)
        if not namespace.startswith(NAMESPACE) or run_id not in (None, its_run):
            continue
        kind, key, _ = entry["name"].removeprefix(f"{its_run} ").split(" ")
        try:
            handle = ray.get_actor(entry["name"], namespace)
        except ValueError:
            continue  # It has just ended.
        found.append(LivingActor(kind, key, its_run, handle, entry["name"] in up))
    return found


def answers_of(calls: Mapping[Any, ray.ObjectRef[Any]], within_s: float) -> dict[Any, Any]:
    """Return the answers that come within `within_s` seconds, by key; an error is no answer."""
    if not calls:
        return {}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=within_s)
    answered = set(ready)
    found = {}
    for key, call in calls.items():
        if call in answered:
            try:
                found[key] = ray.get(call)
            except RayError as error:
                logger.warning("%s is not taken over: %s", key, error)
    return found


def request_stop(run_id: str, by: str) -> None:
    """Ask the driver of a run, the present one or the next, to stop it."""
    ClusterMemory("stop", run_id).save({"by": by})


def forget_stop(run_id: str) -> None:
    """Withdraw what `request_stop` has asked for."""
    ClusterMemory("stop", run_id).save({})


class Charge:
    """This driver's charge of its run's actors, by an epoch in Ray's key-value store.

    A kill carries no epoch, and passes through the same store's server: it is made only while no
    later driver has put its epoch there.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.epoch = 0
        self._memory = ClusterMemory("epoch", run_id)

    def take(self, epoch: int) -> None:
        """Put this driver's epoch, before it commands anything."""
        self.epoch = epoch
        self._memory.save({"epoch": epoch})

    @property
    def is_mine(self) -> bool:
        """True unless a later driver has taken over."""
        return epoch_in_charge(self.run_id) <= self.epoch

    def kill(self, handles: Iterable[Any]) -> None:
        """End these actors; no-op once a later driver has taken over."""
        handles = list(handles)
        if handles and self.is_mine:
            for handle in handles:
                ray.kill(handle)
