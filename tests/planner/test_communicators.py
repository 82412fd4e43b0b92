"""Few communicators for any plan, the same groups at every worker, and every set of holders inside
its group.
"""

import itertools
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.links.sync import sync_jobs
from planner.cost.parameters import CostParameters
from planner.plans.communicators import (
    COMMUNICATOR_BYTES,
    MAX_COMMUNICATORS,
    communicators_at_most,
    communicators_by_worker,
    holder_sets,
    max_sync_groups,
    merged_groups,
    sync_groups,
)
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Plan


@st.composite
def plans_of_64(draw: Any) -> Plan:
    """Up to 64 GPUs in pipelines of unlike depth, cut and TP degree, of up to 80 layers."""
    layers, left, number = draw(st.integers(8, 80)), 64, 0
    pipelines = []
    while left > 0 and len(pipelines) < 12:
        shape = []
        depth = draw(st.integers(1, min(8, left, layers)))
        cuts = sorted(
            draw(st.sets(st.integers(1, layers - 1), min_size=depth - 1, max_size=depth - 1))
        )
        for start, end in itertools.pairwise([0, *cuts, layers]):
            degree = draw(
                st.sampled_from(
                    [d for d in (1, 2, 4, 8) if d <= left - (depth - len(shape) - 1)] or [1]
                )
            )
            shape.append(
                {
                    "first_layer": start,
                    "num_layers": end - start,
                    "workers": [f"n{(number + r) // 8}/{(number + r) % 8}" for r in range(degree)],
                }
            )
            number, left = number + degree, left - degree
        pipelines.append({"num_microbatches": 1, "stages": shape})
    return Plan.from_document(
        {
            "version": 1,
            "model": "m",
            "global_batch_sequences": len(pipelines),
            "microbatch_sequences": 1,
            "sequence_length": 4,
            "pipelines": pipelines,
        }
    )


@settings(max_examples=25)
@given(plans_of_64(), st.booleans(), st.sampled_from((0, 1, 2)), st.integers(0, 9))
def test_any_plan_of_64_gpus_has_few_communicators_a_worker_and_the_same_at_each(
    plan: Plan, tied: bool, kv_units: int, seed: int
) -> None:
    """Each worker finds the same groups, whatever order it meets the sets of holders in."""
    counts = communicators_by_worker(plan, tied=tied, key_value_units=kv_units)
    assert set(counts) == set(plan.workers)
    assert max(counts.values()) <= MAX_COMMUNICATORS
    groups = sync_groups(plan, tied=tied, most=max_sync_groups(plan), key_value_units=kv_units)
    sets = holder_sets(plan, tied=tied, key_value_units=kv_units)
    assert set(groups) == set(sets)
    assert all(set(holders) <= set(group) for holders, group in groups.items())
    shuffled = list(sets.items())
    random.Random(seed).shuffle(shuffled)
    assert merged_groups(dict(shuffled), 2) == merged_groups(sets, 2)


@settings(max_examples=15)
@given(plans_of_64(), st.booleans(), st.sampled_from((0, 1, 2)))
def test_what_is_charged_is_no_less_than_what_there_is(
    plan: Plan, tied: bool, kv_units: int
) -> None:
    layer = LayerSpec(64, 4, key_value_parameters=8 if kv_units else 0, key_value_units=kv_units)
    spec = ModelSpec(
        "m",
        "test",
        4,
        8,
        4,
        4,
        4,
        tied,
        8,
        LayerSpec(32),
        (layer,) * plan.pipelines[0].stages[-1].end_layer,
        LayerSpec(36, 4),
    )
    sets = Counter(
        worker for job in sync_jobs(plan, spec, CostParameters()) for worker in job.members
    )
    most, exact = (
        communicators_at_most(plan, sets),
        communicators_by_worker(plan, tied=tied, key_value_units=kv_units),
    )
    assert all(exact[worker] <= most[worker] <= MAX_COMMUNICATORS for worker in plan.workers)


def test_what_fits_stays_as_it_is_and_what_does_not_adds_the_fewest_zeros() -> None:
    few = {("a", "b"): 5.0, ("a", "c"): 1.0, ("a", "b", "c"): 1.0}
    assert merged_groups(few, 3) == {members: members for members in few}
    assert merged_groups(few, None) == {members: members for members in few}
    merged = merged_groups(few, 2)
    assert merged == {
        ("a", "b"): ("a", "b"),
        ("a", "c"): ("a", "b", "c"),
        ("a", "b", "c"): ("a", "b", "c"),
    }


def test_an_asymmetric_plan_had_more_than_it_may_have() -> None:
    """Twelve pipelines of 80 layers, each cut at other layers: without merging the test above would
    prove nothing.
    """
    documents = []
    for index in range(16):
        cuts = [0, 5 + 4 * index, 7 + 4 * index, 9 + 4 * index, 80]
        stages = [
            {"first_layer": a, "num_layers": b - a, "workers": [f"n{index}/{rank}"]}
            for rank, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
        documents.append({"num_microbatches": 1, "stages": stages})
    common = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 16,
        "microbatch_sequences": 1,
        "sequence_length": 4,
    }
    plan = Plan.from_document({**common, "pipelines": documents})
    sets = holder_sets(plan, tied=False)
    before = Counter(worker for members in sets for worker in members)
    assert max(before.values()) > 2 * MAX_COMMUNICATORS
    assert max(communicators_by_worker(plan, tied=False).values()) <= MAX_COMMUNICATORS
    assert COMMUNICATOR_BYTES * MAX_COMMUNICATORS < 5 * 2**30
