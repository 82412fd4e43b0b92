"""Neighbours of pipelines against what is asked of them, and against their own times."""

import numpy as np
import pytest

from planner.search.cost_tables import tables_of
from planner.search.draft import Estimator
from planner.strategies.neighbours import Neighbours
from planner.strategies.refine import well_formed
from tests.planner.cases import fleet, model, request


def test_neighbours_are_a_change_away_within_the_supply_and_each_given_once() -> None:
    tables = tables_of(request(fleet(("A100", 4, 8), ("T4", 4, 8)), 64, model(24, 512)))
    size = tables.rows[0].microbatch
    rows = [i for i, row in enumerate(tables.rows) if row.microbatch == size]
    degree = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
    neighbours, supply, prices = Neighbours(tables, rows, degree, 12), np.array([8, 6]), np.array([4.0, 1.0])
    before = (rows[0],) * 4
    found = list(neighbours.best({before: 20.0}, supply, prices, 10.0))
    assert len(found) > 5
    assert before not in [shape.rows for shape in found]
    for shape in found:
        assert well_formed(shape)
        assert shape.ends[-1] == tables.num_layers
        usage = np.zeros(2, dtype=int)
        for row in shape.rows:
            usage[tables.kinds[tables.rows[row].kind].resource] += degree[row]
        assert (usage <= supply).all()
        assert 2 <= len(shape.rows) <= 8
    assert not list(neighbours.best({before: 20.0}, supply, prices, 10.0))


def test_neighbours_that_lose_least_come_first() -> None:
    tables = tables_of(request(fleet(("A100", 4, 8), ("T4", 4, 8)), 64, model(24, 512)))
    rows = [i for i, row in enumerate(tables.rows) if row.microbatch == tables.rows[0].microbatch]
    degree = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
    prices, step_s, timing = np.array([4.0, 1.0]), 10.0, Estimator(tables)
    found = list(Neighbours(tables, rows, degree, 12).best({(rows[0],) * 4: 20.0}, np.array([32, 32]), prices, step_s))
    lost = []
    for shape in found:
        fill_s, period_s = timing.affine(shape)
        worth = sum(degree[row] * prices[tables.kinds[tables.rows[row].kind].resource] for row in shape.rows)
        lost.append(worth / tables.rows[shape.rows[0]].microbatch - (1 + (step_s - fill_s) / period_s))
    ranks = np.argsort(np.argsort(lost))
    assert np.corrcoef(ranks, np.arange(len(ranks)))[0, 1] == pytest.approx(1.0, abs=0.1)
