"""What a stage's choices of memory cost and save: recomputation per stage, optimizer state shared
out, communicators.
"""

from collections import Counter
from dataclasses import replace

import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.plans.communicators import COMMUNICATOR_BYTES, communicators_by_worker
from planner.plans.model_spec import KeptValues, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.redundancy import redundancy, require_disjoint_holders
from tests.planner.cases import fleet, model, profile

FLEET = fleet(("A100", 4, 1))
KEPT = KeptValues(16 * 256, 6 * 256, 8 * 256, 3 * 256)


def spec() -> ModelSpec:
    plain = model()
    return replace(plain, blocks=tuple(replace(block, autograd=KEPT) for block in plain.blocks))


def cost(precision: str = "fp32", **changes: object) -> CostModel:
    parameters = replace(framework_parameters(OURS, CostParameters()), **changes)  # type: ignore[arg-type]
    return CostModel(FLEET, Workload(spec(), 128, precision), Measurements(profile()), parameters)


def plan(*stages: Stage, microbatches: int = 4) -> Plan:
    return Plan("tiny", 2 * microbatches, 2, 128, (Pipeline(stages, microbatches, 2),))


def two(recompute: object = None) -> Plan:
    return plan(Stage(0, 4, ("a100-0/0",), recompute), Stage(4, 4, ("a100-1/0",)))  # type: ignore[arg-type]


def side_by_side(**flags: bool) -> Plan:
    """Two pipelines, cut differently."""
    first = Pipeline((Stage(0, 2, ("a100-0/0",)), Stage(2, 6, ("a100-1/0",), **flags)), 4, 1)
    second = Pipeline((Stage(0, 4, ("a100-2/0",)), Stage(4, 4, ("a100-3/0",))), 4, 1)
    return Plan("tiny", 8, 1, 128, (first, second))


def test_each_stage_recomputes_by_itself_and_selective_lies_between() -> None:
    of = {how: cost().predict(two(how)) for how in ("none", "selective", "full")}
    first = {how: prediction.memory_bytes_by_worker["a100-0/0"] for how, prediction in of.items()}
    other = {prediction.memory_bytes_by_worker["a100-1/0"] for prediction in of.values()}
    seconds = [of[how].step_time_s for how in ("none", "selective", "full")]
    assert first["none"] > first["selective"] > first["full"]
    assert len(other) == 1
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 3
    tokens = 2 * 128
    # two microbatches in flight; the largest peak is the embedding's gradient, not what a block
    # computes again
    assert first["none"] - first["selective"] == pytest.approx(
        2 * 4 * tokens * 4 * (22 - 11) * 256, abs=4
    )
    assert first["none"] - first["full"] == pytest.approx(
        2 * 4 * tokens * 4 * (22 - 1) * 256, abs=4
    )


def test_a_stage_that_says_nothing_does_as_the_job_says() -> None:
    full = CostModel(
        FLEET, Workload(spec(), 128, "fp32", recompute="full"), Measurements(profile())
    )
    none = CostModel(FLEET, Workload(spec(), 128, "fp32"), Measurements(profile()))
    said = plan(Stage(0, 4, ("a100-0/0",), "full"), Stage(4, 4, ("a100-1/0",), "full"))
    assert (
        full.predict(two()).step_time_s
        == none.predict(said).step_time_s
        > none.predict(two()).step_time_s
    )
    assert full.predict(two()).memory_bytes_by_worker == none.predict(said).memory_bytes_by_worker


@pytest.mark.parametrize(
    ("precision", "whole", "shared"), [("bf16", 18, 6 + 12 / 2), ("fp32", 16, 8 + 12 / 2)]
)
def test_optimizer_state_of_a_layer_is_shared_out_over_all_its_holders(
    precision: str, whole: int, shared: float
) -> None:
    """One stage asks for it: its layers, 2 to 7 and the head, are shared out wherever they lie."""
    before, after = (
        cost(precision).predict(side_by_side(**flags)) for flags in ({}, {"shard_optimizer": True})
    )
    block, head = spec().blocks[0].parameters, spec().head.parameters
    of = {
        "a100-0/0": 0,
        "a100-1/0": 6 * block + head,
        "a100-2/0": 2 * block,
        "a100-3/0": 4 * block + head,
    }
    for worker, parameters in of.items():
        saved = before.memory_bytes_by_worker[worker] - after.memory_bytes_by_worker[worker]
        assert saved == pytest.approx((whole - shared) * parameters, abs=2)
    assert after.breakdown_s["grad_sync"] == before.breakdown_s["grad_sync"]
    assert after.breakdown_s["optimizer"] < before.breakdown_s["optimizer"]


def test_one_holder_shares_nothing_out() -> None:
    alone = plan(Stage(0, 8, ("a100-0/0",), shard_optimizer=True))
    assert cost().memory_of.by_worker(alone) == cost().memory_of.by_worker(
        plan(Stage(0, 8, ("a100-0/0",)))
    )
    assert redundancy(alone, FLEET, 8).sharded == ()


def test_moments_that_are_shared_out_have_no_twin() -> None:
    assert redundancy(side_by_side(), FLEET, 8).weakest == 2
    report = redundancy(side_by_side(shard_optimizer=True), FLEET, 8)
    assert report.weakest == 1
    assert report.weakest < 2
    assert report.sharded == ("2", "3", "4", "5", "6", "7", "head")
    assert "7 layers (2-7, head)" in report.sentences()[-1]
    assert "copies of snapshots" in report.sentences()[-1]
    require_disjoint_holders(side_by_side(), FLEET, 8, 2)
    with pytest.raises(InfeasibleError, match="optimizer state of layer 2"):
        require_disjoint_holders(side_by_side(shard_optimizer=True), FLEET, 8, 2)


def test_communicators_are_charged_to_the_memory_limit() -> None:
    plans = side_by_side()
    before, after = (
        cost().predict(plans),
        cost(communicator_bytes=float(COMMUNICATOR_BYTES)).predict(plans),
    )
    more = {
        w: n - before.memory_bytes_by_worker[w] for w, n in after.memory_bytes_by_worker.items()
    }
    assert Counter(more) == Counter(
        {w: n * COMMUNICATOR_BYTES for w, n in after.communicators_by_worker.items()}
    )
    assert communicators_by_worker(plans, tied=False) == after.communicators_by_worker


def test_working_ahead_leaves_room_for_communicators() -> None:
    """A100s of 24 GiB: microbatches so large that a few fill them, and communicators in place of
    one of these.
    """
    parameters = {"communicator_bytes": 2.0 * 2**30, "activation_scale": 300.0}
    of = cost(**parameters)
    ahead = of.stage_choices.working_ahead(
        plan(Stage(0, 4, ("a100-0/0",)), Stage(4, 4, ("a100-1/0",)), microbatches=20)
    )
    without = cost(activation_scale=300.0).stage_choices.working_ahead(ahead)
    assert of.predict(ahead).fits
    assert without.pipelines[0].in_flight(0) > ahead.pipelines[0].in_flight(0)
