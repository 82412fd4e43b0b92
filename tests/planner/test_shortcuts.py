"""What a search leaves out or remembers changes nothing of what it finds."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import planner.search.autohet as autohet
from planner.search.bounds.bound import best_mix
from planner.search.drafts.closed_form import families, rank_families, roughly_s
from planner.search.drafts.cut import Balancer
from planner.search.drafts.side_by_side import SideBySide
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Rejected, Request
from planner.search.problem.tables import Tables
from planner.search.walk.judge import Costed
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, request

SOME = settings(max_examples=60, derandomize=True)


def case(batch: int = 37) -> tuple[Request, Tables]:
    asked = request(fleet(("A100", 2, 4), ("A10G", 3, 2), ("T4", 2, 4)), batch, model(9))
    return asked, tables_of(asked)


@SOME
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 6),
    kind=st.sampled_from(("wide", "whole", "far")),
    seed=st.integers(0, 999),
)
def test_the_best_mix_is_the_linear_programs(rows: int, columns: int, kind: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    wide = draw.normal(size=(rows, columns))
    gains = {"wide": wide, "whole": np.round(2 * wide), "far": np.exp(3 * wide) - 1}[
        kind
    ]  # whole: many are equal
    shares, least = best_mix(gains)
    found = linprog(
        [*[0.0] * columns, -1.0],
        A_ub=np.hstack([-gains, np.ones((rows, 1))]),
        b_ub=np.zeros(rows),
        A_eq=[[*[1.0] * columns, 0.0]],
        b_eq=[1.0],
        bounds=[*[(0.0, None)] * columns, (None, None)],
    )
    scale = np.abs(gains).max()
    assert least == pytest.approx(found.x[-1], abs=1e-7 * scale)
    assert (gains @ shares).min() == pytest.approx(least, abs=1e-7 * scale)
    assert shares.sum() == pytest.approx(1.0)
    assert shares.min() >= -1e-9


@pytest.mark.parametrize("chunk", [1, 7, 10**6])
@pytest.mark.parametrize("batch", [3, 37, 512])
def test_families_come_as_if_all_were_costed(
    monkeypatch: pytest.MonkeyPatch, chunk: int, batch: int
) -> None:
    asked, tables = case(batch)
    every, sync = families(tables), SideBySide(asked, tables, 1)
    if chunk == 1:
        every = every.take(np.arange(0, len(every.number), 29))
    monkeypatch.setattr(limits, "CUTS_AT_ONCE", chunk)
    found = list(rank_families(tables, batch, every, sync))
    assert sorted(family for family, _ in found) == list(range(len(every.number)))
    seconds = [seconds for _, seconds in found]
    assert seconds == sorted(seconds)
    whole = roughly_s(tables, batch, every, sync)
    assert seconds == pytest.approx(sorted(whole.tolist()), rel=limits.FINE)


def test_pipelines_are_cut_alike_together_alone_and_again() -> None:
    _, tables = case()
    draw, rows = random.Random(1), [r for r, row in enumerate(tables.rows) if row.microbatch == 1]
    pipelines = [tuple(sorted(draw.choices(rows, k=draw.randint(1, 9)))) for _ in range(40)]
    one, found = Balancer(tables), list[list[float]]()
    for microbatches in (None, 9.0, 3.0):  # working ahead as these allow
        counts = [microbatches] * len(pipelines) if microbatches else ()
        together = one.cut_each(pipelines, counts)
        assert all(
            a is b
            for a, b in zip(one.cut_each(pipelines[::-1], counts), together[::-1], strict=True)
        )
        assert [cut.shape.rows for cut in together] == pipelines
        alone = [Balancer(tables).cut_each([pipeline], counts[:1])[0] for pipeline in pipelines]
        found.append([cut.bottleneck_s for cut in together])
        assert found[-1] == pytest.approx([cut.bottleneck_s for cut in alone], rel=2 * limits.FINE)
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("microbatches", [None, 5.0])
def test_one_pipeline_is_cut_alike_by_lists_and_by_arrays(
    monkeypatch: pytest.MonkeyPatch, microbatches: float | None
) -> None:
    _, tables = case()
    draw, rows = random.Random(2), [r for r, row in enumerate(tables.rows) if row.microbatch == 1]
    counts = [microbatches] if microbatches else []
    pipelines = [tuple(draw.choices(rows, k=draw.randint(1, 9))) for _ in range(40)]
    by_lists = [Balancer(tables).cut_each([pipeline], counts) for pipeline in pipelines]
    monkeypatch.setattr(limits, "CUT_BY_LISTS", 0)
    by_arrays = [Balancer(tables).cut_each([pipeline], counts) for pipeline in pipelines]
    assert repr(by_lists) == repr(by_arrays)  # of pipelines that cannot lie so, some are NaN


@pytest.mark.parametrize("likely", [0.5, 1.1, 1e9])
def test_cuts_do_not_depend_on_the_level_that_is_tried_first(
    monkeypatch: pytest.MonkeyPatch, likely: float
) -> None:
    _, tables = case()
    draw, rows = random.Random(3), [r for r, row in enumerate(tables.rows) if row.microbatch == 1]
    pipelines = [tuple(draw.choices(rows, k=draw.randint(1, 9))) for _ in range(40)]
    usual = Balancer(tables).cut_each(pipelines)
    monkeypatch.setattr(limits, "LIKELY_BOTTLENECK", likely)
    assert repr(Balancer(tables).cut_each(pipelines)) == repr(usual)


@pytest.mark.parametrize(
    ("times", "again"), [(0.99, True), (1.14, True), (1.16, False), (float("inf"), False)]
)
def test_drafts_are_made_with_less_memory_where_one_near_the_best_was_refused(
    monkeypatch: pytest.MonkeyPatch, times: float, again: bool
) -> None:
    asked, tables = case()
    answer = plan_with("megatron", asked)
    best = Costed(answer.plan, answer.prediction)
    asks = list[Tables]()
    monkeypatch.setattr(autohet, "_place_drafts", lambda _, mine, __: asks.append(mine) or [])
    monkeypatch.setattr(
        autohet, "rank", lambda *_: ([best], [Rejected("", "", times * best.step_time_s)])
    )
    autohet.rank_drafts(asked, tables, [], [])
    assert len(asks) == (2 if again else 1)
