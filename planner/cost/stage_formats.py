"""Number format of each stage, and bytes of hidden states inside stages and between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cost.memory.training_bytes import FP32_BYTES, VALUE_BYTES
from planner.inputs.fleet import Fleet
from planner.plans.formats import shared_format
from planner.plans.plan import ComputeFormat, Plan, Stage

_OF_VALUES = {"fp8": "bf16"}
"""Format of hidden states by that of products, where they differ."""


@dataclass(frozen=True)
class StageFormats:
    """Formats in which the stages of one fleet compute.

    precision: format of GPU types that `by_type` does not name. values_by_sequence: hidden states
    of one sequence. scales_gradients: gradients inside fp16 stages are scaled, so that what leaves
    them is in fp32.
    """

    fleet: Fleet
    precision: str
    by_type: Mapping[str, ComputeFormat]
    values_by_sequence: int
    scales_gradients: bool
    _known: dict[tuple[str, ...], str] = field(default_factory=dict)

    def of_type(self, gpu_type: str) -> str:
        """Return the format of a stage on GPUs of one type."""
        return self.by_type.get(gpu_type, self.precision)

    def of(self, stage: Stage) -> str:
        """Return the format of a stage: the one it names, else that of its workers' GPU types."""
        if stage.compute is not None:
            return stage.compute
        if not self.by_type:
            return self.precision
        # searches ask for the same groups in thousands of plans
        known = self._known.get(stage.workers)
        if known is None:
            types = self.fleet.gpu_types_of(stage.workers)
            formats = {each: self.of_type(each) for each in types}
            known = self._known[stage.workers] = shared_format(formats)
        return known

    def in_use(self, plan: Plan) -> dict[str, list[str]]:
        """Return the formats in which the stages of each GPU type compute, in plan order."""
        found: dict[str, list[str]] = {}
        for stage in plan.stages:
            compute = self.of(stage)
            for gpu_type in sorted(self.fleet.gpu_types_of(stage.workers)):
                used = found.setdefault(gpu_type, [])
                if compute not in used:
                    used.append(compute)
        return found

    def inside_bytes(self, microbatch: int, compute: str) -> float:
        """Return bytes of a microbatch's hidden states where a stage computes in this format."""
        return float(microbatch * self.values_by_sequence * VALUE_BYTES[compute])

    def border_bytes(self, microbatch: int, one: str, other: str) -> float:
        """Return bytes of a microbatch's hidden states between stages of two formats.

        They are in the format of both stages, or in fp32 if these differ
        (`autohet.runtime.parallel.borders.border_dtype`). Products in fp8 return bf16.
        """
        one = _OF_VALUES.get(one, one)
        other = _OF_VALUES.get(other, other)
        is_scaled = one == "fp16" and self.scales_gradients
        if one == other and not is_scaled:
            width = VALUE_BYTES[one]
        else:
            width = FP32_BYTES
        return float(microbatch * self.values_by_sequence * width)
