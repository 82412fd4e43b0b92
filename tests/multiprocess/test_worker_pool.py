"""A case that fails leaves the next one a pool in which nothing of it lives on."""

import gc
import os
import time

import pytest

from tests.harness.worker_pool import TaskFailed, WorkerPool

pytestmark = pytest.mark.multiprocess


def disturb(how: str) -> int:
    """What a worker of a failing case does: raises, dies, or waits for those that did."""
    if how == "raise":
        raise ValueError("as asked")
    if how == "die":
        os._exit(1)
    time.sleep(30.0)
    return os.getpid()


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_failed_case_does_not_reach_the_next(how: str) -> None:
    pool = WorkerPool(2)
    try:
        before = pool.map(os.getpid, [()] * 2)
        with pytest.raises(TaskFailed):
            pool.map(disturb, [(how,), ("wait",)])
        after = pool.map(os.getpid, [()] * 2)
        assert not set(before) & set(after), (
            "a process of the failed case lives on, and with it the task"
        )
    finally:
        pool.close()


def test_a_process_that_died_between_two_cases_is_named_and_replaced() -> None:
    pool = WorkerPool(1)
    try:
        pool.processes[0]._process.kill()
        pool.processes[0]._process.join(10)
        with pytest.raises(TaskFailed, match="died"):
            pool.map(os.getpid, [()])
        assert pool.map(os.getpid, [()])
    finally:
        pool.close()


def test_a_forked_process_collects_no_garbage_of_its_server() -> None:
    pool = WorkerPool(1)
    try:
        assert pool.map(gc.get_freeze_count, [()])[0] > 100_000
    finally:
        pool.close()
