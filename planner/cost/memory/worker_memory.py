"""Bytes of one worker: what it may use, what it always needs, and what each layer needs."""

from planner.cost.basis import CostBasis
from planner.cost.memory.training_bytes import (
    MemoryTerms,
    TokensOnRank,
    memory_terms,
    with_cut_sequence,
)
from planner.inputs.fleet import NodeType
from planner.plans.plan import Recompute, TensorShare

TermsByUse = dict[tuple[str, int, int, Recompute, TensorShare | None], MemoryTerms]
"""Bytes of layers by format, TP degree, microbatch size, recomputation and share."""


class WorkerMemory:
    """Memory of single workers.

    known: cache of layers' bytes, which may be shared by fleets.
    """

    def __init__(self, basis: CostBasis, known: TermsByUse) -> None:
        self._spec = basis.workload.spec
        self._sequence_length = basis.workload.sequence_length
        self._parameters = basis.parameters
        self._formats = basis.formats
        self._known = known

    def fixed_bytes(self, node_type: NodeType) -> float:
        """Return bytes that any worker needs, independent of its layers."""
        context_share = self._parameters.context_share
        return self._parameters.context_bytes + context_share * node_type.gpu_memory_bytes

    def limit_bytes(self, node_type: NodeType) -> float:
        """Return bytes of a GPU that a plan may use: its memory less the margin."""
        return (1.0 - self._parameters.memory_margin) * node_type.gpu_memory_bytes

    def terms(
        self,
        compute: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute,
        share: TensorShare | None = None,
    ) -> MemoryTerms:
        """Return the bytes of every layer where it computes in one format.

        share: the worker's own share, if the TP degree does not define it.
        """
        key = (compute, tp_degree, microbatch, recompute, share)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._terms(*key)
        return known

    def _terms(
        self,
        compute: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute,
        share: TensorShare | None,
    ) -> MemoryTerms:
        parameters = self._parameters
        spec = self._spec
        cut: float = tp_degree
        if share is not None:
            spec = spec.with_share(share)
            # the TP degree at which even parts would be as large
            cut = 1 / share.fraction
        length = self._sequence_length
        on_rank = TokensOnRank(microbatch * length, length, compute, cut)
        memory = memory_terms(spec, on_rank, recompute, parameters)

        # selective recomputation is not combined with it
        cuts_sequence = parameters.sequence_parallel and recompute != "selective"
        if cuts_sequence and tp_degree > 1:
            inside = self._formats.inside_bytes(microbatch, compute)
            value_bytes = inside / self._spec.hidden_size
            by_modules = parameters.autograd_activations
            memory = with_cut_sequence(memory, spec, value_bytes, tp_degree, recompute, by_modules)
        return memory.offloaded() if parameters.offload_optimizer else memory
