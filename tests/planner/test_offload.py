"""Optimizer state in host memory as the planner's last resort: savings, costs, and limits."""

from dataclasses import replace
from typing import Any

import pytest

from planner.answers.replan import MigrationCost, replan
from planner.cost.basis import Measurements, Workload
from planner.cost.layers.layer_costs import MemoryChoices
from planner.cost.memory.host_memory import USABLE, Kept
from planner.cost.memory.offload import UPDATE_BYTES
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan, Recompute, Stage
from planner.search.problem.request import Request
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, profile

WIDTH, LAYERS, LENGTH = 256, 4, 128
DEEP = 16
OWN = replace(framework_parameters(OURS, CostParameters()), context_bytes=0.0, context_share=0.0)
MIB = 2**20


def request(
    mib: float,
    *,
    nodes: int = 1,
    offload: bool = True,
    host_mib: float | None = None,
    gpu: str = "A100",
    parameters: CostParameters = OWN,
) -> Request:
    """One GPU a node, and one stage a pipeline."""
    spec = model(LAYERS, WIDTH, vocab=500)
    of = fleet((gpu, nodes, 1), memory_gib={gpu: mib / 1024})
    host = None if host_mib is None else int(host_mib * MIB)
    kinds = (replace(node.node_type, host_memory_bytes=host) for node in of.nodes)
    placed = (replace(n, node_type=kind) for n, kind in zip(of.nodes, kinds, strict=True))
    of = Fleet(0, tuple(placed))
    cost = CostModel(
        of,
        Workload(spec, LENGTH, "fp32"),
        Measurements(profile(seconds={gpu: 1e-3})),
        parameters,
        choices=MemoryChoices(("none",), offload=offload),
    )
    wishes: dict[str, Any] = {"max_stages": 1, "prove": False}
    return Request(of, spec, cost, 8, LENGTH, microbatch_sequences=1, **wishes)


def plan_of(asked: Request, *, offload: bool, shard: bool = False) -> Plan:
    stages = (
        Stage(0, LAYERS, (worker,), shard_optimizer=shard, offload_optimizer=offload)
        for worker in asked.fleet.workers
    )
    count = 8 // len(asked.fleet.workers)
    return Plan("tiny", 8, 1, LENGTH, tuple(Pipeline((each,), count, 1) for each in stages))


def parameters_of(asked: Request) -> float:
    spec = asked.spec
    return sum(float(layer.parameters) for layer in (spec.embedding, *spec.blocks, spec.head))


def needed_mib(*, offload: bool) -> float:
    asked = request(1 << 20)
    plan = plan_of(asked, offload=offload)
    return max(asked.cost.memory_of.by_worker(plan).values()) / MIB


def between() -> float:
    """MiB of a GPU that holds the plan with its optimizer state in host memory alone."""
    return (needed_mib(offload=False) + needed_mib(offload=True)) / 2 / (1 - OWN.memory_margin)


def test_masters_and_moments_leave_the_gpu_and_a_copy_of_the_weights_stays() -> None:
    """In fp32: 12 bytes a parameter go, 4 of what is computed with come."""
    asked = request(1 << 20)
    saved = (needed_mib(offload=False) - needed_mib(offload=True)) * MIB
    assert saved == pytest.approx(8 * parameters_of(asked), rel=1e-6)
    held = asked.cost.memory_of.offloaded_by_node(plan_of(asked, offload=True))
    assert held["a100-0"] == pytest.approx(12 * parameters_of(asked))
    assert asked.cost.memory_of.offloaded_by_node(plan_of(asked, offload=False)) == {}


def test_the_update_takes_the_copies_and_the_hosts_time() -> None:
    asked = request(1 << 20)
    here, there = (asked.cost.predict(plan_of(asked, offload=each)) for each in (False, True))
    count = parameters_of(asked)
    update = UPDATE_BYTES * count / OWN.host_update_bytes_per_s
    weights = max(4 * count / OWN.host_link_bytes_per_s, 8 * count / OWN.host_update_bytes_per_s)
    assert there.breakdown_s["optimizer"] == pytest.approx(update + weights)
    assert there.step_time_s > here.step_time_s


def with_inputs_moved(
    mib: float, host_mib: float | None = None, parameters: CostParameters = OWN
) -> Request:
    """A pipeline of two GPUs that may recompute all, and move inputs of blocks to host memory."""
    asked = request(mib, nodes=2, offload=False, host_mib=host_mib)
    spec = model(DEEP, WIDTH, vocab=500)
    choices = MemoryChoices(("none", "full"), offload_inputs=True)
    cost = CostModel(
        asked.fleet,
        Workload(spec, LENGTH, "fp32"),
        Measurements(profile(seconds={"A100": 1e-3})),
        parameters,
        choices=choices,
    )
    wishes: dict[str, Any] = {"max_stages": 2, "microbatch_sequences": 8}
    return replace(asked, spec=spec, cost=cost, global_batch_sequences=64, **wishes)


def two_stages(recompute: Recompute) -> Plan:
    workers = with_inputs_moved(1 << 20).fleet.workers
    halves = (
        Stage(0, DEEP // 2, workers[:1], recompute=recompute),
        Stage(DEEP // 2, DEEP // 2, workers[1:], recompute=recompute),
    )
    return Plan("tiny", 64, 8, LENGTH, (Pipeline(halves, 8, 8),))


INPUT_BYTES = 8 * LENGTH * WIDTH * 4
"""Of one block, for one microbatch in fp32."""


def test_inputs_of_blocks_leave_the_gpu_but_for_two_on_their_way() -> None:
    asked = with_inputs_moved(1 << 20)
    full, moved = (asked.cost.memory_of.by_worker(two_stages(way)) for way in ("full", "offload"))
    first, last = asked.fleet.workers
    # eight blocks each, with two microbatches in flight and with one
    assert full[first] - moved[first] == pytest.approx((2 * 8 - 1 - 2) * INPUT_BYTES, abs=2)
    assert full[last] - moved[last] == pytest.approx((8 - 1 - 2) * INPUT_BYTES, abs=2)
    assert asked.cost.memory_of.offloaded_by_node(two_stages("full")) == {}
    held = asked.cost.memory_of.offloaded_by_node(two_stages("offload"))
    assert held == {"a100-0": 16 * INPUT_BYTES, "a100-1": 8 * INPUT_BYTES}


def test_copies_of_inputs_take_time_only_where_they_are_longer_than_the_passes() -> None:
    asked = with_inputs_moved(1 << 20)
    full, moved = (asked.cost.predict(two_stages(way)) for way in ("full", "offload"))
    assert moved.step_time_s == full.step_time_s
    # ten seconds a block and pass: 8 microbatches over two stages of eight blocks
    slow = replace(OWN, host_link_bytes_per_s=INPUT_BYTES / 10.0)
    asked = with_inputs_moved(1 << 20, parameters=slow)
    moved = asked.cost.predict(two_stages("offload"))
    assert moved.step_time_s == pytest.approx((8 + 1) * 8 * 2 * 10.0, rel=0.01)


def test_inputs_are_moved_only_where_nothing_else_fits_and_host_memory_has_room() -> None:
    def needed(way: Recompute) -> float:
        used = with_inputs_moved(1 << 20).cost.memory_of.by_worker(two_stages(way))
        return max(used.values()) / MIB / (1 - OWN.memory_margin)

    answer = plan_with("autohet", with_inputs_moved(needed("full") + 1))
    assert all(stage.recompute != "offload" for stage in answer.plan.stages)
    between = (needed("full") + needed("offload")) / 2
    answer = plan_with("autohet", with_inputs_moved(between))
    assert any(stage.recompute == "offload" for stage in answer.plan.stages)
    assert "inputs of blocks" in answer.choice
    with pytest.raises(InfeasibleError):
        plan_with("autohet", with_inputs_moved(between, host_mib=1.0))


def test_shared_out_state_takes_its_part_of_host_memory_and_of_the_update() -> None:
    asked = request(1 << 20, nodes=4)
    alone, shared = (plan_of(asked, offload=True, shard=shard) for shard in (False, True))
    whole, part = (asked.cost.memory_of.offloaded_by_node(each) for each in (alone, shared))
    assert part["a100-0"] == pytest.approx(whole["a100-0"] / 4)
    assert asked.cost.memory_of.by_worker(alone) == asked.cost.memory_of.by_worker(shared)
    seconds = [asked.cost.predict(each).breakdown_s["optimizer"] for each in (alone, shared)]
    assert seconds[1] == pytest.approx(seconds[0] / 4)


def test_what_fits_only_so_is_planned_so_and_said_with_its_price() -> None:
    asked = request(between())
    answer = plan_with("autohet", asked)
    assert answer.plan.offloads
    assert "host memory" in answer.choice
    assert f"{answer.prediction.breakdown_s['optimizer']:.3g} s" in answer.choice
    # Whoever reads the plan predicts the same of it.
    again = request(between()).cost.predict(answer.plan)
    assert again.memory_bytes_by_worker == answer.prediction.memory_bytes_by_worker
    assert again.step_time_s == pytest.approx(answer.prediction.step_time_s)


def test_where_the_gpus_hold_the_state_it_stays_there() -> None:
    assert not plan_with("autohet", request(2 * needed_mib(offload=False))).plan.offloads


@pytest.mark.parametrize(
    "wishes",
    [
        {"offload": False},
        {"gpu": "CPU"},  # the same memory
        {"host_mib": 20.0},
    ],
)
def test_where_it_may_not_or_cannot_help_nothing_is_planned(wishes: dict[str, Any]) -> None:
    with pytest.raises(InfeasibleError):
        plan_with("autohet", request(between(), **wishes))


def test_too_little_host_memory_is_named_with_its_limit() -> None:
    asked = request(1 << 20, host_mib=20.0)
    prediction = asked.cost.predict(plan_of(asked, offload=True))
    assert prediction.fits_devices
    assert not prediction.fits
    assert "a100-0 would have to keep" in str(prediction.not_offloaded)
    assert "autohet.io/host-memory-gib" in str(prediction.not_offloaded)


def test_snapshots_get_what_the_state_leaves_of_host_memory() -> None:
    asked = request(1 << 20, host_mib=100.0)
    here, there = (
        asked.cost.memory_of.host_memory(plan_of(asked, offload=each), Kept())[0]
        for each in (False, True)
    )
    assert here.offloaded_bytes == 0
    assert there.offloaded_bytes == there.state_bytes == here.state_bytes
    free = USABLE * 100 * MIB - there.offloaded_bytes
    assert there.room_bytes == pytest.approx(min(here.room_bytes, free))
    assert there.to_document()["offloaded_bytes"] == int(there.offloaded_bytes)


def test_a_job_is_not_refused_for_a_change_that_may_never_come() -> None:
    """Host memory holds the state once, not the next plan's beside it."""
    once = 12 * parameters_of(request(1)) / MIB
    answer = plan_with("autohet", request(between(), host_mib=1.5 * once / USABLE))
    assert answer.plan.offloads
    assert answer.prediction.not_offloaded is None
    assert "of optimizer state of a100-0" in str(answer.prediction.not_staged)


def test_a_wish_for_it_holds_for_every_plan() -> None:
    always = replace(OWN, offload_optimizer=True)
    answer = plan_with("autohet", request(1 << 20, offload=False, parameters=always))
    assert answer.plan.offloads
    plain = request(1 << 20).cost.predict(answer.plan)
    assert plain.step_time_s == pytest.approx(answer.prediction.step_time_s)


def test_a_replan_goes_on_slower_where_the_gpus_left_do_not_hold_the_state() -> None:
    """Two nodes share the state out; one alone does not hold it."""
    mib = between()
    both = request(mib, nodes=2)
    previous = plan_of(both, offload=False, shard=True)
    left = request(mib)
    decision = replan(previous, left)
    assert decision.kind == "move"
    assert decision.answer.plan.offloads
    with pytest.raises(InfeasibleError):
        replan(previous, request(mib, offload=False))


def test_a_replan_on_more_gpus_needs_no_host_memory_any_more() -> None:
    small = request(between())
    previous = plan_with("autohet", small).plan
    roomy = request(4 * needed_mib(offload=False), nodes=2)
    decision = replan(previous, roomy, migration=MigrationCost(horizon_s=1e6))
    assert not decision.answer.plan.offloads
