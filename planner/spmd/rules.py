"""Hoare-style rules of an operator, as data: with its inputs in these layouts, its output is in
that one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.spmd.graph import Dimension, Graph, GraphNode, Signature
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
        of_inputs = tuple(layout.dual for layout in self.inputs)
        return self.output.dual, of_inputs


def rules_of(graph: Graph, node: GraphNode) -> tuple[Rule, ...]:
    """Return the rules of a node; first the replicated one, which every operator has."""
    rules = [Rule((REPLICATED,) * len(node.inputs), REPLICATED)]
    if node.signature is None:
        return tuple(rules)
    rules += _sharded_rules(graph, node, node.signature)
    for together in node.signature.linear:
        inputs = []
        for index in range(len(node.inputs)):
            inputs.append(PARTIAL if index in together else REPLICATED)
        rules.append(Rule(tuple(inputs), PARTIAL))
    return tuple(dict.fromkeys(rules))


def _sharded_rules(graph: Graph, node: GraphNode, signature: Signature) -> Iterator[Rule]:
    for letter in signature.letters:
        is_cut = _dimension(node, signature, letter) in graph.axes
        is_contracted = letter in signature.contracted
        is_in_output = letter in signature.output
        if not is_cut or not (is_contracted or is_in_output):
            continue

        inputs: list[TensorLayout] = []
        for index, text in enumerate(signature.inputs):
            if letter in text:
                inputs.append(sharded(text.index(letter)))
            elif is_contracted and index in signature.additive:
                # a bias is added once, so its parts must sum up to it
                inputs.append(PARTIAL)
            else:
                inputs.append(REPLICATED)
        output = PARTIAL
        if not is_contracted:
            output = sharded(signature.output.index(letter))
        yield Rule(tuple(inputs), output, letter)

        # with the data cut, the weight's gradient can come from everyone's gathered factors
        cuts_data = letter in signature.inputs[0] and not is_contracted
        if signature.factored and cuts_data and _owns_weights(graph, node):
            weights = (FACTORED,) * (len(inputs) - 1)
            yield Rule((inputs[0], *weights), output, letter)


def _owns_weights(graph: Graph, node: GraphNode) -> bool:
    """Return True if all inputs but the first are parameters that no other node reads."""
    for name in node.inputs[1:]:
        is_parameter = graph.by_name[name].kind == "parameter"
        if not is_parameter or len(graph.consumers[name]) > 1:
            return False
    return True


def _dimension(node: GraphNode, signature: Signature, letter: str) -> Dimension:
    """The first (tensor, dimension) that a letter of a signature stands for."""
    for name, text in signature.letters_by_tensor(node):
        if letter in text:
            return name, text.index(letter)
    raise AssertionError(f"the signature of {node.name} has no letter {letter}")


def axis_of(graph: Graph, node: GraphNode, letter: str) -> str:
    """The name of the axis that a rule's letter stands for."""
    assert node.signature is not None
    return graph.axes[_dimension(node, node.signature, letter)].name


def leaf_layouts(graph: Graph, node: GraphNode) -> tuple[TensorLayout, ...]:
    """Return the layouts in which a rank can have a leaf without communication.

    A leaf is an input, a constant or a parameter.
    """
    cut = graph.sharded_layouts(node.name)
    if node.kind == "parameter":
        return (REPLICATED, FACTORED, *cut)
    return (REPLICATED, *cut)
