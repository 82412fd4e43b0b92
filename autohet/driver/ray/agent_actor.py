"""One Ray actor per node: prepares its data, keeps the node's snapshots when workers die, serves them to peers, copies what it alone
holds to them, and watches for notices.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from autohet.driver.control.upkeep import Part, Prune
from autohet.runtime.instance_metadata import InstanceMetadata, MetadataUnavailable
from autohet.runtime.job import Job
from autohet.runtime.messages import AgentEndpoint, DataState
from autohet.runtime.preparation import Preparation
from autohet.runtime.process_log import RunRecord, log_as
from autohet.runtime.process_state import ProcessState, process_states
from recovery.local.agent_store import AgentStore
from recovery.peers.replication import Endpoint, Replicator, hand_over, withdraw_others
from recovery.peers.server import ShardServer

logger = logging.getLogger("autohet.agent")
NOTHING_YET = DataState()
SELDOM = 6
"""Polls of a metadata service that has never answered take this many times longer."""


@dataclass(frozen=True)
class AgentReport:
    """What a node's agent knows: where it serves, what notice the instance has had, trouble with its disk, and how its data stands."""

    node: str
    endpoint: AgentEndpoint
    instance_type: str | None = None
    notice_in_s: float | None = None
    notice: str | None = None
    problems: tuple[str, ...] = ()
    data: DataState = NOTHING_YET


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4, concurrency_groups={"witness": 1})  # type: ignore[call-overload]
class AgentActor:
    """Started when the node joins; holds a lease, so that a draining node stays until it is told to go."""

    def __init__(
        self,
        node: str,
        host: str,
        token: str,
        memory_directory: str,
        disk_directory: str,
        metadata_poll_s: float | None,
        job: Job,
        environment: Mapping[str, str],
        record: RunRecord | None = None,
    ) -> None:
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        self._log = log_as(node, record)
        self._node = node
        self._directories = (memory_directory, disk_directory)
        self._store = AgentStore(memory_directory, disk_directory, node)
        self._store.remove_unfinished()
        self._server = ShardServer(self._store, token, host=host)
        self._replicator = Replicator(self._store, memory_directory, token)
        self._endpoint = AgentEndpoint(node, host, self._server.port, token)
        self._watch = None if metadata_poll_s is None else NoticeWatch(metadata_poll_s)
        self._data = Preparation(job)

    def report(self) -> AgentReport:
        notice = None if self._watch is None else self._watch.notice
        left = None if notice is None or notice[1] is None else notice[1] - time.monotonic()
        return AgentReport(
            self._node,
            self._endpoint,
            None if self._watch is None else self._watch.instance_type,
            left,
            notice and notice[0],
            self._store.problems,
            self._data.state,
        )

    @ray.method(concurrency_group="witness")
    def process_states(self, process_ids: Sequence[int]) -> dict[int, ProcessState]:
        """How processes of this node that say nothing look from outside; answered whatever else the agent does."""
        return process_states(process_ids)

    def inventory(self) -> list[Any]:
        return list(self._store.inventory())

    def refuse_copies(self) -> tuple[int, int] | None:
        """The node is to leave: take no more copies of others' state; the age of the newest one that is here."""
        return self._store.refuse_copies()

    def hand_over(self, parts: Sequence[Part], peers: Sequence[AgentEndpoint], timeout_s: float) -> int:
        """Push these shards, kept here alone, to other nodes' agents before this node leaves; blocks; the bytes that went."""
        endpoints = [Endpoint(peer.node, peer.host, peer.port) for peer in peers]
        return hand_over(self._store, parts, endpoints, self._endpoint.token, timeout_s)

    def prune(self, what: Prune) -> int:
        """Remove what newer state has made useless; returns how many files."""
        self._log.generation = what.memory_before[0]
        withdraw_others(self._directories[0], what.living)
        return self._store.prune(what.memory_before, what.disk_before, what.living)

    def close(self, forget_snapshots: bool) -> None:
        """End threads and server; with `forget_snapshots` this node's copies go too, and directories left empty."""
        if self._watch is not None:
            self._watch.close()
        self._data.close()
        self._replicator.close()
        self._server.close()
        self._store.close()
        self._log.close()
        if forget_snapshots:
            for directory in map(Path, self._directories):
                shutil.rmtree(directory, ignore_errors=True)
                for parent in (directory.parent, directory.parent.parent):  # the run's, once its last node has left it
                    with suppress(OSError):
                        parent.rmdir()


class NoticeWatch:
    """Polls the EC2 instance metadata in an owned thread. Where none answers, as off EC2, it goes on asking, more seldom: a service that
    was away when the node booted would else never be heard.
    """

    def __init__(self, poll_s: float) -> None:
        self.notice: tuple[str, float | None] | None = None
        """The action, and the moment of it on this process's monotonic clock."""
        self.instance_type: str | None = None
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notice-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        metadata, pause, said = InstanceMetadata(), 0.0, ""
        while not self._stop.wait(pause):
            try:
                self.instance_type = self.instance_type or metadata.instance_type()
                found = metadata.interruption()
            except MetadataUnavailable as error:
                if str(error) != said:
                    said = str(error)
                    logger.info("The EC2 instance metadata does not answer: %s", said)
                pause = self._poll_s if self.instance_type else self._poll_s * SELDOM
                continue
            pause = self._poll_s
            self.notice = None if found is None else (found.action, found.deadline)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
