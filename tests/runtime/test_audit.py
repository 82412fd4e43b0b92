"""Audits of arithmetic: what their bits depend on and what not, who is compared with whom, who is
named, and which faults of a device they see.
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from autohet.runtime.messages import AuditCause
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.stages import block_audit, sketches
from autohet.runtime.models.stages.block_audit import (
    audit_block,
    device_key,
    joint_checksum,
    weights_checksum,
)
from autohet.runtime.models.stages.sketches import CEILINGS, NUM_SUMS, distance, find_far, sketch
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.models.thread_group import run_ranks
from autohet.runtime.profiling import exact_products
from autohet.runtime.profiling.exact_products import FaultyDevice, has_exact_products
from autohet.runtime.step.audit import (
    FAILED,
    PASSED,
    AuditedDevice,
    audited_layers,
    comparable_workers,
    find_mismatches,
    unlike_workers,
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
    found = [audit_block(stage, layer, 7, step, LENGTH) for layer in range(3)]
    return [each and each.checksum for each in found]


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


def test_workers_on_unlike_devices_are_compared_by_values() -> None:
    """Wrong: other slices or experts are compared; equal devices alone; other layers."""
    layers = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1, "f": 1, "g": 1}
    devices = {
        "a": AuditedDevice(1, 7, 1e-4),
        "b": AuditedDevice(1, 7, 1e-4),
        "c": AuditedDevice(2, 7, 3e-2),
        "d": AuditedDevice(3, 7, 1e-4),
        "e": AuditedDevice(4, 8, 1e-4),  # another slice
        "f": AuditedDevice(5, 0, 1e-4),  # experts
        "g": AuditedDevice(6, 7, 0.0),  # a format without a ceiling
    }
    assert unlike_workers(layers, devices) == [("a", "b", "c")]
    assert unlike_workers(layers, {**devices, "c": devices["a"]}) == []


def test_who_is_far_from_all_others_is_named() -> None:
    near = dict.fromkeys("abc", [0.0] * 9)
    far = [1e-3] * 9
    ceilings = dict.fromkeys("abcd", 1e-4)
    assert find_far(near, ceilings) == (False, ())
    assert find_far({**near, "b": far}, ceilings) == (True, ("b",))
    assert find_far({**near, "b": far}, {**ceilings, "b": 5e-3}) == (False, ())
    assert find_far({"a": far, "b": near["b"]}, ceilings) == (True, ())
    assert find_far({**near, "b": far, "c": far, "d": near["a"]}, ceilings) == (True, ())
    norms = [*near["a"][:8], 1e-3]
    assert find_far({**near, "c": norms}, ceilings) == (True, ("c",)), "all values are 0.1% larger"


@pytest.mark.parametrize("place", ["element", "row", "column", "all"])
def test_a_sketch_tells_the_relative_difference_wherever_it_is(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: signs of a period, or of rows or columns alone, in which a difference cancels."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(5000, 64, generator=draw), torch.randn(32, generator=draw)]
    where = {"element": (7, 9), "row": (4500,), "column": (slice(None), 3), "all": ()}[place]
    found = []
    for seed in range(30):
        error = torch.zeros(5000, 64)
        noise = torch.randn(error.shape, generator=draw.manual_seed(seed))
        error[where] = noise[where]
        error *= 0.01 * tensors[0].norm() / error.norm()
        found.append(distance(sketch(tensors), sketch([tensors[0] + error, tensors[1]])))
    whole = sketch(tensors)
    monkeypatch.setattr(sketches, "CHUNK_ELEMENTS", 1 << 12)
    assert sketch(tensors) == pytest.approx(whole, abs=1e-5), "in parts"
    # One of two tensors differs by 1%.
    assert sum(found) / len(found) == pytest.approx(0.01 / 2**0.5, rel=0.3)
    assert min(found) > 1e-3
    assert len(sketch(tensors)) == NUM_SUMS + 1


def test_formats_lie_apart_by_less_than_their_ceilings() -> None:
    """The devices of a mixed fleet compute one layer in unlike formats."""
    config = tiny_config("llama")
    parameters = random_parameters(config)
    sketches = {}
    for name in CEILINGS:
        (stage,) = stage_chain(config, parameters, [3], dtype=COMPUTE_DTYPES[name])
        result = audit_block(stage, 1, 7, 20, LENGTH, sketched=True)
        assert result is not None
        assert result.sketch is not None
        sketches[name] = result.sketch
    for name, found in sketches.items():
        assert distance(found, sketches["fp32"]) <= CEILINGS[name] / 2
    assert distance(sketches["bf16"], sketches["fp32"]) > CEILINGS["fp32"]


@pytest.mark.parametrize("seed", range(5))
def test_votes_sum_to_zero_for_equal_checksums_alone(seed: int) -> None:
    draw = random.Random(seed)
    workers = [f"w{index}" for index in range(64)]
    layers = {worker: draw.randrange(3) for worker in workers}
    devices = {worker: AuditedDevice(draw.randrange(2)) for worker in workers}
    groups = comparable_workers(layers, devices)
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
