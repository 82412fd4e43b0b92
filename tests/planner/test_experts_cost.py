"""What experts cost beyond their FLOPs: tiles, weights, and ranks that hold most of the load."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from planner.cost.layers.experts import (
    TILE_ROWS,
    USUAL_LOAD_SPREAD,
    imbalance,
    largest_rank_loads,
    load_spread,
    padded_share,
)
from planner.cost.layers.layer_seconds import LayerTimeModel
from planner.cost.layers.measured_layers import MeasuredLayers
from planner.cost.layers.roofline import LayerWork, grouped_seconds
from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import find_gpu_type
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.model_spec import Experts, ModelSpec
from planner.plans.plan import TensorShare
from tests.planner.cases import model

WIDTH, LENGTH = 256, 128
EVEN = Experts(8, 2, 8 * 3 * WIDTH * WIDTH)


def spec_of(experts: Experts = EVEN) -> ModelSpec:
    """A model whose blocks have these experts beside an attention of 4 * WIDTH^2 weights."""
    spec = model(4, WIDTH)
    attention = 4 * WIDTH * WIDTH
    used = experts.parameters * experts.per_token // experts.number
    block = replace(
        spec.blocks[0],
        parameters=attention + experts.parameters,
        replicated_parameters=0,
        matmul_parameters=attention + used,
        experts=experts,
    )
    return replace(spec, blocks=(block,) * 4)


def times_of(
    spec: ModelSpec, degrees: tuple[int, ...] = (1,), spread: float | None = None
) -> LayerTimeModel:
    """Layer times of a profile with a second for each layer and TP degree."""
    table = ProfileTable(
        Measurement("tiny", "A100", "fp32", degree, LENGTH, 1, layer, 1.0, 2.0, 0.0,
                    expert_load_spread=spread)
        for degree in degrees
        for layer in ("embedding", "block", "head")
    )  # fmt: skip
    parameters = CostParameters(launch_exposure=1.0)
    return LayerTimeModel(
        MeasuredLayers(table, spec, "tiny", "fp32", LENGTH), parameters, lambda *_: 0.0
    )


def routed_share(spec: ModelSpec) -> float:
    experts = spec.blocks[0].experts
    assert experts is not None
    used = experts.parameters * experts.per_token / experts.number
    return 2 * used * LENGTH / spec.blocks[0].forward_flops(LENGTH)


def test_equal_loads_on_equal_ranks_add_nothing() -> None:
    assert imbalance(EVEN, 2, 1 / 4, 4, 0.0) == 1.0
    assert imbalance(EVEN, 8, 1.0, 1, 5.0) == 1.0, "one rank has all of the load"


def test_the_largest_of_the_ranks_follows_the_spread() -> None:
    """Beside the mean of many draws, for groups of two to eight ranks."""
    experts, spread, draw = Experts(32, 4, 1), 0.3, random.Random(0)
    for held, ranks in ((16, 2), (8, 4), (4, 8)):
        largest = []
        for _ in range(3000):
            loads = [draw.gauss(1.0, spread) for _ in range(experts.number)]
            parts = [sum(loads[first : first + held]) for first in range(0, len(loads), held)]
            largest.append(max(parts) / sum(loads) * ranks)
        assert imbalance(experts, held, 1 / ranks, ranks, spread) == pytest.approx(
            fmean(largest), rel=0.02
        )


def test_the_largest_load_has_the_experts_that_the_parts_do_not_divide() -> None:
    even, uneven = largest_rank_loads(8, 0.0, (2, 4)), largest_rank_loads(5, 0.0, (2, 4))
    assert even == [1.0, 1.0]
    assert uneven == [pytest.approx(6 / 5), pytest.approx(8 / 5)]


def test_the_spread_is_that_of_the_loads() -> None:
    assert load_spread([3.0, 3.0, 3.0]) == 0.0
    assert load_spread([1.0, 3.0]) == 0.5


def test_few_tokens_of_an_expert_fill_no_tile() -> None:
    experts = Experts(64, 4, 1)
    assert padded_share(experts, 16) == TILE_ROWS
    assert padded_share(experts, 64 * 1024) == pytest.approx(1 + TILE_ROWS / 2 / 4096)


def test_a_pass_reads_the_weights_of_all_experts() -> None:
    """With few tokens the memory's rate counts, however few FLOPs there are."""
    block, parameters = spec_of().blocks[0], CostParameters()
    device = find_gpu_type("A100-40")
    assert device is not None
    work = LayerWork("block", block, "bf16", 1, 1, 1)
    forward_s, backward_s = grouped_seconds(device, work, parameters)
    read_s = EVEN.parameters * 2 / (device.memory_bytes_per_s * parameters.memory_efficiency)
    assert forward_s == pytest.approx(read_s, rel=0.01)
    assert backward_s > forward_s
    dense = replace(work, layer=replace(block, experts=None))
    assert grouped_seconds(device, dense, parameters) == (0.0, 0.0)


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_a_group_waits_for_the_rank_with_most_tokens(spread: float) -> None:
    """By the measured spread; a measured group has only the loads of its even routing added."""
    spec = spec_of()
    load = imbalance(EVEN, 4, 1 / 2, 2, spread)
    expected = 1 + routed_share(spec) * (load - 1)
    assert (expected == 1.0) == (spread == 0.0)
    by_degree = times_of(spec, (1,), spread).times("A100", 2, 1)
    assert by_degree.forward_s[1] == pytest.approx(0.5 * expected)
    measured = times_of(spec, (1, 2), spread).times("A100", 2, 1)
    assert measured.backward_s[1] == pytest.approx(2.0 * expected)
    assert measured.forward_s[0] == 1.0, "an embedding has no experts"
    assert times_of(spec, (1,), spread).times("A100", 1, 1).forward_s[1] == 1.0


def test_an_assumed_spread_is_said() -> None:
    said = times_of(spec_of()).times("A100", 2, 1).estimated
    assert any(f"{USUAL_LOAD_SPREAD:.0%}" in note for note in said)
    assert not any(
        "loads" in note for note in times_of(spec_of(), (1,), 0.3).times("A100", 2, 1).estimated
    )


def test_experts_that_the_parts_do_not_divide() -> None:
    """Of 5 experts on 4 ranks one has two: it takes 8/5 of a quarter's work, and holds as much."""
    experts = Experts(5, 2, 5 * 3 * WIDTH * WIDTH)
    spec = spec_of(experts)
    one = 3 * WIDTH * WIDTH
    assert spec.blocks[0].parameters_per_worker(4) == WIDTH * WIDTH + 2 * one
    times = times_of(spec, (1,), 0.0).times("A100", 4, 1)
    assert times.forward_s[1] == pytest.approx(0.25 * (1 + routed_share(spec) * (8 / 5 - 1)))
    measured = times_of(spec, (1, 4), 0.0).times("A100", 4, 1)
    assert measured.forward_s[1] == 1.0, "the group was measured with its two experts on a rank"


def test_a_rank_has_the_experts_of_its_parts() -> None:
    """Of 5 experts on 8 parts, the parts from 0 to 3 have one, and those from 3 to 6 two."""
    spec = spec_of(Experts(5, 2, 5 * 3 * WIDTH * WIDTH))
    few, many = TensorShare(0, 3, 8), TensorShare(5, 8, 8)
    one = 3 * WIDTH * WIDTH
    for share, held in ((few, 1), (many, 2)):
        block = spec.with_share(share).blocks[0]
        expected = 4 * WIDTH * WIDTH * 3 / 8 + held * one
        assert block.parameters_per_worker(8 / 3) == pytest.approx(expected)
    times = times_of(spec, (1,), 0.0)
    assert (
        times.times("A100", 3, 1, share=few).forward_s[1]
        < (times.times("A100", 3, 1, share=many).forward_s[1])
    )
