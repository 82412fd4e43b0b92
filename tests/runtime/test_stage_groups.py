"""Groups of a worker's stage: a plan without borders has no communicator for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autohet.runtime.parallel.place import place_of
from autohet.runtime.step.stage_parts import StageGroups
from planner.plans.communicators import communicators_by_worker
from planner.plans.plan import Pipeline, Plan, Stage


def plan_of(*cuts: tuple[int, ...]) -> Plan:
    """Return a plan of four layers with a pipeline for each tuple of stages' layers."""
    pipelines = []
    for number, sizes in enumerate(cuts):
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        stages = [
            Stage(first, size, (f"n{number}/{index}",))
            for index, (first, size) in enumerate(zip(firsts, sizes, strict=True))
        ]
        pipelines.append(Pipeline(tuple(stages), 2, 1))
    return Plan("m", 2 * len(cuts), 1, 16, tuple(pipelines))


@pytest.mark.parametrize(
    ("cuts", "purposes"),
    [
        (((4,), (4,), (4,)), {"world"}),
        (((2, 2), (4,)), {"forward/even", "backward/even"}),
        (
            ((1, 2, 1), (4,)),
            {"forward/even", "forward/odd", "backward/even", "backward/odd"},
        ),
    ],
)
def test_groups_are_those_that_something_crosses(
    cuts: tuple[tuple[int, ...], ...], purposes: set[str]
) -> None:
    """Each is a communicator on GPUs: 0.5 GiB of memory, and 0.7 s of every change."""
    built: dict[str, Any] = {}
    plan = plan_of(*cuts)

    def group(members: tuple[str, ...], purpose: str) -> Any:
        assert members == plan.workers
        return built.setdefault(purpose, SimpleNamespace(purpose=purpose))

    groups: Any = SimpleNamespace(group=group, gated=False)
    place = place_of(plan, "n0/0")
    assert place is not None
    found = StageGroups.build(plan, groups, place)
    assert built.keys() == purposes
    assert found.world in built.values()
    assert len(found.forward) == len(found.backward) == 2
    # Beside these there is the group of gradient sums; the planner counts a world of its own.
    counted = max(communicators_by_worker(plan, tied=False).values())
    assert counted - 1 >= len(purposes)
