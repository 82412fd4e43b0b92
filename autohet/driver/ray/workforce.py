"""Workforce on a real Ray cluster, directed by the controller's decisions.

There is one agent actor per node, and one worker actor per GPU.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autohet.driver.checkpoints.durable import Durable, durable_suspects
from autohet.driver.control.actions import Rehearse
from autohet.driver.control.observation import Part, Prune
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.agent_actor import AgentActor, AgentPlace
from autohet.driver.ray.drain import drain
from autohet.driver.ray.environment import forwarded_environment
from autohet.driver.ray.launches import LaunchWatch
from autohet.driver.ray.observer import BEATS, RayObserver, TrackedNode
from autohet.driver.ray.scaling import FleetRequest
from autohet.driver.ray.worker_actor import WorkerActor
from autohet.runtime.job import Job
from autohet.runtime.messages import AgentEndpoint, GenerationOrder, WorkerPlace
from autohet.runtime.process.log import RunRecord
from planner.cluster import Cluster, node_of
from recovery.state.ancestry import Descent

CALM_GATHER_S, CALM_TICK_S = 0.05, 0.5
"""Seconds to gather further news after the first, and between rounds, while all train.

They hold while no node leaves. Gathered news is read in one round, since each round costs 0.5 ms.
An end that Ray reports is handled at once.
"""
BUSY_GATHER_S, BUSY_TICK_S = 0.01, 0.05
"""Same periods in any other phase, so that a reconfiguration does not wait for its driver."""


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a run's processes: CPU threads of a worker, and where their logs go."""

    threads: int
    record: RunRecord | None = None


class RayWorkforce(RayObserver):
    """Implements `Workforce` over Ray. All calls come from the driver's one thread."""

    def __init__(
        self,
        job: Job,
        run_id: str,
        durable: Durable,
        cluster: Cluster | None,
        workers: WorkerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(job, run_id, durable, cluster, clock)
        self._token = secrets.token_hex(16)
        self._worker_threads = workers.threads
        self._record = workers.record
        self._request: FleetRequest | None = None
        self.rehearsal: Callable[[Rehearse], None] | None = None
        """Function that makes scripted events happen."""
        self._waited_at = -math.inf

    def wait(self) -> None:
        """Block until there is news or the next round is due.

        Rounds follow soon while anything changes, and later while all workers train.
        """
        gather_s, tick_s = (
            (CALM_GATHER_S, CALM_TICK_S) if self._calm() else (BUSY_GATHER_S, BUSY_TICK_S)
        )
        tick_s = min(
            tick_s, self.timeouts.suspicion_s / BEATS
        )  # signs of life are read in rounds alone
        self._bell.wait(self._waited_at + tick_s - time.monotonic(), gather_s)
        self._waited_at = time.monotonic()
        for reports in (self._agents, self._reports):
            reports.listen()

    def request_inventories(self) -> None:
        self._inventories.request(self._agent_handles, self.clock())
        answers = self._reports.answers.values()
        self.durable.refresh(durable_suspects(answer.value for answer in answers))

    def hire(self, workers: Sequence[str]) -> None:
        now = self.clock()
        for worker in workers:
            name = node_of(worker)
            if name not in self._seats:
                continue
            if worker in self._workers:
                if (
                    worker not in self._losses
                    or now - self._losses[worker].seen_at < self.timeouts.heartbeat_s
                ):
                    continue
                self.dismiss(
                    [worker]
                )  # an idle one that died, or one that never came up: tried again
            self._start(worker, self._seats[name])

    def _start(self, worker: str, seat: TrackedNode) -> None:
        self._losses.pop(worker, None)
        node = seat.view.node
        place = WorkerPlace(
            worker,
            node.name,
            node.node_type.gpu_type,
            self._memory(seat.directory),
            self._disk(seat.directory),
        )
        address = self._reports.expect(worker)
        actor_class: Any = WorkerActor
        placed = actor_class.options(
            num_gpus=1, scheduling_strategy=affinity(seat.ray_node.node_id)
        )
        handle = placed.remote(
            place, self.job, self._worker_threads, forwarded_environment(), self._record, address
        )
        # Watch it first: a worker that is not watched is not kept, and is started again.
        self._reports.watch(worker, handle.until_end.remote)
        self._workers[worker] = handle

    def dismiss(self, workers: Sequence[str]) -> None:
        for worker in workers:
            handle = self._workers.pop(worker, None)
            if handle is not None:
                self._reports.remove(worker)
                ray.kill(handle)

    def kill_processes(self, workers: Sequence[str]) -> None:
        """Kill these workers' processes without telling the controller (rehearsals)."""
        self._tell(workers, lambda handle: ray.kill(handle))

    def claim_generation(self, entry: Descent) -> None:
        self.durable.claim(entry)

    def begin(self, orders: Mapping[str, GenerationOrder]) -> None:
        self._inventories.drop()
        for worker, order in orders.items():
            self._workers[worker].begin.remote(self._rendezvous.with_secret(order))

    def request_stop(self, workers: Sequence[str], *, checkpoint: bool) -> None:
        self._tell(workers, lambda handle: handle.request_stop.remote(checkpoint))

    def interrupt(self, workers: Sequence[str], generation: int) -> None:
        self._tell(workers, lambda handle: handle.interrupt.remote(generation))

    def roll_forward(self, workers: Sequence[str], generation: int, vote: tuple[int, Any]) -> None:
        self._tell(workers, lambda handle: handle.roll_forward.remote(generation, vote))

    def _tell(self, workers: Sequence[str], call: Callable[[Any], Any]) -> None:
        for worker in workers:
            if worker in self._workers:
                call(self._workers[worker])

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        self.durable.commit(step, generation, layout, receipts)

    def start_agents(self, nodes: Sequence[str]) -> None:
        for name in nodes:
            seat = self._seats.get(name)
            if seat is None or seat.agent is not None:
                continue
            node = seat.ray_node
            address = self._agents.expect(name)
            agent = AgentActor.options(scheduling_strategy=affinity(node.node_id)).remote(  # type: ignore[attr-defined]
                AgentPlace(
                    name,
                    node.address,
                    self._token,
                    self._memory(seat.directory),
                    self._disk(seat.directory),
                ),
                self.job.elastic.notice_sources,
                self.job,
                forwarded_environment(),
                self._record,
                address,
            )
            self._agents.watch(name, agent.until_end.remote)
            seat.agent, seat.view = agent, replace(seat.view, agent_started=True)

    def _memory(self, directory: str) -> str:
        return f"{self.job.checkpoint.memory_directory}/{directory}"

    def _disk(self, directory: str) -> str:
        return f"{self.job.checkpoint.local_directory}/{directory}"

    def drain(self, node: str, reason: str, deadline: float | None) -> None:
        """Drain the node, unless Ray drains it already or its end is only rehearsed."""
        seat = self._seats.get(node)
        if (
            seat is not None
            and node not in self.scripted.by_node
            and seat.ray_node.node_id not in self._drains.known
        ):
            drain(
                seat.ray_node.node_id, reason, None if deadline is None else deadline - self.clock()
            )

    def prune(self, what: Prune) -> None:
        self._errands.prune(self._agent_handles, what)

    def ask_holdings(self) -> None:
        self._errands.ask_holdings(self._agent_handles, self.clock())

    def hand_over(self, parts: Mapping[str, Sequence[Part]], to: Sequence[AgentEndpoint]) -> None:
        self._errands.hand_over(self._agent_handles, parts, to)

    @property
    def handing_over(self) -> bool:
        """True while a leaving node's agent copies away what it alone holds."""
        return self._errands.handing_over

    def release_node(self, node: str) -> None:
        seat = self._seats.get(node)
        if seat is not None and seat.agent is not None and not seat.released:
            seat.released = True
            self._errands.refuse_copies(node, seat.agent)

    def end_agent(self, node: str) -> None:
        """End the node's agent, so that a draining node has no lease left and Ray lets it go."""
        if node in self._agent_handles:
            ray.kill(self._agent_handles[node])

    def rehearse(self, what: Rehearse) -> None:
        assert self.rehearsal is not None, "no script, no rehearsal"
        self.rehearsal(what)

    def buy_by(self, request: FleetRequest) -> None:
        """Set the request to the autoscaler, which the controller changes from now on."""
        self._request, self.launches, self.spot_types = request, LaunchWatch(), request.spot_types

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        if self._request is not None:
            self._request.change(counts)

    def give_back(self, node: str) -> None:
        """Give an idle node back: Ray drains it, which shows as its notice."""
        if node in self._seats:
            drain(self._seats[node].ray_node.node_id, "idle", None)

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish the job's status, with the seconds since each worker's last sign."""
        now = self.clock()
        heard = {worker: answer.heard_at for worker, answer in self._reports.answers.items()}
        silence = {worker: round(now - at, 1) for worker, at in heard.items() if at is not None}
        ray_cluster.publish_status(self.job.name, {**status, "silence_s": silence})

    def close(self, *, forget_snapshots: bool = False, at_once: bool = False) -> None:
        """End every actor of the job and the rendezvous store.

        `forget_snapshots`: also remove the nodes' copies (a finished job needs none, and host
        memory is dear). `at_once`: do so without a message to the actors.
        """
        told: tuple[tuple[Mapping[str, Any], tuple[bool, ...]], ...] = (
            (self._workers, ()),  # first: what they write after their agents have gone would stay
            (self._agent_handles, (forget_snapshots,)),
        )
        for handles, arguments in told:
            if handles and not at_once:
                calls = [handle.close.remote(*arguments) for handle in handles.values()]
                ray.wait(calls, num_returns=len(calls), timeout=5)
            for handle in handles.values():
                ray.kill(handle)
        self._workers.clear()
        self._agents.close()
        self._reports.close()
        self._bell.close()
        self._board.close()
        self._prices.close()
        self._rendezvous.close()


def affinity(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
