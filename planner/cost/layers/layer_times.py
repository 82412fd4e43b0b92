"""Seconds of every layer in each number format of a job."""

from collections.abc import Mapping
from functools import partial

from planner.cost.basis import CostBasis, Measurements
from planner.cost.layers.even_layers import LayerTimes
from planner.cost.layers.layer_seconds import LayerTimeModel
from planner.cost.layers.measured_layers import MeasuredLayers
from planner.inputs.fleet import NodeType
from planner.inputs.profile import default_profile
from planner.plans.plan import Plan, Recompute, TensorShare

ModelsByFormat = dict[str, LayerTimeModel]
"""Models of layer times by number format."""


class LayerTimesByFormat:
    """Layer times of one workload on one fleet's links, in any format.

    known: cache of the models of layer times, which may be shared by the parts of a fleet. nodes: a
    node type of each GPU type, shared with `known`: a part that lacks a type must not decide what
    all-reduces of that type cost.
    """

    def __init__(
        self,
        basis: CostBasis,
        measurements: Measurements,
        known: ModelsByFormat,
        nodes: dict[str, NodeType],
    ) -> None:
        self._basis = basis
        self._workload = basis.workload
        self._profile = measurements.profile or default_profile()
        self._model = measurements.model or basis.workload.spec.name
        self._known = known
        self._nodes = nodes
        for kind in basis.fleet.node_types:
            nodes.setdefault(kind.gpu_type, kind)

    def times(
        self,
        gpu_type: str,
        compute: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute,
        share: TensorShare | None = None,
    ) -> LayerTimes:
        """Return forward, backward and update seconds of every layer in the format `compute`.

        The backward includes what is recomputed. share: the worker's own share, if the TP degree
        does not define it.
        """
        return self.model_in(compute).times(gpu_type, tp_degree, microbatch, recompute, share)

    def model_in(self, compute: str) -> LayerTimeModel:
        """Return the model of layer times in one format."""
        if compute not in self._known:
            measured = MeasuredLayers(
                self._profile,
                self._workload.spec,
                self._model,
                compute,
                self._workload.sequence_length,
            )
            communication_s = partial(self._tp_communication_s, compute)
            self._known[compute] = LayerTimeModel(measured, self._basis.parameters, communication_s)
        return self._known[compute]

    def load_spread(self) -> float | None:
        """Return the measured spread of the experts' loads; None: not measured."""
        return self.model_in(self._workload.precision).measured.load_spread

    def rates(self, plan: Plan) -> dict[str, Mapping[str, str]]:
        """Return precision, basis and source of block times by GPU type in use.

        The precision is the format of the type's first stage. The basis is measured or estimated;
        the source is what the times are made from.
        """
        found: dict[str, Mapping[str, str]] = {}
        formats_in_use = self._basis.formats.in_use(plan)
        for gpu_type, formats in sorted(formats_in_use.items()):
            precision = formats[0]
            basis, source = self.model_in(precision).even.basis(gpu_type)
            found[gpu_type] = {"precision": precision, "basis": basis, "source": source}
        return found

    def _tp_communication_s(
        self, compute: str, gpu_type: str, tp_degree: int, microbatch: int
    ) -> float:
        """Return seconds of the two all-reduces of the hidden states, a block and direction.

        Source: Shoeybi et al., Megatron-LM, 2019, section 3.
        """
        kind = self._nodes.get(gpu_type)
        # a type without a node is in the profile alone: no plan uses it
        if tp_degree == 1 or kind is None:
            return 0.0
        members = [("node", kind)] * tp_degree
        num_bytes = self._basis.formats.inside_bytes(microbatch, compute)
        return 2 * self._basis.links.all_reduce_s(members, num_bytes)
