"""What a search estimates of a draft beside what the cost model predicts of it, placed."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.search.autohet import placements
from planner.search.drafts.draft import Estimator
from planner.search.drafts.families import proposals_for
from planner.search.problem.cost_tables import tables_of
from tests.planner.cases import fleet, model, request

fleets = st.lists(
    st.tuples(
        st.sampled_from(("A100", "A10G", "T4")), st.integers(1, 2), st.sampled_from((1, 2, 4))
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda t: t[0],
)


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(types=fleets, batch=st.integers(2, 40), blocks=st.integers(4, 10))
def test_a_draft_is_estimated_as_the_cost_model_predicts_it(
    types: list, batch: int, blocks: int
) -> None:
    """Its pipelines never longer than predicted, nor much shorter; the whole step, with gradient
    sync, within a tenth.
    """
    asked = request(fleet(*types), batch, model(blocks), prove=False)
    tables = tables_of(asked)
    estimator = Estimator(tables)
    for proposal in proposals_for(asked, tables)[:4]:
        for plan in placements(tables, proposal, (1,)):
            ways = [asked.cost.predict(way) for way in asked.cost.stage_choices.ways_ahead(plan)]
            estimated_s = max(
                estimator.way(shape).step_s(count) for shape, count in proposal.draft.pipelines
            )
            predicted_s = min(way.breakdown_s["pipeline"] for way in ways)
            assert 0.9 * predicted_s <= estimated_s <= predicted_s * (1 + 1e-9)
            assert abs(proposal.seconds / min(way.step_time_s for way in ways) - 1) < 0.1
