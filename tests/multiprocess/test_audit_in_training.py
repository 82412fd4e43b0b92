"""Audits in a training of several processes: what each fault of a worker is caught by, who is
named, and that an audit changes nothing of the training.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autohet.runtime.job import AdapterSection
from autohet.runtime.messages import AuditCause
from planner.plans.plan import Plan
from tests.harness.parity import LLAMA, MIXTURES, TRAINING, grid, pipeline, plan_document
from tests.harness.training_case import Case, run_audited, run_scaled
from tests.multiprocess.test_formats_parity import in_formats

pytestmark = pytest.mark.multiprocess
GENERATIONS = itertools.count(3000)
THREE_HOLDERS = plan_document(
    pipeline((4, 1), microbatches=3),
    pipeline((4, 1), microbatches=2),
    pipeline((1, 1), (3, 1), microbatches=3),
)
A, B, FIRST, SECOND = (f"w/{index}" for index in range(4))
CASE = Case(LLAMA, THREE_HOLDERS, {**TRAINING, "audit_every": 1, "replica_check_steps": 100}, 4)


def run(pool: Any, case: Case, faults: Mapping[str, str] | None = None) -> Any:
    """Loss, parted replicas and audit of each step, which all workers see alike; states."""
    processes, port = pool
    generation = next(GENERATIONS)
    workers = Plan.from_document(case.plan).workers
    calls = [(case, worker, port, generation, faults or {}) for worker in workers]
    answers = processes.map(run_audited, calls)
    steps = [seen for seen, _ in answers]
    assert all(each == steps[0] for each in steps), "a wrong program tells workers unlike things"
    return steps[0], [state for _, state in answers]


@pytest.fixture(scope="module")
def sound(pool: Any) -> Any:
    return run(pool, CASE)


def equal(one: Any, two: Any) -> bool:
    return all(
        np.array_equal(mine[name], theirs[name])
        for mine, theirs in zip(one, two, strict=True)
        for name in mine
    )


def test_sound_workers_agree_and_train_as_without_audits(pool: Any, sound: Any) -> None:
    """Wrong: keys or layers differ, so that nobody is compared; the audit changes a bit."""
    steps, states = sound
    by_step = [audit.compared for _, _, audit in steps]
    assert by_step == [(A, B, FIRST), (A, B, SECOND)] * 2
    assert all(audit.mismatches == () for _, _, audit in steps)

    off = replace(CASE, training={**CASE.training, "audit_every": 0})
    plain, plain_states = run(pool, off)
    assert [loss for loss, *_ in plain] == [loss for loss, *_ in steps]
    assert [audit for *_, audit in plain] == [None] * 4
    assert equal(states, plain_states)

    rarely = replace(CASE, training={**CASE.training, "audit_every": 2})
    spaced, _ = run(pool, rarely)
    assert [audit is None for *_, audit in spaced] == [False, True, False, True]


@pytest.mark.parametrize("wrong", [A, B, SECOND])
def test_wrong_arithmetic_is_named_by_the_others_that_agree(pool: Any, wrong: str) -> None:
    """Wrong: the first by name is taken to be right."""
    steps, _ = run(pool, CASE, {wrong: "softmax"})
    named = [each for _, _, audit in steps for each in audit.mismatches]
    assert len(named) >= 2
    assert {(each.named, each.cause) for each in named} == {((wrong,), AuditCause.ARITHMETIC)}
    assert all(parted == () for _, parted, _ in steps), "all add the same wrong sums"


def test_exact_products_prove_which_of_two_is_wrong(pool: Any) -> None:
    case = replace(CASE, plan=grid(2, 1, 1))
    steps, _ = run(pool, case, {"w/1": "products"})
    causes = {(each.named, each.cause) for _, _, audit in steps for each in audit.mismatches}
    assert causes == {(("w/1",), AuditCause.PRODUCTS), ((), AuditCause.ARITHMETIC)}
    steps, _ = run(pool, case, {"w/1": "softmax"})
    causes = {(each.named, each.cause) for _, _, audit in steps for each in audit.mismatches}
    assert causes == {((), AuditCause.ARITHMETIC)}


def test_unlike_devices_are_compared_by_values(pool: Any) -> None:
    """Wrong: rounding of another format is named; the one in that format is compared with nobody;
    weights that part are the device's fault.
    """
    formats = in_formats(THREE_HOLDERS, "fp32", "fp32", "bf16", "bf16")
    case = replace(CASE, plan=formats, training={**CASE.training, "precision": "bf16"})
    steps, _ = run(pool, case)
    assert [audit.compared for *_, audit in steps] == [(A, B, FIRST), (A, B, SECOND)] * 2
    assert all(audit.mismatches == () for *_, audit in steps)
    steps, _ = run(pool, case, {A: "exponents"})
    found = [each for *_, audit in steps for each in audit.mismatches]
    by_values = [each.named for each in found if each.cause is AuditCause.VALUES]
    assert len(by_values) >= 2
    assert set(by_values) == {(A,)}
    by_bits = [each.named for each in found if each.cause is AuditCause.ARITHMETIC]
    assert set(by_bits) == {()}, "of two equal devices nobody knows"
    steps, _ = run(pool, case, {A: "sum"})
    causes = {each.cause for *_, audit in steps for each in audit.mismatches}
    assert causes == {AuditCause.WEIGHTS}


@pytest.mark.parametrize("fault", ["update", "sum"])
def test_weights_that_part_are_no_wrong_arithmetic_and_are_repaired_at_once(
    pool: Any, fault: str
) -> None:
    """Wrong: the worker is drained for a flipped bit; the repair waits for the 100th step."""
    steps, _ = run(pool, CASE, {A: fault})
    found = [each for _, _, audit in steps for each in audit.mismatches]
    assert found
    assert {(each.named, each.cause) for each in found} == {((), AuditCause.WEIGHTS)}
    parted = [each for _, mismatches, _ in steps for each in mismatches]
    assert {each.workers for each in parted} == {(A,)}


@pytest.mark.parametrize("fault", ["addend", "border"])
def test_faults_that_no_check_sees(pool: Any, sound: Any, fault: str) -> None:
    """The guide says so of them; a check that begins to see one must be told there."""
    # Sums that start in the backward pass would have begun before the addend is disturbed.
    steps, _ = run(pool, replace(CASE, overlap=False), {SECOND: fault})
    assert [loss for loss, *_ in steps] != [loss for loss, *_ in sound[0]]
    assert all(audit.mismatches == () and parted == () for _, parted, audit in steps)


def test_a_message_that_changes_on_its_way_is_found_and_the_step_run_again(
    pool: Any, sound: Any
) -> None:
    """Wrong: the step is committed; sums of halves that lose the highest bit; a border is named
    that is not the one.
    """
    steps, states = run(pool, CASE, {FIRST: "message"})
    (found,) = (each for *_, audit in steps for each in audit.mismatches)
    assert (found.cause, found.workers, found.named) == (AuditCause.MESSAGES, (FIRST, SECOND), ())
    border = THREE_HOLDERS["pipelines"][2]["stages"][1]["first_layer"]
    assert (found.step, found.layer) == (0, border)
    assert equal(states, sound[1])


def test_a_worker_without_memory_for_the_audit_is_not_named(pool: Any, sound: Any) -> None:
    steps, states = run(pool, CASE, {B: "memory"})
    assert all(audit.mismatches == () for _, _, audit in steps)
    assert equal(states, sound[1])


OTHERS = {
    "routers' counts": Case(
        MIXTURES["deepseek_v3"], grid(2, 1, 2), {**TRAINING, "router_balance": "bias"}, 3
    ),
    "TP, cuts and dropout": Case(
        {**LLAMA, "attention_dropout": 0.2},
        plan_document(pipeline((2, 2), (2, 1), microbatches=4), pipeline((4, 2), microbatches=4)),
        TRAINING,
        3,
    ),
    "adapters with dropout": Case(
        LLAMA,
        grid(2, 1, 1),
        TRAINING,
        3,
        adapter=AdapterSection(rank=4, alpha=16.0, dropout=0.3),
    ),
    "overflows of fp16": Case(
        LLAMA, in_formats(grid(2, 1, 1), "fp16"), {**TRAINING, "precision": "fp16"}, 3
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_results_are_equal_with_and_without_audits(pool: Any, name: str) -> None:
    processes, port = pool
    found = []
    for every in (0, 1):
        case = replace(OTHERS[name], training={**OTHERS[name].training, "audit_every": every})
        generation = next(GENERATIONS)
        workers = Plan.from_document(case.plan).workers
        calls = [(case, worker, port, generation) for worker in workers]
        found.append(processes.map(run_scaled, calls))
    for plain, audited in zip(*found, strict=True):
        assert plain[0] == audited[0]
        assert equal([plain[1]], [audited[1]])
