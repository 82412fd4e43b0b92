"""What frameworks do differently: whom a transfer occupies, the width of gradients."""

import pytest

from planner.cost.model import CostModel
from planner.cost.parameters import FRAMEWORKS, OURS, CostParameters, framework_parameters
from planner.errors import ConfigError
from planner.plan import Pipeline, Plan, Stage
from tests.planner.cases import fleet, model, profile, request, with_nics


def _step_s(framework: str) -> float:
    """Two stages of slow links: transfers matter."""
    spec, of = model(4), fleet(("A100", 2, 1))
    parameters = framework_parameters(framework, CostParameters())
    cost = CostModel(
        of, spec, profile(), sequence_length=128, precision="fp32", parameters=parameters
    )
    stages = (Stage(0, 2, ("a100-0/0",)), Stage(2, 2, ("a100-1/0",)))
    return cost.predict(Plan("tiny", 16, 2, 128, (Pipeline(stages, 8, 2),))).step_time_s


def test_waiting_senders_take_longer_and_ours_does_not_wait() -> None:
    assert framework_parameters(OURS, CostParameters()).transfers == "none"
    assert _step_s(OURS) < _step_s("megatron") < _step_s("deepspeed")


def test_other_parameters_stay() -> None:
    given = CostParameters(launch_s=1e-3, context_bytes=5.0)
    for name in FRAMEWORKS:
        found = framework_parameters(name, given)
        assert (found.launch_s, found.context_bytes) == (1e-3, 5.0)


def test_an_unknown_framework_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'alpa'; known: autohet, deepspeed, megatron"):
        framework_parameters("alpa", CostParameters())


def test_deepspeed_sends_slices_over_tensor_parallel_ranks() -> None:
    """Eight ranks over one slow card: the hidden states cross it once, not eight times."""
    of = with_nics(fleet(("A10G", 2, 8)), {"A10G": 1e9 / 8})
    cost = request(of, 8, framework="deepspeed").cost
    kind = of.nodes[0].node_type
    once_s = cost.activation_message_bytes(8) / (1e9 / 8 * cost.parameters.efficiency_inter)
    assert cost.boundary_s(kind, kind, 8, tp_degree=8) == pytest.approx(once_s, rel=0.05)
