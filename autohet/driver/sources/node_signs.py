"""Watch of a node's instance metadata on EC2, in a thread of its agent."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from autohet.driver.sources.protocol import Sign
from autohet.driver.sources.watch import Watch
from autohet.runtime.process.instance_metadata import (
    InstanceMetadata,
    InstanceNotice,
    MetadataUnavailable,
)

METADATA = "EC2 instance metadata"
FACTS_WITHIN_S = 0.25
"""Seconds to wait for the first answer, so that the agent's first report has the facts.

A service that is there answers in milliseconds.
"""


@dataclass(frozen=True)
class InstanceFacts:
    """Facts of an instance by its metadata service."""

    instance_id: str
    instance_type: str
    zone: str
    market: str
    """Market of the instance: spot or on-demand."""


@dataclass(frozen=True)
class _Heard:
    facts: InstanceFacts
    notices: tuple[InstanceNotice, ...]


class MetadataWatch:
    """Owns a thread that polls the metadata service every `poll_s`."""

    def __init__(self, poll_s: float) -> None:
        self._metadata = InstanceMetadata()
        self._facts: InstanceFacts | None = None
        self._watch = Watch("the EC2 instance metadata", self._ask, poll_s)
        self._watch.wait_for_first(FACTS_WITHIN_S)

    @property
    def facts(self) -> InstanceFacts | None:
        """Facts of the instance; None until its metadata service has answered, always off EC2."""
        heard = self._watch.answer
        return None if heard is None else heard.facts

    def signs(self) -> tuple[Sign, ...]:
        """Return the signs that stand now, with deadlines counted from now."""
        now = time.monotonic()
        heard = self._watch.answer
        if heard is None:
            return ()
        return tuple(_sign(notice, now) for notice in heard.notices)

    def _ask(self) -> _Heard:
        self._facts = self._facts or InstanceFacts(
            self._metadata.instance_id(),
            self._metadata.instance_type(),
            self._metadata.availability_zone(),
            self._metadata.market_type(),
        )
        standing = [self._metadata.interruption()]
        # An answer to this question that makes no sense must hide no interruption.
        with suppress(MetadataUnavailable):
            standing.append(self._metadata.rebalance())
        return _Heard(self._facts, tuple(notice for notice in standing if notice is not None))

    def close(self) -> None:
        self._watch.close()


def _sign(notice: InstanceNotice, now: float) -> Sign:
    if notice.kind == "rebalance":
        return Sign(METADATA, "rebalance recommendation", risk=True)
    return Sign(METADATA, notice.action, in_s=notice.seconds_left(now))
