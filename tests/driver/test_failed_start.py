"""A run that cannot start leaves nothing that lives on."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.driver.job import run as run_module
from autohet.driver.job.job_run import Machines
from planner.errors import ConfigError
from recovery.storage.errors import StorageUnreachable
from tests.harness.fake_job import fake_job


@pytest.mark.parametrize("fails_in", ["buy", "start", "begin"])
def test_what_a_run_has_begun_ends_when_it_cannot_start(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook its lease would be renewed for ever, and the next run be told that its own
    process holds it.
    """
    calls = list[tuple[str, Any]]()

    def called(name: str) -> Any:
        def call(*_: Any, **given: Any) -> None:
            calls.append((name, given))
            if name == fails_in:
                raise StorageUnreachable("s3://b", "no answer")

        return call

    run = SimpleNamespace(buy=called("buy"), start=called("start"), close=called("close"))
    monkeypatch.setattr(run_module, "JobRun", lambda *_, **__: run)
    copies: Any = SimpleNamespace(record={}, begin=called("begin"))
    files = run_module.RunFiles(Mock(), copies)
    with pytest.raises(ConfigError, match="no answer"):
        run_module.train_with(fake_job(), Machines(), files, lambda *_: None)
    assert calls[-1] == ("close", {"at_once": True})
