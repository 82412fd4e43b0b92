"""What frameworks do differently in a step, as parameters of the cost model: for predicting runs of theirs, or of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.cost.parameters import CostParameters
from planner.errors import ConfigError

OURS = "autohet"


@dataclass(frozen=True)
class Framework:
    """`changes` to the cost parameters, and what they stand for."""

    what: str
    changes: Mapping[str, Any]


FRAMEWORKS: Mapping[str, Framework] = {
    OURS: Framework(
        "this project's runtime: transfers beside its work, in slices between nodes, fp32 gradients that lie in the buffers of"
        " their sums, one sum over all holders of a tied embedding",
        {
            "transfers": "none",
            "sliced_boundaries": True,
            "sync_bytes_per_parameter": 4.0,
            "tied_sync": "union",
            "flat_gradients": False,
            "border_messages": 5.0,
        },
    ),
    "deepspeed": Framework(
        "DeepSpeed's pipeline engine: sender and receiver both wait for a transfer, fp32 gradients",
        {"transfers": "both", "sync_bytes_per_parameter": 4.0, "tied_sync": "union"},
    ),
    "megatron": Framework(
        "Megatron-LM: fused sends, gradients in 16 bits, a tied embedding summed within the stages, then between them",
        {"transfers": "receiver", "sync_bytes_per_parameter": 2.0, "tied_sync": "two_step"},
    ),
}


def framework_parameters(name: str, parameters: CostParameters) -> CostParameters:
    """The parameters with what is known of the framework. ConfigError for a framework that is not known."""
    if name not in FRAMEWORKS:
        raise ConfigError(f"framework is '{name}'; known: {', '.join(FRAMEWORKS)}")
    return replace(parameters, **FRAMEWORKS[name].changes)
