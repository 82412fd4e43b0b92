"""Hoare-style rules of an operator, as data: with its inputs in these layouts, its output is in
that one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.spmd.graph import Graph, GraphNode, Signature
from planner.spmd.layouts import FACTORED, PARTIAL, REPLICATED, TensorLayout, sharded


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of an operator: {inputs} -> {output}.

    letter: the dimension whose ranges the ranks compute; "" if every rank computes the whole.
    """

    inputs: tuple[TensorLayout, ...]
    output: TensorLayout
    letter: str = ""

    @property
    def gradient(self) -> tuple[TensorLayout, tuple[TensorLayout, ...]]:
        """Layouts of the backward operator: the output's gradient, and the inputs' gradients."""
        return self.output.dual, tuple(layout.dual for layout in self.inputs)


def rules_of(graph: Graph, node: GraphNode) -> tuple[Rule, ...]:
    """Return the rules of a node; first the replicated one, which every operator has."""
    rules = [Rule((REPLICATED,) * len(node.inputs), REPLICATED)]
    if node.signature is not None:
        rules += _sharded(graph, node, node.signature)
        for together in node.signature.linear:
            inputs = [PARTIAL if at in together else REPLICATED for at in range(len(node.inputs))]
            rules.append(Rule(tuple(inputs), PARTIAL))
    return tuple(dict.fromkeys(rules))


def _sharded(graph: Graph, node: GraphNode, signature: Signature) -> Iterator[Rule]:
    for letter in signature.letters:
        contracted = letter in signature.contracted
        if _dimension(node, signature, letter) not in graph.axes or not (
            contracted or letter in signature.output
        ):
            continue
        inputs: list[TensorLayout] = []
        for at, text in enumerate(signature.inputs):
            if letter in text:
                inputs.append(sharded(text.index(letter)))
            elif contracted and at in signature.additive:
                inputs.append(PARTIAL)
            else:
                inputs.append(REPLICATED)
        output = PARTIAL if contracted else sharded(signature.output.index(letter))
        yield Rule(tuple(inputs), output, letter)
        if (
            signature.factored
            and letter in signature.inputs[0]
            and not contracted
            and _owns_weights(graph, node)
        ):
            yield Rule((inputs[0], *(FACTORED for _ in inputs[1:])), output, letter)


def _owns_weights(graph: Graph, node: GraphNode) -> bool:
    """Return True if all inputs but the first are parameters that no other node reads."""
    others = [graph.by_name[name] for name in node.inputs[1:]]
    return all(
        other.kind == "parameter" and len(graph.consumers[other.name]) == 1 for other in others
    )


def _dimension(node: GraphNode, signature: Signature, letter: str) -> tuple[str, int]:
    """The first (tensor, dimension) that a letter of a signature stands for."""
    texts = zip((*node.inputs, node.name), (*signature.inputs, signature.output), strict=True)
    return next((name, text.index(letter)) for name, text in texts if letter in text)


def axis_of(graph: Graph, node: GraphNode, letter: str) -> str:
    """The name of the axis that a rule's letter stands for."""
    assert node.signature is not None
    return graph.axes[_dimension(node, node.signature, letter)].name


def leaf_layouts(graph: Graph, node: GraphNode) -> tuple[TensorLayout, ...]:
    """Return the layouts in which a rank can have a leaf without communication.

    A leaf is an input, a constant or a parameter.
    """
    whole = (REPLICATED,) if node.kind != "parameter" else (REPLICATED, FACTORED)
    return (*whole, *(sharded(dim) for dim in graph.dims(node.name)))
