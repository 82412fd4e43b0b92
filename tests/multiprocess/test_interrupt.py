"""Faults in the middle of a step: every survivor is woken long before its groups' own deadline,
goes on in new groups, and loses nothing that was committed.

On the exact model, so that what survivors end with is compared bit for bit with an undisturbed run.
Plan: a pipeline of two stages, the first with TP 2, beside a one-stage pipeline; so every kind of
wait occurs: stage to stage, tensor-parallel, gradient sync, vote.
"""

import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness import training_case as case_of
from tests.harness.toy_model import TOY_CONFIG
from tests.harness.training_case import BACK_ENDS, Case
from tests.harness.worker_pool import TaskFailed, WorkerPool, pool_and_store

pytestmark = pytest.mark.multiprocess
TRAINING = {
    "global_batch_sequences": 6,
    "sequence_length": 5,
    "steps": 20,
    "precision": "fp32",
    "learning_rate": 5e-2,
    "clip_norm": 0.5,
}
COMMON = {
    "version": 1,
    "model": "m",
    "global_batch_sequences": 6,
    "microbatch_sequences": 1,
    "sequence_length": 5,
}
STAGES = [
    {"first_layer": 0, "num_layers": 3, "workers": ["a/0", "a/1"]},
    {"first_layer": 3, "num_layers": 1, "workers": ["b/0"]},
]
WHOLE = [{"first_layer": 0, "num_layers": 4, "workers": ["c/0"]}]
PLAN = {
    **COMMON,
    "pipelines": [
        {"num_microbatches": 4, "stages": STAGES},
        {"num_microbatches": 2, "stages": WHOLE},
    ],
}
WORKERS = ("a/0", "a/1", "b/0", "c/0")
SMALL_PLAN = {**COMMON, "pipelines": [{"num_microbatches": 6, "stages": WHOLE}]}
CASES = {back_end: Case(TOY_CONFIG, PLAN, TRAINING, 4, back_end=back_end) for back_end in BACK_ENDS}
CASE = CASES["gloo"]
SMALL = Case(TOY_CONFIG, SMALL_PLAN, TRAINING, 4)
GENERATIONS = itertools.count(1)
FAULT_STEP = 1


@pytest.fixture(params=BACK_ENDS, autouse=True)
def back_end(request: pytest.FixtureRequest) -> None:
    """Every case on gloo and on groups with CUDA's semantics."""
    global CASE
    CASE = CASES[request.param]


@pytest.fixture(scope="module")
def bench() -> Iterator[tuple[WorkerPool, int]]:
    with pool_and_store(len(WORKERS)) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(bench: tuple[WorkerPool, int]) -> dict[int, dict[str, np.ndarray]]:
    """The one-stage worker's state after each number of steps of an undisturbed run."""
    pool, port = bench
    process = pool.processes[3]
    process.call(case_of.build, SMALL, "c/0", port, next(GENERATIONS))
    states = {}
    for step in range(1, 5):
        process.call(case_of.train, SMALL, 1)
        states[step] = process.call(case_of.show_state)
    process.call(case_of.leave)
    return states


def seat_all(bench: tuple[WorkerPool, int]) -> WorkerPool:
    pool, port = bench
    generation = next(GENERATIONS)
    pool.map(case_of.build, [(CASE, worker, port, generation) for worker in WORKERS])
    return pool


def check_bits(state: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(state) == set(wanted)
    for name, tensor in state.items():
        assert tensor.tobytes() == wanted[name].tobytes(), (
            f"{name} differs from the undisturbed run"
        )


def go_on_alone(
    bench: tuple[WorkerPool, int], undisturbed: dict[int, dict[str, np.ndarray]]
) -> None:
    """The one-stage worker holds the whole model: a new generation in its process, up to step 4,
    equals the undisturbed run.
    """
    pool, port = bench
    survivor = pool.processes[3]
    step = survivor.call(case_of.progress)[0]
    check_bits(survivor.call(case_of.show_state), undisturbed[step])
    survivor.call(case_of.rebuild, SMALL, "c/0", port, next(GENERATIONS))
    survivor.call(case_of.train, SMALL, 4 - step)
    check_bits(survivor.call(case_of.show_state), undisturbed[4])
    survivor.call(case_of.leave)


def disturb(pool: WorkerPool, victim: int, number: signal.Signals, phase: str) -> None:
    """Run to `phase` of FAULT_STEP at the victim, hit it there, interrupt the survivors; each
    raises, where the groups' own deadline is twice the pool's.
    """
    victim_process = pool.processes[victim]
    victim_process.call(case_of.hold_at, phase, FAULT_STEP)
    survivors = [index for index in range(len(WORKERS)) if index != victim]
    tasks = {index: pool.processes[index].start(case_of.train, CASE, 4) for index in survivors}
    victim_process.start(case_of.train, CASE, 4)
    victim_process.call(case_of.wait_held)
    victim_process.send_signal(number)
    time.sleep(0.2)  # survivors run into their waits; only makes the test harder
    asked = {index: pool.processes[index].start(case_of.interrupt) for index in survivors}
    for index in survivors:
        process = pool.processes[index]
        process.result(asked[index])
        with pytest.raises(TaskFailed) as raised:
            process.result(tasks[index])
        assert raised.value.name in ("Interrupted", "PeerLost"), raised.value


@pytest.mark.parametrize("phase", ["forward", "backward", "gradient_sync", "vote"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_survivors_are_woken_and_go_on(
    bench: Any, undisturbed: Any, number: signal.Signals, phase: str
) -> None:
    pool = seat_all(bench)
    try:
        disturb(pool, 0, number, phase)
        step, _, vote, _ = pool.processes[3].call(case_of.progress)
        assert step == FAULT_STEP, "a step whose vote the lost worker had not joined was committed"
        assert vote is None or vote[0] == FAULT_STEP - 1
        go_on_alone(bench, undisturbed)
    finally:
        pool.replace(0)


def test_a_lost_peer_wakes_those_who_wait_for_others(bench: Any, undisturbed: Any) -> None:
    """Without any interrupt from outside: each worker that sees the loss closes its own
    connections.
    """
    pool = seat_all(bench)
    try:
        pool.processes[0].call(case_of.hold_at, "backward", FAULT_STEP)
        tasks = {index: pool.processes[index].start(case_of.train, CASE, 4) for index in (1, 2, 3)}
        pool.processes[0].start(case_of.train, CASE, 4)
        pool.processes[0].call(case_of.wait_held)
        pool.processes[0].send_signal(signal.SIGKILL)
        for index, task in tasks.items():
            with pytest.raises(TaskFailed) as raised:
                pool.processes[index].result(task)  # the groups' own deadline is longer
            assert raised.value.name in ("PeerLost", "Interrupted"), raised.value
        go_on_alone(bench, undisturbed)
    finally:
        pool.replace(0)


def test_an_interrupt_without_a_fault(bench: Any, undisturbed: Any) -> None:
    """All workers live and are interrupted while they wait for one that dawdles; the same processes
    build the next generation.
    """
    pool = seat_all(bench)
    _, port = bench
    pool.processes[1].call(case_of.hold_at, "gradient_sync", FAULT_STEP)
    tasks = [process.start(case_of.train, CASE, 4) for process in pool.processes]
    pool.processes[1].call(case_of.wait_held)
    for process in pool.processes:
        process.call(case_of.interrupt)
    pool.processes[1].call(case_of.release)
    for process, task in zip(pool.processes, tasks, strict=True):
        with pytest.raises(TaskFailed) as raised:
            process.result(task)
        assert raised.value.name in ("Interrupted", "PeerLost"), raised.value
    generation = next(GENERATIONS)
    pool.map(case_of.rebuild, [(CASE, worker, port, generation) for worker in WORKERS])
    pool.map(case_of.train, [(CASE, 3)] * len(WORKERS))
    check_bits(pool.processes[3].call(case_of.show_state), undisturbed[4])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_update_that_had_begun_is_finished(
    bench: Any, undisturbed: Any, number: signal.Signals
) -> None:
    """All see the vote; a/0 is lost and c/0 is interrupted between the vote and the update: the
    step is committed, so c/0 updates too.
    """
    pool = seat_all(bench)
    try:
        pool.processes[0].call(case_of.hold_at, "apply", FAULT_STEP)
        pool.processes[3].call(case_of.hold_at, "apply", FAULT_STEP)
        tasks = [process.start(case_of.train, CASE, 4) for process in pool.processes]
        pool.processes[0].call(case_of.wait_held)
        pool.processes[3].call(case_of.wait_held)
        assert pool.processes[3].call(case_of.progress)[:2] == (FAULT_STEP, FAULT_STEP)
        pool.processes[0].send_signal(number)
        for index in (1, 2, 3):
            pool.processes[index].call(case_of.interrupt)
        pool.processes[3].call(case_of.release)
        for index in (1, 2, 3):
            with pytest.raises(TaskFailed):
                pool.processes[index].result(tasks[index])
        assert pool.processes[2].call(case_of.progress)[0] == FAULT_STEP + 1
        # the update had begun when the interrupt came: it was finished
        assert pool.processes[3].call(case_of.progress)[:2] == (FAULT_STEP + 1, None)
        go_on_alone(bench, undisturbed)
    finally:
        pool.replace(0)


def test_roll_forward_with_the_vote_that_another_saw(bench: Any, undisturbed: Any) -> None:
    """c/0 never learns its vote's result (it is made to forget it): b/0's gives the same bits."""
    pool = seat_all(bench)
    pool.processes[3].call(case_of.lose_vote_at, FAULT_STEP)
    tasks = [process.start(case_of.train, CASE, 4) for process in pool.processes]
    with pytest.raises(TaskFailed, match="PeerLost"):
        pool.processes[3].result(tasks[3])
    for index in (0, 1, 2):
        with pytest.raises(TaskFailed):
            pool.processes[index].result(tasks[index])
    step, prepared, vote, _ = pool.processes[3].call(case_of.progress)
    assert (step, prepared) == (FAULT_STEP, FAULT_STEP)
    assert vote[0] == FAULT_STEP - 1
    seen = pool.processes[2].call(case_of.progress)[2]
    assert seen[0] == FAULT_STEP
    assert pool.processes[3].call(case_of.roll_forward, seen[1]) == FAULT_STEP + 1
    go_on_alone(bench, undisturbed)
