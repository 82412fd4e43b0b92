"""Audits of arithmetic: what their bits depend on and what not, who is compared with whom, who is
named, and which faults of a device they see.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from autohet.runtime.messages import AuditCause
from autohet.runtime.models.stages import block_audit
from autohet.runtime.models.stages.block_audit import (
    block_checksum,
    device_key,
    joint_checksum,
    weights_checksum,
)
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.models.thread_group import run_ranks
from autohet.runtime.profiling import exact_products
from autohet.runtime.profiling.exact_products import FaultyDevice, has_exact_products
from autohet.runtime.step.audit import (
    FAILED,
    PASSED,
    audited_layers,
    comparable_workers,
    find_mismatches,
    vote_part,
)
from planner.plans.plan import Plan
from tests.harness.faulty_arithmetic import NORMS, SOFTMAX, Fault, FaultyArithmetic
from tests.harness.random_plans import plans
from tests.harness.tiny_models import (
    TINY,
    batch,
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
)

CPU = torch.device("cpu")
LENGTH = 16


def stage_of(name: str, tp: Any = None) -> StageModel:
    config = tiny_config(name)
    (stage,) = stage_chain(config, random_parameters(config), [3], tp)
    return stage


def audits(stage: StageModel, step: int = 20) -> list[int | None]:
    return [block_checksum(stage, layer, 7, step, LENGTH) for layer in range(3)]


# the block
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TINY))
def test_an_audit_leaves_no_trace_in_training(name: str) -> None:
    """Wrong: gradients accumulate, routers count tokens, a generator is drawn from, dropout keeps
    the audit's keys, tables of the audit's shape take the place of the training's.
    """
    config = tiny_config(name)
    parameters = random_parameters(config)

    def gradients(disturbed: bool) -> Any:
        (stage,) = stage_chain(config, parameters, [3])
        if disturbed:
            tables = stage.inputs
            state = torch.get_rng_state()
            found = audits(stage)
            assert found == audits(stage)
            assert len({*found, *audits(stage, step=40)}) == 6
            assert stage.inputs is tables
            assert torch.equal(torch.get_rng_state(), state)
            assert all(each.grad is None for each in stage.parameters())
            assert not torch.are_deterministic_algorithms_enabled()
        return run_chain(config, [stage])

    logits, loss, plain = gradients(False)
    logits_after, loss_after, after = gradients(True)
    assert torch.equal(logits, logits_after)
    assert loss == loss_after
    assert all(torch.equal(plain[key], after[key]) for key in plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("kind", [{}, {"cuts_sequence": True}, {"all_to_all": True}])
def test_ranks_of_a_group_compute_alone(name: str, kind: dict[str, bool]) -> None:
    """Wrong: the block's own sums run, and one faulty rank makes all ranks' bits wrong."""

    def work(tp: Any) -> Any:
        stage = stage_of(name, tp)
        group = tp.group
        # A call of the group by one rank alone would break the barrier.
        found = audits(stage) if tp.rank == 1 else None
        assert tp.group is group
        tp.group.all_reduce(torch.zeros(1))
        key = device_key(stage, "fp32", LENGTH)
        return found, audits(stage), key

    if kind.get("all_to_all") and "moe" not in name and "deepseek" not in name:
        pytest.skip("no experts")
    (_, first, key), (alone, together, other_key) = run_ranks(2, work, **kind)
    assert not torch.are_deterministic_algorithms_enabled(), "ranks in threads set it at once"
    assert alone == together != first
    assert key != other_key


def test_bits_do_not_depend_on_where_weights_lie_nor_on_compiled_or_recomputed_blocks() -> None:
    stage = stage_of("llama")
    wanted = audits(stage)
    for module in stage.blocks.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                flat = torch.empty(parameter.numel() + 1)[1:]
                flat.copy_(parameter.detach().flatten())
                module._parameters[name] = torch.nn.Parameter(flat.view(parameter.shape))
    assert audits(stage) == wanted
    stage.recompute = "full"
    for block in stage.blocks:
        block._compiled_call_impl = lambda *args, **kwargs: pytest.fail("compiled code ran")
    assert audits(stage) == wanted
    assert stage.recompute == "full"


def test_a_key_has_all_that_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of("llama")
    keys = {
        device_key(stage, "fp32", LENGTH),
        device_key(stage, "fp32", 2 * LENGTH),
        device_key(stage, "fp8", LENGTH),
    }
    assert device_key(stage_of("llama"), "fp32", LENGTH) in keys
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    keys.add(device_key(stage, "fp32", LENGTH))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    keys.add(device_key(stage, "fp32", LENGTH))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    keys.add(device_key(stage, "fp32", LENGTH))
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(device_key(stage, "fp32", LENGTH))
    monkeypatch.setattr(block_audit, "_cpu_facts", lambda: ["model name: another"])
    keys.add(device_key(stage, "fp32", LENGTH))
    monkeypatch.setattr(type(stage.blocks[0].mlp.act_fn), "__module__", "liger_kernel.ops")
    keys.add(device_key(stage, "fp32", LENGTH))
    assert len(keys) == 9


def test_short_memory_gives_no_result_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of("llama")

    def fail(*args: Any, **rest: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.autograd, "grad", fail)
    assert audits(stage) == [None] * 3
    stage(batch(stage.spec.config)[0])


# faults
# ----------------------------------------------------------------------------------

FAULTS = {
    "products": (Fault(rate=1e-3), True, True),
    "products, forward": (Fault(rate=1e-3, passes="forward"), True, True),
    "products, backward": (Fault(rate=1e-3, passes="backward"), True, False),
    "products, lowest bit": (Fault(rate=1e-3, bit=0), True, True),
    "one head": (Fault(rate=1e-2, part=2), True, False),
    "norm": (Fault(operators=NORMS, rate=1e-1), True, False),
    "softmax": (Fault(operators=SOFTMAX, rate=1e-2), True, False),
}
"""Fault, and whether an audit and exact products see it: the guide has the same table."""


@pytest.mark.parametrize("name", FAULTS)
def test_which_check_sees_a_fault_of_a_device(name: str) -> None:
    fault, by_audit, by_products = FAULTS[name]
    stage = stage_of("llama")
    wanted = audits(stage)
    for seed in range(3):
        with FaultyArithmetic(Fault(**{**vars(fault), "seed": seed})) as faulty:
            found = audits(stage)
        assert faulty.flips > 0
        assert (found != wanted) == by_audit
        with FaultyArithmetic(Fault(**{**vars(fault), "seed": seed})):
            assert has_exact_products(CPU, torch.float32) != by_products
    assert audits(stage) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_products_are_integers_and_any_flipped_bit_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = (exact_products._integers(each, CPU, dtype).long() for each in "ab")
    products = torch.stack([left @ right, left @ right.T, left.T @ right])
    most = int((left.abs() @ right.abs()).max())
    assert most < (2**24 if dtype is torch.float32 else 2**8)
    # Integer arithmetic of the host is the judge.
    constant = exact_products.WIDE if dtype is torch.float32 else exact_products.NARROW
    assert exact_products.view_checksums([products.float()]) == [constant]
    assert has_exact_products(CPU, dtype)
    exact_products.check_products(CPU, dtype)

    bmm = torch.bmm
    draw = random.Random(1)
    for _ in range(20):
        call = draw.randrange(3 if dtype is torch.float32 else 6)
        calls = iter(range(99))

        def faulty(a: Any, b: Any, call: int = call, calls: Any = calls) -> Any:
            out = bmm(a, b)
            if next(calls) == call:
                words = torch.int32 if out.dtype is torch.float32 else torch.int16
                flat = out.view(-1).view(words)
                flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(words.itemsize * 8 - 1)
            return out

        monkeypatch.setattr(torch, "bmm", faulty)
        with pytest.raises(FaultyDevice, match="wrong bits; replace"):
            exact_products.check_products(CPU, dtype)


# who is compared, and who is named
# ----------------------------------------------------------------------------------


@given(plans(num_layers=6, max_tp_degree=2))
@settings(max_examples=20, deadline=None)
def test_each_layer_is_audited_by_all_its_holders(plan: Plan) -> None:
    num_layers = max(stage.end_layer for stage in plan.stages)
    holders: dict[int, set[str]] = {}
    for stage in plan.stages:
        for layer in range(stage.first_layer, stage.end_layer):
            holders.setdefault(layer, set()).update(stage.workers)
    audited = set()
    for number in range(2 * num_layers**2):
        layers = audited_layers(plan, number)
        assert layers.keys() == {*plan.workers}
        by_layer: dict[int, set[str]] = {}
        for worker, layer in layers.items():
            by_layer.setdefault(layer, set()).add(worker)
        for layer, workers in by_layer.items():
            assert workers <= holders[layer]
            if workers == holders[layer]:
                audited.add(layer)
    assert audited == {*range(num_layers)}


def settle(results: dict[str, int], weights: dict[str, int] | None = None, failed: str = "") -> Any:
    groups = [tuple(sorted(results))]
    layers = dict.fromkeys(results, 3)
    answers = {}
    for worker, result in results.items():
        products = FAILED if worker == failed else PASSED
        answers[worker] = [result, (weights or {}).get(worker, 5), products]
    return find_mismatches(40, layers, groups, answers)


def test_a_worker_is_named_where_others_agree() -> None:
    """Wrong: the first by name is right; of two that differ one is named; a majority of half."""
    (one,) = settle({"a": 1, "b": 2, "c": 2})
    assert (one.named, one.cause, one.workers) == (("a",), AuditCause.ARITHMETIC, ("a", "b", "c"))
    assert settle({"a": 1, "b": 1, "c": 2})[0].named == ("c",)
    assert settle({"a": 1, "b": 2})[0].named == ()
    assert settle({"a": 1, "b": 2, "c": 3})[0].named == ()
    assert settle({"a": 1, "b": 2, "c": 2, "d": 4})[0].named == ("a", "d")
    assert settle({"a": 1, "b": 1, "c": 2, "d": 2})[0].named == ()
    assert settle({"a": 1, "b": 1}) == ()
    assert settle({"a": 0, "b": 1, "c": 1}) == (), "a worker without a result is not compared"
    (parted,) = settle({"a": 1, "b": 2, "c": 2}, weights={"a": 6})
    assert (parted.named, parted.cause) == ((), AuditCause.WEIGHTS)
    proof, differ = settle({"a": 1, "b": 2}, failed="b")
    assert (proof.named, proof.cause, differ.named) == (("b",), AuditCause.PRODUCTS, ())
    assert "no majority tells" in str(differ)
    assert "b computed exact products wrongly" in str(proof)


@pytest.mark.parametrize("seed", range(5))
def test_votes_sum_to_zero_for_equal_checksums_alone(seed: int) -> None:
    draw = random.Random(seed)
    workers = [f"w{index}" for index in range(64)]
    layers = {worker: draw.randrange(3) for worker in workers}
    keys = {worker: draw.randrange(2) for worker in workers}
    groups = comparable_workers(layers, keys)
    bits = {group: draw.getrandbits(64) for group in groups}
    held = {worker: bits[group] for group in groups for worker in group}
    assert sum(vote_part(groups, worker, held.get(worker)) for worker in workers) == 0.0
    wrong = draw.choice(sorted(held))
    held[wrong] ^= 1 << draw.randrange(32)
    parts = [vote_part(groups, worker, held.get(worker)) for worker in workers]
    assert sum(parts) != 0.0
    assert sum(abs(part) for part in parts) < 2.0**53
    held[wrong] = 0
    assert sum(vote_part(groups, worker, held.get(worker)) for worker in workers) != 0.0
    assert vote_part([], "w0", 5) == 0.0


def test_checksums_are_of_content_and_never_zero() -> None:
    stage = stage_of("llama")
    before = weights_checksum(stage, 1)
    with torch.no_grad():
        next(stage.blocks[0].parameters()).view(torch.int32).view(-1)[0] ^= 1
    assert weights_checksum(stage, 1) == before
    assert weights_checksum(stage, 0) != weights_checksum(stage_of("llama"), 0)
    assert joint_checksum([]) != 0
