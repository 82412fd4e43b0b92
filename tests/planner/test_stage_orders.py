"""Orders of stages out of groups of several kinds, against every order and cut."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.plan import check_plan
from planner.search.cost_tables import tables_of
from planner.search.draft import Estimator, Shape
from planner.search.tables import Tables
from planner.strategies import plan_with
from planner.strategies.interleave import interleaved
from planner.strategies.stage_orders import best_orders
from tests.planner.cases import fleet, model, request


def _bottleneck_s(tables: Tables, shape: Shape, microbatches: int) -> float:
    """The longest stage, each as long as it may be longer than the last: T >= K t - min(K - 1, ahead) f, over K - 1."""
    depth, worst = len(shape.rows), 0.0
    for s, (row, start, end) in enumerate(zip(shape.rows, shape.starts, shape.ends, strict=True)):
        if end > tables.fitting(depth)[row, depth - 1 - s, start]:
            return np.inf
        ahead = min(1.0, tables.begun_ahead * (depth - 1 - s) / max(microbatches - 1, 1))
        busy = tables.time_sums[row, end] - tables.time_sums[row, start]
        worst = max(worst, (busy + tables.stage_overhead_s) * (1 - ahead * tables.forward_share[row]))
    return worst


def _cuts(layers: int, depth: int) -> list[tuple[int, ...]]:
    """Ends of stages of a block or more, embedding and head beside one."""
    return [(*ends, layers) for ends in itertools.combinations(range(2, layers - 1), depth - 1)]


@pytest.mark.parametrize("memory_gib", [24.0, 1.15])
@settings(max_examples=12, deadline=None)
@example(
    counts=(1, 0, 2), blocks=4, microbatches=13
)  # two stages could reach all but the first block, and three hide more
@given(counts=st.tuples(*[st.integers(0, 2)] * 3), blocks=st.integers(1, 6), microbatches=st.integers(1, 20))
def test_each_number_of_stages_gets_the_best_order_and_cut(
    memory_gib: float, counts: tuple[int, int, int], blocks: int, microbatches: int
) -> None:
    of = fleet(
        ("A100", 2, 1), ("A10G", 2, 1), ("T4", 2, 1), memory_gib=dict.fromkeys(("A100", "A10G", "T4"), memory_gib)
    )
    asked = request(of, 8, model(blocks, 256, 1000), max_microbatch_sequences=1)
    tables = tables_of(asked)
    groups = {row: count for row, count in enumerate(counts) if count}
    found = {len(shape.rows): shape for shape in best_orders(tables, groups, microbatches, 6, 0.1)} if groups else {}
    fewer_s = 0.1
    for depth in range(1, min(sum(counts), blocks) + 1):
        orders = set(itertools.permutations([row for row, count in groups.items() for _ in range(count)], depth))
        every = (Shape(rows, ends) for rows in orders for ends in _cuts(tables.num_layers, depth))
        best = min(_bottleneck_s(tables, shape, microbatches) for shape in every)
        if best < fewer_s * 0.95:
            assert _bottleneck_s(tables, found[depth], microbatches) <= best * 1.03
        fewer_s = min(fewer_s, best)


@settings(max_examples=8, deadline=None)
@given(a100=st.integers(1, 3), t4=st.integers(1, 3), batch=st.integers(4, 24))
def test_other_orders_are_whole_plans_of_the_fleet(a100: int, t4: int, batch: int) -> None:
    asked = request(fleet(("A100", a100, 1), ("T4", t4, 1)), batch, model(7))
    tables = tables_of(asked)
    for plan in interleaved(asked, tables, Estimator(tables), plan_with("megatron", asked).plan):
        check_plan(plan, 7)
        assert set(plan.workers) <= set(asked.fleet.workers)


def test_frameworks_whose_stages_do_not_work_ahead_are_left_alone() -> None:
    asked = request(fleet(("A100", 2, 1), ("T4", 2, 1)), 8, model(6), "megatron")
    tables = tables_of(asked)
    assert not list(interleaved(asked, tables, Estimator(tables), plan_with("megatron", asked).plan))
