"""The order of gradient all-reduces: a worker does one at a time, and the fullest is hardly ever idle."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from planner.step_simulation import in_order

WORKERS = "abcdef"
jobs = st.lists(st.tuples(st.sets(st.sampled_from(WORKERS), min_size=2), st.floats(0.1, 5.0)), min_size=1, max_size=14)


@given(jobs=jobs, ready=st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6))
def test_a_worker_does_one_at_a_time_and_only_when_all_members_are_ready(jobs: list, ready: list) -> None:
    members, seconds = [sorted(job[0]) for job in jobs], [job[1] for job in jobs]
    begin = dict(zip(WORKERS, ready, strict=True))
    free = dict(begin)
    starts = dict(in_order(members, seconds, free))
    assert sorted(starts) == list(range(len(jobs)))
    for worker in WORKERS:
        mine = sorted((starts[i], starts[i] + seconds[i]) for i in starts if worker in members[i])
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(mine))
        assert all(start >= begin[worker] for start, _ in mine)
        assert free[worker] == (mine[-1][1] if mine else begin[worker])


@given(jobs=jobs)
def test_no_all_reduce_waits_while_all_its_members_are_idle(jobs: list) -> None:
    members, seconds = [sorted(job[0]) for job in jobs], [job[1] for job in jobs]
    starts = dict(in_order(members, seconds, dict.fromkeys(WORKERS, 0.0)))
    for i, start in starts.items():
        before = [
            starts[j] + seconds[j] for j in starts if j != i and starts[j] < start and set(members[j]) & set(members[i])
        ]
        assert start == max(before, default=0.0)


def test_pipelines_cut_differently_sync_in_little_more_than_the_fullest_worker_takes() -> None:
    """Three stages that each share a layer with each of three others: nine all-reduces in four rounds, where three is the least."""
    members = [(a, b) for a in "abc" for b in "def"]
    free = dict.fromkeys(WORKERS, 0.0)
    assert max(start for _, start in in_order(members, [1.0] * 9, free)) <= 3.0
