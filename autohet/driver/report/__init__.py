"""Report of a run for people: one HTML page and a Perfetto timeline.

Both are made of `events.jsonl` alone.
"""

from autohet.driver.report.write import write_report

__all__ = ["write_report"]
