"""Broker of the requests of all jobs on a Ray cluster, whose autoscaler knows a single request.

One actor on the head holds them and sends their sum, so that no job overwrites another's. It keeps
them in Ray's key-value store for its next life.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.ray.cluster import ClusterMemory

NAME = "autohet-requests"
NAMESPACE = "autohet"
PRUNE_S = 10.0
ANSWER_S = 60.0
"""Limit on the broker's answer; its process may have to start first."""
Bundles = Sequence[Mapping[str, float]]
Selectors = Sequence[Mapping[str, str]]


class Requests:
    """Requests by owner, each a list of (bundle, label selector); sends their sum on every change.

    An owner is the id of a driver's Ray job; the request of one that has ended is dropped.
    """

    def __init__(
        self, send: Callable[[list[Any]], None], living: Callable[[], set[str]], memory: Any
    ) -> None:
        self._send = send
        self._living = living
        self._memory = memory
        self._by_owner: dict[str, list[Any]] = memory.load()

    def put(self, owner: str, request: list[Any]) -> None:
        """Replace the request of an owner; an empty one withdraws it."""
        kept = self._of_the_living()
        kept.pop(owner, None)
        if request:
            kept[owner] = request
        self._change(kept)

    def prune(self) -> None:
        """Withdraw the requests of owners that have ended."""
        kept = self._of_the_living()
        if kept != self._by_owner:
            self._change(kept)

    def _of_the_living(self) -> dict[str, list[Any]]:
        if not self._by_owner:
            return {}
        living = self._living()
        return {owner: each for owner, each in self._by_owner.items() if owner in living}

    def _change(self, by_owner: dict[str, list[Any]]) -> None:
        self._by_owner = by_owner
        self._memory.save(by_owner)
        self._send([node for owner in sorted(by_owner) for node in by_owner[owner]])


def send_to_autoscaler(nodes: list[Any]) -> None:
    """Request these (bundle, label selector) of Ray's autoscaler."""
    bundles = [bundle for bundle, _ in nodes]
    selectors = [selector for _, selector in nodes]
    # Only version 2 of the autoscaler knows selectors.
    labelled = selectors if any(selectors) else None
    request_resources(bundles=bundles, bundle_label_selectors=labelled)


def living_jobs() -> set[str]:
    """Return the ids of the Ray jobs whose drivers have not ended."""
    return {job["JobID"] for job in ray_state.job_table() if not job["IsDead"]}


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class RequestBroker:
    """Actor that holds the requests; it outlives the jobs."""

    def __init__(self) -> None:
        memory = ClusterMemory("requests", "all")
        self._requests = Requests(send_to_autoscaler, living_jobs, memory)
        self._lock = threading.Lock()
        # The actor's process ends the thread.
        threading.Thread(target=self._prune, name="prune-requests", daemon=True).start()

    def put(self, owner: str, request: list[Any]) -> None:
        with self._lock:
            self._requests.put(owner, request)

    def _prune(self) -> None:
        pause = threading.Event()
        while not pause.wait(PRUNE_S):
            with self._lock:
                self._requests.prune()


def put_request(
    bundles: Bundles,
    selectors: Selectors,
    run_id: str = "",
    takes: bool = False,
    *,
    wait: bool = True,
) -> None:
    """Set the request of this driver's job; without bundles, withdraw it.

    run_id: the request counts as that of the run, of which `takes` makes this driver the only one
    that asks: what a driver before it has asked for, which may only stand still, is withdrawn.
    wait: block until the autoscaler has it, ANSWER_S at the most. Raises RayError if it has not.
    """
    context = ray.get_runtime_context()
    actor_class: Any = RequestBroker
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
    broker = actor_class.options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=here,
    ).remote()
    me = context.get_job_id()
    if run_id:
        memory = ClusterMemory("asker", run_id)
        asker = memory.load().get("job", me)
        if asker != me and not takes:
            return
        if takes:
            memory.save({"job": me})
        if asker != me:
            broker.put.remote(asker, [])
    request = [
        [dict(bundle), dict(selector)] for bundle, selector in zip(bundles, selectors, strict=True)
    ]
    answer = broker.put.remote(me, request)
    if wait:
        ray.get(answer, timeout=ANSWER_S)
