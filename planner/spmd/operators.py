"""Signatures of aten operators by name: which dimensions may be sharded, and what follows for the
output. Data for `rules`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from planner.spmd.graph import GraphNode, Signature

TensorShape = tuple[int, ...]
ONE = (frozenset({0}),)


@dataclass(frozen=True)
class Ref:
    """Stands in a call's arguments for one of its tensor inputs."""

    index: int


@dataclass(frozen=True)
class Operation:
    """A call as capture saw it. name: without overload. shapes: of the inputs. args, kwargs:

    Ref where a tensor stood.
    """

    name: str
    shapes: tuple[TensorShape, ...]
    output: TensorShape
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


def _letters(shape: Sequence[int]) -> str:
    return ascii_letters[: len(shape)]


def _blocked(shape: Sequence[int], *dims: int) -> str:
    """Letters with the given dimensions not shardable."""
    blocked = {dim % len(shape) for dim in dims}
    return "".join("." if at in blocked else letter for at, letter in enumerate(_letters(shape)))


def _broadcast(letters: str, shape: TensorShape, whole: TensorShape) -> str:
    """Letters of a tensor of this shape where it meets one of the whole shape: none where it is
    stretched.
    """
    first = len(letters) - len(shape)
    return "".join(
        "." if own == 1 != size else c
        for c, own, size in zip(letters[first:], shape, whole[first:], strict=True)
    )


def _elementwise(operation: Operation) -> Signature:
    """Linear: in the terms of a sum together (where both are tensors), in each factor of a product,
    in what is scaled.
    """
    letters = _letters(operation.output)
    count = len(operation.shapes)
    linear: tuple[frozenset[int], ...] = ONE if operation.name in _SCALED else ()
    if operation.name == "mul":
        linear = tuple(frozenset({at}) for at in range(count))
    elif operation.name in ("add", "sub") and count == 2:
        linear = (frozenset({0, 1}),)
    return Signature(
        tuple(_broadcast(letters, shape, operation.output) for shape in operation.shapes),
        letters,
        linear=linear,
    )


def _weighted(
    operation: Operation, x: str, weight: str, output: str, factored: bool = False
) -> Signature:
    """A product summed over the weight's second letter, and perhaps a bias along its first, which
    is added once.
    """
    additive = frozenset({2} if len(operation.shapes) == 3 else ())
    inputs = (x, weight, *(weight[0] for _ in additive))
    return Signature(
        inputs, output, weight[1], additive, (frozenset({0}) | additive,), factored=factored
    )


def _linear(operation: Operation) -> Signature:
    x = _letters(operation.shapes[0])
    return _weighted(operation, x, "Z" + x[-1], x[:-1] + "Z", factored=True)


def _matmul(operation: Operation) -> Signature | None:
    left, right = operation.shapes
    if len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    batch = ascii_letters[: len(left) - 2]
    return Signature(
        (batch + "XY", batch + "YZ"), batch + "XZ", "Y", linear=(frozenset({0}), frozenset({1}))
    )


def _equation(operation: Operation) -> tuple[tuple[str, ...], str]:
    """Letters of an einsum's inputs and of its output."""
    inputs, _, output = str(operation.args[0]).replace(" ", "").partition("->")
    return tuple(inputs.split(",")), output


def _einsum(operation: Operation) -> Signature | None:
    texts, output = _equation(operation)
    letters = "".join(texts)
    if "." in letters or not output or any(len(set(text)) < len(text) for text in texts):
        return None
    contracted = "".join(sorted(set(letters) - set(output)))
    return Signature(
        texts, output, contracted, linear=tuple(frozenset({at}) for at in range(len(texts)))
    )


def _embedding(operation: Operation) -> Signature:
    """Return the signature of an embedding, whose vocabulary may be sharded.

    Each rank then looks up its own rows. The vocabulary is not sharded if one row is for padding
    and has no gradient.
    """
    ids = _letters(operation.shapes[1])
    padded = operation.argument(2, "padding_idx", -1) >= 0
    return Signature((".Z" if padded else "YZ", ids), ids + "Z", "" if padded else "Y")


def _attention(operation: Operation) -> Signature:
    """Batch and heads; a mask's only where it has them.

    Key and value heads may be fewer (grouped queries).
    """
    query = operation.shapes[0]
    letters = "bh.." if len(query) == 4 else "b.."
    return Signature(
        (letters,) * 3 + tuple(_broadcast(letters, mask, query) for mask in operation.shapes[3:]),
        letters,
    )


def _last_dims_whole(operation: Operation) -> Signature:
    """layer_norm, rms_norm: weights have the normalized shape."""
    shape = operation.shapes[0]
    count = len(operation.args[1])
    x = _blocked(shape, *range(len(shape) - count, len(shape)))
    return Signature((x, *("." * count for _ in operation.shapes[1:])), x)


def _dim_whole(operation: Operation) -> Signature:
    """softmax, cumsum, topk and the like: along one dimension they need all of it."""
    position = 2 if operation.name == "topk" else 1
    text = _blocked(operation.shapes[0], operation.argument(position, "dim", -1))
    return Signature((text,), text)


def _reduced(operation: Operation, contracted: bool = True) -> Signature:
    """sum and mean (over the whole's size), and argmax and the like, which need whole
    dimensions.
    """
    shape = operation.shapes[0]
    dims = operation.argument(1, "dim", None)
    if dims in (None, []):
        dims = range(len(shape))
    elif isinstance(dims, int):
        dims = [dims]
    gone = {dim % len(shape) for dim in dims} if shape else set()
    text = _letters(shape) if contracted else _blocked(shape, *gone)
    keep = len(operation.output) == len(shape)
    mark = "." if keep else ""
    output = "".join(mark if at in gone else letter for at, letter in enumerate(text))
    return Signature(
        (text,),
        output,
        "".join(text[at] for at in gone) if contracted else "",
        linear=ONE if contracted else (),
    )


def _permuted(operation: Operation) -> Signature:
    text = list(_letters(operation.shapes[0]))
    if operation.name == "permute":
        order = [dim % len(text) for dim in operation.args[1]]
    else:
        first, second = (0, 1) if operation.name == "t" else (operation.args[1], operation.args[2])
        order = list(range(len(text)))
        order[first], order[second] = order[second], order[first]
    return Signature(("".join(text),), "".join(text[at] for at in order), linear=ONE)


def _reshaped(operation: Operation) -> Signature:
    """Groups of dimensions with equal products map onto each other; the outermost of each group may
    be sharded.
    """
    source = operation.shapes[0]
    target = operation.output
    before = ["."] * len(source)
    after = ["."] * len(target)
    letters = iter(ascii_letters)
    i = j = 0
    while i < len(source) and j < len(target):
        first = i
        second = j
        left = source[i]
        right = target[j]
        while left != right:
            if left < right:
                i += 1
                left *= source[i]
            else:
                j += 1
                right *= target[j]
        while first < i and source[first] == 1:
            first += 1
        while second < j and target[second] == 1:
            second += 1
        if source[first] > 1 and target[second] > 1:
            before[first] = after[second] = next(letters)
        i = i + 1
        j = j + 1
    return Signature(("".join(before),), "".join(after), linear=ONE)


def _cut(operation: Operation) -> Signature:
    """slice, split and select: the dimension that they cut stays whole."""
    shape = operation.shapes[0]
    position = 2 if operation.name in ("split", "split_with_sizes", "chunk") else 1
    dim = operation.argument(position, "dim", 0) % len(shape)
    text = _blocked(shape, dim)
    return Signature(
        (text,), text[:dim] + text[dim + 1 :] if operation.name == "select" else text, linear=ONE
    )


def _concatenated(operation: Operation) -> Signature:
    text = _blocked(operation.output, operation.argument(1, "dim", 0))
    every = frozenset(range(len(operation.shapes)))
    return Signature((text,) * len(operation.shapes), text, linear=(every,))


def _convolution(operation: Operation) -> Signature | None:
    if operation.argument(6, "groups", 1) != 1:
        return None
    spatial = "." * (len(operation.output) - 2)
    return _weighted(operation, "aY" + spatial, "ZY" + spatial, "aZ" + spatial)


def _loss_sum(operation: Operation) -> Signature:
    """Sum of cross entropies of rows; over a sharded vocabulary it all-reduces each row's maximum,
    normalizer and gathered logit.
    """
    return Signature(("aY", "a"), "", "aY", reduced_bytes={"Y": 4.0 * 2 * operation.shapes[0][0]})


Handler = Callable[[Operation], Signature | None]
_NONLINEAR = """
    pow rsqrt sqrt exp log log2 tanh sigmoid silu gelu relu abs cos sin erf reciprocal rsub maximum minimum
    clamp clamp_min clamp_max eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or
    __and__ __or__ __xor__ where masked_fill floor softplus leaky_relu elu hardtanh relu6 isnan sign square
""".split()  # noqa: E501, SIM905
_SCALED = frozenset(("div", "neg", "to", "_to_copy", "clone", "detach", "type_as", "expand"))
SHAPED = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view"))
"""Run as a reshape to the local shape of their output."""
ALIASES = (SHAPED - {"_unsafe_view"}) | {
    "transpose",
    "permute",
    "t",
    "unsqueeze",
    "expand",
    "slice",
    "select",
    "split",
    "chunk",
    "detach",
}
HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys((*_NONLINEAR, *_SCALED, "add", "sub", "mul"), _elementwise),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "cumsum", "topk", "sort", "argsort"), _dim_whole
    ),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_dims_whole),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(
        ("argmax", "argmin", "amax", "amin", "max", "min", "any", "all"),
        lambda operation: _reduced(operation, False),
    ),
    **dict.fromkeys(("transpose", "permute", "t"), _permuted),
    **dict.fromkeys((*SHAPED, "unsqueeze"), _reshaped),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk"), _cut),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("conv2d", "conv1d"), _convolution),
    "linear": _linear,
    "addmm": lambda _: Signature(
        ("Z", "ab", "bZ"), "aZ", "b", frozenset({0}), (frozenset({0, 1}),)
    ),
    "einsum": _einsum,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    # [batch, heads, length, size] turned by tables of cosines and sines; each rank has all
    # positions of its batch or heads
    "rotary": lambda _: Signature(("bh..", "....", "...."), "bh..", linear=ONE),
    "one_hot": lambda operation: Signature(
        (_letters(operation.output[:-1]),), _letters(operation.output[:-1]) + "."
    ),
    "cat": _concatenated,
    "cross_entropy_sum": _loss_sum,
    "count_targets": lambda _: Signature(("a",), "", "a"),
}


def forward_flops(operation: Operation) -> float:
    """Return the FLOPs of matrix products, two per multiply-add; 0 for other operators."""
    shapes = operation.shapes
    output = math.prod(operation.output)
    match operation.name:
        case "linear" | "matmul" | "bmm":
            return 2.0 * output * shapes[0][-1]
        case "addmm":
            return 2.0 * output * shapes[1][-1]
        case "conv2d" | "conv1d":
            return 2.0 * output * math.prod(shapes[1][1:])
        case "scaled_dot_product_attention":
            return 4.0 * math.prod(shapes[0]) * shapes[1][-2]
        case "einsum":
            texts = _equation(operation)[0]
            sizes: dict[str, int] = {}
            for text, shape in zip(texts, shapes, strict=True):
                sizes.update(zip(text, shape, strict=True))
            return 2.0 * math.prod(sizes.values()) if len(shapes) > 1 else 0.0
    return 0.0


def operator_node(
    name: str,
    operation: Operation,
    inputs: Sequence[GraphNode],
    item_bytes: int,
    is_floating: bool = True,
) -> GraphNode:
    """A graph's node for an operator on these nodes; without a signature where no rule is known for
    it.
    """
    op = operation.name
    handler = HANDLERS.get(op)
    flops = forward_flops(operation)
    backward = 2 * flops if op == "scaled_dot_product_attention" else 0.0
    if not backward:
        backward = flops * sum(node.needs_gradient for node in inputs[: 3 if op == "einsum" else 2])
    needs = is_floating and op != "detach" and any(node.needs_gradient for node in inputs)
    names = tuple(node.name for node in inputs)
    signature = handler(operation) if handler else None
    return GraphNode(
        name,
        "op",
        op,
        names,
        operation.output,
        item_bytes,
        needs,
        signature,
        flops,
        backward,
        op in ALIASES,
    )


def numbered(op: str, counts: Counter[str]) -> str:
    """A node's name, by its operator and how many of that came before, whoever makes the graph;
    counts it.
    """
    counts[op] += 1
    return f"{op}_{counts[op] - 1}" if counts[op] > 1 else op
