"""The pipelines of all sets of GPUs against every order, every grouping and every cut; divisions against all that there are."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from planner.strategies.bundles import bundled_plans
from planner.strategies.cost_tables import tables_of
from planner.strategies.divisions import divisions
from planner.strategies.drafts import Estimator, Shape
from planner.strategies.lattice import BestOf, Lattice, Sets
from planner.strategies.packing import Packer
from planner.strategies.refine import fits, well_formed
from planner.strategies.request import Request
from planner.strategies.tables import Ints, Tables
from tests.planner.cases import fleet, model, request

FLEETS = [
    ((("A100", 1, 2), ("T4", 1, 2)), 4),
    ((("A10G", 1, 4),), 5),
    ((("A100", 1, 1), ("A10G", 1, 1), ("T4", 1, 2)), 5),
]


def lattice_of(asked: Request, step_s: float, sync: tuple[float, float] = (1.0, 0.0), limits: int = 400) -> Lattice:
    tables = tables_of(asked)
    rows = [i for i, row in enumerate(tables.rows) if row.microbatch == 1]
    most = np.array([resource.num_gpus for resource in tables.resources])
    byte_s = np.full(len(tables.rows), sync[1])
    return Lattice(tables, rows, most, tables.num_blocks, step_s, (sync[0], byte_s), limits, 10**7)


def arrangements(tables: Tables, rows: list[int], gpus: Ints) -> Iterator[tuple[int, ...]]:
    """All groups of all these GPUs, in every order."""
    if not gpus.any():
        yield ()
    for row in rows:
        kind = tables.kinds[tables.rows[row].kind]
        if kind.tp_degree <= gpus[kind.resource]:
            left = gpus.copy()
            left[kind.resource] -= kind.tp_degree
            yield from ((row, *rest) for rest in arrangements(tables, rows, left))


def every_shape(tables: Tables, rows: list[int], gpus: Ints) -> Iterator[Shape]:
    for arranged in arrangements(tables, rows, gpus):
        for cuts in itertools.combinations(range(2, tables.num_blocks + 1), len(arranged) - 1):
            shape = Shape(arranged, (*cuts, tables.num_layers))
            if well_formed(shape):
                yield shape


@pytest.mark.parametrize(("types", "layers"), FLEETS)
def test_hardly_any_pipeline_does_more_than_the_lattices(types: tuple, layers: int) -> None:
    asked = request(fleet(*types), 64, model(layers))
    tables = tables_of(asked)
    estimator, step_s = Estimator(tables), 64 * float(tables.time_sums[0, -1]) / 2
    lattice = lattice_of(asked, step_s)
    sets = lattice.sets()
    assert len(sets.usage)
    for i, gpus in enumerate(sets.usage):
        shape = sets.shape(i)
        assert shape is not None
        kinds = [tables.kinds[tables.rows[row].kind] for row in shape.rows]
        used = np.zeros_like(gpus)
        np.add.at(used, [kind.resource for kind in kinds], [kind.tp_degree for kind in kinds])
        assert used.tolist() == gpus.tolist()
        assert well_formed(shape)
        assert shape.ends[-1] == tables.num_layers
        microbatches = int(sets.sequences[i])
        assert fits(estimator, shape, microbatches)
        assert estimator.pipeline_s(shape, microbatches) <= 1.03 * step_s
        best = max(
            (estimator.most_in(other, step_s) for other in every_shape(tables, lattice.rows, gpus) if fits(estimator, other, 64)),
            default=0,
        )  # fmt: skip
        assert sets.sequences[i] >= 0.96 * best - 1


def test_first_stages_hold_what_is_summed_in_time() -> None:
    """Eight blocks on four GPUs; the sums of two blocks and the embedding take just less than is allowed."""
    asked = request(fleet(("A100", 4, 1)), 64, model(8))
    tables = tables_of(asked)
    step_s, block = 64 * float(tables.time_sums[0, -1]), float(tables.rows[0].sync_bytes[1])
    allowed = 1e-3
    two_blocks = (2 * block + float(tables.rows[0].sync_bytes[0])) * 1.001

    def largest_first(byte_s: float) -> int:
        sets = lattice_of(asked, step_s, (allowed, byte_s)).sets()
        shapes = [sets.shape(i) for i in range(len(sets.usage))]
        return max(shape.ends[0] - 1 for shape in shapes if shape is not None and len(shape.rows) > 1)

    assert largest_first(0.0) > 2
    assert largest_first(allowed / two_blocks) == 2


@pytest.mark.parametrize("seed", range(4))
def test_divisions_find_the_best_of_all(seed: int) -> None:
    asked = request(fleet(("A100", 2, 2), ("T4", 2, 2)), 64, model(4))
    supply = np.array([4, 4])
    lattice = lattice_of(asked, 64 * float(tables_of(asked).time_sums[0, -1]) / 2)
    known = lattice.sets()
    pay = np.random.default_rng(seed).uniform(1, 2, len(known.usage)) * known.usage.sum(axis=1) ** 1.2
    sets = Sets(lattice, known.usage, pay, known.lanes, np.arange(len(pay)))
    prices = Packer(sets.usage, supply).relax(sets.sequences).prices
    found = divisions(sets.usage, pay, supply, prices, BestOf(sets).within, 600, 8)
    assert found == sorted(found, key=lambda chosen: -pay[list(chosen)].sum())
    assert all((sets.usage[list(chosen)].sum(axis=0) <= supply).all() for chosen in found)

    def best(left: Ints, first: int) -> float:
        ways = (i for i in range(first, len(pay)) if (sets.usage[i] <= left).all())
        return max((float(pay[i]) + best(left - sets.usage[i], i) for i in ways), default=0.0)

    assert pay[list(found[0])].sum() == pytest.approx(best(supply, 0))


def test_bundles_are_plans_of_copies_on_gpus_of_their_own() -> None:
    asked = request(fleet(("A100", 16, 8), ("A10G", 12, 8), ("T4", 4, 8)), 512, model(12))
    plans = list(bundled_plans(asked, tables_of(asked), 1, 1e9, lambda: False))
    assert plans
    for plan in plans:
        assert len(set(plan.workers)) == len(plan.workers)
        assert sum(p.num_microbatches * p.microbatch_sequences for p in plan.pipelines) == 512
        shapes = [tuple((s.first_layer, s.tp_degree) for s in p.stages) for p in plan.pipelines]
        assert all(shapes.count(shape) % 2 == 0 for shape in shapes)
        first = [p.stages[0].workers[0].split("/")[0] for p in plan.pipelines]
        assert len(set(first)) < len(first)


def test_no_bundles_where_they_promise_nothing() -> None:
    asked = request(fleet(("A100", 8, 8)), 512, model(12))
    assert not list(bundled_plans(asked, tables_of(asked), 1, 1e-9, lambda: False))
    assert not list(bundled_plans(asked, tables_of(asked), 1, 1e9, lambda: True))
