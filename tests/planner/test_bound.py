"""The path bound of large fleets, on fleets small enough for every plan to be tried."""

import numpy as np
import pytest

from planner.strategies import plan_with
from planner.strategies.bound import BoundAlone, lower_bound_s
from planner.strategies.cost_tables import tables_of
from tests.planner.cases import fleet, model, request


@pytest.mark.parametrize(
    ("types", "batch", "layers"),
    [
        ((("A100", 2, 1), ("T4", 1, 1)), 5, 3),
        ((("A100", 1, 2), ("A10G", 1, 1)), 12, 4),
        ((("T4", 3, 1),), 3, 3),
        ((("T4", 1, 2), ("A10G", 2, 1)), 8, 4),
    ],
)
def test_no_plan_is_faster_than_the_bound(types: tuple, batch: int, layers: int) -> None:
    asked = request(fleet(*types), batch, model(layers), max_microbatch_sequences=4)
    tables = tables_of(asked)
    bound = lower_bound_s(tables, batch, [r.num_gpus for r in tables.resources], tables.num_blocks)
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert 0 < bound <= best * (1 + 1e-9)


def test_hardly_any_microbatches_for_many_gpus() -> None:
    """With fewer microbatches than pipelines the inequalities allow less than no time at all."""
    asked = request(fleet(("A100", 3, 8), ("T4", 3, 8)), 4, model(3), max_microbatch_sequences=4)
    tables = tables_of(asked)
    bound = lower_bound_s(tables, 4, [r.num_gpus for r in tables.resources], tables.num_blocks)
    assert 0 <= bound <= plan_with("autohet", asked).prediction.step_time_s


def test_where_only_one_pipeline_fits_the_bound_knows_its_microbatches() -> None:
    asked = request(
        fleet(("A100", 2, 1), ("T4", 2, 1), memory_gib={"A100": 1.6, "T4": 1.6}),
        8,
        model(5, 512),
        max_microbatch_sequences=4,
    )
    best = plan_with("exhaustive", asked)
    assert len(best.plan.pipelines) == 1
    tables = tables_of(asked)
    bound = BoundAlone(tables, 8, np.array([r.num_gpus for r in tables.resources]), 5).seconds()
    assert 0.9 * best.prediction.step_time_s <= bound <= best.prediction.step_time_s


def test_no_bound_is_below_the_work_that_there_is() -> None:
    """Twelve microbatches a GPU and one pipeline a GPU: nothing is lost but gradient sync."""
    asked = request(fleet(("A100", 8, 1)), 96, model(2), microbatch_sequences=1)
    tables = tables_of(asked)
    row = min((row for row in tables.rows), key=lambda row: tables.kinds[row.kind].tp_degree)
    work = 12 * float((row.forward_s + row.backward_s).sum())
    assert lower_bound_s(tables, 96, [8], 2) >= work * (1 - 1e-9)
