"""Hypothesis strategies: any plan that the runtime must be able to run."""

import itertools
from typing import Any

from hypothesis import strategies as st

from planner.plans.plan import Plan

UNEVEN: tuple[tuple[int, ...], ...] = (
    (),
    (),
    (3, 1),
    (2, 1, 1),
    (1, 2, 1),
    (3, 3, 2),
    (1, 5, 2),
    (3, 2, 1, 1, 1),
)
"""Shares of a stage's ranks; none: equal ones."""


@st.composite
def plans(
    draw: Any, num_layers: int, max_tp_degree: int, max_pipelines: int = 3, uneven: bool = False
) -> Plan:
    """Pipelines of unequal depth, unequal cuts, unequal TP degrees, and unequal numbers and sizes
    of microbatches; with `uneven`, also of stages whose ranks have unequal shares.
    """
    pipelines: list[dict[str, Any]] = []
    number = total = 0
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= max_tp_degree]
    for _ in range(draw(st.integers(1, max_pipelines))):
        inner = draw(st.sets(st.integers(1, num_layers - 1), max_size=num_layers - 1))
        borders = [0, *sorted(inner), num_layers]
        stages = []
        for first, last in itertools.pairwise(borders):
            shares = (
                draw(st.sampled_from([each for each in UNEVEN if sum(each) <= max_tp_degree]))
                if uneven
                else ()
            )
            degree = len(shares) or draw(st.sampled_from(degrees))
            workers = [f"n{(number + rank) % 3}/{number + rank}" for rank in range(degree)]
            stage = {"first_layer": first, "num_layers": last - first, "workers": workers}
            stages.append({**stage, "tp_shares": list(shares)} if shares else stage)
            number += degree
        count = draw(st.integers(1, 4))
        size = draw(st.integers(1, 3))
        last = draw(st.integers(1, size))
        total += (count - 1) * size + last
        counts = {"num_microbatches": count, "microbatch_sequences": size}
        if last < size:
            counts["last_microbatch_sequences"] = last
        pipelines.append({**counts, "stages": stages})
    return Plan.from_document(
        {
            "version": 1,
            "model": "m",
            "global_batch_sequences": total,
            "microbatch_sequences": 1,
            "sequence_length": 4,
            "pipelines": pipelines,
        }
    )
