"""What is left of a run for people: one HTML page and a Perfetto timeline, both made of
`events.jsonl` alone.
"""

from autohet.driver.report.write import write_report

__all__ = ["write_report"]
