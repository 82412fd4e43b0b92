"""Capture of a model's training loss as a typed graph.

It uses `torch.export` without decomposition, so that linear, attention and norms stay whole.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from planner.errors import ConfigError
from planner.spmd.graph import MOST_UNITS, Graph, GraphNode, NodeKind
from planner.spmd.operators import Operation, Ref, next_name, operator_node

IGNORED_TARGET = -100
_DROPPED = frozenset({"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"})
_RANDOM = frozenset(
    {"dropout", "bernoulli", "rand_like", "randn_like", "native_dropout", "multinomial"}
)
_IDENTITIES = frozenset(
    {
        "_to_copy",
        "alias",
        "clone",
        "contiguous",
        "dropout",
        "expand",
        "lift_fresh_copy",
        "reshape",
        "to",
        "type_as",
        "view",
    }
)
"""Operators that return their input if neither its dtype nor its shape changes."""


@dataclass(frozen=True)
class OperatorCall:
    """Call of an operator: a function and its arguments.

    A Ref stands for an input; `item` picks one of several outputs. dtype: of the output.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    item: int | None = None
    dtype: torch.dtype = torch.float32

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        args, kwargs = pytree.tree_map_only(
            Ref, lambda ref: tensors[ref.index], (self.args, dict(self.kwargs))
        )
        result = self.function(*args, **kwargs)
        output: Tensor = result if self.item is None else result[self.item]
        return output


@dataclass
class Captured:
    """Captured model.

    graph: for the planner. calls: by node. constants: values that do not depend on data or weights.
    parameters: by the model's names, which are the nodes' names too. inputs: nodes in the order of
    the model's arguments. modules: path of the module that computes each operator.
    """

    graph: Graph
    calls: Mapping[str, OperatorCall]
    constants: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict)


def capture(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    most_units: int = MOST_UNITS,
    prefixes: Mapping[str, str] | None = None,
) -> Captured:
    """Capture the graph of `model(*example)`, a scalar loss of a whole global batch.

    An operator without rules is computed on every rank, and the graph's notes say so. prefixes:
    prefixes of parameters' names, with their replacements in the graph.

    Raises:
        ConfigError: an operator, which the message names, is random or changes its inputs, or the
        model cannot be exported.
    """
    try:
        with torch.no_grad():
            exported = torch.export.export(model, example)
    except Exception as error:  # noqa: BLE001
        # torch.export reports through many classes, and with pages of a trace after the first line.
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"the model cannot be exported: {first_line[:300]}") from None
    return _Reader(model, exported, most_units, prefixes or {}).read()


@dataclass
class _Reader:
    model: nn.Module
    exported: Any
    most_units: int
    prefixes: Mapping[str, str]
    nodes: dict[str, GraphNode] = field(default_factory=dict)
    calls: dict[str, OperatorCall] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Value of each exported node.

    It is the name of a node of our graph, a constant's value, or a pending call with several
    outputs.
    """
    notes: list[str] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def read(self) -> Captured:
        with torch.no_grad():
            for node in self.exported.graph.nodes:
                match node.op:
                    case "placeholder":
                        self._placeholder(node)
                    case "get_attr":
                        self.values[node] = getattr(self.exported.graph_module, node.target)
                    case "call_function":
                        self._call(node)
                    case "output":
                        self._output(node)
        fuse_rotary(self.nodes, self.calls)
        self._rename()
        notes = tuple(dict.fromkeys(self.notes))
        graph = Graph(list(self.nodes.values()), notes, self.most_units)

        # `Graph` leaves out the nodes that nothing reads.
        constants: dict[str, Tensor] = {
            name: value for name, value in self.constants.items() if name in graph.by_name
        }
        inputs = [name for name, node in self.nodes.items() if node.kind == "input"]
        return Captured(
            graph, self.calls, constants, self.parameters, tuple(inputs), modules=self.modules
        )

    def _rename(self) -> None:
        """Rename the remaining operators by kind and number."""
        counts = Counter[str]()
        new: dict[str, str] = {}
        for name, node in self.nodes.items():
            new[name] = name
            if node.kind == "op":
                new[name] = next_name(node.op, counts)

        nodes: dict[str, GraphNode] = {}
        for name, node in self.nodes.items():
            inputs = tuple(new[each] for each in node.inputs)
            nodes[new[name]] = replace(node, name=new[name], inputs=inputs)
        self.nodes = nodes

        # Fused operators are no nodes any more, but still have entries here.
        self.calls = {new[name]: call for name, call in self.calls.items() if name in new}
        self.modules = {new[name]: path for name, path in self.modules.items() if name in new}

    def _leaf(self, kind: NodeKind, name: str, value: Tensor) -> None:
        needs_gradient = kind == "parameter" and value.requires_grad
        self.nodes[name] = GraphNode(
            name, kind, "", (), tuple(value.shape), value.element_size(), needs_gradient
        )

    def _placeholder(self, node: fx.Node) -> None:
        signature = self.exported.graph_signature
        name = node.name
        if parameter := signature.inputs_to_parameters.get(name):
            self._parameter(node, parameter)
        elif buffer := signature.inputs_to_buffers.get(name):
            self.values[node] = self.model.get_buffer(buffer).detach()
        elif constant := signature.inputs_to_lifted_tensor_constants.get(name):
            self.values[node] = self.exported.constants[constant]
        else:
            self._leaf("input", name, node.meta["val"])
            self.values[node] = name

    def _parameter(self, node: fx.Node, name: str) -> None:
        """Add a parameter; tied ones are one node, under the first name in the model."""
        tensor = self.model.get_parameter(name)
        # `named_parameters` lists a tied tensor once, under its first name.
        for known, value in self.model.named_parameters():
            if value is tensor:
                name = self._graph_name(known)
                break
        if name not in self.nodes:
            self._leaf("parameter", name, tensor)
            self.parameters[name] = tensor
        self.values[node] = name

    def _graph_name(self, parameter: str) -> str:
        """Return a parameter's name with its prefix replaced."""
        for old, new in self.prefixes.items():
            if parameter.startswith(old):
                return new + parameter.removeprefix(old)
        return parameter

    def _call(self, node: fx.Node) -> None:
        before = len(self.nodes)
        self._read_call(node)
        for name in itertools.islice(self.nodes, before, None):
            self.modules[name] = _innermost_module(node)

    def _read_call(self, node: fx.Node) -> None:
        name = _operator_name(node.target)
        if name in _DROPPED:
            return
        if name == "getitem":
            source = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(source, OperatorCall):
                item = int(node.args[1])  # type: ignore[arg-type]
                return self._add(node, replace(source, item=item))
        args, kwargs = pytree.tree_map_only(
            fx.Node, self.values.__getitem__, (node.args, node.kwargs)
        )
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(self._is_node(leaf) for leaf in leaves):
            # It depends on no input and no weight, so its value is a constant.
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        self._check(node, name, args)
        if self._is_identity(node, name, args):
            self.values[node] = args[0]
            return
        self.values[node] = OperatorCall(node.target, args, kwargs)  # type: ignore[arg-type]
        if isinstance(node.meta["val"], Tensor):
            if name == "cross_entropy_loss":
                return self._loss(node, args, kwargs)
            self._add(node, self.values[node])

    def _is_node(self, value: Any) -> bool:
        """Return True if a value is the name of a node of our graph."""
        return isinstance(value, str) and value in self.nodes

    def _check(self, node: fx.Node, name: str, args: tuple[Any, ...]) -> None:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise ConfigError(
                f"operator '{name}' at '{node.name}' changes its inputs, which no rule covers: use"
                " a model without it"
            )
        # dropout(input, p, train)
        drops_nothing = name == "dropout" and (args[1] == 0 or not args[2])
        if name in _RANDOM and not drops_nothing:
            raise ConfigError(
                f"operator '{name}' at '{node.name}' is random, which no rule covers: set dropout"
                " to 0"
            )

    def _is_identity(self, node: fx.Node, name: str, args: tuple[Any, ...]) -> bool:
        if name not in _IDENTITIES or not isinstance(args[0], str):
            return False
        before = node.args[0].meta["val"]  # type: ignore[union-attr]
        after = node.meta["val"]
        return bool(before.dtype == after.dtype and before.shape == after.shape)

    def _add(self, node: fx.Node, call: OperatorCall) -> None:
        op = _operator_name(call.function)
        self.values[node] = self._insert(op, call, node.meta["val"])

    def _insert(self, op: str, call: OperatorCall, value: Tensor) -> str:
        """Add a node of our graph for the (one) output of a call."""
        inputs: list[str] = []

        def ref(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                leaf = self._constant(leaf)
            if not self._is_node(leaf):
                return leaf
            inputs.append(leaf)
            return Ref(len(inputs) - 1)

        given = (tuple(call.args), dict(call.kwargs))
        args, kwargs = pytree.tree_map(ref, given)
        read = [self.nodes[each] for each in inputs]
        shapes = tuple(each.shape for each in read)
        operation = Operation(op, shapes, tuple(value.shape), args, kwargs)
        name = f"{op}.{len(self.nodes)}"
        node = operator_node(name, operation, read, value.element_size(), value.is_floating_point())
        if node.signature is None:
            self.notes.append(
                f"operator '{op}' has no sharding rule: every rank computes the whole of it"
            )
        self.nodes[name] = node
        self.calls[name] = replace(call, args=args, kwargs=kwargs, dtype=value.dtype)
        return name

    def _constant(self, value: Tensor) -> str:
        """Return the name of a constant's node; equal constants are one node."""
        for known, other in self.constants.items():
            if _is_same(other, value):
                return known
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        self._leaf("constant", name, value)
        return name

    def _loss(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add a plain sum of losses over rows as an operator of its own.

        It is exact for any split of rows over ranks.
        """
        settings = dict(zip(_LOSS_SETTINGS, args[2:], strict=False))
        settings |= kwargs
        logits, targets = args[:2]
        has_weights = settings.get("weight") is not None
        is_smoothed = settings.get("label_smoothing", 0.0) != 0.0
        is_matrix = len(self.nodes[logits].shape) == 2
        is_sum = settings.get("reduction") == _SUM
        if not is_sum or not is_matrix or has_weights or is_smoothed:
            return self._add(node, OperatorCall(node.target, args, kwargs))  # type: ignore[arg-type]
        ignored = settings.get("ignore_index", IGNORED_TARGET)
        losses = OperatorCall(cross_entropy_sum, (logits, targets, ignored))
        self.values[node] = self._insert("cross_entropy_sum", losses, node.meta["val"])

    def _output(self, node: fx.Node) -> None:
        leaves = pytree.tree_leaves(node.args[0])
        results = [self.values[leaf] for leaf in leaves if isinstance(leaf, fx.Node)]
        if len(results) != 1 or not isinstance(results[0], str):
            raise ConfigError(
                f"the model returns {len(results)} tensors; it must return its loss alone"
            )
        # A graph's last node is its loss.
        last = self.nodes.pop(results[0])
        self.nodes[last.name] = last


_LOSS_SETTINGS = ("weight", "reduction", "ignore_index", "label_smoothing")
"""Arguments of aten's cross entropy after the logits and the targets, in their order."""
_SUM = 2
"""Number by which aten names a sum over rows."""

_ROTARY_PATTERNS = (
    ("add", ("mul", "x", "cos"), ("mul", ("cat", ("neg", ("slice", "x")), ("slice", "x")), "sin")),
    (
        "add",
        ("mul", "x", "cos"),
        ("mul", ("flatten", ("stack", ("neg", ("slice", "x")), ("slice", "x"))), "sin"),
    ),
)
"""Patterns of a rotary embedding: operators and their inputs, tensors by names.

Elements are turned in pairs, of one half with the other or of neighbours.
"""


def fuse_rotary(nodes: dict[str, GraphNode], calls: dict[str, OperatorCall]) -> None:
    """Fuse each rotary embedding into one operator, in place.

    Its seven small operators with many live tensors would multiply the layouts to search.
    """
    for node in list(nodes.values()):
        for pattern in _ROTARY_PATTERNS:
            named = dict[str, str]()
            inner = list[str]()
            if _matches(nodes, pattern, node.name, named, inner):
                _fuse(nodes, calls, named, inner)
                break


def _fuse(
    nodes: dict[str, GraphNode],
    calls: dict[str, OperatorCall],
    named: Mapping[str, str],
    inner: Sequence[str],
) -> None:
    """Replace the operators `inner`, the last one first, if they are a rotary embedding."""
    x = nodes[named["x"]]
    cos = nodes[named["cos"]]
    sin = nodes[named["sin"]]
    if not cos.kind == sin.kind == "constant":
        return
    # The first of them is the addition, whose name the fused operator keeps.
    name = inner[0]
    function = _rotary_function(nodes, calls, name, named)
    if function is None:
        return
    shapes = (x.shape, cos.shape, sin.shape)
    args = (Ref(0), Ref(1), Ref(2))
    operation = Operation("rotary", shapes, nodes[name].shape, args, {})
    calls[name] = replace(calls[name], function=function, args=args, kwargs={})
    nodes[name] = operator_node(name, operation, [x, cos, sin], nodes[name].item_bytes)
    for each in inner[1:]:
        del nodes[each]


def _rotary_function(
    nodes: Mapping[str, GraphNode],
    calls: Mapping[str, OperatorCall],
    name: str,
    named: Mapping[str, str],
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the function of x, cos and sin that computes `name`; None: no rotary embedding.

    Values decide, since a pattern does not say which elements a slice takes.
    """
    width = nodes[named["x"]].shape[-1]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 2, width, generator=generator) for _ in range(3)]
    values = {named[key]: value for key, value in zip(("x", "cos", "sin"), inputs, strict=True)}
    computed = _evaluate(nodes, calls, name, values)
    for function in (rotary, rotary_of_neighbours):
        if torch.equal(function(*inputs), computed):
            return function
    return None


def _evaluate(
    nodes: Mapping[str, GraphNode],
    calls: Mapping[str, OperatorCall],
    name: str,
    values: Mapping[str, Tensor],
) -> Tensor:
    """Compute the tensor `name` from the tensors of `values`."""
    if name in values:
        return values[name]
    inputs = [_evaluate(nodes, calls, each, values) for each in nodes[name].inputs]
    return calls[name](inputs)


def _matches(
    nodes: Mapping[str, GraphNode], pattern: Any, name: str, named: dict[str, str], inner: list[str]
) -> bool:
    """Return True if the tensor `name` is computed as in `pattern`.

    named: receives the tensors that the pattern names; inner: receives all others.
    """
    if isinstance(pattern, str):
        return named.setdefault(pattern, name) == name
    op, *inputs = pattern
    inner.append(name)
    node = nodes[name]
    if node.op != op or len(node.inputs) != len(inputs):
        return False
    for below, read in zip(inputs, node.inputs, strict=True):
        if not _matches(nodes, below, read, named, inner):
            return False
    return True


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute a rotary position embedding (Su et al., "RoFormer", 2021).

    It acts on halves, as the library does.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos + turned * sin


def rotary_of_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute a rotary position embedding of neighbouring elements, as GLM 4 and Cohere do."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and torch.equal(one, other)


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Return the sum of the cross entropies of rows whose target counts."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")


def _innermost_module(node: fx.Node) -> str:
    """Return the path of the module whose forward pass calls an operator."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str
    path, _ = list(stack.values())[-1]
    return path


def _operator_name(target: Any) -> str:
    """Return an operator's name without namespace and overload: "add" of aten.add.Tensor."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name: str = schema.name
    return name.split("::")[-1]
