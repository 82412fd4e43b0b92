"""Recomputation and shared optimizer state as choices of the search: what fits by them only, and
what a brute force would choose.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

import planner.search.memory as memory
from planner.answers.replan import replan
from planner.cost.basis import Measurements, Workload
from planner.cost.layers.layer_costs import MemoryChoices
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.model_spec import KeptValues, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import redundancy
from planner.search.autohet import Drafts, RankedDrafts, placements
from planner.search.drafts.families import proposals_for
from planner.search.memory import fewest_shared, search_with_memory
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Request
from planner.search.walk.judge import rank
from tests.planner.cases import fleet, model, profile

ALL = MemoryChoices(("none", "selective", "full"), True)
WIDTH = 256
PARAMETERS = replace(
    framework_parameters(OURS, CostParameters()), context_bytes=0.0, context_share=0.0
)


def spec(layers: int) -> ModelSpec:
    """Blocks of 12.6 MB of state and, a microbatch of one sequence, 14.4 MB of activations."""
    plain = model(layers, WIDTH, vocab=500)
    kept = KeptValues(100 * WIDTH, 10 * WIDTH, 50 * WIDTH, 3 * WIDTH)
    return replace(plain, blocks=(replace(plain.blocks[0], autograd=kept),) * layers)


def request(
    of: Fleet, layers: int, batch: int = 8, choices: MemoryChoices | None = None, **wishes: object
) -> Request:
    wanted = spec(layers)
    cost = CostModel(
        of, Workload(wanted, 128, "fp32"), Measurements(profile()), PARAMETERS, choices=choices
    )
    return Request(of, wanted, cost, batch, 128, **wishes)  # type: ignore[arg-type]


def small(*types: tuple[str, int, int], mib: float) -> Fleet:
    return fleet(*types, memory_gib=dict.fromkeys(("A100", "A10G", "T4"), mib / 1024))


def choices_in(plan: Plan) -> set[object]:
    return {
        choice
        for p in plan.pipelines
        for s in p.stages
        for choice in (s.recompute, s.shard_optimizer)
    }


@pytest.mark.parametrize(
    ("allowed", "stages"),
    [(MemoryChoices(("none", "full")), None), (MemoryChoices(("none",), True), 1), (ALL, None)],
)
def test_a_model_one_layer_larger_than_fits_without_either_is_planned(
    allowed: MemoryChoices, stages: int | None
) -> None:
    """Sharing helps where pipelines may not be deeper: else a further stage saves more."""
    of = small(("A100", 2, 1), mib=160)

    def fits(layers: int) -> bool:
        try:
            search_with_memory(request(of, layers, prove=False, max_stages=stages))
        except InfeasibleError:
            return False
        return True

    first = next(layers for layers in range(4, 40) if not fits(layers))
    wanted = request(of, first, choices=allowed, prove=False, max_stages=stages)
    found = search_with_memory(wanted)
    check_plan(found.plan, first)
    assert found.prediction.fits
    assert choices_in(found.plan) & {"selective", "full", True}
    late = replace(wanted, clock=itertools.count().__next__, deadline_s=1.0)
    assert search_with_memory(late).prediction.fits, "a deadline makes no job infeasible"


def test_what_fits_is_planned_as_without_a_choice() -> None:
    """Plenty of memory: nothing is recomputed, nothing shared, and the plan does not say so."""
    of = small(("A100", 2, 1), ("T4", 1, 1), mib=4000)
    free, plain = (
        search_with_memory(request(of, 6, choices=ALL)),
        search_with_memory(request(of, 6)),
    )
    assert choices_in(free.plan) == {None, False}
    assert free.prediction.step_time_s == pytest.approx(plain.prediction.step_time_s, rel=1e-3)
    assert (
        free.search.lower_bound_s is None
        or free.search.lower_bound_s <= free.prediction.step_time_s * (1 + 1e-9)
    )


@pytest.mark.parametrize(
    ("types", "mib", "layers"),
    [([("T4", 2, 1)], 160, 8), ([("T4", 2, 1), ("A100", 1, 2)], 120, 8)],
)
def test_all_ways_together_are_as_fast_as_the_best_one(
    types: list[tuple[str, int, int]], mib: float, layers: int
) -> None:
    """Here that is the one between the lightest and the heaviest, over a tenth faster."""
    of = small(*types, mib=mib)

    def step_s(allowed: MemoryChoices) -> float:
        return search_with_memory(request(of, layers, 16, allowed, prove=False)).step_time_s

    between = MemoryChoices(("selective",), shard_optimizer=True)
    assert step_s(ALL) <= limits.MIN_SPEEDUP * step_s(between)


def test_choices_for_need_alone_leave_a_plan_that_fits_as_it_was() -> None:
    """The documents of such plans say nothing of memory; where nothing fits, all choices are
    used.
    """
    of = small(("A100", 2, 1), mib=130)
    spare = replace(ALL, only_if_needed=True)
    same, plain = (search_with_memory(request(of, 6, choices=choices)) for choices in (spare, None))
    assert same.plan == plain.plan
    assert same.search.lower_bound_s == plain.search.lower_bound_s
    with pytest.raises(InfeasibleError):
        search_with_memory(request(of, 14, prove=False))
    assert search_with_memory(request(of, 14, choices=spare, prove=False)).prediction.fits


def test_state_wanted_on_two_nodes_is_not_shared_out() -> None:
    of = small(("A100", 2, 1), mib=220)
    answers = [
        search_with_memory(
            request(of, 8, choices=ALL, min_node_disjoint_holders=holders, prove=False)
        )
        for holders in (1, 2)
    ]
    assert redundancy(answers[1].plan, of, 8).weakest == 2
    assert True not in choices_in(answers[1].plan)


def test_only_stages_that_need_it_share_out_their_state() -> None:
    """The second stage of the first pipeline holds more than fits; its layers are shared out
    wherever they lie, the others' are not.
    """
    narrow, wide = small(("A100", 3, 1), mib=120), small(("A100", 3, 1), mib=2000)
    of = Fleet(0, (*narrow.nodes[:2], wide.nodes[2]))
    first = Pipeline(
        (Stage(0, 1, ("a100-0/0",), "full", True), Stage(1, 9, ("a100-1/0",), "full", True)), 4, 1
    )
    plan = Plan(
        "tiny", 8, 1, 128, (first, Pipeline((Stage(0, 10, ("a100-2/0",), "full", True),), 4, 1))
    )
    cost = request(of, 10, choices=ALL).cost
    assert not cost.predict(replace(plan, pipelines=tuple(_plain(p) for p in plan.pipelines))).fits
    fewer = fewest_shared(cost, plan)
    assert [s.shard_optimizer for p in fewer.pipelines for s in p.stages] == [False, True, False]
    assert cost.predict(fewer).fits


def test_only_drafts_that_fit_and_may_be_the_fastest_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bound left out too much if the fastest plan of some depths were not among the ranked."""
    asked = request(small(("A100", 2, 2), ("T4", 2, 1), mib=160), 10, prove=False)
    tables = tables_of(asked)
    lax = replace(tables, rows=tuple(replace(row, limit_bytes=1e15) for row in tables.rows))
    proposals = [*proposals_for(asked, tables), *proposals_for(asked, lax)]
    plans = [plan for each in proposals for plan in placements(tables, each, {1})]
    every = [asked.cost.predict(asked.cost.stage_choices.working_ahead(plan)) for plan in plans]
    fastest: dict[object, float] = {}
    for said in every:
        if said.fits and said.plan is not None:
            depths = str(sorted(len(pipeline.stages) for pipeline in said.plan.pipelines))
            fastest[depths] = min(said.step_time_s, fastest.get(depths, said.step_time_s))

    seen = list[Plan]()
    predict = CostModel.predict
    monkeypatch.setattr(
        CostModel, "predict", lambda self, plan: seen.append(plan) or predict(self, plan)
    )
    ranked, rejected = rank(asked, plans)
    found: dict[object, float] = {}
    for each in reversed(ranked):
        depths = str(sorted(len(pipeline.stages) for pipeline in each.plan.pipelines))
        found[depths] = each.step_time_s
    assert found == fastest
    assert any(not said.fits for said in every)
    assert all(predict(asked.cost, plan).fits for plan in seen)
    assert len(seen) == len(ranked) < len([said for said in every if said.fits])
    assert len(seen) + len(rejected) == len(set(plans))


def test_ways_to_save_memory_that_an_estimate_shows_to_be_slower_are_not_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing fits without, the slowest way (all is recomputed, nothing shared) is left."""
    asked = request(small(("A100", 4, 1), mib=120), 10, choices=ALL, prove=False)
    ranked = list[float]()
    real = memory.rank_proposed

    def spy(drafts: Drafts) -> RankedDrafts:
        ranked.append(drafts.least_s)
        return real(drafts)

    monkeypatch.setattr(memory, "rank_proposed", spy)
    answer = search_with_memory(asked)
    assert answer.prediction.fits
    assert ranked == sorted(ranked)
    assert any("by an estimate" in each.why for each in answer.rejected)


def _plain(pipeline: Pipeline) -> Pipeline:
    return replace(
        pipeline, stages=tuple(replace(stage, shard_optimizer=False) for stage in pipeline.stages)
    )


def every_plan(of: Fleet, layers: int, batch: int) -> list[Plan]:
    """Of two or three workers: one pipeline in any order, or pipelines of one worker each, every
    cut and every choice of every stage.
    """
    workers, found = of.workers, list[Plan]()
    for size in (1, 2, 4):
        for depth in range(1, len(workers) + 1):
            for order in itertools.permutations(workers, depth):
                for cuts in itertools.combinations(range(1, layers), depth - 1):
                    found += _with_choices(
                        ((order, (0, *cuts, layers), batch // size),), size, batch
                    )
        for number in range(2, len(workers) + 1):
            for some in itertools.combinations(workers, number):
                for counts in _shares(batch // size, number):
                    one_each = tuple(
                        ((w,), (0, layers), k) for w, k in zip(some, counts, strict=True)
                    )
                    found += _with_choices(one_each, size, batch)
    return found


def _shares(total: int, parts: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(1, total), repeat=parts) if sum(c) == total]


def _with_choices(pipelines: tuple, size: int, batch: int) -> list[Plan]:
    found, stages = [], sum(len(order) for order, _, _ in pipelines)
    for recompute in itertools.product(("none", "selective", "full"), repeat=stages):
        for shard in (False, True) if len(pipelines) > 1 else (False,):
            left = iter(recompute)
            made = tuple(_one(order, ends, k, size, left, shard) for order, ends, k in pipelines)
            found.append(Plan("tiny", batch, size, 128, made))
    return found


def _one(
    order: tuple, ends: tuple, number: int, size: int, recompute: Iterator, shard: bool
) -> Pipeline:
    parts = zip(order, itertools.pairwise(ends), strict=True)
    return Pipeline(
        tuple(Stage(a, b - a, (w,), next(recompute), shard) for w, (a, b) in parts), number, size
    )


@pytest.mark.parametrize(
    ("types", "mib", "layers"),
    [
        ((("A100", 2, 1),), 110, 6),
        ((("A100", 1, 1), ("T4", 1, 1)), 130, 6),
        pytest.param((("A100", 2, 1), ("T4", 1, 1)), 95, 4, marks=pytest.mark.slow),
    ],
)
def test_the_choice_is_a_brute_forces(types: tuple, mib: float, layers: int) -> None:
    of = small(*types, mib=mib)
    wanted = request(of, layers, batch=4, choices=ALL, prove=False)
    cost = wanted.cost
    costed = [
        cost.predict(way)
        for plan in every_plan(of, layers, 4)
        for way in cost.stage_choices.ways_ahead(plan)
    ]
    best = min(each.step_time_s for each in costed if each.fits)
    found = search_with_memory(wanted)
    assert choices_in(found.plan) & {"selective", "full", True}
    assert found.prediction.step_time_s <= best * 1.02 * (1 + 1e-9)


def test_a_plan_that_recomputes_is_repaired_by_plans_that_do() -> None:
    of = small(("A100", 4, 1), mib=110)
    before = search_with_memory(
        request(of, 10, choices=MemoryChoices(("none", "full")), prove=False)
    ).plan
    left = replace(of, nodes=of.nodes[:3])
    after = replan(
        before,
        request(left, 10, choices=MemoryChoices(("none", "full")), prove=False),
        thorough=False,
    )
    assert "full" in choices_in(after.answer.plan)
    assert after.answer.prediction.fits
