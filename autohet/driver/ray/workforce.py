"""Workforce on a real Ray cluster, directed by the controller's decisions.

There is one agent actor per node, and one worker actor per GPU.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from autohet.control.values.actions import Rehearse
from autohet.control.values.observation import Observation
from autohet.driver.checkpoints.durable import Durable, durable_suspects
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.agents.node_agents import RayNodeAgents
from autohet.driver.ray.observer import BEATS, RayObserver
from autohet.driver.ray.requests.autoscaler import RayAutoscaler
from autohet.driver.ray.run_actors import Charge, forget_stop
from autohet.driver.ray.take_over import take_over
from autohet.driver.ray.workers import RayWorkers, WorkerSettings
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import node_of
from recovery.checkpoint.epoch import require_epoch
from recovery.checkpoint.errors import Replaced
from recovery.checkpoint.lease import LEASE_S
from recovery.state.ancestry import Descent

CALM_GATHER_S = 0.05
CALM_TICK_S = 0.5
"""Seconds to gather further news after the first, and between rounds, while all train.

They hold while no node leaves. Gathered news is read in one round, since each round costs 0.5 ms,
and 20 ms with a thousand workers (`calm_gather_s`). An end that Ray reports is handled at once.
"""
GATHERED_WORKERS = 256
"""Workers from which on news is gathered for longer, in proportion to their number."""
BUSY_GATHER_S = 0.01
BUSY_TICK_S = 0.05
"""Same periods in any other phase, so that a reconfiguration does not wait for its driver."""
CLOSE_S = 5.0
"""Seconds that the workers, and then the agents, have to close before they are killed."""


def calm_gather_s(num_workers: int) -> float:
    """Return the seconds to gather further news after the first, while all train."""
    return CALM_GATHER_S * max(1.0, num_workers / GATHERED_WORKERS)


class RayWorkforce:
    """Implements `Workforce` over Ray. All calls come from the driver's one thread."""

    def __init__(
        self,
        job: Job,
        run_id: str,
        durable: Durable,
        cluster: Cluster | None,
        settings: WorkerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observer = RayObserver(job, run_id, durable, cluster, clock)
        self.charge = Charge(run_id)
        self.workers = RayWorkers(self.observer, self.charge, settings)
        self.node_agents = RayNodeAgents(
            self.observer, self.charge, settings.record, outlives=settings.outlives
        )
        self.autoscaler = RayAutoscaler(self.observer, self.charge)
        self.rehearsal: Callable[[Rehearse], None] | None = None
        """Function that makes scripted events happen."""
        self._durable = durable
        self._waited_at = -math.inf
        self._observed_at = math.inf
        self._num_xids: dict[str, int] = {}
        """Number of Xid errors by node after which its workers were told to check."""
        self._stops = False
        """True once the actors know that the job is being stopped."""

    def take_over(self, epoch: int, *, restart: bool) -> tuple[GenerationOrder, ...]:
        """Take charge of the run under `epoch`, with the actors that outlived its last driver.

        restart: a parent has started this driver again, so that a stop which was asked for still
        counts. Returns the orders of the generations that living workers know, oldest first.

        Raises:
            Replaced: a later driver has taken over meanwhile.
        """
        observer = self.observer
        # This driver may have stood still since it claimed the epoch.
        require_epoch(self._durable.storage, epoch)
        self.charge.take(epoch)
        observer.calls.epoch = epoch
        observer.agent_reports.epoch = epoch
        observer.worker_reports.epoch = epoch
        if not restart:
            forget_stop(self.charge.run_id)
        return take_over(observer.job, self.charge, self.workers, self.node_agents)

    def wait(self) -> None:
        """Block until there is news or the next round is due.

        Rounds follow soon while anything changes, and later while all workers train.
        """
        observer = self.observer
        # What the round before has observed is decided on, and its events are written.
        observer.agent_reports.acknowledge()
        observer.worker_reports.acknowledge()
        if observer.is_calm():
            gather_s = calm_gather_s(len(observer.workers))
            tick_s = CALM_TICK_S
        else:
            gather_s = BUSY_GATHER_S
            tick_s = BUSY_TICK_S
        # Heartbeats wake nobody, so rounds must not be rarer than they are.
        tick_s = min(tick_s, observer.timeouts.suspicion_s / BEATS)

        left_s = self._waited_at + tick_s - time.monotonic()
        observer.wake_up.wait(left_s, gather_s)
        self._waited_at = time.monotonic()
        observer.agent_reports.listen()
        observer.worker_reports.listen()

    def observe(self) -> Observation:
        """Combine the messages received in `wait` with the state found now.

        What workers have reported to a driver that was replaced is left to its successor.
        """
        observer = self.observer
        is_replaced = self.is_replaced()
        self._observed_at = time.monotonic()
        if is_replaced:
            epoch = ray_cluster.epoch_in_charge(self.charge.run_id)
            why = str(Replaced(self._durable.storage.uri, epoch, "of a later start"))
            seen = observer.observe()
            return replace(seen, reports={}, checkpoint=replace(seen.checkpoint, superseded=why))
        if observer.stop_reason and not self._stops:
            # A driver that is killed before it has ended them is not waited for.
            self._stops = True
            for handle in (*observer.workers.values(), *observer.agents.values()):
                handle.command.remote(self.charge.epoch, "expect_stop")
        self._check_devices()
        return observer.observe()

    def is_replaced(self) -> bool:
        """Return True if a later driver is in charge.

        Ray is asked once this driver has stood still since it observed, for so long that its lease
        may have been taken.
        """
        return time.monotonic() - self._observed_at > LEASE_S / 2 and not self.charge.is_mine

    def _check_devices(self) -> None:
        """Have the workers of each node with a new Xid error check their devices."""
        for node, answer in self.observer.agent_reports.answers.items():
            num_xids = 0 if answer.value is None else answer.value.num_xids
            if num_xids > self._num_xids.get(node, 0):
                for worker, handle in self.observer.workers.items():
                    if node_of(worker) == node:
                        handle.command.remote(self.charge.epoch, "check_device")
            self._num_xids[node] = num_xids

    def request_inventories(self) -> None:
        observer = self.observer
        observer.inventories.request(observer.agents, observer.clock())
        answers = observer.worker_reports.answers.values()
        self._durable.refresh(durable_suspects(answer.value for answer in answers))

    def claim_generation(self, entry: Descent) -> None:
        self._durable.claim(entry)

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        self._durable.commit(step, generation, layout, receipts)

    def fall_back(self, step: int, generation: int) -> None:
        self._durable.fall_back(step, generation)

    def rehearse(self, what: Rehearse) -> None:
        assert self.rehearsal is not None, "no script, no rehearsal"
        self.rehearsal(what)

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish the job's status, with the seconds since each worker's last sign."""
        observer = self.observer
        now = observer.clock()
        silence = {}
        for worker, answer in observer.worker_reports.answers.items():
            if answer.heard_at is not None:
                silence[worker] = round(now - answer.heard_at, 1)
        if self.charge.is_mine:
            ray_cluster.publish_status(observer.job.name, {**status, "silence_s": silence})

    def close(self, *, forget_snapshots: bool = False, at_once: bool = False) -> None:
        """End every actor of the job and the rendezvous store.

        `forget_snapshots`: also remove the nodes' copies (a finished job needs none, and host
        memory is dear). `at_once`: do so without a message to the actors.
        """
        observer = self.observer
        epoch = self.charge.epoch
        workers = list(observer.workers.values())
        agents = list(observer.agents.values())
        # Workers first: what they write after their agents have gone would stay.
        if not at_once:
            _wait_for([worker.command.remote(epoch, "close") for worker in workers])
        self.charge.kill(workers)
        if not at_once:
            _wait_for([agent.command.remote(epoch, "close", forget_snapshots) for agent in agents])
        self.charge.kill(agents)
        if self._stops and self.charge.is_mine:
            forget_stop(self.charge.run_id)
        observer.workers.clear()
        observer.close()


def _wait_for(calls: Sequence[ray.ObjectRef[Any]]) -> None:
    """Wait until the actors have answered, for `CLOSE_S` at the most."""
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=CLOSE_S)
