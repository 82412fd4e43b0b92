"""A whole driver in a process of its own, which a test can kill, freeze and warn, and start again
on the same storage.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from autohet.runtime.job import Job
from tests.harness.fork_server import forking_context, server_address, use_server
from tests.harness.living import is_alive, kill, state_of
from tests.harness.struck_run import Strike, StruckRun, read_events
from tests.harness.waits import HANG_S, wait_until


class DriverLife:
    """One life of a driver. Its workers and agents end with it."""

    def __init__(self, job: Job, directory: Path, strike: Strike | None) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        address = server_address()
        self._process = forking_context().Process(
            target=_drive, args=(job, directory, strike, address)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait_frozen(self) -> None:
        """Return once the driver stands still."""

        def is_frozen() -> bool:
            code = self._process.exitcode
            assert code is None, f"the driver ended ({code}) instead of freezing"
            return state_of(self.pid) == "T"

        wait_until(is_frozen, "the driver's freeze")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> int:
        """Its exit code: negative after a signal. All that it started is gone when this returns."""
        self._process.join(HANG_S)
        code = self._process.exitcode
        assert code is not None, f"the driver did not end within {HANG_S:.0f} s"
        wait_until(lambda: not any(map(is_alive, self.started())), "the end of what it started")
        return code

    def started(self) -> list[int]:
        """Ids of the processes that this driver has started."""
        path = self.directory / "logs" / "processes"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def events(self) -> list[dict[str, Any]]:
        (path,) = self.directory.glob("events-*.jsonl")
        return read_events(path)

    @property
    def result_is_there(self) -> bool:
        return (self.directory / "result.json").exists()

    @property
    def result(self) -> dict[str, Any]:
        """ok, reason, summary, complaints."""
        document: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return document

    def close(self) -> None:
        """End whatever of it is left."""
        for pid in (self.pid, *self.started()):
            kill(pid)
        self._process.join(5)
        self._process.close()


def _drive(job: Job, directory: Path, strike: Strike | None, address: str) -> None:
    use_server(address)
    import torch

    torch.set_num_threads(1)
    run = StruckRun(job, directory, strike)

    def on_signal(number: int, _: object) -> None:
        run.fleet.stop_reason = signal.Signals(number).name

    signal.signal(signal.SIGTERM, on_signal)
    result = run.run()
    document = {
        "ok": result.ok,
        "reason": result.reason,
        "summary": result.summary,
        "complaints": result.complaints,
    }
    (directory / "result.json").write_text(json.dumps(document))
