"""Work in another process: its result, or None where it cannot be had; a plan's bound is the same as without."""

import math
import os
import time
from dataclasses import replace

import pytest

from autohet.cli.bench_planner_synthetic import GPT_26, fleet_of, request_of
from autohet.runtime.beside import beside
from planner.strategies import plan_with
from planner.strategies.bound_beside import begin_bound, bound_of


def test_the_result_of_another_process() -> None:
    assert beside(math.sqrt, 9.0)() == 3.0
    pid = beside(_process, 0)()
    assert pid is not None
    assert pid != os.getpid()


def _process(_: int) -> int:
    return os.getpid()


def test_none_where_the_work_fails_or_cannot_travel() -> None:
    assert beside(math.sqrt, -1.0)() is None
    assert beside(lambda x: x, 1)() is None


def test_none_where_there_is_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert beside(math.sqrt, 9.0)() is None


def test_a_large_fleets_bound_is_proved_beside_and_is_the_same() -> None:
    asked = replace(request_of(GPT_26, fleet_of({"A100-40": 48, "T4": 24}), 144, 1024), clock=time.perf_counter)
    wait, alone = begin_bound(asked), begin_bound(replace(asked, beside=lambda work, of: lambda: None))
    assert wait is not None
    assert alone is not None
    known = bound_of(replace(asked, beside=None))
    assert wait() == known
    assert alone() == known  # where it fails, this process does it
    assert plan_with("autohet", asked).search.lower_bound_s == known
    assert begin_bound(replace(asked, beside=None)) is None
