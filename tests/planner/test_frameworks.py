"""What frameworks do differently: whom a transfer occupies, the width of gradients."""

import pytest

from planner.cost.model import CostModel
from planner.cost.parameters import FRAMEWORKS, OURS, CostParameters, framework_parameters
from planner.errors import ConfigError
from planner.plan import Pipeline, Plan, Stage
from tests.planner.cases import fleet, model, profile


def _step_s(framework: str) -> float:
    """Two stages of slow links: transfers matter."""
    spec, of = model(4), fleet(("A100", 2, 1))
    parameters = framework_parameters(framework, CostParameters())
    cost = CostModel(of, spec, profile(), sequence_length=128, precision="fp32", parameters=parameters)
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
