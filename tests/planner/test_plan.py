"""Plan documents: round trips, strictness, and what makes a plan whole."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ConfigError, InfeasibleError
from planner.plans.plan import COMPUTE_FORMATS, RECOMPUTE_CHOICES, Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import sharded_layers


@st.composite
def plans(draw):
    """A whole plan and its number of layers."""
    num_layers = draw(st.integers(1, 12))
    pipelines, worker = [], 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(
            draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=min(3, num_layers - 1)))
        )
        edges = [0, *[c for c in cuts if c < num_layers], num_layers]
        stages = []
        for first, end in pairwise(edges):
            degree = draw(st.sampled_from([1, 2]))
            workers = tuple(f"n/{worker + i}" for i in range(degree))
            recompute, shares = (
                draw(st.sampled_from([None, *RECOMPUTE_CHOICES])),
                draw(st.sampled_from([(), (3, 1)])),
            )
            stages.append(
                Stage(
                    first,
                    end - first,
                    workers,
                    recompute,
                    draw(st.booleans()),
                    tp_shares=shares if degree == 2 else (),
                    compute=draw(st.sampled_from([None, *COMPUTE_FORMATS])),
                )
            )
            worker += degree
        count, size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        last = draw(st.integers(0, size - 1))
        pipelines.append(Pipeline(tuple(stages), count, size, last_microbatch_sequences=last))
    batch = sum(p.num_sequences for p in pipelines)
    return Plan("m", batch, 1, 16, tuple(pipelines)), num_layers


@settings(max_examples=30)
@given(plans())
def test_a_whole_plan_survives_json_and_pickle_and_the_check(case):
    plan, num_layers = case
    check_plan(plan, num_layers)
    for pipeline in plan.pipelines:
        sizes = pipeline.sizes
        assert (len(sizes), sum(sizes)) == (pipeline.num_microbatches, pipeline.num_sequences)
        assert set(sizes[:-1]) <= {pipeline.microbatch_sequences}
        assert 0 < sizes[-1] <= pipeline.microbatch_sequences
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(plan.workers) == len(set(plan.workers))


@settings(max_examples=30)
@given(plans(), st.data())
def test_any_single_damage_is_found(case, data):
    plan, num_layers = case
    document = plan.to_document()
    pipeline = document["pipelines"][data.draw(st.integers(0, len(document["pipelines"]) - 1))]
    stage = pipeline["stages"][data.draw(st.integers(0, len(pipeline["stages"]) - 1))]
    damage = data.draw(st.sampled_from(["layers", "first", "worker", "batch"]))
    if damage == "layers":
        stage["num_layers"] += 1
    elif damage == "first":
        stage["first_layer"] += 1
    elif damage == "worker":
        stage["workers"] = [*stage["workers"], document["pipelines"][0]["stages"][0]["workers"][0]]
    else:
        pipeline["num_microbatches"] += 1
    with pytest.raises(ConfigError):
        check_plan(Plan.from_document(document), num_layers)


def _document():
    return Plan("m", 4, 2, 8, (Pipeline((Stage(0, 2, ("a/0",)),), 2, 2),)).to_document()


def test_a_document_without_the_memory_choices_leaves_them_to_the_job_and_is_written_as_it_was():
    document = _document()
    stage = Plan.from_document(document).pipelines[0].stages[0]
    assert (stage.recompute, stage.shard_optimizer, stage.compute) == (None, False, None)
    assert set(document["pipelines"][0]["stages"][0]) == {"first_layer", "num_layers", "workers"}


def test_one_holder_of_a_layer_shards_it_for_all():
    first = Pipeline((Stage(0, 1, ("a/0",)), Stage(1, 2, ("a/1",), shard_optimizer=True)), 2, 1)
    second = Pipeline((Stage(0, 2, ("b/0",)), Stage(2, 1, ("b/1",))), 2, 1)
    assert sharded_layers(Plan("m", 4, 1, 8, (first, second))) == {"1", "2", "head"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(colour=1), "colour"),
        (lambda d: d["pipelines"][0].update(depth=1), "depth"),
        (lambda d: d["pipelines"][0]["stages"][0].update(tp=1), "tp"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.pop("model"), "model"),
        (lambda d: d.update(global_batch_sequences=0), "global_batch_sequences"),
        (lambda d: d.update(sequence_length="8"), "sequence_length"),
        (lambda d: d["pipelines"][0].update(num_microbatches=True), "num_microbatches"),
        (lambda d: d["pipelines"][0]["stages"][0].update(workers=[]), "workers"),
        (
            lambda d: d["pipelines"][0].update(last_microbatch_sequences=2),
            "last_microbatch_sequences.* is 2; it must be less than microbatch_sequences, 2",
        ),
        (lambda d: d["pipelines"][0]["stages"][0].update(recompute="some"), "recompute"),
        (lambda d: d["pipelines"][0]["stages"][0].update(compute="tf32"), "fp32, bf16, fp16, fp8"),
        (lambda d: d["pipelines"][0]["stages"][0].update(shard_optimizer=1), "shard_optimizer"),
        (
            lambda d: d["pipelines"][0]["stages"][0].update(tp_shares=[1, 1]),
            "tp_shares.*each of its 1 workers",
        ),
        (lambda d: d["pipelines"][0]["stages"][0].update(tp_shares=["1"]), "tp_shares"),
        (lambda d: d["pipelines"][0]["stages"][0].update(tp_shares=[True]), "tp_shares"),
        (
            lambda d: d["pipelines"][0]["stages"][0].update(tp_shares=[3]),
            "tp_shares.*power of two of at most 8",
        ),
        (
            lambda d: d["pipelines"][0]["stages"][0].update(
                tp_shares=[4, 0], workers=["a/0", "a/1"]
            ),
            "tp_shares",
        ),
        (
            lambda d: d["pipelines"][0]["stages"][0].update(
                tp_shares=[12, 4], workers=["a/0", "a/1"]
            ),
            "tp_shares",
        ),
    ],
)
def test_a_wrong_document_is_an_error_that_names_the_key(change, named):
    document = _document()
    change(document)
    with pytest.raises(ConfigError, match=named):
        Plan.from_document(document)


def test_equal_shares_are_those_of_a_stage_that_names_none():
    stage = {"first_layer": 0, "num_layers": 2, "workers": ["a/0", "a/1"]}
    document = {
        **_document(),
        "pipelines": [{"num_microbatches": 2, "stages": [{**stage, "tp_shares": [2, 2]}]}],
    }
    (read,) = Plan.from_document(document).pipelines[0].stages
    assert (read.tp_shares, read.num_parts, read.share(1)) == ((), 2, (1, 2, 2))


def test_shares_lie_one_after_the_other_and_heads_must_divide_into_all_parts():
    stage = Stage(0, 2, ("a/0", "a/1", "a/2"), tp_shares=(5, 1, 2))
    assert [stage.share(rank) for rank in range(3)] == [(0, 5, 8), (5, 6, 8), (6, 8, 8)]
    assert [list(stage.share(rank).units(2)) for rank in range(3)] == [[0, 1], [1], [1]], (
        "two key-value heads"
    )
    plan = Plan("m", 4, 2, 8, (Pipeline((stage,), 2, 2),))
    check_plan(plan, 2, max_tp_degree=8)
    with pytest.raises(ConfigError, match="8 parts, but its heads allow 1 or 2 or 4"):
        check_plan(plan, 2, max_tp_degree=4)


@pytest.mark.parametrize(("sizes", "empty"), [((0, 2), 0), ((2, 0), 1), ((1, 0, 1), 1), ((0,), 0)])
def test_a_stage_of_embedding_or_head_alone_is_refused(sizes, empty):
    """The runtime hangs or fails on such a stage, at the ends of a pipeline too."""
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    stages = tuple(Stage(ends[i], size, (f"a/{i}",)) for i, size in enumerate(sizes))
    plan = Plan("m", 4, 2, 8, (Pipeline(stages, 2, 2),))
    with pytest.raises(ConfigError, match=f"stage {empty} of pipeline 0 has 0 layers"):
        check_plan(plan, sum(sizes))


def test_a_pipeline_may_have_its_own_microbatch_size():
    document = _document()
    document["pipelines"][0]["microbatch_sequences"] = 1
    plan = Plan.from_document(document)
    assert (plan.microbatch_sequences, plan.pipelines[0].microbatch_sequences) == (2, 1)
    assert plan.to_document() == document


def test_published_plans_may_round_their_batch_up():
    plan = Plan("m", 3, 2, 8, (Pipeline((Stage(0, 2, ("a/0",)),), 2, 2),))
    check_plan(plan, 2, exact_batch=False)
    with pytest.raises(ConfigError, match="4 sequences a step"):
        check_plan(plan, 2)


@pytest.mark.parametrize("kind", [ConfigError, InfeasibleError])
def test_errors_pickle(kind):
    copy = pickle.loads(pickle.dumps(kind("too little")))
    assert (type(copy), str(copy)) == (kind, "too little")
