"""Events and logs outlive their machine: copied to the job's storage while it runs and at its end,
named by worker and generation.
"""

import logging
import time
from functools import partial

import pytest

from autohet.driver.events.event_log import EventLog
from autohet.driver.job import supervise
from autohet.driver.job.run_record import RunCopies
from autohet.runtime.job import Job
from autohet.runtime.process import stored_copies
from autohet.runtime.process.log import MOST_BYTES, ProcessLog, RunRecord
from autohet.runtime.process.stored_copies import StoredCopies, tail_of


def wait_for(seen, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(stored_copies, "SOON_S", 0.0)


def test_what_has_grown_is_copied_again_while_it_runs_and_at_the_end(tmp_path):
    events, copy = tmp_path / "events.jsonl", tmp_path / "store" / "runs" / "a" / "events.jsonl"
    events.write_text("of an earlier run\n")
    start = events.stat().st_size
    source = partial(tail_of, str(events), start)
    copies = StoredCopies(
        str(tmp_path / "store"), "runs/a", {"events.jsonl": source}, period_s=0.05
    )
    time.sleep(0.2)
    assert not (tmp_path / "store").exists()  # nothing new: the storage is not touched
    for text in ("one\n", "two\n"):
        with events.open("a") as file:
            file.write(text)
        wait_for(lambda text=text: copy.exists() and copy.read_text().endswith(text))
    with events.open("a") as file:
        file.write("three\n")
    copies.close()
    assert copy.read_text() == "one\ntwo\nthree\n"


def test_a_storage_that_fails_harms_nothing_and_is_told_of_once(tmp_path, caplog):
    (tmp_path / "file").write_text("no directory")
    with caplog.at_level(logging.INFO):
        copies = StoredCopies(
            str(tmp_path / "file"), "runs/a", {"log": lambda: b"text"}, period_s=0.02
        )
        time.sleep(0.3)
        copies.close()
    assert sum("is not copied" in line for line in caplog.messages) == 1


def test_lines_name_worker_and_generation_and_a_warning_is_copied_at_once(tmp_path):
    log = ProcessLog("a100-0/0", RunRecord(str(tmp_path), "runs/a"))
    logger = logging.getLogger("a test of process logs")
    logger.addHandler(log)
    logger.warning("before the first order")
    log.generation = 3
    logger.warning("step %d is not preserved", 7)
    path = tmp_path / "runs" / "a" / "logs" / "a100-0-0.log"
    wait_for(
        lambda: path.exists() and path.read_text().count("\n") == 2
    )  # long before the period's end
    first, second = path.read_text().splitlines()
    assert "Z a100-0/0 WARNING a test of process logs: before" in first
    assert "a100-0/0 generation 3 WARNING a test of process logs: step 7 is not preserved" in second
    logger.removeHandler(log)
    log.close()


def test_of_a_long_log_the_newest_lines_are_kept():
    log = ProcessLog("driver", None)
    for number in range(40):
        log.handle(
            logging.makeLogRecord(
                {"msg": f"{number:02d}" + "x" * (MOST_BYTES // 20), "levelno": 20}
            )
        )
    assert len(log.text()) <= MOST_BYTES
    assert log.text().splitlines()[-1].split(b": ")[1].startswith(b"39")


def toy_job(tmp_path):
    return Job.from_document(
        {
            "name": "toy",
            "model": {"config": {"model_type": "gpt2"}},
            "training": {"global_batch_sequences": 8, "sequence_length": 8},
            "checkpoint": {"storage": str(tmp_path / "store")},
        }
    )


def test_a_run_copies_its_own_events_its_log_and_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr(
        logging.getLogger("autohet"), "level", logging.NOTSET
    )  # as where nobody has set up logging
    events = tmp_path / "events.jsonl"
    events.write_text('{"earlier": "run"}\n')
    copies = RunCopies(toy_job(tmp_path), events)
    copies.begin()
    copies.note({"generation": 2})
    logging.getLogger("autohet").info("Deciding to wait")
    with events.open("a") as file:
        file.write('{"kind": "finished"}\n')
    (tmp_path / "report.html").write_text("<html>")
    copies.close()
    folder = tmp_path / "store" / copies.record.prefix
    assert (folder / "events.jsonl").read_text() == '{"kind": "finished"}\n'
    assert (folder / "report.html").read_text() == "<html>"
    assert (
        "driver generation 2 INFO autohet: Deciding to wait"
        in (folder / "logs" / "driver.log").read_text()
    )


def test_events_of_a_run_whose_driver_was_started_again_are_of_all_its_drivers(
    tmp_path, monkeypatch
):
    """Else what is copied tells of half a run, beside a report of the whole."""
    events = tmp_path / "events.jsonl"
    log = EventLog(events)
    for restart in (False, False, True):
        log.emit("started", 1, restart=restart)
        log.emit("decision", 1, reason="…")
    log.close()
    lines = events.read_text().splitlines(keepends=True)
    for before, kept in ((None, []), (0, []), (1, lines[2:])):
        monkeypatch.setattr(supervise, "restart_count", before)
        start = RunCopies(toy_job(tmp_path), events)._start
        assert events.read_bytes()[start:].decode() == "".join(kept)


def test_a_job_that_is_refused_leaves_nothing(tmp_path):
    RunCopies(toy_job(tmp_path), tmp_path / "events.jsonl").close()
    assert not (tmp_path / "store").exists()
