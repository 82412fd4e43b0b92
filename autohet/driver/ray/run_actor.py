"""Part that all actors of a run share: which run they are of, and whom they obey."""

import hashlib
import importlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autohet.driver.loop.value_codec import PACKAGES, encode
from autohet.runtime.job import Job
from autohet.runtime.process.epoch_fence import EpochFence
from autohet.runtime.process.headless_watch import HeadlessWatch
from autohet.runtime.process.report_channel import ReportAddress, ReportSender


@cache
def _code_digest() -> str:
    """Return the SHA-256 of this process's own code."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for root in importlib.import_module(package).__path__:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint(job: Job) -> str:
    """Return a digest of a whole job document, and of the code that runs it."""
    parts = [encode(job), _code_digest(), version("torch")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class RunActor:
    """Part that all actors of a run share. A subclass sets the fields in its constructor."""

    _fingerprint: str
    _fence: EpochFence
    _reports: ReportSender
    _watch: HeadlessWatch

    def command(self, epoch: int, method: str, *arguments: Any) -> Any:
        """Call a method for the driver of `epoch`.

        Raises:
            StaleDriver: a later driver has taken over.
        """
        self._fence.admit(epoch)
        return getattr(self, method)(*arguments)

    def introduce(self) -> tuple[str, Any]:
        """Return the fingerprint of this actor's job, and what its next driver has to know."""
        return self._fingerprint, self._knowledge()

    def _knowledge(self) -> Any:
        raise NotImplementedError

    def adopt(self, driver: ReportAddress) -> None:
        """Obey this driver from now on, and report to it."""
        self._fence.admit(driver.epoch)
        self._watch.is_stopped = False
        self._reports.redirect(driver)

    def expect_stop(self) -> None:
        """Note that the user stops the job: if its driver goes, this actor does not wait."""
        self._watch.is_stopped = True
