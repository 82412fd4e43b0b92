"""Work in another process: its result, or None where it cannot be had."""

import math
import os

import pytest

from autohet.runtime.process.background import run_in_background


def test_the_result_of_another_process() -> None:
    assert run_in_background(math.sqrt, 9.0)() == 3.0
    pid = run_in_background(_process, 0)()
    assert pid is not None
    assert pid != os.getpid()


def _process(_: int) -> int:
    return os.getpid()


def test_none_where_the_work_fails_or_cannot_travel() -> None:
    assert run_in_background(math.sqrt, -1.0)() is None
    assert run_in_background(lambda x: x, 1)() is None


def test_none_where_there_is_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert run_in_background(math.sqrt, 9.0)() is None
