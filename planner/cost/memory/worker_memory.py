"""Bytes of one worker: what it may use, what it always needs, and what each layer needs."""

from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.basis import CostBasis
from planner.cost.memory.training_bytes import (
    MemoryTerms,
    TokensOnRank,
    memory_terms,
    with_cut_sequence,
)
from planner.inputs.fleet import NodeType
from planner.plans.plan import Recompute, TensorShare


class MemoryUse(NamedTuple):
    """Way in which a worker holds its layers.

    share: its own share, if the TP degree does not define it. cuts_sequence, offloads: its stage is
    sequence parallel, or has masters and moments in host memory, whatever the parameters say.
    """

    compute: str
    tp_degree: int
    microbatch: int
    recompute: Recompute
    share: TensorShare | None = None
    cuts_sequence: bool = False
    offloads: bool = False


TermsByUse = dict[MemoryUse, MemoryTerms]
"""Bytes of layers by use."""


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of single workers.

    known: cache of layers' bytes, which may be shared by fleets.
    """

    basis: CostBasis
    known: TermsByUse

    def fixed_bytes(self, node_type: NodeType) -> float:
        """Return bytes that any worker needs, independent of its layers."""
        context_share = self.basis.parameters.context_share
        return self.basis.parameters.context_bytes + context_share * node_type.gpu_memory_bytes

    def limit_bytes(self, node_type: NodeType) -> float:
        """Return bytes of a GPU that a plan may use: its memory less the margin."""
        return (1.0 - self.basis.parameters.memory_margin) * node_type.gpu_memory_bytes

    def terms(self, use: MemoryUse) -> MemoryTerms:
        """Return the bytes of every layer."""
        known = self.known.get(use)
        if known is None:
            known = self.known[use] = self._terms(use)
        return known

    def _terms(self, use: MemoryUse) -> MemoryTerms:
        parameters = self.basis.parameters
        spec = self.basis.workload.spec
        cut: float = use.tp_degree
        if use.share is not None:
            spec = spec.with_share(use.share)
            # the TP degree at which even parts would be as large
            cut = 1 / use.share.fraction
        length = self.basis.workload.sequence_length
        on_rank = TokensOnRank(use.microbatch * length, length, use.compute, cut)
        memory = memory_terms(spec, on_rank, use.recompute, parameters)

        # selective recomputation is not combined with it
        may_cut = use.tp_degree > 1 and use.recompute != "selective"
        if use.cuts_sequence or (parameters.sequence_parallel and may_cut):
            inside = self.basis.formats.inside_bytes(use.microbatch, use.compute)
            value_bytes = inside / self.basis.workload.spec.hidden_size
            by_modules = parameters.autograd_activations
            memory = with_cut_sequence(
                memory, spec, value_bytes, use.tp_degree, use.recompute, by_modules
            )
        offloads = use.offloads or parameters.offload_optimizer
        return memory.offload() if offloads else memory
