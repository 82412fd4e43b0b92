"""Watch of a node's instance metadata on any cloud, in a thread of its agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from autohet.driver.sources.protocol import FAR_S, Sign
from autohet.driver.sources.watch import Watch
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.process.cloud_metadata import CLOUDS, find_cloud
from autohet.runtime.process.google_metadata import GoogleMetadata
from autohet.runtime.process.metadata_server import (
    CloudMetadata,
    InstanceFacts,
    InstanceNotice,
    MetadataUnavailable,
)

logger = logging.getLogger("autohet.sources")
FACTS_WITHIN_S = 0.25
"""Seconds to wait for the first answer, so that the agent's first report has the facts.

A service that is there answers in milliseconds.
"""


def cloud_clients(elastic: ElasticSection) -> list[CloudMetadata]:
    """Return a client for each cloud that the job names as a source of notices."""
    clients = []
    for source, make in CLOUDS.items():
        if source not in elastic.notice_sources:
            continue
        client = make()
        if isinstance(client, GoogleMetadata):
            client.notice_s = elastic.preemption_s
        clients.append(client)
    return clients


class MetadataWatch:
    """Owns a thread that polls the metadata service every `poll_s`.

    clients: services that may be there; the first that answers is this machine's.
    """

    def __init__(self, poll_s: float, clients: Sequence[CloudMetadata] | None = None) -> None:
        self._clients = [make() for make in CLOUDS.values()] if clients is None else clients
        self._cloud: CloudMetadata | None = None
        self.facts: InstanceFacts | None = None
        """Facts of the instance; None until its metadata service has answered, and off clouds."""
        self._watch = Watch("the instance metadata", self._ask, poll_s)
        self._watch.wait_for_first(FACTS_WITHIN_S)

    def signs(self) -> tuple[Sign, ...]:
        """Return the signs that stand now, with deadlines counted from now."""
        now = time.monotonic()
        cloud = self._cloud
        if cloud is None:
            return ()
        return tuple(_sign(cloud.source, notice, now) for notice in self._watch.answer or ())

    def acknowledge(self) -> None:
        """Tell the cloud that this node has left, so that no event need wait for its time."""
        cloud = self._cloud
        for notice in self._watch.answer or ():
            if cloud is None or not notice.event_id:
                continue
            try:
                cloud.acknowledge(notice.event_id)
            except MetadataUnavailable as error:
                logger.warning("%s was not acknowledged: %s", notice.action, error)

    def _ask(self) -> tuple[InstanceNotice, ...]:
        if self._cloud is None:
            self._cloud, self.facts = find_cloud(self._clients)
        return self._cloud.notices()

    def close(self) -> None:
        self._watch.close()


def _sign(source: str, notice: InstanceNotice, now: float) -> Sign:
    if notice.kind == "rebalance":
        return Sign(source, "rebalance recommendation", risk=True)
    in_s = notice.seconds_left(now)
    if notice.kind == "risk" or (in_s is not None and in_s > FAR_S):
        return Sign(source, notice.action, risk=True)
    return Sign(source, notice.action, in_s=in_s, wants_answer=bool(notice.event_id))
