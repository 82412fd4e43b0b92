"""The `sky` command line: launch, status, queue and down, and nothing else of SkyPilot."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ConfigError

STATUS_TIMEOUT_S = 300.0
"""Limit on a question. The first one also starts SkyPilot's server on this machine."""
DOWN_TIMEOUT_S = 900.0


class SkyFailed(RuntimeError):
    """A `sky` command failed or did not end in time."""


@dataclass(frozen=True)
class SkyCluster:
    """Cluster that SkyPilot knows. status: INIT, UP, STOPPED, ...

    is_launching: INIT, and a launch is in flight (else nodes are missing).
    """

    name: str
    status: str
    is_launching: bool = False


@dataclass(frozen=True)
class SkyJob:
    """Newest job of a cluster. submitted_at: Unix time, which tells it from all others."""

    status: str
    submitted_at: float


NO_JOB = SkyJob("", 0.0)
"""Stands for the newest job of a cluster that has none."""


Call = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""call(arguments, timeout_s) runs `sky` with these arguments and returns its end and output."""


def find_sky(executable: str = "sky") -> Call:
    """Return the caller of the `sky` executable. Raises ConfigError if there is none."""
    found = shutil.which(executable)
    if found is None:
        raise ConfigError(
            f"the command '{executable}' is not there: install SkyPilot in an environment of its"
            " own (pipx install 'skypilot[aws]'), and check it by `sky check aws`"
        )

    def call(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [found, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return call


class SkyCommand:
    """The few commands that the supervisor uses. Each call blocks until its command ends."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def launch(self, cluster: str, task: Path, timeout_s: float) -> None:
        """Launch the task on a cluster, new or not; return when its job is submitted.

        Raises:
            SkyFailed: no capacity, or another refusal, in SkyPilot's own words.
        """
        self._run(["launch", "-y", "-d", "-c", cluster, str(task)], timeout_s)

    def clusters(self) -> dict[str, SkyCluster]:
        """Return the user's clusters by name, as the cloud has them now."""
        records = _document(self._run(["status", "--refresh", "-o", "json"], STATUS_TIMEOUT_S))
        clusters = {}
        for record in records:
            name = record["name"]
            is_launching = record.get("init_kind") == "launching"
            clusters[name] = SkyCluster(name, record["status"], is_launching)
        return clusters

    def newest_job(self, cluster: str) -> SkyJob | None:
        """Return the newest job of a cluster that is UP, `NO_JOB` if it has none.

        None: the cluster does not answer.
        """
        records = _document(self._run(["queue", "-o", "json", cluster], STATUS_TIMEOUT_S))
        if cluster not in records:
            return None
        newest = max(records[cluster], key=lambda record: record["job_id"], default=None)
        if newest is None:
            return NO_JOB
        return SkyJob(newest["status"], float(newest["submitted_at"]))

    def down(self, cluster: str) -> None:
        """Terminate a cluster; return when its nodes are gone. Raises SkyFailed."""
        self._run(["down", "-y", cluster], DOWN_TIMEOUT_S)

    def _run(self, arguments: list[str], timeout_s: float) -> str:
        what = f"sky {arguments[0]}"
        try:
            ended = self._call(arguments, timeout_s)
        except subprocess.TimeoutExpired:
            raise SkyFailed(f"{what} did not end within {timeout_s:.0f} s") from None
        if ended.returncode != 0:
            lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
            reason = lines[-1].strip() if lines else "no message"
            raise SkyFailed(f"{what} failed with exit code {ended.returncode}: {reason}")
        return ended.stdout


def _document(text: str) -> Any:
    """Return the JSON document after SkyPilot's log lines, which share standard output with it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith(("[", "{")):
            continue
        try:
            return json.loads("\n".join(lines[number:]))
        except ValueError:
            # A line of the log may begin with a bracket, too.
            continue
    raise SkyFailed(f"sky printed no JSON document: {text[-200:]!r}")
