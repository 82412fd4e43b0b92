"""Program of instructions in order, the same on every rank.

Each instruction has a precondition and a postcondition.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planner.spmd.graph import Graph
from planner.spmd.layouts import CONVERSIONS, PARTIAL, REPLICATED, TensorLayout, conversion_between
from planner.spmd.rules import leaf_layouts, rules_of

Property = tuple[str, TensorLayout]
"""A tensor that a rank has in a layout."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction with its precondition and postcondition: {inputs} op {(tensor, output)}.

    op: "load" a leaf, "compute" an operator by the rule with `letter`, or one of CONVERSIONS.
    """

    op: str
    tensor: str
    inputs: tuple[Property, ...]
    output: TensorLayout
    letter: str = ""
    variant: str = ""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the input tensors."""
        return tuple(name for name, _ in self.inputs)

    @property
    def input_layouts(self) -> tuple[TensorLayout, ...]:
        """Layouts in which the input tensors are wanted."""
        return tuple(layout for _, layout in self.inputs)

    @property
    def result(self) -> Property:
        return self.tensor, self.output

    def __str__(self) -> str:
        before = ", ".join(f"{name}: {layout}" for name, layout in self.inputs)
        how = f" ({self.variant})" if self.variant else ""
        return f"{{{before}}} {self.op}{how} {{{self.tensor}: {self.output}}}"


@dataclass(frozen=True)
class Program:
    """Instructions that end with a partial loss."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def loads(self) -> tuple[Instruction, ...]:
        """Instructions that load a leaf."""
        return tuple(instruction for instruction in self.instructions if instruction.op == "load")

    @cached_property
    def storage(self) -> dict[str, TensorLayout]:
        """Layout of each leaf as a rank holds it; for a parameter, that of its training state."""
        return {load.tensor: load.output for load in self.loads}

    def check(self, graph: Graph) -> None:
        """Check that every instruction is derivable from those before it.

        Raises:
            AssertionError: one is not, or the loss does not end partial.
        """
        known: set[Property] = set()
        for instruction in self.instructions:
            assert known.issuperset(instruction.inputs), (
                f"{instruction}: a precondition does not hold"
            )
            assert _is_sound(graph, instruction), f"{instruction} follows from no rule"
            known.add(instruction.result)
        assert (graph.nodes[-1].name, PARTIAL) in known, "the loss is not partial at the end"


def _is_sound(graph: Graph, instruction: Instruction) -> bool:
    node = graph.by_name[instruction.tensor]
    layouts = instruction.input_layouts
    if instruction.op == "load":
        is_leaf = node.kind != "op"
        return is_leaf and instruction.output in leaf_layouts(graph, node)
    if instruction.op == "compute":
        if instruction.input_names != node.inputs:
            return False
        for rule in rules_of(graph, node):
            if rule.inputs == layouts and rule.output == instruction.output:
                return True
        return False
    if len(layouts) != 1:
        return False
    conversion = conversion_between(layouts[0], instruction.output)
    return conversion == instruction.op


def layouts_of(graph: Graph, name: str) -> tuple[TensorLayout, ...]:
    """Return the layouts that a tensor can be converted to."""
    return (REPLICATED, PARTIAL, *graph.sharded_layouts(name))


def conversions_of(graph: Graph, name: str) -> tuple[Instruction, ...]:
    """Every instruction from one layout of a tensor to another, with its variants."""
    layouts = layouts_of(graph, name)
    found = []
    for source, target in itertools.product(layouts, repeat=2):
        op = conversion_between(source, target)
        if op is not None:
            for variant in CONVERSIONS[op]:
                found.append(Instruction(op, name, ((name, source),), target, "", variant))
    return tuple(found)


def explain_tensors(graph: Graph, program: Program) -> list[dict[str, Any]]:
    """Return one entry per tensor: its shape, its layouts and the instructions that yield them.

    Entries are in the program's order.
    """
    entries: dict[str, dict[str, Any]] = {}
    for instruction in program.instructions:
        node = graph.by_name[instruction.tensor]
        head = {
            "tensor": node.name,
            "op": node.op or node.kind,
            "shape": list(node.shape),
            "instructions": [],
        }
        entry = entries.setdefault(node.name, head)
        entry["instructions"].append(str(instruction))
    return list(entries.values())
