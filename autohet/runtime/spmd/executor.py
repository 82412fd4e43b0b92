"""Execution of one rank's part of a program, on plain local tensors.

Autograd goes through the collectives. (An uneven DTensor would return wrong data silently.)
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from autohet.runtime.groups import Group
from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.spmd.capture import Captured
from autohet.runtime.spmd.clock import ComputeClock
from autohet.runtime.spmd.collectives import FactoredLinear, VocabularyLoss, convert
from autohet.runtime.step.pacing import Pace
from planner.spmd.graph import GraphNode
from planner.spmd.layouts import TensorLayout
from planner.spmd.operators import SHAPED
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Instruction, Property
from planner.spmd.rules import axis_of


class ProgramExecutor:
    """Executor of a rank of a plan.

    pace: seconds that all operators owe the clock; each owes a part in proportion to its FLOPs.
    """

    def __init__(
        self,
        captured: Captured,
        plan: PlacedProgram,
        group: Group,
        clock: ComputeClock | None = None,
        pace: Pace | None = None,
    ) -> None:
        size = len(plan.shares.ratios[0])
        assert group.size == size, f"{group.size} ranks for {size} shares"
        self.captured = captured
        self.plan = plan
        self.group = group
        self.graph = plan.graph
        self._clock = clock
        self._last_use: dict[Property, int] = {}
        for at, instruction in enumerate(plan.program.instructions):
            for used in instruction.inputs:
                self._last_use[used] = at
        self._flops_s = _flops_s(plan, group.rank, pace)

    def run(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of the loss; the sum over ranks is the loss.

        parameters: local tensors by name, each in its layout in the program (`local_part`). They
        are the caller's, and are cast to the type of the captured ones. inputs: the whole global
        batch; a rank reads its part of it. Backward of the result gives each local parameter's
        gradient in its layout's dual. Every rank calls it; it blocks on the others.
        """
        given = dict(zip(self.captured.inputs, inputs, strict=True))
        given |= self.captured.constants
        instructions = self.plan.program.instructions
        values: dict[Property, Tensor] = {}
        for at, instruction in enumerate(instructions):
            values[instruction.result] = self._run(instruction, values, given, parameters)
            # Autograd keeps what backward needs; all else is freed after its last use.
            for used in instruction.inputs:
                if self._last_use[used] == at:
                    values.pop(used, None)
        return values[instructions[-1].result]

    def _run(
        self,
        instruction: Instruction,
        values: Mapping[Property, Tensor],
        given: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> Tensor:
        name = instruction.tensor
        if instruction.op == "load":
            if name in parameters:
                return parameters[name].to(self.captured.parameters[name].dtype)
            return self.local_part(given[name], name, instruction.output)
        tensors = [values[used] for used in instruction.inputs]
        if instruction.op == "compute":
            return self._add_pace(instruction, self._compute(instruction, tensors))
        (_, source) = instruction.inputs[0]
        lengths = partial(self.plan.lengths, name)
        return convert(
            self.group, tensors[0], source, instruction.output, lengths, instruction.variant
        )

    def local_part(self, whole: Tensor, name: str, layout: TensorLayout) -> Tensor:
        """Return this rank's part of a leaf."""
        if layout.kind != "sharded":
            return whole
        start, length = self._part(name, layout)
        return whole.narrow(layout.dim, start, length)

    def _part(self, name: str, layout: TensorLayout) -> tuple[int, int]:
        """Return the offset and the length of this rank's part of a sharded tensor."""
        lengths = self.plan.lengths(name, layout.dim)
        rank = self.group.rank
        return sum(lengths[:rank]), lengths[rank]

    def _add_pace(self, instruction: Instruction, result: Tensor) -> Tensor:
        """Add the operator's emulated seconds to the clock's debt, and return its result.

        Forward seconds are added now, backward seconds when the gradient of the output has arrived.
        """
        owed = self._flops_s.get(instruction.tensor)
        if owed is not None and self._clock is not None:
            clock = self._clock
            (forward_s, backward_s) = owed
            clock.owe(forward_s)
            if result.requires_grad:
                result.register_hook(lambda gradient: clock.owe(backward_s))
        return result

    def _compute(self, instruction: Instruction, tensors: list[Tensor]) -> Tensor:
        node = self.graph.by_name[instruction.tensor]
        call = self.captured.calls[instruction.tensor]
        if any(layout.kind == "factored" for _, layout in instruction.inputs):
            name, layout = instruction.inputs[0]
            lengths = self.plan.lengths(name, layout.dim)
            return apply(FactoredLinear, self.group, layout.dim, lengths, *tensors)
        # Letter Y: the operator is cut along the vocabulary, so its ids need this rank's offset.
        cuts_vocabulary = instruction.letter == "Y"
        if node.op == "cross_entropy_sum" and cuts_vocabulary:
            start, _ = self._part(*instruction.inputs[0])
            ignored = call.args[2]
            return apply(VocabularyLoss, self.group, start, *tensors, ignored)
        shape = self._local_shape(instruction)
        if self._has_empty_part(instruction):
            zeros = _nothing(tensors, shape, call.dtype)
            return _with_additive(node, zeros, tensors, instruction.output)
        if node.op == "embedding" and cuts_vocabulary:
            start, _ = self._part(*instruction.inputs[0])
            return _partial_embedding(tensors[0], tensors[1], start)
        if node.op == "mean":
            return self._mean(instruction, tensors[0], shape)
        if node.op in SHAPED:
            return tensors[0].reshape(shape)
        if node.op == "expand":
            return tensors[0].expand(shape)
        return call(tensors)

    def _has_empty_part(self, instruction: Instruction) -> bool:
        """Return True if this rank's part of an input or of the output has no elements."""
        for name, layout in (*instruction.inputs, instruction.result):
            if layout.kind == "sharded":
                _, length = self._part(name, layout)
                if not length:
                    return True
        return False

    def _local_shape(self, instruction: Instruction) -> tuple[int, ...]:
        shape = list(self.graph.by_name[instruction.tensor].shape)
        if instruction.output.kind == "sharded":
            _, length = self._part(*instruction.result)
            shape[instruction.output.dim] = length
        return tuple(shape)

    def _mean(self, instruction: Instruction, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the local part's mean, weighted so that it divides by the whole tensor's size."""
        node = self.graph.by_name[instruction.tensor]
        call = self.captured.calls[node.name]
        averaged = self.graph.by_name[node.inputs[0]]
        count = _per_result(averaged.shape, node.shape)
        local = _per_result(tensor.shape, shape)
        return call([tensor]) * (local / count)


def _per_result(inputs: Sequence[int], results: Sequence[int]) -> float:
    """Return how many elements of an input of this shape each element of the result averages."""
    return math.prod(inputs) / max(math.prod(results), 1)


def _flops_s(plan: PlacedProgram, rank: int, pace: Pace | None) -> dict[str, tuple[float, float]]:
    """Return the forward and backward seconds of each operator of a rank.

    pace: seconds of all operators together.
    """
    if pace is None:
        return {}
    flops: dict[str, float] = {}
    for instruction in plan.program.instructions:
        node = plan.graph.by_name[instruction.tensor]
        if instruction.op != "compute" or not node.flops:
            continue
        # Without a letter the operator is not cut: each rank computes the whole of it.
        share = 1.0
        if instruction.letter:
            axis = axis_of(plan.graph, node, instruction.letter)
            share = float(plan.shares.of(axis)[rank])
        flops[instruction.tensor] = node.flops * share
    total = sum(flops.values())
    seconds = {}
    for name, part in flops.items():
        if part:
            forward_s = pace.forward_s * part / total
            backward_s = pace.backward_s * part / total
            seconds[name] = (forward_s, backward_s)
    return seconds


def _nothing(tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that depend on their inputs.

    So backward runs the same collectives as on other ranks.
    """
    result = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        if tensor.requires_grad and dtype.is_floating_point:
            no_elements = tensor.flatten()[:0]
            result = result + no_elements.sum()
    return result


def _with_additive(
    node: GraphNode, result: Tensor, tensors: Sequence[Tensor], output: TensorLayout
) -> Tensor:
    """Add the bias to an empty partial sum, which has it, too."""
    assert node.signature is not None
    if output.kind != "partial":
        return result
    for at in node.signature.additive:
        letters = node.signature.inputs[at]
        shape = []
        for letter, length in zip(node.signature.output, result.shape, strict=True):
            shape.append(length if letter in letters else 1)
        result = result + tensors[at].reshape(shape)
    return result


def _partial_embedding(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Return the rows of tokens that this rank holds, and zeros for the others."""
    local = ids - start
    here = (local >= 0) & (local < len(weight))
    # The tokens of other ranks read row 0, and are set to zero.
    indices = torch.where(here, local, 0)
    rows = torch.nn.functional.embedding(indices, weight)
    return rows * here.unsqueeze(-1)
