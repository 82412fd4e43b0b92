"""Ray actor that runs on each node as its agent.

The agent prepares the node's data, keeps its snapshots when workers die, and serves them to peers.
It also copies to peers what it alone holds, and watches for notices.
"""

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from autohet.control.values.observation import HeldPart, Prune
from autohet.driver.ray.agents.agent_calls import AgentReport
from autohet.driver.ray.run_actor import RunActor, fingerprint
from autohet.driver.sources.gpu_health import GpuWatch
from autohet.driver.sources.node_signs import MetadataWatch, cloud_clients
from autohet.driver.sources.protocol import Sign
from autohet.runtime.facts.preparation import Preparation
from autohet.runtime.job import Job
from autohet.runtime.messages import AgentEndpoint, StateTransfer
from autohet.runtime.process.epoch_fence import EpochFence
from autohet.runtime.process.headless_watch import HeadlessWatch
from autohet.runtime.process.log import RunRecord, log_as
from autohet.runtime.process.report_channel import ReportAddress, ReportSender
from autohet.runtime.process.stopped import ProcessState, process_states
from recovery.local.agent_store import AgentStore
from recovery.local.owner import ancestor_named, claim_directory, remove_ownerless
from recovery.peers.replication import Endpoint, Replicator, hand_over, withdraw_others
from recovery.peers.server import ShardServer

logger = logging.getLogger("autohet.agent")
RAYLET = "raylet"
LOOK_S = 0.1
"""Seconds between two checks for news that the driver does not have yet."""


def claim_directories(*directories: str) -> None:
    """Record the owner of a node's directories, and remove those of dead nodes; best effort.

    A directory is removed if it belongs to a node of this machine whose raylet died: no driver
    looks for a directory by the id of a dead node.
    """
    raylet = ancestor_named(RAYLET)
    for directory in directories:
        try:
            remove_ownerless(Path(directory).parent.parent)
            if raylet is not None:
                claim_directory(directory, raylet)
        except OSError as error:
            logger.warning("%s: snapshot directories are not looked after: %s", directory, error)


@dataclass(frozen=True)
class AgentPlace:
    """Node of an agent, the address and token that it serves with, and its directories."""

    node: str
    host: str
    token: str
    memory_directory: str
    disk_directory: str


@ray.remote(
    num_cpus=0, max_restarts=0, max_concurrency=4, concurrency_groups={"witness": 1, "life": 1}
)  # type: ignore[call-overload]
class AgentActor(RunActor):
    """Agent of one node, started when the node joins.

    It holds a lease, so that a draining node stays until the agent is ended.
    """

    def __init__(
        self,
        place: AgentPlace,
        notice_sources: Sequence[str],
        job: Job,
        environment: Mapping[str, str],
        record: RunRecord | None = None,
        driver: ReportAddress | None = None,
    ) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)

        node = place.node
        memory_directory = place.memory_directory
        self._log = log_as(node, record)
        self._node = node
        self._directories = (memory_directory, place.disk_directory)
        claim_directories(*self._directories)
        self._store = AgentStore(memory_directory, place.disk_directory, node)
        self._store.remove_unfinished()

        self._server = ShardServer(self._store, place.token, host=place.host)
        self.replicator = Replicator(self._store, memory_directory, place.token)
        self._endpoint = AgentEndpoint(node, place.host, self._server.port, place.token)
        poll_s = job.elastic.metadata_poll_s
        clients = cloud_clients(job.elastic)
        self._metadata = MetadataWatch(poll_s, clients) if clients else None
        self._gpus = GpuWatch(poll_s) if "gpu" in notice_sources else None
        self.data = Preparation(job)
        self._told_at = 0.0
        self._driver_parts: tuple[HeadlessWatch, ReportSender] | None = None
        if driver is None:
            return
        self._fingerprint = fingerprint(job)
        self._fence = EpochFence(driver.epoch)
        # Last: it reports at once, from a thread of its own.
        self._reports = ReportSender(driver, self.report, self._is_news, LOOK_S)
        self._watch = HeadlessWatch(self._reports, job.elastic.headless_s)
        self._driver_parts = (self._watch, self._reports)

    def _is_news(self, before: AgentReport | None, report: AgentReport) -> bool:
        now = time.monotonic()
        is_new = before is None or report.is_news_after(before, now - self._told_at)
        if is_new:
            self._told_at = now
        return is_new

    @ray.method(concurrency_group="life")
    def until_end(self) -> None:
        """Return when this agent is closed; raise the error that ends its reports earlier.

        The end of its process ends the call, too.
        """
        self._reports.wait()

    def _knowledge(self) -> str:
        return self._endpoint.token

    def report(self) -> AgentReport:
        facts = None
        signs: list[Sign] = []
        num_xids = 0
        if self._metadata is not None:
            facts = self._metadata.facts
            signs += self._metadata.signs()
        if self._gpus is not None:
            signs += self._gpus.signs()
            num_xids = self._gpus.num_xids
        problems = self._store.problems
        return AgentReport(
            self._node, self._endpoint, facts, tuple(signs), problems, self.data.state, num_xids
        )

    @ray.method(concurrency_group="witness")
    def process_states(self, process_ids: Sequence[int]) -> dict[int, ProcessState]:
        """Return how silent processes of this node look from outside.

        The agent answers this call whatever else it does.
        """
        return process_states(process_ids)

    def inventory(self, disk_within_s: float) -> list[Any]:
        return self._store.inventory(disk_within_s)

    def refuse_copies(self) -> tuple[int, int] | None:
        """Take no more copies of others' state, since the node is to leave.

        Returns the age of the newest copy that is here.
        """
        return self._store.refuse_copies()

    def hand_over(
        self, parts: Sequence[HeldPart], peers: Sequence[AgentEndpoint], timeout_s: float
    ) -> StateTransfer:
        """Push shards that only this agent holds to other agents before the node leaves; blocks."""
        started = time.monotonic()
        ages = [(source.generation, source.step) for source, _ in parts]
        generation, step = max(ages, default=(0, 0))
        endpoints = [Endpoint(peer.node, peer.host, peer.port) for peer in peers]
        sent = hand_over(self._store, parts, endpoints, self._endpoint.token, timeout_s)
        seconds = time.monotonic() - started
        return StateTransfer("peer", self._node, generation, step, sent, seconds)

    def acknowledge(self) -> None:
        """Tell the cloud that this node has left and may be ended before its deadline."""
        if self._metadata is not None:
            self._metadata.acknowledge()

    def prune(self, what: Prune) -> int:
        """Remove copies that newer state supersedes; return the number of files."""
        self._log.generation = what.memory_before[0]
        withdraw_others(self._directories[0], what.living)
        return self._store.prune(what.memory_before, what.disk_before, what.living, what.generation)

    def close(self, forget_snapshots: bool) -> None:
        """End threads and server; with `forget_snapshots`, remove this node's copies too.

        Directories left empty are removed as well. Removal happens as soon as no peer pushes any
        more, or a moment later, so that no caller waits for ever (a peer that is cut off keeps a
        push until its deadline).
        """
        self.replicator.close(1.0)
        self._server.close(1.0)
        if forget_snapshots:
            for name in self._directories:
                directory = Path(name)
                shutil.rmtree(directory, ignore_errors=True)
                # The run's directories, which the last of its nodes on this machine leaves empty.
                for parent in (directory.parent, directory.parent.parent):
                    with suppress(OSError):
                        parent.rmdir()
        for watch in (self._metadata, self._gpus):
            if watch is not None:
                watch.close()
        self.data.close()
        self._store.close()
        for part in self._driver_parts or ():
            part.close()
        self._log.close()
