"""Signatures of aten operators by name: which dimensions may be sharded, and what follows for the output. Data for `rules`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

from planner.spmd.graph import Node, Signature

Shape = tuple[int, ...]
ONE = (frozenset({0}),)


@dataclass(frozen=True)
class Ref:
    """Stands in a call's arguments for one of its tensor inputs."""

    index: int


@dataclass(frozen=True)
class Operation:
    """A call as capture saw it. name: without overload. shapes: of the inputs. args, kwargs: Ref where a tensor stood."""

    name: str
    shapes: tuple[Shape, ...]
    output: Shape
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


def _elementwise(operation: Operation, linear: Sequence[frozenset[int]] = ()) -> Signature:
    letters = _letters(operation.output)
    inputs = []
    for shape in operation.shapes:
        tail = letters[len(letters) - len(shape) :]
        sizes = operation.output[len(letters) - len(shape) :]
        inputs.append("".join("." if own == 1 != size else c for c, own, size in zip(tail, shape, sizes, strict=True)))
    return Signature(tuple(inputs), letters, linear=tuple(linear))


def _sum_like(operation: Operation) -> Signature:
    return _elementwise(operation, (frozenset(range(len(operation.shapes))),))


def _product(operation: Operation) -> Signature:
    return _elementwise(operation, [frozenset({at}) for at in range(len(operation.shapes))])


def _scaled(operation: Operation) -> Signature:
    return _elementwise(operation, ONE)


def _with_scalar_added(operation: Operation) -> Signature:
    """add and sub: linear only where both are tensors."""
    return _sum_like(operation) if len(operation.shapes) == 2 else _elementwise(operation)


def _linear(operation: Operation) -> Signature:
    x = _letters(operation.shapes[0])
    weight, bias = "Z" + x[-1], ("Z",) if len(operation.shapes) == 3 else ()
    additive = frozenset({2} if bias else ())
    return Signature((x, weight, *bias), x[:-1] + "Z", x[-1], additive, (frozenset({0}) | additive,), factored=True)


def _addmm(operation: Operation) -> Signature:
    return Signature(("Z", "ab", "bZ"), "aZ", "b", frozenset({0}), (frozenset({0, 1}),))


def _matmul(operation: Operation) -> Signature | None:
    left, right = operation.shapes
    if len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    batch = ascii_letters[: len(left) - 2]
    return Signature((batch + "XY", batch + "YZ"), batch + "XZ", "Y", linear=(frozenset({0}), frozenset({1})))


def _einsum(operation: Operation) -> Signature | None:
    inputs, _, output = str(operation.args[0]).replace(" ", "").partition("->")
    texts = tuple(inputs.split(","))
    if "." in inputs or not output or any(len(set(text)) < len(text) for text in texts):
        return None
    contracted = "".join(sorted(set("".join(texts)) - set(output)))
    return Signature(texts, output, contracted, linear=tuple(frozenset({at}) for at in range(len(texts))))


def _embedding(operation: Operation) -> Signature:
    """Over a sharded vocabulary each rank looks up its own rows; not where one row is for padding and has no gradient."""
    ids, padded = _letters(operation.shapes[1]), operation.argument(2, "padding_idx", -1) >= 0
    return Signature((".Z" if padded else "YZ", ids), ids + "Z", "" if padded else "Y")


def _attention(operation: Operation) -> Signature:
    """Batch and heads; a mask's only where it has them. Key and value heads may be fewer (grouped queries)."""
    query = operation.shapes[0]
    letters = "bh.." if len(query) == 4 else "b.."
    mask: tuple[str, ...] = ()
    if len(operation.shapes) == 4:
        shape = operation.shapes[3]
        tail = letters[len(letters) - len(shape) :]
        mask = ("".join(c if size > 1 else "." for c, size in zip(tail, shape, strict=True)),)
    return Signature((letters, letters, letters, *mask), letters)


def _rotary(operation: Operation) -> Signature:
    """[batch, heads, length, size] turned by tables of cosines and sines; each rank has all positions of its batch or heads."""
    return Signature(("bh..", "....", "...."), "bh..", linear=ONE)


def _last_dims_whole(operation: Operation) -> Signature:
    """layer_norm, rms_norm: weights have the normalized shape."""
    shape, count = operation.shapes[0], len(operation.args[1])
    x = _blocked(shape, *range(len(shape) - count, len(shape)))
    return Signature((x, *("." * count for _ in operation.shapes[1:])), x)


def _dim_whole(operation: Operation) -> Signature:
    """softmax, cumsum, topk and the like: along one dimension they need all of it."""
    position = 2 if operation.name == "topk" else 1
    text = _blocked(operation.shapes[0], operation.argument(position, "dim", -1))
    return Signature((text,), text)


def _reduced(operation: Operation, contracted: bool = True) -> Signature:
    """sum and mean (over the whole's size), and argmax and the like, which need whole dimensions."""
    shape, dims = operation.shapes[0], operation.argument(1, "dim", None)
    dims = range(len(shape)) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    gone = {dim % len(shape) for dim in dims} if shape else set()
    text = _letters(shape) if contracted else _blocked(shape, *gone)
    keep = len(operation.output) == len(shape)
    output = "".join(("." if keep else "") if at in gone else c for at, c in enumerate(text))
    return Signature((text,), output, "".join(text[at] for at in gone) if contracted else "", linear=ONE if contracted else ())


def _one_hot(operation: Operation) -> Signature:
    text = _letters(operation.shapes[0])
    return Signature((text,), text + ".")


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
    """Groups of dimensions with equal products map onto each other; the outermost of each group may be sharded."""
    source, target = operation.shapes[0], operation.output
    before, after, letters = ["."] * len(source), ["."] * len(target), iter(ascii_letters)
    i = j = 0
    while i < len(source) and j < len(target):
        first, second, left, right = i, j, source[i], target[j]
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
        i, j = i + 1, j + 1
    return Signature(("".join(before),), "".join(after), linear=ONE)


def _unsqueezed(operation: Operation) -> Signature:
    text, dim = _letters(operation.shapes[0]), operation.args[1] % len(operation.output)
    return Signature((text,), text[:dim] + "." + text[dim:], linear=ONE)


def _cut(operation: Operation) -> Signature:
    """slice, split and select: the dimension that they cut stays whole."""
    shape, position = operation.shapes[0], 2 if operation.name in ("split", "split_with_sizes", "chunk") else 1
    dim = operation.argument(position, "dim", 0) % len(shape)
    text = _blocked(shape, dim)
    return Signature((text,), text[:dim] + text[dim + 1 :] if operation.name == "select" else text, linear=ONE)


def _concatenated(operation: Operation) -> Signature:
    text = _blocked(operation.output, operation.argument(1, "dim", 0))
    every = frozenset(range(len(operation.shapes)))
    return Signature((text,) * len(operation.shapes), text, linear=(every,))


def _convolution(operation: Operation) -> Signature | None:
    if operation.argument(6, "groups", 1) != 1:
        return None
    spatial = "." * (len(operation.output) - 2)
    bias = ("Z",) if len(operation.shapes) == 3 else ()
    additive = frozenset({2} if bias else ())
    inputs = ("aY" + spatial, "ZY" + spatial, *bias)
    return Signature(inputs, "aZ" + spatial, "Y", additive, (frozenset({0}) | additive,))


def _loss_sum(operation: Operation) -> Signature:
    """Sum of cross entropies of rows; over a sharded vocabulary it all-reduces each row's maximum, normalizer and gathered logit."""
    return Signature(("aY", "a"), "", "aY", reduced_bytes={"Y": 4.0 * 2 * operation.shapes[0][0]})


def _count(operation: Operation) -> Signature:
    return Signature(("a",), "", "a")


Handler = Callable[[Operation], Signature | None]
_NONLINEAR = """
    pow rsqrt sqrt exp log log2 tanh sigmoid silu gelu relu abs cos sin erf reciprocal rsub maximum minimum
    clamp clamp_min clamp_max eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or
    __and__ __or__ __xor__ where masked_fill floor softplus leaky_relu elu hardtanh relu6 isnan sign square
""".split()  # noqa: SIM905  shorter to read
HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(_NONLINEAR, _elementwise),
    **dict.fromkeys(("add", "sub"), _with_scalar_added),
    **dict.fromkeys(("mul",), _product),
    **dict.fromkeys(("div", "neg", "to", "_to_copy", "clone", "detach", "type_as"), _scaled),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "cumsum", "topk", "sort", "argsort"), _dim_whole),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_dims_whole),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(("argmax", "argmin", "amax", "amin", "max", "min", "any", "all"), lambda operation: _reduced(operation, False)),
    **dict.fromkeys(("transpose", "permute", "t"), _permuted),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view"), _reshaped),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk"), _cut),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("conv2d", "conv1d"), _convolution),
    "linear": _linear,
    "addmm": _addmm,
    "einsum": _einsum,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "rotary": _rotary,
    "one_hot": _one_hot,
    "unsqueeze": _unsqueezed,
    "expand": _scaled,
    "cat": _concatenated,
    "cross_entropy_sum": _loss_sum,
    "count_targets": _count,
}
ALIASES = frozenset(
    (
        "view", "reshape", "flatten", "unflatten", "squeeze", "transpose", "permute", "t",
        "unsqueeze", "expand", "slice", "select", "split", "chunk", "detach",
    )
)
SHAPED = frozenset(["view", "reshape", "flatten", "unflatten", "squeeze", "_unsafe_view"])
"""Run as a reshape to the local shape of their output."""


def forward_flops(operation: Operation) -> float:
    """Of matrix products; two for each multiplication and addition."""
    shapes, output = operation.shapes, math.prod(operation.output)
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
            sizes = dict(pair for text, shape in zip(_operands(operation), shapes, strict=True) for pair in zip(text, shape, strict=True))
            return 2.0 * math.prod(sizes.values()) if len(shapes) > 1 else 0.0
    return 0.0


def _operands(operation: Operation) -> list[str]:
    return str(operation.args[0]).replace(" ", "").partition("->")[0].split(",")


def operator_node(name: str, operation: Operation, inputs: Sequence[Node], item_bytes: int, is_floating: bool = True) -> Node:
    """A graph's node for an operator on these nodes; without a signature where no rule is known for it."""
    op = operation.name
    handler = HANDLERS.get(op)
    flops = forward_flops(operation)
    backward = 2 * flops if op == "scaled_dot_product_attention" else 0.0
    if not backward:
        backward = flops * sum(node.needs_gradient for node in inputs[: 3 if op == "einsum" else 2])
    needs = is_floating and op != "detach" and any(node.needs_gradient for node in inputs)
    names = tuple(node.name for node in inputs)
    signature = handler(operation) if handler else None
    return Node(name, "op", op, names, operation.output, item_bytes, needs, signature, flops, backward, op in ALIASES)


class Names:
    """A name for each node by its operator and how many of that came before, whoever makes the graph."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, op: str) -> str:
        count = self._counts[op] = self._counts.get(op, -1) + 1
        return f"{op}_{count}" if count else op
