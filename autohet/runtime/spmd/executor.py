"""Runs one rank's part of a program on plain local tensors; autograd goes through the collectives. (An uneven DTensor would return wrong
data silently.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autohet.runtime.pacing import Pace
from autohet.runtime.spmd import collectives
from autohet.runtime.spmd.capture import Captured
from autohet.runtime.spmd.clock import ComputeClock
from autohet.runtime.spmd.collectives import Collectives, own_part
from planner.spmd.graph import Node
from planner.spmd.layouts import Layout
from planner.spmd.operators import SHAPED
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Instruction, Property
from planner.spmd.rules import axis_of


class Executor:
    """One rank of a plan. `parameters` are local tensors by name, each in its layout in the program (`local_part`); the caller's, and
    cast to the type of the captured ones. pace: seconds that operators owe the clock, in proportion to their FLOPs."""

    def __init__(
        self, captured: Captured, plan: PlacedProgram, group: Collectives, clock: ComputeClock | None = None, pace: Pace | None = None
    ) -> None:
        assert group.size == plan.shares.num_devices, f"{group.size} ranks for {plan.shares.num_devices} shares"
        self.captured, self.plan, self.group = captured, plan, group
        self.graph = plan.graph
        self._last_use = self._last_uses()
        self._clock, self._pace = clock, pace
        self._flops_s = _flops_s(plan, group.rank, pace)

    def _last_uses(self) -> dict[Property, int]:
        return {used: at for at, i in enumerate(self.plan.program.instructions) for used in i.inputs}

    def run(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """This rank's part of the loss: the sum over ranks is the loss. `inputs`: the whole global batch; a rank reads its part of it.
        Backward of the result gives each local parameter's gradient in its layout's dual. Every rank calls it; it blocks on the others."""
        given = {**dict(zip(self.captured.inputs, inputs, strict=True)), **self.captured.constants}
        values: dict[Property, Tensor] = {}
        for at, instruction in enumerate(self.plan.program.instructions):
            values[instruction.result] = self._run(instruction, values, given, parameters)
            for used in instruction.inputs:
                if self._last_use[used] == at:
                    values.pop(used, None)
        return values[self.plan.program.instructions[-1].result]

    def _run(
        self, instruction: Instruction, values: Mapping[Property, Tensor], given: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> Tensor:  # fmt: skip
        name = instruction.tensor
        if instruction.op == "load":
            if name in parameters:
                return parameters[name].to(self.captured.parameters[name].dtype)
            return self.local_part(given[name], name, instruction.output)
        tensors = [values[used] for used in instruction.inputs]
        if instruction.op == "compute":
            return self._paced(instruction, self._compute(instruction, tensors))
        return self._convert(instruction, tensors[0])

    def local_part(self, whole: Tensor, name: str, layout: Layout) -> Tensor:
        """This rank's part of a leaf."""
        if layout.kind != "sharded":
            return whole
        return own_part(whole, layout.dim, self.plan.lengths(name, layout.dim), self.group.rank)

    def _convert(self, instruction: Instruction, tensor: Tensor) -> Tensor:
        name, source, target = instruction.tensor, instruction.inputs[0][1], instruction.output
        group, variant = self.group, instruction.variant
        match instruction.op:
            case "all_gather":
                return collectives.all_gather(group, tensor, source.dim, self.plan.lengths(name, source.dim), variant)
            case "reduce_scatter":
                return collectives.reduce_scatter(group, tensor, target.dim, self.plan.lengths(name, target.dim), variant)
            case "all_reduce":
                return collectives.all_reduce(group, tensor)
            case "all_to_all":
                before, after = self.plan.lengths(name, source.dim), self.plan.lengths(name, target.dim)
                return collectives.all_to_all(group, tensor, source.dim, target.dim, before, after)
            case "slice":
                return own_part(tensor, target.dim, self.plan.lengths(name, target.dim), group.rank)
        assert instruction.op == "mask", instruction.op
        return collectives.mask(group, tensor)

    def _paced(self, instruction: Instruction, result: Tensor) -> Tensor:
        """What an operator takes on the emulated device is owed at its end, and once its output's gradient has come."""
        owed = self._flops_s.get(instruction.tensor)
        if owed is not None and self._clock is not None:
            clock, (forward_s, backward_s) = self._clock, owed
            clock.owe(forward_s)
            if result.requires_grad:
                result.register_hook(lambda gradient: clock.owe(backward_s))
        return result

    # ---- operators ----

    def _compute(self, instruction: Instruction, tensors: list[Tensor]) -> Tensor:
        node, call = self.graph.by_name[instruction.tensor], self.captured.calls[instruction.tensor]
        if any(layout.kind == "factored" for _, layout in instruction.inputs):
            name, layout = instruction.inputs[0]
            return collectives.factored_linear(self.group, layout.dim, self.plan.lengths(name, layout.dim), tensors)
        if node.op == "cross_entropy_sum" and instruction.letter == "Y":
            start = self._start(*instruction.inputs[0])
            return collectives.vocabulary_loss(self.group, start, tensors[0], tensors[1], call.args[2])
        shape = self._local_shape(instruction)
        if self._is_empty(instruction):
            return _with_additive(node, _nothing(tensors, shape, self.captured.dtypes[node.name]), tensors, instruction.output)
        if node.op == "embedding" and instruction.letter == "Y":
            return _partial_embedding(tensors[0], tensors[1], self._start(*instruction.inputs[0]))
        if node.op == "mean":
            return self._mean(instruction, tensors[0], shape)
        if node.op in SHAPED:
            return tensors[0].reshape(shape)
        if node.op == "expand":
            return tensors[0].expand(shape)
        return call(tensors)

    def _start(self, name: str, layout: Layout) -> int:
        return sum(self.plan.lengths(name, layout.dim)[: self.group.rank])

    def _local_shape(self, instruction: Instruction) -> tuple[int, ...]:
        shape = list(self.graph.by_name[instruction.tensor].shape)
        if instruction.output.kind == "sharded":
            dim = instruction.output.dim
            shape[dim] = self.plan.lengths(instruction.tensor, dim)[self.group.rank]
        return tuple(shape)

    def _is_empty(self, instruction: Instruction) -> bool:
        """Whether this rank's share of a sharded operator is nothing."""
        used = [*instruction.inputs, instruction.result]
        return any(layout.kind == "sharded" and self.plan.lengths(name, layout.dim)[self.group.rank] == 0 for name, layout in used)

    def _mean(self, instruction: Instruction, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Over the whole tensor's size, whatever part of it is here."""
        node = self.graph.by_name[instruction.tensor]
        call = self.captured.calls[node.name]
        count = math.prod(self.graph.by_name[node.inputs[0]].shape) / max(math.prod(node.shape), 1)
        local = math.prod(tensor.shape) / max(math.prod(shape), 1)
        return call([tensor]) * (local / count)


def _flops_s(plan: PlacedProgram, rank: int, pace: Pace | None) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds of each operator of a rank at this pace, which is for all of them."""
    if pace is None:
        return {}
    flops: dict[str, float] = {}
    for i in plan.program.instructions:
        node = plan.graph.by_name[i.tensor]
        if i.op == "compute" and node.flops:
            share = float(plan.shares.of(axis_of(plan.graph, node, i.letter))[rank]) if i.letter else 1.0
            flops[i.tensor] = node.flops * share
    total = sum(flops.values())
    return {name: (pace.forward_s * part / total, pace.backward_s * part / total) for name, part in flops.items() if part}


def _nothing(tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that hang on their inputs, so that backward runs the same collectives as on other ranks."""
    result = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        if tensor.requires_grad and dtype.is_floating_point:
            result = result + tensor.flatten()[:0].sum()
    return result


def _with_additive(node: Node, result: Tensor, tensors: Sequence[Tensor], output: Layout) -> Tensor:
    """A partial sum of nothing still has its bias."""
    assert node.signature is not None
    for at in node.signature.additive if output.kind == "partial" else ():
        letters = node.signature.inputs[at]
        result = result + tensors[at].reshape([n if c in letters else 1 for c, n in zip(node.signature.output, result.shape, strict=True)])
    return result


def _partial_embedding(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Rows of tokens that this rank holds, zeros for the others."""
    local = ids - start
    here = (local >= 0) & (local < len(weight))
    rows = torch.nn.functional.embedding(torch.where(here, local, 0), weight)
    return rows * here.unsqueeze(-1)
