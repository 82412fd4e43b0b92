"""Orders of stages beside every order there is, and placements of parts on nodes of their own."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from planner.errors import InfeasibleError
from planner.inputs.fleet import node_of
from planner.search.drafts.cut import Balancer
from planner.search.drafts.draft import Draft, Estimator, Shape, steady_s
from planner.search.drafts.orders import Orders, neighbours, rows_of, supply_of
from planner.search.drafts.place import place_by_stage
from planner.search.drafts.unlike import uncut_in_divisions
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.tables import Tables
from tests.planner.cases import fleet, model, request

few = st.lists(
    st.tuples(st.sampled_from(("A100", "A10G", "T4")), st.integers(1, 2), st.sampled_from((1, 2))),
    min_size=1,
    max_size=3,
    unique_by=lambda t: t[0],
)


def some_tables(types: list, blocks: int, memory_gib: dict[str, float]) -> Tables:
    """Return tables of a fleet; an example whose GPUs hold no part of the model is left out."""
    of = fleet(*types, memory_gib=memory_gib)
    try:
        return tables_of(request(of, 8, model(blocks, 1024, 2000), prove=False))
    except InfeasibleError:
        reject()


def every_order(tables: Tables, supply: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return each sequence of rows that the supply can form, by enumeration."""
    out = []
    for depth in range(1, min(tables.num_blocks, sum(supply)) + 1):
        for rows in itertools.product(rows_of(tables, supply, size), repeat=depth):
            used = [0] * len(supply)
            for row in rows:
                used[tables.kind(row).resource] += tables.kind(row).tp_degree
            if all(mine <= most for mine, most in zip(used, supply, strict=True)):
                out.append(rows)
    return out


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    types=few,
    blocks=st.integers(2, 5),
    size=st.sampled_from((1, 2)),
    gib=st.tuples(*(st.sampled_from((1.4, 1.6, 24.0)) for _ in range(3))),
)
def test_no_order_has_a_much_smaller_bottleneck(
    types: list, blocks: int, size: int, gib: tuple[float, ...]
) -> None:
    """For each type of the last stage, and each number of stages at most."""
    tables = some_tables(types, blocks, dict(zip(("A100", "A10G", "T4"), gib, strict=True)))
    supply = supply_of(tables, 1, range(len(tables.resources)))
    balancer = Balancer(tables)

    def bottlenecks(orders: list[tuple[int, ...]]) -> dict[tuple[int, int], float]:
        best: dict[tuple[int, int], float] = {}
        for rows, cut in zip(orders, balancer.cut_each(orders), strict=True):
            for depth in range(len(rows), blocks + 1):
                key = tables.kind(rows[-1]).resource, depth
                best[key] = min(best.get(key, math.inf), cut.bottleneck_s)
        return best

    found = bottlenecks(list(Orders(tables, supply, size).found()))
    widest = max(Orders(tables, supply, size).levels)
    for key, least_s in bottlenecks(every_order(tables, supply, size)).items():
        if least_s * limits.LEVEL**2 <= widest:  # beyond the levels none is looked for
            assert found.get(key, math.inf) <= least_s * limits.LEVEL**2


def _gpus(tables: Tables, rows: tuple[int, ...]) -> tuple[int, ...]:
    used = [0] * len(tables.resources)
    for row in rows:
        used[tables.kind(row).resource] += tables.kind(row).tp_degree
    return tuple(used)


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(types=few, blocks=st.integers(2, 4), gib=st.sampled_from((1.4, 24.0)))
def test_no_pipeline_of_any_gpus_has_a_much_smaller_bottleneck(
    types: list, blocks: int, gib: float
) -> None:
    """Or one of fewer GPUs and stages has it, too."""
    tables = some_tables(types, blocks, {"A100": 24.0, "A10G": gib, "T4": 24.0})
    supply = supply_of(tables, 1, range(len(tables.resources)))
    balancer = Balancer(tables)

    best = np.full([gpus + 1 for gpus in supply], math.inf)
    within = {}
    for uses in Orders(tables, supply, 1, levels=80).by_use():
        for use in np.argwhere(np.isfinite(uses.seconds)).tolist():
            rows = uses.order(tuple(use))
            assert _gpus(tables, rows) == tuple(use)
            assert len(rows) == uses.depth
            found_s = balancer.cut_each([rows])[0].bottleneck_s
            best[tuple(use)] = min(best[tuple(use)], found_s)
        within[uses.depth] = best.copy()

    every = every_order(tables, supply, 1)
    for rows, cut in zip(every, balancer.cut_each(every), strict=True):
        part = within[len(rows)][tuple(slice(0, gpus + 1) for gpus in _gpus(tables, rows))]
        assert math.isinf(cut.bottleneck_s) or part.min() <= cut.bottleneck_s * limits.LEVEL**2


def test_two_kinds_of_pipelines_are_divided_as_enumeration_divides_them() -> None:
    """A lone A100 node serves one pipeline, since each layer is to lie on two nodes."""
    of = fleet(("A100", 1, 2), ("A10G", 2, 1), ("T4", 1, 1))
    tables = tables_of(request(of, 24, model(3, 1024, 2000), prove=False))
    found = uncut_in_divisions(tables, 2)
    lone = [at for at, each in enumerate(tables.resources) if each.num_nodes == 1]
    assert len(lone) == 2
    for uncut in found:
        uses = [_gpus(tables, rows) for rows, _ in uncut.pipelines]
        numbers = [number for _, number in uncut.pipelines]
        taken = np.array(numbers) @ np.array(uses)
        assert (taken <= [each.num_gpus for each in tables.resources]).all()
        for at in lone:
            assert sum(number for use, number in zip(uses, numbers, strict=True) if use[at]) <= 1

    estimator = Estimator(tables)
    balancer = Balancer(tables)

    def seconds(pipelines: Iterable[tuple[tuple[int, ...], int]]) -> float:
        cut = [(balancer.cut_each([rows])[0], number) for rows, number in pipelines]
        if not all(math.isfinite(each.bottleneck_s) for each, _ in cut):
            return math.inf
        return steady_s(estimator, [(each.shape, number) for each, number in cut], tables.batch)

    supply = supply_of(tables, 1, range(len(tables.resources)))
    best_s = math.inf
    for size in tables.sizes:
        every = every_order(tables, supply, size)
        for first, second in itertools.combinations(every, 2):
            uses = np.array([_gpus(tables, first), _gpus(tables, second)])
            is_apart = (uses[:, lone].astype(bool).sum(axis=0) <= 1).all()
            if is_apart and (uses.sum(axis=0) <= supply).all():
                best_s = min(best_s, seconds([(first, 1), (second, 1)]))
    assert min(seconds(uncut.pipelines) for uncut in found) <= best_s * 1.02


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(types=few, draw=st.data())
def test_neighbours_stay_within_the_supply(types: list, draw: st.DataObject) -> None:
    tables = tables_of(request(fleet(*types), 8, model(4), prove=False))
    supply = supply_of(tables, 1, range(len(tables.resources)))
    allowed = set(every_order(tables, supply, 1))
    rows = draw.draw(st.sampled_from(sorted(allowed)))
    found = neighbours(tables, rows, supply)
    assert set(found) <= allowed - {rows}
    assert all(abs(len(each) - len(rows)) <= 1 for each in found)
    one_off = {each for each in allowed if len(each) == len(rows) and differ(each, rows) == 1}
    assert one_off <= set(found)


def differ(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("nodes", "is_apart"), [(2, True), (1, False)])
def test_each_part_begins_a_node_if_there_are_enough(nodes: int, is_apart: bool) -> None:
    """Two pipelines of three GPUs on nodes of four: one node each, where there are two."""
    tables = tables_of(request(fleet(("A100", nodes, 8)), 8, model(6), prove=False))
    row = tables.row_by_use[tables.resources[0].node_type, 1, 1]
    shape = Shape((row,) * 3, (3, 5, 8))
    plan = place_by_stage(tables, Draft(((shape, 4), (shape, 4))), 2)
    assert plan is not None
    first, second = ({node_of(w) for w in pipeline.workers} for pipeline in plan.pipelines)
    assert first.isdisjoint(second) == is_apart
