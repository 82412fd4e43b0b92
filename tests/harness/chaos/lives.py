"""One struck job from start to end, through as many lives of its driver as its strikes need."""

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autohet.control.ledger.ledger import ToldSteps
from autohet.driver.job import supervise
from autohet.driver.job.patience import with_patience
from autohet.driver.job.preparation import require_own_storage
from autohet.driver.job.run_record import steps_told
from autohet.runtime.job import Job
from tests.harness.chaos.kept_state import newest_kept_step
from tests.harness.chaos.places import Places
from tests.harness.chaos.striker import Striker
from tests.harness.chaos.strikes import Strike
from tests.harness.exact_job import exact_job
from tests.harness.fork_server import forking_context, server_address, use_server
from tests.harness.living import kill, state_of
from tests.harness.served_objects import STEP_PAUSE_S
from tests.harness.struck_run import StruckRun
from tests.harness.waits import HANG_S

EVERY = 8
JOB_TIMEOUT_S = HANG_S
POLL_S = 0.05
PAUSE_S = 0.25
"""In each step: a job lasts until its strikes have come."""
PATIENCE_S = HANG_S
"""For which a restarted driver tries its first checks again."""


@dataclass(frozen=True)
class Life:
    """One life of a driver.

    exit_code: negative after a signal, None where it had to be ended. kept_step: the step that the
    nodes' files and the storage held whole before it began, as far as can be proved.
    """

    directory: Path
    exit_code: int | None
    kept_step: int | None

    @property
    def result(self) -> dict[str, Any] | None:
        path = self.directory / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


@dataclass
class StruckJob:
    """What there is to judge of one job."""

    places: Places
    lives: list[Life] = field(default_factory=list)
    seconds: float = 0.0

    def strikes(self) -> list[dict[str, Any]]:
        """Strikes that came, and those that were left out (`victim` null)."""
        path = self.places.strikes
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def chaos_job(places: Places, shared: Path, steps: int, **sections: Mapping[str, Any]) -> Job:
    """The exact model's job of so many steps on file systems of its own; `sections` are added."""
    return exact_job(
        places.root,
        shared,
        places.memory,
        training={"steps": steps, "decay_steps": steps},
        checkpoint={
            "storage": str(places.storage),
            "local_directory": str(places.disk),
            "every_steps": EVERY,
        },
        **sections,
    )


def strike_job(places: Places, shared: Path, steps: int, strikes: Sequence[Strike]) -> StruckJob:
    """Run a job to its end while it is struck; a driver that is killed is started again."""
    job = chaos_job(places, shared, steps)
    struck = StruckJob(places)
    began = time.monotonic()
    kept_step = None
    while True:
        number = len(struck.lives)
        directory = places.root / f"life-{number}"
        directory.mkdir()
        left = strikes[len(struck.strikes()) :]
        deadline = began + JOB_TIMEOUT_S
        code = _live(job, places, directory, list(left), number, deadline)
        struck.lives.append(Life(directory, code, kept_step))
        if code != -signal.SIGKILL or time.monotonic() >= deadline:
            break
        kept_step = newest_kept_step(job, places)
    while places.outages():
        places.end_outages()
        time.sleep(POLL_S)
    struck.seconds = time.monotonic() - began
    return struck


def _live(
    job: Job,
    places: Places,
    directory: Path,
    strikes: list[Strike],
    number: int,
    deadline: float,
) -> int | None:
    """Exit code of one life; every process that it started is gone afterwards."""
    arguments = (job, places, directory, strikes, number, server_address())
    process = forking_context().Process(target=_drive, args=arguments)
    process.start()
    try:
        while process.exitcode is None and time.monotonic() < deadline:
            places.end_outages()
            frozen = any(path.stem == "driver_freeze" for path in places.outages())
            if not frozen and state_of(process.pid) == "T":
                os.kill(process.pid, signal.SIGCONT)
            process.join(POLL_S)
        code: int | None = process.exitcode
    finally:
        _end_processes(process, directory)
    return code


def _end_processes(driver: Any, directory: Path) -> None:
    """Kill and reap the driver, and kill whatever it started."""
    started = directory / "logs" / "processes"
    others = started.read_text().split() if started.exists() else []
    for process_id in (driver.pid, *map(int, others)):
        kill(process_id)
    driver.join(10.0)
    driver.close()


def _drive(
    job: Job, places: Places, directory: Path, strikes: list[Strike], number: int, address: str
) -> None:
    """One life of the driver, in a process of its own."""
    use_server(address)
    import torch

    torch.set_num_threads(1)
    supervise.restart_count = number  # as in a child of `supervise.supervise_child`
    if number:
        told = _told_by_others(directory)
        with_patience(lambda: require_own_storage(job, told), PATIENCE_S)
    run = with_patience(lambda: StruckRun(job, directory), PATIENCE_S)
    run.fleet.environment[STEP_PAUSE_S] = str(PAUSE_S)
    start = run.start
    run.start = lambda: with_patience(start, PATIENCE_S)  # type: ignore[method-assign]
    result = run.run(Striker(places, strikes), JOB_TIMEOUT_S)
    document = {"ok": result.ok, "reason": result.reason, "complaints": result.complaints}
    (directory / "result.json").write_text(json.dumps(document))


def _told_by_others(directory: Path) -> ToldSteps:
    """Steps and checkpoints of which the events of a job's earlier drivers tell."""
    told = [steps_told(path) for path in directory.parent.glob("life-*/events-*.jsonl")]
    steps = frozenset[int]().union(*(each.steps for each in told))
    committed = [each.checkpoint_step for each in told if each.checkpoint_step is not None]
    return ToldSteps(0, steps, max(committed, default=None))
