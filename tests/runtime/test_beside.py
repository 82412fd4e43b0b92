"""Work in another process: its result, or None where it cannot be had; a plan's bound is the same as without."""

import math
import os
import time
from dataclasses import replace

import pytest

from autohet.bench.planner.synthetic import GPT_26, fleet_of, request_of
from autohet.runtime.beside import beside
from planner.strategies import plan_with
from planner.strategies.companion import accompany, begin_companion


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


@pytest.mark.thorough
def test_what_goes_on_beside_the_search_of_a_large_fleet_is_the_same_as_in_turn() -> None:
    asked = replace(request_of(GPT_26, fleet_of({"A100-40": 80, "T4": 56}), 272, 1024), clock=time.perf_counter)
    beside_it, failed = begin_companion(asked), begin_companion(replace(asked, beside=lambda work, of: lambda: None))
    assert beside_it is not None
    assert failed is not None
    known = accompany(replace(asked, beside=None))
    assert known.plans
    assert beside_it() == known
    assert failed() == known  # this process does it then
    answer = plan_with("autohet", asked)
    assert answer.plan == plan_with("autohet", replace(asked, beside=None)).plan
