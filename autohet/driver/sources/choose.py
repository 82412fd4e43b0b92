"""Choice of the driver's sources of notices for one job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autohet.driver.sources.merge import AgentSigns
from autohet.driver.sources.protocol import NoticeSource
from autohet.driver.sources.script_file import LineMemory, ScriptNotices
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.sqs_queue import QueueNotices
from autohet.runtime.job.elastic import ElasticSection


@dataclass(frozen=True)
class SourceParts:
    """Parts of the driver that factories of sources may use.

    memory: storage of a script's lines that outlives the driver.
    """

    elastic: ElasticSection
    drains: RayDrains
    scripted: Scripted
    memory: LineMemory | None


def _leave_to_agents(parts: SourceParts) -> None:
    """Make no source: nodes' agents read it (ray/agent_actor.py), and `AgentSigns` passes it on."""


def _make_queue(parts: SourceParts) -> NoticeSource | None:
    if not parts.elastic.notice_queue:
        return None
    return QueueNotices(parts.elastic.notice_queue)


def _make_file(parts: SourceParts) -> NoticeSource | None:
    elastic = parts.elastic
    if not elastic.notice_file and not elastic.notice_command:
        return None
    return ScriptNotices(
        elastic.notice_file, elastic.notice_command, elastic.metadata_poll_s, parts.memory
    )


FACTORIES: Mapping[str, Callable[[SourceParts], NoticeSource | None]] = {
    "ray": lambda parts: parts.drains,
    "aws": _leave_to_agents,
    "google": _leave_to_agents,
    "azure": _leave_to_agents,
    "gpu": _leave_to_agents,
    "queue": _make_queue,
    "file": _make_file,
    "script": lambda parts: parts.scripted,
}
"""Factory of each source of `NOTICE_SOURCES`; it returns None if the source is not configured."""


def make_sources(
    elastic: ElasticSection,
    drains: RayDrains,
    scripted: Scripted,
    memory: LineMemory | None = None,
) -> list[NoticeSource]:
    """Create the sources of notices that the job names.

    Signs that nodes see themselves are always read; their agents watch only the sources that the
    job names. memory: storage of a script's lines that outlives the driver.
    """
    parts = SourceParts(elastic, drains, scripted, memory)
    found: list[NoticeSource] = [AgentSigns()]
    for name, make in FACTORIES.items():
        if name not in elastic.notice_sources:
            continue
        source = make(parts)
        if source is not None:
            found.append(source)
    return found
