"""Generated pipelines against every pipeline that there is, paths in zones against every path, lateness against the simulated sync."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from planner.plan import check_plan
from planner.search.cost_tables import tables_of
from planner.search.draft import Draft, Shape
from planner.search.paths import Paths, PricedStages, Zone
from planner.search.place import place_by_copies
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.alike import alike_plans
from planner.strategies.assembly import Assembly, assembled_plans
from planner.strategies.autohet import Costed, choose
from planner.strategies.generation import Column, Pool
from planner.strategies.lateness import Lateness, early_s, ready_s
from planner.strategies.refine import fits
from planner.strategies.symmetric import draft_of
from tests.planner.cases import fleet, model, request
from tests.planner.every_pipeline import every_shape


def ways(blocks: int, rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every pipeline as (row, first block, blocks) of its stages."""
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, blocks), n) for n in range(blocks)):
        ends = (*cuts, blocks)
        for chosen in itertools.product(range(rows), repeat=len(ends)):
            yield [(row, begin, end - begin) for row, begin, end in zip(chosen, (0, *ends), ends)]


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_path_in_zones_is_the_cheapest_of_all(seed: int) -> None:
    random, blocks = np.random.default_rng(seed), 5
    asked = request(fleet(("A100", 1, 1), ("T4", 1, 2)), 64, model(blocks))
    stages = PricedStages(tables_of(asked), 1, blocks, np.array([1, 2]), 2)
    high = np.array([float(stages.slowest) * random.uniform(0.3, 1)])
    prices, weight = random.uniform(1, 9, 2), random.uniform(0, 1e3, 1)
    depths, syncs, after = np.array([[1, blocks]]), np.array([[0.0, stages.sync_range[1]]]), np.array([30.0])
    zones = [Zone(begin, random.uniform(size=stages.busy.shape) < 0.6) for begin in (0, 1, 3)]
    cost = prices[stages.resource] * stages.degree
    anywhere = Paths(stages, weight, high, cost, after, depths, syncs)
    paths = Paths(stages, weight, high, cost, after, depths, syncs, zones)

    def price(way: list[tuple[int, int, int]]) -> float:
        total = 0.0
        for number, (row, begin, size) in enumerate(way):
            left, place = len(way) - 1 - number, 2 if begin + size == blocks else 1 if begin else 0
            allowed = [zone for zone in zones if zone.begin <= begin][-1].allowed
            possible = size <= anywhere.wide and anywhere.from_depth[0][0, row, place, size - 1] <= left
            if not possible or not allowed[row, place, size - 1] or not anywhere._room(left)[row, place, size - 1]:
                return np.inf
            total += float(anywhere.value[0, row, place, size - 1])
        return total

    least = min(map(price, ways(blocks, len(stages.rows))))
    assert least < np.inf
    assert paths.solve()[0] == pytest.approx(least)
    found = [(int(row[0]), int(size[0]) + 1) for _, row, _, size in paths.stages()]
    begins = itertools.accumulate((size for _, size in found), initial=0)
    assert price([(row, begin, size) for (row, size), begin in zip(found, begins)]) == pytest.approx(least)


def cut_alike(tables: Tables, kinds: list[tuple[str, int]], blocks: list[int]) -> Shape:
    """A pipeline of these (GPU type, TP degree), one sequence a microbatch, with so many blocks a stage."""
    rows = {(kind.name, degree): row for (kind, degree, size), row in tables.row_of.items() if size == 1}
    ends = [1 + sum(blocks[: i + 1]) for i in range(len(blocks))]
    return Shape(tuple(rows[each] for each in kinds), (*ends[:-1], tables.num_layers))


def test_stages_that_are_timely_are_those_whose_sums_are() -> None:
    """First, inner and last stages, and one alone: with a little more or less than their sums take allowed."""
    asked = request(fleet(("A100", 4, 4), ("T4", 4, 4)), 256, model(6, 512))
    tables, blocks, kind = tables_of(asked), 6, ("a100", 1)
    ready = np.zeros(tables.num_layers)
    row = cut_alike(tables, [kind], [blocks]).rows[0]
    lateness, rows = Lateness(asked, tables, [row], 8, 2), np.array([row])
    for begin, size in [(0, 1), (0, 3), (0, 6), (2, 1), (2, 4)]:
        second = size if 0 < begin < blocks - size else 0  # on the same node
        sizes = [each for each in (begin, size, second, blocks - begin - size - second) if each]
        shape = cut_alike(tables, [kind] * len(sizes), sizes)
        stage, place = min(begin, 1), 2 if begin + size == blocks else min(begin, 1)
        mine = slice(shape.starts[stage], shape.ends[stage + (second > 0)])
        longest = max(sums[mine].max() for sums in lateness.sums_s(shape))
        for factor, timely in ((1.001, True), (0.999, False)):
            mask = lateness.timely(rows, blocks, begin, ready, factor * longest)
            assert mask[0, place, size - 1] == timely


@pytest.mark.parametrize(("copies", "degree"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_equal_pipelines_are_as_late_as_the_simulation_says(copies: int, degree: int) -> None:
    number = 8
    asked = request(fleet(("A100", 4 * degree, 4), ("T4", 4 * degree, 4)), 32 * number, model(12, 2048))
    tables = tables_of(asked)
    shape = cut_alike(tables, [("t4", degree)] * 2 + [("a100", degree)] * 2, [2, 2, 4, 4])
    draft = Draft(((shape, 32),) * number)
    plan = place_by_copies(tables, draft, [i // copies for i in range(number)], "tiny", 32 * number, 128)
    assert plan is not None
    placed = asked.cost.predict(asked.cost.working_ahead(plan)).breakdown_s["grad_sync"]
    ready = ready_s(tables, [shape])
    assert Lateness(asked, tables, shape.rows, number, copies).late_s(shape, ready) == pytest.approx(placed, rel=0.1)


def test_who_is_ready_late_keeps_the_others_waiting() -> None:
    """Sums take no time to speak of; the last layer before the coarse pipeline's second stage is what others have longest."""
    asked = request(fleet(("A100", 4, 4), ("T4", 4, 4)), 256, model(12, 64, 320))
    tables = tables_of(asked)
    fine = cut_alike(tables, [("a100", 1)] * 4, [2, 2, 4, 4])
    coarse = cut_alike(tables, [("a100", 1)] * 2, [6, 6])
    lateness, (early, late) = (
        Lateness(asked, tables, fine.rows, 8, 8),
        (early_s(tables, each) for each in (fine, coarse)),
    )
    assert ready_s(tables, [coarse, fine]) == pytest.approx(np.minimum(early, late))
    waits = lateness.late_s(coarse, ready_s(tables, [fine]))
    assert waits == pytest.approx(early[6] - late[6])
    assert lateness.late_s(coarse, ready_s(tables, [coarse])) < waits / 2


@pytest.mark.parametrize(
    ("types", "layers"), [((("A100", 1, 2), ("T4", 1, 2)), 5), ((("A100", 1, 1), ("A10G", 1, 2), ("T4", 1, 1)), 5)]
)
def test_generated_pipelines_do_as_much_as_all_there_are(types: tuple, layers: int) -> None:
    asked = request(fleet(*types), 256, model(layers, 64, 320))
    tables = tables_of(asked)
    pool = pool_of(asked, tables, 256 * float(tables.time_sums[0, -1]))
    step_s, prices = 256 * float(tables.time_sums[0, -1]) / 2, pool.speed
    limits = np.geomspace(step_s / 2000, step_s / 40, 200)
    for _ in range(8):
        pool.find(prices * 256 / float(prices @ pool.supply), step_s, limits, 1.0)
        prices = prices / 2 + pool.relax(step_s).prices / 2
    found = pool.relax(step_s).value
    every = pool_of(asked, tables, step_s)
    rows = [i for i, row in enumerate(tables.rows) if row.microbatch == 1]
    some = itertools.product(*(range(count + 1) for count in every.supply))
    for used in filter(any, some):
        for shape in every_shape(tables, rows, np.array(used)):
            if fits(every.timing, shape, 64):
                every.add(Column(shape, 1), step_s)
    assert len(every.columns) > 10 * len(pool.columns)
    assert found == pytest.approx(every.relax(step_s).value, rel=0.02)


def pool_of(asked: Request, tables: Tables, step_s: float) -> Pool:
    """Of single pipelines, where sums take no time to speak of."""
    first = next(row for row, each in enumerate(tables.rows) if each.microbatch == 1)
    return Pool(asked, tables, 1, 1, (1,), [Shape((first,), (tables.num_layers,))], step_s)


def large() -> tuple[Request, Tables, Costed]:
    """288 GPUs of three types whose equal pipelines leave something to be gained."""
    asked = request(fleet(("A100", 17, 8), ("A10G", 12, 8), ("T4", 7, 8)), 1152, model(24, 512))
    tables = tables_of(asked)
    known, _ = choose(asked, alike_plans(asked, tables))
    assert known is not None
    return asked, tables, known


def test_assembled_plans_are_plans_and_the_same_every_time() -> None:
    asked, tables, known = large()
    draft = draft_of(tables, known.plan, asked.fleet)
    assert draft is not None
    known_s = known.prediction.step_time_s
    plans, again = (list(assembled_plans(asked, tables, draft, known_s, lambda: False)) for _ in range(2))
    assert plans
    assert plans == again
    for plan in plans:
        check_plan(plan, asked.spec.num_layers)
        assert len(set(plan.workers)) == len(plan.workers)
        assert sum(pipeline.num_sequences for pipeline in plan.pipelines) == 1152
    better, _ = choose(asked, plans)
    assert better is not None
    assert better.prediction.step_time_s < known_s


def test_few_pipelines_begin_alike() -> None:
    """All NICs are equal here, so as the known ones do."""
    asked = request(fleet(("A100", 12, 8), ("A10G", 8, 8), ("T4", 4, 8)), 768, model(20, 512))
    tables = tables_of(asked)
    known, _ = choose(asked, alike_plans(asked, tables))
    assert known is not None
    draft = draft_of(tables, known.plan, asked.fleet)
    assert draft is not None
    shapes = [shape for shape, _ in draft.pipelines]
    assembly = Assembly(asked, tables, shapes, (1,), known.prediction.step_time_s)
    assembly.generate(lambda: False)
    first = tables.rows[assembly.pool.columns[0].shape.rows[0]].kind
    assert tables.kinds[first].resource == tables.kinds[tables.rows[shapes[0].rows[0]].kind].resource
    assert len(assembly.pool.columns) > 10
    for column in assembly.pool.columns:
        begin = [row for row, start in zip(column.shape.rows, column.shape.starts, strict=True) if start - 1 < 20 // 5]
        assert {tables.rows[row].kind for row in begin} == {first}


@pytest.mark.parametrize("copies", [(1, 2), (2, 4, 8)])
def test_packings_are_nearly_those_of_an_integer_program(copies: tuple[int, ...]) -> None:
    asked, tables, known = large()
    draft = draft_of(tables, known.plan, asked.fleet)
    assert draft is not None
    shapes = [shape for shape, _ in draft.pipelines]
    assembly = Assembly(asked, tables, shapes, copies, known.prediction.step_time_s)
    assembly.generate(lambda: False)
    assembly.widen(lambda: False)
    pool, done = assembly.pool, list[float]()
    packings = assembly.packings(lambda: False)
    assert [each.seconds for each in packings] == sorted(each.seconds for each in packings)
    for packing in packings:
        assert sum(packing.microbatches) * pool.size == asked.global_batch_sequences
        indices = [pool.columns.index(column) for column in packing.columns]
        assert (pool.usage[indices].sum(axis=0) <= pool.supply).all()
        done.append(float(pool.sequences(assembly.step_s, whole=True)[indices].sum()))
    value = pool.sequences(assembly.step_s, whole=True)
    best = milp(
        -value, constraints=LinearConstraint(pool.usage.T, 0, pool.supply), integrality=np.ones(len(value)), bounds=Bounds(0, np.inf)
    )  # fmt: skip
    assert best.success
    assert 0.96 * -best.fun < max(done) <= -best.fun * (1 + 1e-6)


def test_nothing_is_assembled_where_little_is_promised_or_time_is_up() -> None:
    asked, tables, known = large()
    draft = draft_of(tables, known.plan, asked.fleet)
    assert draft is not None
    assert not list(assembled_plans(asked, tables, draft, 1e-3 * known.prediction.step_time_s, lambda: False))
    assert not list(assembled_plans(asked, tables, draft, known.prediction.step_time_s, lambda: True))


def test_copies_lie_side_by_side_and_first_stages_together() -> None:
    asked = request(fleet(("A100", 8, 8)), 256, model(24, 512))
    tables, owners = tables_of(asked), [0, 0, 1, 1, 2, 2, 3, 3]
    shape = cut_alike(tables, [("a100", 1)] * 8, [3] * 8)
    plan = place_by_copies(tables, Draft(((shape, 32),) * 8), owners, "tiny", 256, 128)
    assert plan is not None
    nodes = [[asked.fleet.node_of(stage.workers[0]).name for stage in pipeline.stages] for pipeline in plan.pipelines]
    assert all(one == other for one, other in zip(nodes[::2], nodes[1::2], strict=True))
    assert len({each[0] for each in nodes}) == 1
    assert len({each[1] for each in nodes}) > 1
