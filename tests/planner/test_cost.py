"""The cost model on small cases whose answer can be computed by hand, and properties that any cost
model must have.
"""

import math
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.layers.calibration import MeasuredRun, calibrate
from planner.cost.links.sync import sync_jobs
from planner.cost.links.traffic import Links, read_links
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters, framework_parameters
from planner.cost.trace import chrome_trace
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage, TensorShare
from tests.planner import cases

BLOCK = LayerSpec(1000, 100, 900, 8, 80.0, 40.0)
PARAMETERS = CostParameters(context_bytes=0.0, context_share=0.0, launch_exposure=1.0)


def spec(num_layers=4, tied=False):
    head = LayerSpec(8, 8, 800) if tied else LayerSpec(808, 8, 800)
    return ModelSpec(
        "m", "test", 8, 100, 4, 4, 32, tied, 4, LayerSpec(800), (BLOCK,) * num_layers, head
    )


def node_type(name="t4", gpu="T4", gpus=4, memory=2**20, usd=1.0):
    return NodeType(name, gpu, gpus, memory, 1e9, 1e8, usd)


def profile(speed_by_gpu=None, degrees=(1, 2)):
    rows = []
    for gpu, speed in (speed_by_gpu or {"T4": 1.0}).items():
        for degree in degrees:
            for size in (1, 2, 4, 8):
                for layer, seconds in (("embedding", 0.1), ("block", 1.0), ("head", 0.5)):
                    t = seconds * size / speed / degree
                    rows.append(
                        Measurement(
                            "m", gpu, "fp32", degree, 16, size, layer, t, 2 * t, 0.25 / degree
                        )
                    )
    return ProfileTable(rows)


def model(fleet, the_spec=None, parameters=PARAMETERS, **kwargs):
    measurements = Measurements(kwargs.pop("profile", None) or profile())
    workload = Workload(the_spec or spec(), 16, "fp32", **kwargs)
    return CostModel(fleet, workload, measurements, parameters)


def fleet_of(*kinds):
    return Fleet(0, tuple(Node(f"{kind.name}-{i}", kind) for i, kind in enumerate(kinds)))


def test_one_worker_pays_its_layers_and_its_update():
    fleet = fleet_of(node_type())
    plan = Plan("m", 6, 2, 16, (Pipeline((Stage(0, 4, ("t4-0/0",)),), 3, 2),))
    prediction = model(fleet).predict(plan)
    # 3 microbatches x 2 sequences x (0.1 + 4 x 1 + 0.5) x 3, and 6 layers' updates.
    assert prediction.step_time_s == pytest.approx(6 * 4.6 * 3 + 6 * 0.25)
    assert prediction.breakdown_s["grad_sync"] == 0.0
    assert prediction.tokens_per_s == pytest.approx(96 / prediction.step_time_s)
    assert prediction.usd_per_hour == 1.0
    assert prediction.usd_per_million_tokens == pytest.approx(
        1e6 / 3600 * prediction.step_time_s / 96
    )
    assert prediction.estimated == ()


def test_memory_counts_state_and_activations_in_flight():
    fleet = fleet_of(node_type())
    stages = (Stage(0, 2, ("t4-0/0",)), Stage(2, 2, ("t4-0/1",)))
    found = model(fleet).memory_of.by_worker(Plan("m", 8, 2, 16, (Pipeline(stages, 4, 2),)))
    tokens, per_parameter = 32, 20
    block_kept = tokens * 120 * 4
    backward = tokens * 40 * 4 + 1000 / 3 * 4
    assert found["t4-0/0"] == int((800 + 2000) * per_parameter + 2 * 2 * block_kept + backward)
    logits = tokens * 100 * 2 * 8 + 808 * 4
    assert found["t4-0/1"] == (2000 + 808) * per_parameter + 2 * block_kept + logits


def test_a_worker_of_an_uneven_stage_pays_and_holds_its_share():
    """On equal GPUs the largest share decides; a GPU of twice the speed with twice the share takes
    as long as the others.
    """
    shares, plain = (2, 1, 1), model(fleet_of(node_type()), profile=profile(degrees=(1, 2, 4)))
    stage = Stage(0, 4, ("t4-0/0", "t4-0/1", "t4-0/2"), tp_shares=shares)
    plan = Plan("m", 2, 2, 16, (Pipeline((stage,), 1, 2),))
    found = plain.predict(plan)
    half = plain.layer_times.times("T4", "fp32", 2, 2, "none")
    assert found.breakdown_s["pipeline"] >= float(half.forward_s.sum() + half.backward_s.sum())
    assert "50.0% of a layer on T4" in " ".join(found.estimated)
    per_parameter, tokens = 20, 32
    for share, worker in zip(shares, stage.workers, strict=True):
        part = share / 4
        held = per_parameter * (part * (800 + 4 * 900 + 800) + 4 * 100 + 8)
        kept = 4 * 4 * tokens * (80 * part + 40)
        logits = tokens * 100 * 2 * 8 * part + 808 * 4 * part
        assert found.memory_bytes_by_worker[worker] == pytest.approx(held + kept + logits, abs=2)

    both = fleet_of(node_type("fast", "A100", 1), node_type(gpus=2))
    mixed = model(both, profile=profile({"A100": 2.0, "T4": 1.0}, (1, 2, 4)))

    def seconds(shares: tuple[int, ...]) -> float:
        stage = Stage(0, 4, ("fast-0/0", "t4-1/0", "t4-1/1"), tp_shares=shares)
        return sum(mixed.stages.seconds(Pipeline((stage,), 1, 1), 0))

    assert seconds((2, 1, 1)) < seconds((1, 2, 1))
    slow = mixed.layer_times.times("T4", "fp32", 4, 1, "none")
    alone = float(slow.forward_s.sum() + slow.backward_s.sum())
    assert alone <= seconds((2, 1, 1)) < 1.01 * alone, "all three take as long"


def test_other_shares_of_the_same_workers_are_summed_over_others():
    both = fleet_of(node_type(), node_type())
    other = Pipeline((Stage(0, 4, ("t4-1/0", "t4-1/1")),), 1, 1)

    def plan(shares: tuple[int, ...]) -> Plan:
        stage = Stage(0, 4, ("t4-0/0", "t4-0/1", "t4-0/2"), tp_shares=shares)
        return Plan("m", 2, 1, 16, (Pipeline((stage,), 1, 1), other))

    of = model(both, profile=profile(degrees=(1, 2, 4)))
    jobs = {
        shares: of.steps.simulate(plan(shares)).sync.events for shares in ((2, 1, 1), (1, 2, 1))
    }
    for shares, events in jobs.items():
        found = {event.job.members: event.job.num_bytes for event in events}
        assert found == {
            job.members: job.num_bytes for job in sync_jobs(plan(shares), of.spec, of.parameters)
        }
    assert {e.job.members for e in jobs[2, 1, 1]} != {e.job.members for e in jobs[1, 2, 1]}


def test_seconds_are_linear_in_the_share_between_tp_degrees():
    of = model(fleet_of(node_type()), profile=profile(degrees=(1, 2, 4)))
    work = [
        of.layer_times.model_in(of.precision)
        .times("T4", 3, 1, share=TensorShare(0, parts, 8))
        .forward_s[1]
        for parts in range(1, 8)
    ]
    assert all(later > before for before, later in pairwise(work))
    assert work[2] == pytest.approx((work[1] + work[3]) / 2), (
        "3/8 lies halfway between a quarter and a half"
    )


def test_this_runtime_needs_no_flat_gradients_but_messages_at_its_borders():
    stages = (Stage(0, 1, ("t4-0/0",)), Stage(1, 2, ("t4-0/1",)), Stage(3, 1, ("t4-0/2",)))
    plan = Plan("m", 8, 2, 16, (Pipeline(stages, 4, 2),))
    theirs = model(fleet_of(node_type())).memory_of.by_worker(plan)
    ours = model(
        fleet_of(node_type()), parameters=framework_parameters("autohet", PARAMETERS)
    ).memory_of.by_worker(plan)
    message = 2 * 16 * 8 * 4
    held = {"t4-0/0": (800 + 1000, 1), "t4-0/1": (2000, 2), "t4-0/2": (1000 + 808, 1)}
    # Of four fp32 tensors like the logits one is left, and the gradient of the head's input.
    loss = {"t4-0/2": 3 * 4 * 2 * 16 * 100 - message}
    for worker, (parameters, borders) in held.items():
        expected = 5 * borders * message - 4 * parameters - loss.get(worker, 0)
        assert ours[worker] - theirs[worker] == pytest.approx(expected, abs=2)


def test_recomputation_trades_memory_for_time():
    fleet = fleet_of(node_type())
    stages = (Stage(0, 2, ("t4-0/0",)), Stage(2, 2, ("t4-0/1",)))
    plan = Plan("m", 16, 2, 16, (Pipeline(stages, 8, 2),))
    plain, again = model(fleet).predict(plan), model(fleet, recompute="full").predict(plan)
    assert again.step_time_s > plain.step_time_s
    assert again.memory_bytes_by_worker["t4-0/0"] < plain.memory_bytes_by_worker["t4-0/0"]


def test_a_tied_embedding_is_held_once_by_a_single_stage():
    fleet = fleet_of(node_type())
    one = Plan("m", 2, 2, 16, (Pipeline((Stage(0, 4, ("t4-0/0",)),), 1, 2),))
    tied, apart = model(fleet, spec(tied=True)), model(fleet, spec())
    gap = apart.memory_of.by_worker(one)["t4-0/0"] - tied.memory_of.by_worker(one)["t4-0/0"]
    assert gap == pytest.approx(800 * 20, abs=2)


def test_gradients_are_summed_over_the_holders_of_each_layer():
    a = Pipeline((Stage(0, 1, ("a/0",)), Stage(1, 3, ("a/1",))), 2, 1)
    b = Pipeline((Stage(0, 4, ("b/0",)),), 2, 1)
    jobs = sync_jobs(Plan("m", 4, 1, 16, (a, b)), spec(), CostParameters())
    found = {frozenset(job.members): job.num_bytes / 4 for job in jobs}
    assert found == {frozenset({"a/0", "b/0"}): 800 + 1000, frozenset({"a/1", "b/0"}): 3000 + 808}


def test_unequal_tensor_parallel_degrees_share_units():
    a, b = Pipeline((Stage(0, 4, ("a/0", "a/1")),), 1, 1), Pipeline((Stage(0, 4, ("b/0",)),), 1, 1)
    jobs = sync_jobs(Plan("m", 2, 1, 16, (a, b)), spec(), CostParameters())
    assert {frozenset(job.members) for job in jobs} == {
        frozenset({"a/0", "b/0"}),
        frozenset({"a/1", "b/0"}),
    }
    assert sum(job.num_bytes for job in jobs) / 4 == pytest.approx(spec().parameters)


def test_a_tied_embedding_is_summed_over_first_and_last_stages():
    stages = (Stage(0, 2, ("a/0",)), Stage(2, 2, ("a/1",)))
    jobs = sync_jobs(
        Plan("m", 2, 1, 16, (Pipeline(stages, 2, 1),)), spec(tied=True), CostParameters()
    )
    assert [(job.members, job.num_bytes, job.tied) for job in jobs] == [
        (("a/0", "a/1"), 3200.0, True)
    ]


def test_rings_share_the_nic_that_they_cross():
    links = Links(
        CostParameters(efficiency_inter=1.0, all_reduce_efficiency=1.0, latency_inter_s=0.0)
    )
    kind = node_type()
    members = [("a", kind), ("b", kind)]
    assert links.all_reduce_s(members, 1e8) == pytest.approx(1.0)
    assert links.all_reduce_s(members, 1e8, flows=4) == pytest.approx(4.0)
    assert links.all_reduce_s(members[:1], 1e8) == 0.0


def test_a_link_table_replaces_the_labels(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text(
        "scope,gpu_type,peer_gpu_type,message_bytes,bytes_per_s\nintra,T4,T4,1024,1e6\nintra,T4,T4,4096,3e6\n"
    )
    links = Links(CostParameters(), read_links(path))
    kind = node_type()
    assert links.bandwidth(kind, kind, True, 2048, 1) == pytest.approx(2e6)
    assert links.bandwidth(kind, kind, True, 1e9, 1) == pytest.approx(3e6)
    path.write_text("scope,gpu_type,peer_gpu_type,message_bytes,bytes_per_s\nnear,T4,T4,1,1\n")
    with pytest.raises(ConfigError, match="near"):
        read_links(path)


def test_faster_gpus_never_slow_a_plan():
    slow, fast = node_type("t4", "T4"), node_type("l4", "L4")
    table = profile({"T4": 1.0, "L4": 2.0})
    stages = (Stage(0, 2, ("t4-0/0",)), Stage(2, 2, ("t4-0/1",)))
    faster = (stages[0], Stage(2, 2, ("l4-1/0",)))
    m = model(
        fleet_of(slow, fast), profile=table, parameters=replace(PARAMETERS, latency_inter_s=0.0)
    )
    before, after = (m.predict(Plan("m", 4, 1, 16, (Pipeline(s, 4, 1),))) for s in (stages, faster))
    assert after.step_time_s < before.step_time_s


def test_what_was_not_measured_is_estimated_and_says_so():
    fleet = fleet_of(node_type("a10g", "A10G", memory=2**34))
    plan = Plan("m", 2, 1, 16, (Pipeline((Stage(0, 4, ("a10g-0/0",)),), 2, 1),))
    prediction = CostModel(fleet, Workload(spec(), 16, "bf16")).predict(plan)
    assert prediction.step_time_s > 0
    assert any("estimated from" in note for note in prediction.estimated)
    degrees = model(fleet_of(node_type()), profile=profile(degrees=(1,)))
    four = Plan(
        "m", 2, 1, 16, (Pipeline((Stage(0, 4, tuple(f"t4-0/{i}" for i in range(4))),), 2, 1),)
    )
    assert any("from TP 1" in note for note in degrees.predict(four).estimated)


def test_a_model_measured_on_another_gpu_is_scaled_by_the_speeds_of_measured_models():
    table = ProfileTable(
        Measurement(
            "m", "A100-40", "fp16", 1, 1024, size, layer, seconds * size, 2 * seconds * size, 1e-3
        )
        for layer, seconds in (("embedding", 1e-4), ("block", 1e-2), ("head", 5e-3))
        for size in (1, 2, 4)
    )
    big = LayerSpec(12 * 4096**2, 0, 12 * 4096**2, 4096)
    the_spec = replace(spec(), hidden_size=4096, blocks=(big,) * 4)
    kinds = [node_type("a100", "A100-40"), node_type("a10g", "A10G"), node_type("t4", "T4")]
    m = CostModel(fleet_of(*kinds), Workload(the_spec, 1024, "fp16"), Measurements(table))
    a100, a10g, t4 = (m.layer_times.times(kind.gpu_type, "fp16", 1, 2, "none") for kind in kinds)
    assert a100.estimated == ()
    assert any("from its time on A100-40" in note for note in a10g.estimated)
    # Bundled measurements of models of that size: an A10G takes 3 to 4 times, a T4 5 to 8 times an
    # A100's time.
    assert 2.5 < a10g.forward_s[1] / a100.forward_s[1] < 4.5
    assert 4.0 < t4.forward_s[1] / a100.forward_s[1] < 9.0
    of = CostModel(fleet_of(*kinds), Workload(the_spec, 2048, "bf16"), Measurements(table))
    longer = of.layer_times.times("A100-40", "bf16", 1, 2, "none")
    assert 1.8 < longer.forward_s[1] / a100.forward_s[1] < 2.6


def test_a_gpu_that_nobody_knows_is_an_error_not_zero():
    fleet = fleet_of(node_type("x", "MYSTERY"))
    plan = Plan("m", 1, 1, 16, (Pipeline((Stage(0, 4, ("x-0/0",)),), 1, 1),))
    with pytest.raises(ConfigError, match="MYSTERY"):
        CostModel(fleet, Workload(spec(), 16, "fp32")).predict(plan)


def test_a_plan_that_does_not_fit_names_its_tightest_worker():
    fleet = fleet_of(node_type(memory=2**16))
    plan = Plan("m", 2, 1, 16, (Pipeline((Stage(0, 4, ("t4-0/0",)),), 2, 1),))
    prediction = model(fleet).predict(plan)
    assert not prediction.fits
    worker, share = prediction.tightest_worker
    assert worker == "t4-0/0"
    assert share == pytest.approx(prediction.memory_bytes_by_worker[worker] / int(0.97 * 2**16))


def test_the_trace_holds_every_action_once_and_ends_with_the_step():
    fleet = fleet_of(node_type())
    stages = (Stage(0, 2, ("t4-0/0",)), Stage(2, 2, ("t4-0/1", "t4-0/2")))
    plan = Plan("m", 3, 1, 16, (Pipeline(stages, 3, 1),))
    m = model(fleet)
    events = [e for e in chrome_trace(plan, m)["traceEvents"] if e["ph"] == "X"]
    for lane in range(3):
        names = [
            e["name"] for e in events if e["tid"] == lane and e["cat"] in ("forward", "backward")
        ]
        assert sorted(names) == ["B0", "B1", "B2", "F0", "F1", "F2"]
    last = max(e["ts"] + e["dur"] for e in events)
    assert last / 1e6 == pytest.approx(m.predict(plan).step_time_s)
    for lane in range(3):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == lane)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_what_is_remembered_of_plans_does_not_grow_with_their_microbatches():
    """The actions of a search's thousand pipelines would take gigabytes."""
    fleet = fleet_of(node_type(gpus=8))
    m, held = model(fleet, spec(8)), []
    for number in (50, 1000):
        tracemalloc.start()
        for more in range(12):
            stages = tuple(Stage(i, 1, (f"t4-0/{i}",)) for i in range(8))
            m.predict(Plan("m", number + more, 1, 16, (Pipeline(stages, number + more, 1),)))
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    actions = 12 * 2 * 8 * 950
    assert held[1] - held[0] < 12 * actions  # the order of a pipeline's actions takes 8 bytes each


def test_calibration_recovers_a_slower_network_and_a_longer_backward():
    fleet = fleet_of(node_type(), node_type())
    table = ProfileTable(
        Measurement("m", "T4", "fp32", 1, 16, 1, layer, seconds, None, 0.01)
        for layer, seconds in (("embedding", 1e-4), ("block", 5e-3), ("head", 1e-3))
    )
    truth = replace(PARAMETERS, backward_ratio=2.4, efficiency_inter=0.6)

    def model_of(plan, parameters):
        return model(fleet, spec(), parameters, profile=table)

    runs = []
    for size in (1, 2, 4, 8):
        pipelines = tuple(
            Pipeline((Stage(0, 4, (f"t4-{i}/0",)),), 8 // size, size) for i in range(2)
        )
        plan = Plan("m", 16, size, 16, pipelines)
        runs.append(MeasuredRun(plan, model_of(plan, truth).predict(plan).step_time_s))
    fit = calibrate(runs, model_of, PARAMETERS)
    assert fit.error_after < 0.25 * fit.error_before
    assert fit.parameters.backward_ratio > PARAMETERS.backward_ratio
    assert math.isclose(fit.to_document()["parameters"]["backward_ratio"]["default"], 2.0)


def test_calibration_with_exact_defaults_moves_nothing():
    fleet = fleet_of(node_type())
    plan = Plan("m", 4, 1, 16, (Pipeline((Stage(0, 4, ("t4-0/0",)),), 4, 1),))
    seconds = model(fleet).predict(plan).step_time_s
    fit = calibrate(
        [MeasuredRun(plan, seconds)], lambda plan, p: model(fleet, parameters=p), PARAMETERS
    )
    assert fit.parameters.backward_ratio == pytest.approx(PARAMETERS.backward_ratio)
    assert fit.error_after < 1e-6


def test_no_worker_updates_before_every_gradient_is_summed():
    case = cases.request(cases.fleet(("A100", 2, 2)), 5, cases.model(4))
    pipelines = tuple(
        Pipeline((Stage(0, 2, (f"a100-{i}/0",)), Stage(2, 2, (f"a100-{i}/1",))), 2 + i, 1)
        for i in range(2)
    )
    sync = case.cost.steps.simulate(Plan("tiny", 5, 1, 128, pipelines)).sync
    (start,) = set(sync.update_start_s.values())
    assert len(sync.events) == 2
    assert start == max(event.end_s for event in sync.events)
    assert sync.end_s == start + max(sync.update_s.values())
    late, early = sorted(sync.events, key=lambda event: event.start_s)
    assert late.job.members[0].endswith(
        "/1"
    )  # the last stage's sum runs while the first stages still drain
    assert late.start_s < early.start_s


def test_the_same_model_on_another_fleet_predicts_as_a_new_one_and_an_unknown_type_is_an_error():
    """What depends on which nodes there are is made anew; a node type that is not known is never
    borrowed.
    """
    whole = cases.fleet(("A100", 2, 1), ("T4", 2, 1))
    part = Fleet(0, (whole.nodes[-1], whole.nodes[0]))
    request = cases.request(whole, 8)
    shared, anew = request.cost.with_fleet(part), cases.request(part, 8).cost
    stages = tuple(Stage(4 * i, 4, (f"{node.name}/0",)) for i, node in enumerate(part.nodes))
    plan = Plan("tiny", 8, 1, 128, (Pipeline(stages, 8, 1),))
    assert shared.predict(plan) == anew.predict(plan)
    assert shared.predict(plan).step_time_s > 0
    with pytest.raises(ConfigError, match="node type 'other'"):
        shared.with_fleet(Fleet(0, (Node("other-0", node_type("other")),)))


def test_layer_times_do_not_depend_on_the_fleet_that_asks_first():
    """A part of the fleet that lacks a type must not decide what all-reduces of that type cost."""

    def cost_of(of):
        measured = Measurements(cases.profile(degrees=(1,)))
        return CostModel(of, Workload(cases.model(), 128, "fp32"), measured, CostParameters())

    whole = cases.fleet(("A100", 1, 4), ("A10G", 1, 4))
    asked_first = cost_of(whole)
    part = asked_first.with_fleet(Fleet(0, whole.nodes[1:]))
    part.layer_times.times("A10G", "fp32", 2, 1, "none")
    found, alone = (
        each.layer_times.model_in("fp32").even.block_communication_s("A100", 2, 1)
        for each in (asked_first, cost_of(whole))
    )
    assert alone.sum() > 0
    assert found.tolist() == alone.tolist()
