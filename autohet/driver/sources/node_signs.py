"""What a node's agent watches at its node: the EC2 instance metadata and the GPUs' health, each in a thread of its own; and how the
driver takes what agents have said for notices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autohet.driver.control.observation import Notice
from autohet.driver.sources.gpu_health import GpuHealth
from autohet.driver.sources.protocol import Sign, WatchedNode
from autohet.driver.sources.watch import Watch
from autohet.runtime.instance_metadata import InstanceMetadata, InstanceNotice, MetadataUnavailable

METADATA = "EC2 instance metadata"
FACTS_WITHIN_S = 0.25  # a service that is there answers in milliseconds: the agent's first report then has its facts


@dataclass(frozen=True)
class InstanceFacts:
    """What an instance is, as its metadata service says."""

    instance_id: str
    instance_type: str
    zone: str
    market: str
    """spot or on-demand."""


@dataclass(frozen=True)
class _Heard:
    facts: InstanceFacts
    notices: tuple[InstanceNotice, ...]


@dataclass(frozen=True)
class _Looked:
    signs: tuple[Sign, ...]


class NodeWatch:
    """Owns its threads. sources: `aws` and `gpu` are watched here; others are the driver's."""

    def __init__(self, sources: Sequence[str], poll_s: float, nvml: Any = None) -> None:
        self._metadata, self._nvml = InstanceMetadata(), nvml
        self._facts: InstanceFacts | None = None
        self._health: GpuHealth | None = None
        self._watches: list[Watch[Any]] = []
        self._aws = self._gpu = None
        if "aws" in sources:
            self._aws = self._start(Watch("the EC2 instance metadata", self._ask_metadata, poll_s))
            self._aws.wait_for_first(FACTS_WITHIN_S)
        if "gpu" in sources:
            self._gpu = self._start(Watch("NVML", self._ask_gpus, poll_s))

    def _start(self, watch: Watch[Any]) -> Watch[Any]:
        self._watches.append(watch)
        return watch

    @property
    def facts(self) -> InstanceFacts | None:
        """None until the metadata service has answered; off EC2 for ever."""
        heard = None if self._aws is None else self._aws.answer
        return None if heard is None else heard.facts

    def signs(self) -> tuple[Sign, ...]:
        """What stands now; deadlines counted from now."""
        now = time.monotonic()
        found: tuple[Sign, ...] = ()
        if self._aws is not None and self._aws.answer is not None:
            found += tuple(_sign(notice, now) for notice in self._aws.answer.notices)
        if self._gpu is not None and self._gpu.answer is not None:
            found += self._gpu.answer.signs
        return found

    def _ask_metadata(self) -> _Heard:
        self._facts = self._facts or InstanceFacts(
            self._metadata.instance_id(),
            self._metadata.instance_type(),
            self._metadata.availability_zone(),
            self._metadata.market_type(),
        )
        standing = [self._metadata.interruption()]
        with suppress(MetadataUnavailable):  # nonsense there hides no interruption
            standing.append(self._metadata.rebalance())
        return _Heard(self._facts, tuple(notice for notice in standing if notice is not None))

    def _ask_gpus(self) -> _Looked:
        if self._health is None:
            self._health = GpuHealth(self._nvml)
        return _Looked(tuple(self._health.look()))

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        if self._health is not None:
            self._health.close()


class AgentSigns:
    """The driver's source: what the nodes' agents have said."""

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        return [
            Notice(
                node.name,
                f"{sign.source}: {sign.text}",
                now,
                None if sign.in_s is None else node.heard_at + sign.in_s,
                sign.risk,
            )
            for node in nodes
            for sign in node.signs
        ]

    def close(self) -> None:
        """Agents are ended by the workforce."""


def _sign(notice: InstanceNotice, now: float) -> Sign:
    if notice.kind == "rebalance":
        return Sign(METADATA, "rebalance recommendation", risk=True)
    return Sign(METADATA, notice.action, in_s=notice.seconds_left(now))
