"""A driver that stood still while a later one took its run over: nothing of it counts, whether or
not it reaches the storage that would tell it so.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from autohet.control.values.observation import Prune
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.checkpoints.spending import Spending, store_spending
from autohet.driver.events.event_log import EventLog
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.run_actors import living_actors, request_stop
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.runtime.job import Job
from recovery.checkpoint.errors import Superseded
from recovery.state.ancestry import Descent
from recovery.state.layout import Layout
from recovery.storage.errors import StorageUnreachable
from recovery.storage.open import open_storage
from tests.harness.faulty_storage import FaultyStorage
from tests.harness.local_fleet import local_fleet, make_job
from tests.harness.waits import wait_until

pytestmark = pytest.mark.cluster
RUN = "tiny-0123456789"
EMPTY = Layout({}, {})
NINTH = Descent(generation=9, parent=None, first_step=0)
LEASE_S = 0.5
ALWAYS = 10**6


def driver_of(job: Job) -> RayWorkforce:
    """A driver's side of Ray and storage, as it stands before it takes a run over."""
    storage = FaultyStorage(open_storage(job.checkpoint_storage))
    durable = Durable(storage, RunFacts(job.name, {}, {}), Retention(1), lease_s=LEASE_S)
    return RayWorkforce(job, RUN, durable, None, WorkerSettings(1, outlives=True))


def take_over(driver: RayWorkforce) -> None:
    driver._durable.take_lease()
    driver.take_over(driver._durable.epoch, restart=True)


def freeze(driver: RayWorkforce) -> None:
    """Renew its lease no more."""
    assert driver._durable._keeper is not None
    driver._durable._keeper.close()


def cut_storage(driver: RayWorkforce) -> None:
    for method in ("put", "get", "size", "list", "delete"):
        driver._durable.storage.fault(method, fail, times=ALWAYS)


def fail(name: str, call: Callable[[], Any]) -> None:
    raise StorageUnreachable(name, "no connection")


def traces(job: Job) -> dict[str, Any]:
    """Return all that a driver of the run could change."""
    storage = open_storage(job.checkpoint_storage)
    kept = {what: ray_cluster.ClusterMemory(what, RUN).load() for what in KEPT}
    objects = [info.name for info in storage.list() if not info.name.endswith(".lease")]
    return kept | {
        "drains": ray_cluster.draining_nodes(),
        "status": ray_cluster.read_statuses(),
        "actors": sorted((actor.kind, actor.key) for actor in living_actors(RUN)),
        "storage": {name: storage.get(name) for name in objects},
    }


KEPT = ("names", "notices", "stop", "epoch")


def refused(call: Any) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="epoch 2"):
        ray.get(call)


def unnamed(driver: RayWorkforce) -> Any:
    """A node that no driver has named."""
    return SimpleNamespace(node_id="a new node", group="g5")


def command(driver: RayWorkforce, *command: Any) -> None:
    """Command all of the run's actors."""
    for actor in living_actors(RUN):
        refused(actor.handle.command.remote(driver.charge.epoch, *command))


def take_over_late(driver: RayWorkforce) -> None:
    """It stood still after it had claimed its epoch."""
    with pytest.raises((Superseded, StorageUnreachable)):
        driver.take_over(driver._durable.epoch, restart=True)


def kept_lines(driver: RayWorkforce) -> Any:
    return ray_cluster.ClusterMemory("notices", RUN, lambda: driver._durable.epoch)


STALE: dict[str, Callable[[RayWorkforce, str], Any]] = {
    "drains a node": lambda old, node: old.autoscaler.drain(node, "leaves", None),
    "gives a node back": lambda old, node: old.autoscaler.give_back(node),
    "publishes a status": lambda old, node: old.publish({"state": "old"}),
    "names a node": lambda old, node: old.observer.tracked._name_of(unnamed(old)),
    "keeps lines of notices": lambda old, node: kept_lines(old).save({"1 old": [0.0, "", False]}),
    "starts a worker": lambda old, node: old.workers.hire([f"{node}/0"]),
    "starts an agent": lambda old, node: old.node_agents.start_agents([node]),
    "kills processes": lambda old, node: old.charge.kill(a.handle for a in living_actors(RUN)),
    "prunes snapshots": lambda old, node: command(old, "prune", Prune((9, 9), 9, frozenset())),
    "ends processes": lambda old, node: command(old, "close", True),
    "claims a generation": lambda old, node: old._durable.claim(NINTH),
    "commits a step": lambda old, node: old.commit_checkpoint(4, 1, EMPTY, ()),
    "stores its dollars": lambda old, node: store_spending(
        old._durable.storage, Spending(0.0, 1.0), old._durable.epoch
    ),
    "takes over late": lambda old, node: take_over_late(old),
}
"""Each with what it does after it has woken, on the run of the driver that has replaced it."""


def test_nothing_of_a_driver_that_was_replaced_counts(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with local_fleet(big=1):
        old, new = driver_of(job), driver_of(job)
        take_over(old)
        old.observer._read_nodes(time.monotonic())
        (node,) = old.observer.nodes
        freeze(old)
        take_over(new)
        new.observer._read_nodes(time.monotonic())
        new.node_agents.start_agents([node])
        wait_until(lambda: [actor for actor in living_actors(RUN) if actor.is_up], "the agent")
        request_stop(RUN, "a test")
        new.publish({"state": "new"})
        old._stops = True
        before = traces(job)
        for is_cut in (False, True):
            if is_cut:
                cut_storage(old)
            for what, act in STALE.items():
                act(old, node)
                for pool in (old._durable.claim_pool, old._durable.work_pool):
                    pool.submit(lambda: None).result()
                assert traces(job) == before, (what, is_cut)
        log = EventLog(tmp_path / "events.jsonl")
        log.is_silenced = old.is_replaced
        old._observed_at = -math.inf
        log.emit("decision", 1, "An event of before it stood still.")
        assert not (tmp_path / "events.jsonl").read_text()
        seen = old.observe()
        assert "has taken the job over" in str(seen.checkpoint.superseded)
        old.close(forget_snapshots=True)
        assert traces(job) == before, "closes"
        assert new.charge.is_mine
        old._durable.close(at_once=True)
        new.close(forget_snapshots=True)
        new._durable.close(at_once=True)
