"""Microbatches shared anew by what the placed pipelines take."""

from hypothesis import given
from hypothesis import strategies as st

from planner.plan import Pipeline, Plan, Stage
from planner.strategies.rebalance import rebalanced


def plan(counts: list[int]) -> Plan:
    pipelines = tuple(Pipeline((Stage(0, 4, (f"n-{i}/0",)),), k, 2) for i, k in enumerate(counts))
    return Plan("m", 2 * sum(counts), 2, 128, pipelines)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 9.0)), min_size=1, max_size=6))
def test_the_batch_stays_whole_and_nobody_ends_later_than_the_last_did(pipelines: list) -> None:
    before = plan([k for k, _ in pipelines])
    ends = [k * each for k, each in pipelines]
    after = rebalanced(before, ends)
    counts = [p.num_microbatches for p in after.pipelines]
    assert sum(counts) == sum(k for k, _ in pipelines)
    assert min(counts) >= 1
    assert max(k * each for k, (_, each) in zip(counts, pipelines, strict=True)) <= max(ends) * (1 + 1e-9)


def test_a_pipeline_that_ends_late_gives_to_one_that_ends_early() -> None:
    after = rebalanced(plan([10, 10]), [20.0, 10.0])
    assert [p.num_microbatches for p in after.pipelines] == [7, 13]
