"""Choice of the driver's sources of notices for one job."""

from __future__ import annotations

from autohet.driver.sources.merge import AgentSigns
from autohet.driver.sources.protocol import NoticeSource
from autohet.driver.sources.script_file import LineMemory, ScriptNotices
from autohet.driver.sources.simple import RayDrains, Scripted
from autohet.driver.sources.sqs_queue import QueueNotices
from autohet.runtime.job.elastic import ElasticSection


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
    named = elastic.notice_sources
    found: list[NoticeSource] = [AgentSigns(), scripted]
    if "ray" in named:
        found.append(drains)
    if "queue" in named and elastic.notice_queue:
        found.append(QueueNotices(elastic.notice_queue))
    if "file" in named and (elastic.notice_file or elastic.notice_command):
        found.append(
            ScriptNotices(
                elastic.notice_file, elastic.notice_command, elastic.metadata_poll_s, memory
            )
        )
    return found
