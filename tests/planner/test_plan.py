"""Plan documents: round trips, strictness, and what makes a plan whole."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ConfigError, InfeasibleError
from planner.plan import Pipeline, Plan, Stage, check_plan


@st.composite
def plans(draw):
    """A whole plan and its number of layers."""
    num_layers = draw(st.integers(1, 12))
    pipelines, worker = [], 0
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=min(3, num_layers - 1))))
        edges = [0, *[c for c in cuts if c < num_layers], num_layers]
        stages = []
        for first, end in pairwise(edges):
            degree = draw(st.sampled_from([1, 2]))
            stages.append(Stage(first, end - first, tuple(f"n/{worker + i}" for i in range(degree))))
            worker += degree
        pipelines.append(Pipeline(tuple(stages), draw(st.integers(1, 5)), draw(st.integers(1, 3))))
    batch = sum(p.num_sequences for p in pipelines)
    return Plan("m", batch, 1, 16, tuple(pipelines)), num_layers


@settings(max_examples=30, deadline=None)
@given(plans())
def test_a_whole_plan_survives_json_and_pickle_and_the_check(case):
    plan, num_layers = case
    check_plan(plan, num_layers)
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len(plan.workers) == len(set(plan.workers))


@settings(max_examples=30, deadline=None)
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
    ],
)
def test_a_wrong_document_is_an_error_that_names_the_key(change, named):
    document = _document()
    change(document)
    with pytest.raises(ConfigError, match=named):
        Plan.from_document(document)


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
