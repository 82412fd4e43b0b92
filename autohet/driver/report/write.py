"""Writing of a run's report and timeline, by default next to its events."""

import json
import logging
from pathlib import Path

from autohet.driver.report.events import last_run, read_events
from autohet.driver.report.page import report_page
from autohet.driver.report.timeline import timeline
from planner.errors import ConfigError
from planner.inputs.documents import refuse_unwritable

logger = logging.getLogger("autohet")


def write_report(events: str | Path, directory: Path | None = None) -> tuple[Path, Path]:
    """Write the report of the last run in these events; return the paths of page and timeline.

    The files are `<events' stem>-report.html` and `-timeline.json` in `directory` (default: the
    directory of the events). `events.jsonl` gives `report.html` and `timeline.json`.

    Raises:
        ConfigError: the events cannot be read, or the files cannot be written.
    """
    path = Path(events)
    found = last_run(read_events(path))
    job = path.stem
    for event in found:
        if event.get("job"):
            job = event["job"]
            break

    folder = path.parent if directory is None else directory
    page, trace = report_paths(path, folder)
    with refuse_unwritable(folder, "the report to "):
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(report_page(found, f"Run {job}"), encoding="utf-8")
        trace.write_text(json.dumps(timeline(found)), encoding="utf-8")
    return page, trace


def report_paths(events: Path, directory: Path | None = None) -> tuple[Path, Path]:
    """Return the paths of the page and the timeline of these events."""
    folder = events.parent if directory is None else directory
    prefix = "" if events.stem == "events" else f"{events.stem}-"
    return folder / f"{prefix}report.html", folder / f"{prefix}timeline.json"


def leave_report(events: Path | None) -> None:
    """Write the report at a run's end, best effort: a failure is logged and does no harm."""
    if events is None or not events.exists():
        return
    try:
        page, trace = write_report(events)
    except ConfigError as error:
        logger.warning("No report: %s", error)
        return
    except Exception:
        # A defect of the report costs the report, never what else the run leaves at its end.
        logger.exception("No report")
        return
    logger.info("Report: %s; timeline, for ui.perfetto.dev: %s", page, trace)
