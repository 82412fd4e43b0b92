"""What must hold of every search: more or faster GPUs never hurt, equal GPUs are used evenly or
better, odd numbers work, processes agree, and what cannot be done says which limit is in the way.
"""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.plan_checks import check_plan
from planner.strategies import STRATEGIES, Request, plan_with
from tests.planner.cases import SECONDS_PER_BLOCK, fleet, model, profile, request

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
SOME = settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
SMALL = {"autohet", "exhaustive"}
PIPELINED = set(STRATEGIES) - {"hap"}
"""hap wants a model whose graph is known: tests/planner/test_hap.py."""
gpu_types = st.sampled_from(("A100", "A10G", "T4"))


def _seconds(strategy: str, asked: Request) -> float:
    return plan_with(strategy, asked).prediction.step_time_s


@pytest.mark.parametrize("strategy", sorted(SMALL))
@SOME
@given(
    types=st.lists(gpu_types, min_size=2, max_size=4),
    width=st.sampled_from((32, 256)),
    batch=st.integers(2, 7),
    layers=st.integers(1, 3),
)
def test_one_more_gpu_never_hurts(
    strategy: str, types: list[str], width: int, batch: int, layers: int
) -> None:
    counts = {gpu: types.count(gpu) for gpu in sorted(set(types))}
    more = {gpu: count - (gpu == types[-1]) for gpu, count in counts.items()}
    small, large = (fleet(*((g, n, 1) for g, n in c.items() if n)) for c in (more, counts))
    spec = model(layers, width=width, vocab=1000)
    few, many = (request(of, batch, spec, max_microbatch_sequences=2) for of in (small, large))
    assert _seconds(strategy, many) <= _seconds(strategy, few) * (1 + 1e-9)


@pytest.mark.parametrize("strategy", sorted(SMALL))
@SOME
@given(
    types=st.lists(gpu_types, min_size=1, max_size=3),
    faster=gpu_types,
    factor=st.floats(1.0, 4.0),
    batch=st.integers(1, 7),
    layers=st.integers(1, 3),
)
def test_a_faster_gpu_type_never_hurts(
    strategy: str, types: list[str], faster: str, factor: float, batch: int, layers: int
) -> None:
    of = fleet(*((gpu, types.count(gpu), 1) for gpu in sorted(set(types))))
    before = request(of, batch, model(layers, width=32, vocab=1000), max_microbatch_sequences=2)
    seconds = SECONDS_PER_BLOCK | {faster: SECONDS_PER_BLOCK[faster] / factor}
    cost = CostModel(of, Workload(before.spec, 128, "fp32"), Measurements(profile(seconds)))
    after = dataclasses.replace(before, cost=cost)
    assert _seconds(strategy, after) <= _seconds(strategy, before) * (1 + 1e-9)


@SOME
@given(
    gpu=gpu_types,
    nodes=st.integers(1, 4),
    gpus=st.sampled_from((1, 2, 4)),
    batch=st.integers(1, 32),
)
def test_equal_gpus_get_a_symmetric_plan_or_a_better_one(
    gpu: str, nodes: int, gpus: int, batch: int
) -> None:
    asked = request(fleet((gpu, nodes, gpus)), batch, model(6))
    ours = _seconds("autohet", asked)
    for grid in ("megatron", "varuna"):
        assert ours <= _seconds(grid, asked) * (1 + 1e-9)


@pytest.mark.parametrize("strategy", sorted(PIPELINED - {"exhaustive"}))
@pytest.mark.parametrize(
    ("types", "batch", "layers"),
    [
        ((("A100", 1, 5),), 13, 7),
        ((("A10G", 7, 1),), 31, 5),
        ((("A100", 1, 3), ("T4", 2, 5)), 17, 11),
        ((("T4", 1, 1),), 1, 1),
    ],
    ids=["5 GPUs", "7 nodes", "3 and 10 GPUs", "1 of each"],
)
def test_odd_numbers_work(strategy: str, types: tuple, batch: int, layers: int) -> None:
    asked = request(fleet(*types), batch, model(layers, width=64, vocab=1000))
    answer = plan_with(strategy, asked)
    check_plan(answer.plan, layers)
    assert sum(pipeline.num_sequences for pipeline in answer.plan.pipelines) == batch
    assert answer.prediction.fits
    idle = [worker for item in answer.idle for worker in item.workers]
    assert sorted([*answer.plan.workers, *idle]) == sorted(asked.fleet.workers)
    assert all(item.why for item in answer.idle)


def test_every_strategy_gives_the_same_plan_in_every_process() -> None:
    code = (
        "from tests.planner.cases import *; from planner.strategies import STRATEGIES,"
        " plan_with\nasked = request(fleet(('A100', 1, 2), ('A10G', 2, 1)), 7, model(4),"
        " max_microbatch_sequences=2)\nfor name in sorted(set(STRATEGIES) - {'hap'}):"
        " print(plan_with(name, asked).plan.to_json())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
            timeout=1800,
        ).stdout
        for seed in ("0", "1", "99")
    }
    assert len(found) == 1
    assert len(found.pop().splitlines()) == len(PIPELINED)


def test_autohet_finds_the_same_plan_however_late_its_clock_says_it_is() -> None:
    """Each look at this clock is an hour after the one before."""
    asked = request(fleet(("A100", 1, 2), ("A10G", 2, 1)), 7, model(4))
    late = dataclasses.replace(asked, clock=itertools.count(0, 3600).__next__, time_limit_s=1.0)
    assert plan_with("autohet", late).plan == plan_with("autohet", asked).plan


@pytest.mark.parametrize("strategy", ["metis", "fasop"])
def test_a_search_with_a_time_limit_ends_at_it_with_what_it_has(strategy: str) -> None:
    """A limit of some hundred looks at a clock that counts them: fewer plans are tried than
    without, and one of them is chosen.
    """
    asked = request(fleet(("A100", 4, 1), ("A10G", 4, 1), ("T4", 4, 1)), 24, model(12))
    free = plan_with(strategy, asked)
    limited = plan_with(
        strategy, dataclasses.replace(asked, clock=itertools.count().__next__, time_limit_s=1.0)
    )
    assert limited.search.plans_evaluated < free.search.plans_evaluated
    assert limited.prediction.fits


@pytest.mark.parametrize("strategy", sorted(PIPELINED - {"exhaustive"}))
def test_what_does_not_fit_in_sum_names_what_is_lacking(strategy: str) -> None:
    asked = request(
        fleet(("A100", 2, 1), memory_gib={"A100": 3.0}), 4, model(6, width=2048, vocab=1000)
    )
    with pytest.raises(InfeasibleError, match=r"\d GiB too little") as error:
        plan_with(strategy, asked)
    larger = request(
        fleet(("A100", 2, 1), memory_gib={"A100": 80.0}), 4, model(6, width=2048, vocab=1000)
    )
    assert plan_with(strategy, larger).prediction.fits
    assert "GPU" in str(error.value)


@pytest.mark.parametrize("strategy", sorted(PIPELINED))
def test_an_empty_fleet_and_an_empty_batch_are_named(strategy: str) -> None:
    asked = request(fleet(("A100", 1, 1)), 4, model(4))
    with pytest.raises(InfeasibleError, match=r"no GPU|none of 0 plans"):
        plan_with(strategy, dataclasses.replace(asked, fleet=Fleet(0, ())))
    with pytest.raises(ConfigError, match="global_batch_sequences is 0"):
        plan_with(strategy, dataclasses.replace(asked, global_batch_sequences=0))


@pytest.mark.parametrize("strategy", sorted(PIPELINED - {"exhaustive"}))
def test_a_price_below_the_cheapest_node_is_named(strategy: str) -> None:
    asked = request(fleet(("A100", 2, 1)), 4, model(4, width=64, vocab=1000), max_usd_per_hour=0.5)
    with pytest.raises(InfeasibleError, match=r"0\.50 \$/h.*costs 1\.00 \$/h, 0\.50 more"):
        plan_with(strategy, asked)
