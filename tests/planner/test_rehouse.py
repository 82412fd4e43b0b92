"""Stages that share nodes with other stages than before: the same stages, each group on one node of its type, no GPU twice."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import Pipeline, Plan, Stage
from planner.strategies.rehouse import rehoused
from tests.planner.cases import fleet

FLEET = fleet(("A100", 4, 4), ("T4", 4, 4))
DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def contiguous(draw: st.DrawFn) -> Plan:
    """One to four pipelines of like stages, each over its own nodes, one after the other."""
    degrees = draw(st.lists(DEGREES, min_size=1, max_size=2)), draw(st.lists(DEGREES, min_size=1, max_size=2))
    pipelines = []
    for number in range(draw(st.integers(1, 4))):
        groups = [
            tuple(f"{name}-{number}/{gpu}" for gpu in range(sum(each[:i]) % 4, sum(each[:i]) % 4 + degree))
            for name, each in zip(("a100", "t4"), degrees, strict=True)
            for i, degree in enumerate(each)
            if sum(each[: i + 1]) <= 4
        ]
        pipelines.append(Pipeline(tuple(Stage(i, 1, group) for i, group in enumerate(groups)), 2, 1))
    return Plan("m", 2 * len(pipelines), 1, 128, tuple(pipelines))


@settings(deadline=None)
@given(contiguous())
def test_only_the_gpus_change_and_each_group_stays_on_one_node_of_its_type(plan: Plan) -> None:
    for other in rehoused(plan, FLEET):
        assert max(Counter(other.workers).values()) == 1
        for before, after in zip(plan.pipelines, other.pipelines, strict=True):
            assert (before.num_microbatches, len(before.stages)) == (after.num_microbatches, len(after.stages))
            for old, new in zip(before.stages, after.stages, strict=True):
                assert (old.first_layer, old.num_layers, old.tp_degree) == (
                    new.first_layer,
                    new.num_layers,
                    new.tp_degree,
                )
                assert len({worker.rpartition("/")[0] for worker in new.workers}) == 1
                assert old.workers[0].split("-")[0] == new.workers[0].split("-")[0]


def test_stages_of_each_type_are_offered_beside_their_neighbours_and_beside_their_like() -> None:
    """Two pipelines of two stages on each of two types, each pipeline on nodes of its own."""

    def stages(number: int) -> tuple[Stage, ...]:
        a, t = f"a100-{number}", f"t4-{number}"
        return (
            Stage(0, 1, (f"{a}/0", f"{a}/1")),
            Stage(1, 1, (f"{a}/2", f"{a}/3")),
            Stage(2, 1, (f"{t}/0", f"{t}/1")),
            Stage(3, 1, (f"{t}/2", f"{t}/3")),
        )

    plan = Plan("m", 4, 1, 128, tuple(Pipeline(stages(number), 2, 1) for number in range(2)))
    homes = {
        tuple(tuple(stage.workers[0].rpartition("/")[0] for stage in p.stages) for p in other.pipelines)
        for other in rehoused(plan, FLEET)
    }
    apart = ("a100-0", "a100-0", "t4-0", "t4-0"), ("a100-1", "a100-1", "t4-1", "t4-1")
    first_like = ("a100-0", "a100-1", "t4-0", "t4-0"), ("a100-0", "a100-1", "t4-1", "t4-1")
    last_like = ("a100-0", "a100-0", "t4-0", "t4-1"), ("a100-1", "a100-1", "t4-0", "t4-1")
    assert homes == {apart, first_like, last_like}
