"""The bound, on fleets small enough for every plan to be tried."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.bench.planner.synthetic import tie_embeddings
from planner.cost.parameters import OURS
from planner.errors import InfeasibleError
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.bounds.bound import Bound, proof_of
from planner.search.problem.cost_tables import tables_of
from planner.strategies import plan_with
from scripts.benchmarks.planner.exhaustive import proved_s
from tests.planner.cases import fleet, inside, model, request, with_nics

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("framework", [OURS, "deepspeed"])
@pytest.mark.parametrize("rate", [1e6, 1e7])
def test_where_links_inside_a_node_are_slower_than_its_card_neighbours_may_lie_apart(
    rate: float, framework: str
) -> None:
    """Two pipelines over two nodes of two GPUs of one type, each with its first stage on another
    node: all goes through the cards.
    """
    of = inside(with_nics(fleet(("A10G", 2, 2), memory_gib={"A10G": 1.8}), {"A10G": 6e9}), rate)
    asked = request(of, 8, model(6, 512), framework, max_microbatch_sequences=1, max_tp_degree=1)
    pipelines = (
        Pipeline((Stage(0, 3, (f"a10g-{n}/0",)), Stage(3, 3, (f"a10g-{1 - n}/1",))), 4, 1)
        for n in range(2)
    )
    plan = asked.cost.stage_choices.working_ahead(Plan("tiny", 8, 1, 128, tuple(pipelines)))
    predicted = asked.cost.predict(plan)
    assert 0.8 * predicted.breakdown_s["pipeline"] < proved_s(asked) <= predicted.step_time_s


def test_a_bound_is_never_clipped() -> None:
    assert proof_of(0.9, 1.0).gap == pytest.approx(1 / 0.9 - 1)
    above = proof_of(1.001, 1.0)
    assert above.lower_bound_s is None
    assert above.gap is None
    assert above.says.startswith("ERROR: the lower bound of 1.001 s lies above this plan's 1 s")


@pytest.mark.parametrize("bound_s", [0.0, 0.5, 1 / 1.16])
def test_a_gap_that_says_nothing_is_not_shown(bound_s: float) -> None:
    proof = proof_of(bound_s, 1.0)
    assert (proof.lower_bound_s, proof.gap) == (None, None)
    assert "no lower bound" in proof.says


@pytest.mark.parametrize(
    ("types", "batch", "layers"),
    [
        ((("A100", 2, 1), ("T4", 1, 1)), 5, 3),
        ((("A100", 1, 2), ("A10G", 1, 1)), 12, 4),
        ((("T4", 3, 1),), 3, 3),
        ((("T4", 1, 2), ("A10G", 2, 1)), 8, 4),
    ],
)
def test_no_plan_is_faster_than_the_bound(types: tuple, batch: int, layers: int) -> None:
    asked = request(fleet(*types), batch, model(layers), max_microbatch_sequences=4)
    bound = Bound(tables_of(asked)).seconds()
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert 0 < bound <= best * (1 + 1e-9)


def test_hardly_any_microbatches_for_many_gpus() -> None:
    """With fewer microbatches than pipelines the inequalities allow less than no time at all."""
    asked = request(fleet(("A100", 3, 8), ("T4", 3, 8)), 4, model(3), max_microbatch_sequences=4)
    bound = Bound(tables_of(asked)).seconds()
    assert 0 <= bound <= plan_with("autohet", asked).prediction.step_time_s


def test_where_no_pipeline_holds_the_model_no_step_is_short_enough() -> None:
    asked = request(
        fleet(("T4", 2, 1), memory_gib={"T4": 1.2}), 8, model(8, 512), max_microbatch_sequences=2
    )
    assert Bound(tables_of(asked)).seconds() == float("inf")


def test_no_bound_is_below_the_work_that_there_is() -> None:
    """Twelve microbatches a GPU and one pipeline a GPU: nothing is lost but gradient sync."""
    asked = request(fleet(("A100", 8, 1)), 96, model(2), microbatch_sequences=1)
    tables = tables_of(asked)
    row = min((row for row in tables.rows), key=lambda row: tables.kinds[row.kind].tp_degree)
    work = 12 * float((row.forward_s + row.backward_s).sum())
    assert Bound(tables).seconds() >= work * (1 - 1e-9)


@pytest.mark.parametrize(
    ("gpu", "count", "layers", "width", "vocab", "rate", "batch"),
    [
        ("T4", 4, 1, 256, 100_000, 1e9, 16),
        ("A100", 4, 1, 256, 100_000, 1e10, 8),
        ("A100", 2, 3, 64, 32_000, 1e10, 8),
    ],
)
def test_a_stage_with_embedding_and_head_sums_a_tied_embedding_once(
    gpu: str, count: int, layers: int, width: int, vocab: int, rate: float, batch: int
) -> None:
    of = with_nics(fleet((gpu, count, 1)), {gpu: rate})
    asked = request(
        of,
        batch,
        tie_embeddings(model(layers, width, vocab)),
        max_microbatch_sequences=4,
        min_node_disjoint_holders=2,
    )
    best = plan_with("exhaustive", asked)
    assert {len(pipeline.stages) for pipeline in best.plan.pipelines} == {1}
    assert proved_s(asked) <= best.prediction.step_time_s * (1 + 1e-9)


def test_no_bound_is_above_a_plan_that_mostly_sums_gradients() -> None:
    of = with_nics(fleet(("A100", 1, 2), ("T4", 1, 2)), {"A100": 1e10, "T4": 1e8})
    asked = request(of, 4, model(4), max_microbatch_sequences=4, min_node_disjoint_holders=2)
    best = plan_with("exhaustive", asked).prediction
    assert best.breakdown_s["grad_sync"] > 0.8 * best.step_time_s
    assert 0 < proved_s(asked) <= best.step_time_s


def test_a_fast_link_sums_with_several_slow_ones_at_a_time() -> None:
    """One GPU holds all that two others share; each of them has half of the bytes to send, and it
    both halves at once.
    """
    of = with_nics(fleet(("A100", 1, 1), ("T4", 2, 1)), {"A100": 1e10, "T4": 1e7})
    asked = request(
        of, 4, model(2, 1024, 64), max_microbatch_sequences=4, min_node_disjoint_holders=2
    )
    best = plan_with("exhaustive", asked)
    assert sorted(len(pipeline.stages) for pipeline in best.plan.pipelines) == [1, 2]
    seconds = best.prediction.step_time_s
    assert best.prediction.breakdown_s["grad_sync"] > 0.8 * seconds
    assert 0 < proved_s(asked) <= seconds


@pytest.mark.parametrize(
    ("other", "rate", "batch", "width", "holders", "framework"),
    [
        (
            ("T4", 1, 1),
            1e7,
            16,
            512,
            1,
            "deepspeed",
        ),  # a stage is quicker than parts of it with their transfers
        (("A10G", 2, 1), 1e9, 16, 512, 2, OURS),  # sync leaves time for fewer microbatches
        (("A10G", 2, 1), 1e8, 8, 256, 2, "deepspeed"),
    ],
)
def test_many_microbatches_over_a_slow_network(
    other: tuple[str, int, int], rate: float, batch: int, width: int, holders: int, framework: str
) -> None:
    of = with_nics(fleet(("A100", 2, 1), other), {"A100": rate, other[0]: rate})
    wishes = {"max_microbatch_sequences": 2, "min_node_disjoint_holders": holders}
    asked = request(of, batch, model(2, width), framework, **wishes)
    best = plan_with("exhaustive", asked).prediction.step_time_s
    assert 0 < proved_s(asked) <= best * (1 + 1e-9)


@settings(max_examples=40, derandomize=True)
@given(
    types=st.sampled_from(
        [
            (("A100", 2, 1), ("T4", 1, 1)),
            (("A10G", 1, 2), ("T4", 1, 1)),
            (("A100", 1, 1), ("A10G", 2, 1)),
            (("T4", 3, 1),),
            (("A10G", 2, 2),),
            (("A100", 1, 2), ("T4", 1, 2)),
        ]
    ),
    batch=st.one_of(st.integers(1, 6), st.just(16)),
    layers=st.integers(1, 3),
    is_tied=st.booleans(),
    holders=st.integers(1, 2),
    framework=st.sampled_from([OURS, "deepspeed", "megatron"]),
    rates=st.tuples(*[st.sampled_from([1e8, 1.25e9, 1e10])] * 3),
    links=st.sampled_from([1e6, 1e8, 1e11]),
    memory_gib=st.sampled_from([1.7, 24.0]),
)
def test_a_bound_is_a_bound(
    types: tuple,
    batch: int,
    layers: int,
    is_tied: bool,
    holders: int,
    framework: str,
    rates: tuple[float, float, float],
    links: float,
    memory_gib: float,
) -> None:
    """Links inside a node slower than its card among them, and memory that holds no whole model."""
    gpus = ("A100", "A10G", "T4")
    of = with_nics(
        fleet(*types, memory_gib=dict.fromkeys(gpus, memory_gib)),
        dict(zip(gpus, rates, strict=True)),
    )
    of = inside(of, links)
    spec = tie_embeddings(model(layers)) if is_tied else model(layers)
    asked = request(
        of, batch, spec, framework, max_microbatch_sequences=2, min_node_disjoint_holders=holders
    )
    try:
        best = plan_with("exhaustive", asked).prediction.step_time_s
    except InfeasibleError:
        return
    assert proved_s(asked) <= best * (1 + 1e-9)


def test_the_bound_of_few_gpus_counts_two_tp_degrees_on_one_node_type() -> None:
    """Two stages of one node type, of one GPU and of two, beside a slower GPU that is not worth its
    transfers.
    """
    of = with_nics(fleet(("A10G", 1, 1), ("A100", 1, 3)), {"A10G": 2.0e8, "A100": 2.1e8})
    asked = request(of, 2, tie_embeddings(model(3, 1024, 64)), max_microbatch_sequences=1)
    best = plan_with("exhaustive", asked)
    assert {s.tp_degree for p in best.plan.pipelines for s in p.stages} == {1, 2}
    assert proved_s(asked) <= best.prediction.step_time_s * (1 + 1e-9)
