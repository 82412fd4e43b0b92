"""Costs of every layer on one way to use a node type: the tables of a search."""

from dataclasses import replace

import numpy as np

from planner.arrays import Floats
from planner.cost.basis import CostBasis
from planner.cost.layers.even_layers import LayerTimes
from planner.cost.layers.expert_dispatch import DispatchCosts
from planner.cost.layers.layer_costs import Assumed, LayerCosts
from planner.cost.layers.layer_times import LayerTimesByFormat
from planner.cost.memory.offload import offloaded_update_s
from planner.cost.memory.training_bytes import OPTIMIZER_BYTES, VALUE_BYTES, MemoryTerms
from planner.cost.memory.worker_memory import MemoryUse, WorkerMemory
from planner.inputs.fleet import NodeType
from planner.plans.communicators import LEAST_OF_A_GROUP, MOSTLY
from planner.plans.plan import TensorShare

CostsByUse = dict[tuple[NodeType, int, int, TensorShare | None], LayerCosts]
"""Costs of layers by node type, TP degree, microbatch size and share."""


class LayerCostModel:
    """Costs of layers on the nodes of one fleet.

    assumed: stages that they describe. known: cache of the costs.
    """

    def __init__(
        self,
        basis: CostBasis,
        times: LayerTimesByFormat,
        memory: WorkerMemory,
        dispatch: DispatchCosts,
        assumed: Assumed,
        known: CostsByUse,
    ) -> None:
        self._spec = basis.workload.spec
        self._parameters = basis.parameters
        self._formats = basis.formats
        self._is_alone = len(basis.fleet.workers) == 1
        self._times = times
        self._memory = memory
        self._dispatch = dispatch
        self._assumed = assumed
        self._known = known

    def costs(
        self, node_type: NodeType, tp_degree: int, microbatch: int, share: TensorShare | None = None
    ) -> LayerCosts:
        """Return seconds and bytes of every layer on `tp_degree` GPUs of one node of that type.

        share: the share of one of the GPUs, if they are uneven.
        """
        key = (node_type, tp_degree, microbatch, share)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._costs(node_type, tp_degree, microbatch, share)
        return known

    def _costs(
        self, node_type: NodeType, tp_degree: int, microbatch: int, share: TensorShare | None
    ) -> LayerCosts:
        compute = self._formats.of_type(node_type.gpu_type)
        recompute = self._assumed.recompute
        times = self._times.times(
            node_type.gpu_type, compute, tp_degree, microbatch, recompute, share
        )
        forward_s = times.forward_s * node_type.slowdown
        backward_s = times.backward_s * node_type.slowdown
        if tp_degree > 1 and self._dispatch.allowed != "sum":
            more_forward_s, more_backward_s = self._dispatch_s(
                times, node_type, tp_degree, microbatch
            )
            forward_s = forward_s + more_forward_s
            backward_s = backward_s + more_backward_s

        memory = self._memory_terms(compute, tp_degree, microbatch, share)
        border_bytes = self._formats.border_bytes(microbatch, compute, compute)
        cut = tp_degree if share is None else 1 / share.fraction
        return LayerCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            # each holder updates its part of the state
            update_s=self._update_s(node_type, times, memory) / self._assumed.holders,
            state_bytes=memory.state_bytes,
            activation_bytes=memory.activation_bytes,
            peak_bytes=memory.peak_bytes,
            sync_bytes=self._sync_bytes(cut),
            fixed_bytes=self._fixed_bytes(node_type, tp_degree),
            border_bytes=self._parameters.border_messages * border_bytes,
            limit_bytes=self._memory.limit_bytes(node_type),
            estimated=times.estimated,
        )

    def _dispatch_s(
        self, times: LayerTimes, node_type: NodeType, tp_degree: int, microbatch: int
    ) -> tuple[Floats, Floats]:
        """Return the seconds that the allowed way of tokens to experts adds to each layer's passes.

        auto: the faster way of each layer, so that no stage of a plan is faster.
        """
        recomputes = self._assumed.recompute != "none"
        group = self._dispatch.even_group(node_type, tp_degree, microbatch, recomputes=recomputes)
        forward_s, backward_s = self._dispatch.added_by_layer(times, group)
        if self._dispatch.allowed == "auto":
            is_faster = forward_s + backward_s < 0
            forward_s = forward_s * is_faster
            backward_s = backward_s * is_faster
        return forward_s, backward_s

    def _update_s(self, kind: NodeType, times: LayerTimes, memory: MemoryTerms) -> Floats:
        """Return the seconds of each layer's update where its state is, with whole state on a
        worker.
        """
        if not self._parameters.offload_optimizer:
            return times.update_s * kind.slowdown
        value_bytes = VALUE_BYTES[self._formats.of_type(kind.gpu_type)]
        each_s = offloaded_update_s(kind, value_bytes, self._parameters)
        return memory.host_bytes / OPTIMIZER_BYTES * each_s

    def _memory_terms(
        self, compute: str, tp_degree: int, microbatch: int, share: TensorShare | None
    ) -> MemoryTerms:
        assumed = self._assumed
        use = MemoryUse(compute, tp_degree, microbatch, assumed.recompute, share)
        memory = self._memory.terms(use).share_out(assumed.holders)
        if assumed.at_least is None:
            return memory
        least = self._memory.terms(use._replace(recompute=assumed.at_least))
        activations = np.minimum(memory.activation_bytes, least.activation_bytes)
        return replace(memory, activation_bytes=activations)

    def _fixed_bytes(self, node_type: NodeType, tp_degree: int) -> float:
        """Return the bytes of a worker whatever its layers, with its communicators.

        It counts the fewest communicators of such a worker in most plans. A worker alone in its
        stage may have none in some plan, so a lower bound counts none.
        """
        if tp_degree > 1:
            communicators = LEAST_OF_A_GROUP
        elif self._is_alone or self._assumed.at_least is not None:
            communicators = 0
        else:
            communicators = MOSTLY
        communicator_bytes = communicators * self._parameters.communicator_bytes
        return self._memory.fixed_bytes(node_type) + communicator_bytes

    def _sync_bytes(self, tp_degree: float) -> Floats:
        width = self._parameters.sync_bytes_per_parameter
        layers = self._spec.layers
        found = np.array([layer.parameters_per_worker(tp_degree) * width for layer in layers])
        found[-1] += self.tied_sync_bytes(tp_degree)
        return found

    def tied_sync_bytes(self, tp_degree: float) -> float:
        """Return gradient bytes of the tied embedding on one worker.

        They are in `sync_bytes` of the embedding and of the head, although a stage that holds both
        sums them once.
        """
        return self._spec.tied_parameters / tp_degree * self._parameters.sync_bytes_per_parameter
