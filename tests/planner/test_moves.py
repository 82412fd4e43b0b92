"""What moves, walks and families keep: whole plans, tensor-parallel groups inside nodes, the batch,
every group shared out.
"""

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.inputs.fleet import node_of
from planner.plans.plan_checks import check_plan
from planner.search.autohet import placements
from planner.search.drafts.closed_form import families
from planner.search.drafts.cut import Balancer
from planner.search.drafts.cut_ranking import CutRanking, SharedNodes
from planner.search.drafts.draft import Estimator, Shape, assign_microbatches
from planner.search.drafts.families import Drafter, proposals_for
from planner.search.drafts.side_by_side import SideBySide
from planner.search.drafts.uncut import share_groups
from planner.search.problem.cost_tables import tables_of
from planner.search.walk.improve import Improver, Judge
from planner.search.walk.moves import Moves
from tests.planner.cases import fleet, model, request

SOME = settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
fleets = st.lists(
    st.tuples(
        st.sampled_from(("A100", "A10G", "T4")), st.integers(1, 2), st.sampled_from((1, 2, 3, 4))
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda t: t[0],
)


def _start(types, batch):
    asked = request(fleet(*types), batch, model(6))
    tables = tables_of(asked)
    proposals = proposals_for(asked, tables)
    plans = (plan for each in proposals for plan in placements(tables, each, (1,)))
    return asked, tables, next(plans)


@SOME
@given(types=fleets, batch=st.integers(2, 40), seed=st.integers(0, 99))
def test_a_moved_plan_is_whole_and_meets_the_batch_with_groups_inside_nodes(
    types: list, batch: int, seed: int
) -> None:
    asked, tables, plan = _start(types, batch)
    moves, made = Moves(tables, random.Random(seed)), 0
    for _ in range(150):
        drawn = moves.draw(plan)
        if drawn is None:
            continue
        made, plan = made + 1, drawn
        check_plan(plan, 6)
        assert set(plan.workers) <= set(asked.fleet.workers)
        assert all(
            len({node_of(w) for w in s.workers}) == 1 for p in plan.pipelines for s in p.stages
        )
    assert made > 0


def test_a_walk_ends_no_worse_than_it_began_and_the_same_each_time() -> None:
    asked, tables, plan = _start([("A100", 1, 2), ("T4", 2, 2)], 17)

    def walked() -> tuple[float, str]:
        cost = asked.cost
        judge = Judge(lambda p: cost.predict(p).step_time_s, cost.steps.pipelines_at_least_s)
        found = Improver(Moves(tables, random.Random(0)), judge).best_of([plan], 200)
        return cost.predict(found).step_time_s, found.to_json()

    assert walked() == walked()
    assert walked()[0] <= asked.cost.predict(plan).step_time_s


@given(number=st.integers(1, 20), groups=st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_shares_hand_out_every_group(number: int, groups: list[int]) -> None:
    speeds = [1.0 + r for r in range(len(groups))]
    shares = share_groups(number, groups, speeds)
    assert [sum(column) for column in zip(*shares, strict=True)] == groups
    assert len(shares) == number


def test_the_last_of_unlike_pipelines_has_no_microbatches_that_its_memory_does_not_hold() -> None:
    """Fifteen sequences are no multiple of four; three divide them, which fit one node type and not
    the other.
    """
    asked = request(
        fleet(("A100", 2, 1), ("T4", 2, 1), memory_gib={"A100": 24.0, "T4": 1.3}),
        15,
        model(8, 1024),
    )
    tables = tables_of(asked)
    estimator = Estimator(tables)
    sync = SideBySide(asked, tables, 1)
    ranking = CutRanking(estimator, Balancer(tables), sync, SharedNodes(estimator, None))
    drafter = Drafter(ranking, families(tables))
    row = {(tables.kind(r).resource, of.microbatch): r for r, of in enumerate(tables.rows)}
    assert (1, 3) not in row
    large, small = Shape((row[0, 4],), (10,)), Shape((row[1, 1],), (10,))
    assert drafter.with_odd_one([large, small]) == [large, small]
    assert drafter.with_odd_one([large, large]) == [large, Shape((row[0, 3],), (10,))]


def test_unlike_microbatches_share_few_sequences_so_that_none_is_left_to_whoever_has_small_ones() -> (  # noqa: E501
    None
):
    """Five as two of two and one, instead of one of two and three that end last."""
    tables = tables_of(request(fleet(("A100", 2, 1)), 5))
    one = next(of for of in tables.rows if of.microbatch == 1)
    quick = (
        (
            replace(of, forward_s=1.2 * one.forward_s, backward_s=1.2 * one.backward_s)
            if of.microbatch > 1
            else of
        )
        for of in tables.rows
    )
    tables = replace(tables, rows=tuple(quick))
    row = {of.microbatch: r for r, of in enumerate(tables.rows)}
    shapes = [Shape((row[2],), (10,)), Shape((row[1],), (10,))]
    draft = assign_microbatches(Estimator(tables), shapes, 5)
    assert draft is not None
    assert [number for _, number in draft.pipelines] == [2, 1]
    assert assign_microbatches(Estimator(tables), [shapes[0]] * 2, 5) is None
