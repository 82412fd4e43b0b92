"""A GPU type whose rate the catalogue has wrong: found from measured compute, planned on by all
replans, with one move.
"""

from dataclasses import replace

import pytest

from autohet.control import speeds
from autohet.control.planning.orders import OrderBuilder
from autohet.control.values.observation import NodeView
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.planning import make_planning
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.messages import AgentEndpoint
from autohet.runtime.models.config import load_config
from planner.inputs.fleet import Fleet, Node, NodeType
from tests.driver.test_controller import KIND, causes, run
from tests.driver.test_slow import PacedWorkforce
from tests.harness.fake_job import fake_job

OTHER = NodeType("other", "L4", 1, 24 << 30, 32e9, 3e9)
NODES = {"small-0": KIND, "small-1": KIND, "other-0": OTHER, "other-1": OTHER}
MINUTE_S = 60.0
WRONG = 1.5


def _mixed(by_type):
    """Two nodes of each type; a type's compute takes what the plan says times `by_type`."""
    job = fake_job(
        steps=2000,
        training={"global_batch_sequences": 16},
        emulation={"relative_speed_by_gpu_type": {"A10G": 1.0, "L4": 1.0}},
        elastic={"min_workers": 1, "step_timeout_s": 30, "debounce_s": 0.2, "slow_steps": 5},
    )
    workforce = PacedWorkforce(machine=2.0)
    for name, kind in NODES.items():
        endpoint = AgentEndpoint(name, "here", 1, "token")
        workforce.nodes[name] = NodeView(Node(name, kind), workforce.now, endpoint)
    workforce.slow = {name: by_type.get(kind.gpu_type, 1.0) for name, kind in NODES.items()}
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)))
    controller = Controller(job, workforce, make_planning(job), orders, EventLog(None))
    workforce.controller = controller
    return controller, workforce


def _true_steps_s(controller, by_type):
    """Step of the best plan and of the present one, at the rates that the machines have."""
    true = [
        Node(name, replace(kind, slowdown=by_type.get(kind.gpu_type, 1.0)))
        for name, kind in NODES.items()
    ]
    best = make_planning(controller.memory.job).propose(Fleet(1, tuple(true)), None)
    return best.predicted_step_s, best.cost.predict(controller.memory.proposal.plan).step_time_s


@pytest.mark.parametrize("by_type", [{"L4": WRONG}, {"L4": 1 / WRONG}, {"A10G": WRONG}])
def test_a_wrong_catalogue_is_corrected_within_a_minute_with_one_move(by_type):
    """Wrong: the plan stays as the catalogue has it, or moves for each node that seems slow."""
    controller, workforce = _mixed(by_type)
    run(controller, lambda: bool(causes(controller)))
    moved = controller.memory.ledger.committed_steps
    run(controller, lambda: controller.memory.ledger.committed_steps >= moved + 30)
    assert workforce.now < MINUTE_S
    best_s, present_s = _true_steps_s(controller, by_type)
    assert present_s <= 1.05 * best_s
    assert causes(controller) == ["search"]
    assert controller.memory.speeds.slowdowns == {}
    (told,) = [e for e in controller.events.records if e["kind"] == "calibration"]
    l4, a10g = (told["rate_factors"].get(gpu_type, 1.0) for gpu_type in ("L4", "A10G"))
    assert l4 / a10g == pytest.approx(by_type.get("L4", 1.0) / by_type.get("A10G", 1.0), rel=0.01)


MEASURED = {"a-0/0": [1.0] * 5, "a-1/0": [1.0] * 5, "b-0/0": [1.5] * 5, "b-1/0": [1.5] * 5}
TYPES = {"a-0/0": "A", "a-1/0": "A", "b-0/0": "B", "b-1/0": "B"}
PLANNED = dict.fromkeys(MEASURED, 1.0)


@pytest.mark.parametrize(
    ("changed", "factors"),
    [
        ({}, {"B": 1.5}),
        ({"b-1/0": [1.0] * 5}, {}),  # one slow node is no slow type
        ({"b-1/0": [1.5, 1.5, 9.0, 1.5, 1.5]}, {"B": 1.5}),  # an odd step
        ({"b-0/0": [1.1] * 5, "b-1/0": [1.1] * 5}, {}),  # within the model's error
        ({"b-0/0": [40.0] * 5, "b-1/0": [40.0] * 5}, {"B": speeds.MOST_RATE_FACTOR}),
    ],
)
def test_a_types_factor_is_what_most_of_its_workers_take(changed, factors):
    assert speeds.find_rates(MEASURED | changed, PLANNED, TYPES, {}) == factors


def test_a_factor_that_is_known_is_no_news():
    known = {"B": 1.5}
    assert speeds.find_rates(MEASURED, PLANNED | {"b-0/0": 1.5, "b-1/0": 1.5}, TYPES, known) == {}


def test_one_type_alone_has_nothing_to_be_compared_with():
    assert speeds.find_rates(MEASURED, PLANNED, dict.fromkeys(TYPES, "A"), {}) == {}
