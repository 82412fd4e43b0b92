"""Signatures of aten operators by name: dimensions that may be sharded, and their output's.

They are data for `rules`.
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
    """Placeholder in a call's arguments for one of its tensor inputs."""

    index: int


@dataclass(frozen=True)
class Operation:
    """Call of an operator, as captured.

    name: without overload. shapes: of the inputs. args, kwargs: with a Ref for each tensor.
    """

    name: str
    shapes: tuple[TensorShape, ...]
    output: TensorShape
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


def _letters(shape: Sequence[int]) -> str:
    return ascii_letters[: len(shape)]


def _block_letters(shape: Sequence[int], *dims: int) -> str:
    """Return letters with the given dimensions not shardable."""
    letters = list(_letters(shape))
    for dim in dims:
        letters[dim % len(shape)] = "."
    return "".join(letters)


def _broadcast(letters: str, shape: TensorShape, whole: TensorShape) -> str:
    """Return the letters of a tensor of this shape that meets one of the whole shape.

    A dimension that is stretched has none.
    """
    # dimensions are matched from the last one on
    first = len(letters) - len(shape)
    own_letters = letters[first:]
    own_whole = whole[first:]
    found = ""
    for letter, own, size in zip(own_letters, shape, own_whole, strict=True):
        is_stretched = own == 1 and size != 1
        found += "." if is_stretched else letter
    return found


def _each_alone(count: int) -> tuple[frozenset[int], ...]:
    """Return `Signature.linear` of a product: it is linear in each of `count` factors."""
    return tuple(frozenset({index}) for index in range(count))


def _elementwise(operation: Operation) -> Signature:
    """Return the signature of an operator on equal elements.

    It is linear in both terms of a sum together, in each factor of a product, and in what it
    scales.
    """
    letters = _letters(operation.output)
    count = len(operation.shapes)
    linear: tuple[frozenset[int], ...] = ()
    if operation.name in _SCALED:
        linear = ONE
    elif operation.name == "mul":
        linear = _each_alone(count)
    elif operation.name in ("add", "sub") and count == 2:
        # with a number for one term, a sum of parts would add the number more than once
        linear = (frozenset({0, 1}),)
    inputs = [_broadcast(letters, shape, operation.output) for shape in operation.shapes]
    return Signature(tuple(inputs), letters, linear=linear)


def _weighted_sum(
    operation: Operation, x: str, weight: str, output: str, factored: bool = False
) -> Signature:
    """Return the signature of a product that is summed over the weight's second letter.

    It may have a bias along the weight's first letter, which is added once.
    """
    inputs: tuple[str, ...] = (x, weight)
    additive = frozenset[int]()
    if len(operation.shapes) == 3:
        inputs = (x, weight, weight[0])
        additive = frozenset({2})
    linear = (frozenset({0}) | additive,)
    return Signature(inputs, output, weight[1], additive, linear, factored=factored)


def _linear(operation: Operation) -> Signature:
    x = _letters(operation.shapes[0])
    weight = "Z" + x[-1]
    output = x[:-1] + "Z"
    return _weighted_sum(operation, x, weight, output, factored=True)


def _matmul(operation: Operation) -> Signature | None:
    left, right = operation.shapes
    left_batch = left[:-2]
    right_batch = right[:-2]
    has_same_batch = len(left) == len(right) and left_batch == right_batch
    if not has_same_batch:
        # one side is broadcast, which no rule is written for
        return None
    batch = _letters(left_batch)
    inputs = (batch + "XY", batch + "YZ")
    return Signature(inputs, batch + "XZ", "Y", linear=_each_alone(2))


def _equation(operation: Operation) -> tuple[tuple[str, ...], str]:
    """Letters of an einsum's inputs and of its output."""
    equation = str(operation.args[0]).replace(" ", "")
    inputs, _, output = equation.partition("->")
    return tuple(inputs.split(",")), output


def _einsum(operation: Operation) -> Signature | None:
    texts, output = _equation(operation)
    letters = "".join(texts)
    # an ellipsis, or an output that is left for torch to derive
    if "." in letters or not output:
        return None
    for text in texts:
        has_diagonal = len(set(text)) < len(text)
        if has_diagonal:
            return None
    summed = set(letters) - set(output)
    contracted = "".join(sorted(summed))
    return Signature(texts, output, contracted, linear=_each_alone(len(texts)))


def _embedding(operation: Operation) -> Signature:
    """Return the signature of an embedding, whose vocabulary may be sharded.

    Each rank then looks up its own rows. The vocabulary is not sharded if one row is for padding
    and has no gradient.
    """
    ids = _letters(operation.shapes[1])
    is_padded = operation.argument(2, "padding_idx", -1) >= 0
    if is_padded:
        return Signature((".Z", ids), ids + "Z")
    return Signature(("YZ", ids), ids + "Z", "Y")


def _attention(operation: Operation) -> Signature:
    """Return the signature of an attention, which may be cut by batch and heads.

    A mask is cut only along those that it has. Key and value heads may be fewer (grouped queries).
    """
    query = operation.shapes[0]
    letters = "bh.." if len(query) == 4 else "b.."
    masks = [_broadcast(letters, mask, query) for mask in operation.shapes[3:]]
    return Signature((letters, letters, letters, *masks), letters)


def _last_dims_whole(operation: Operation) -> Signature:
    """layer_norm, rms_norm: weights have the normalized shape."""
    shape = operation.shapes[0]
    count = len(operation.args[1])
    normalized = range(len(shape) - count, len(shape))
    x = _block_letters(shape, *normalized)
    weights = ("." * count,) * (len(operation.shapes) - 1)
    return Signature((x, *weights), x)


def _dim_whole(operation: Operation) -> Signature:
    """softmax, cumsum, topk and the like: along one dimension they need all of it."""
    position = 2 if operation.name == "topk" else 1
    dim = operation.argument(position, "dim", -1)
    text = _block_letters(operation.shapes[0], dim)
    return Signature((text,), text)


def _reduction(operation: Operation, contracted: bool = True) -> Signature:
    """Return the signature of a reduction over some dimensions.

    contracted: True for sum and mean (over the whole's size), False for argmax and the like, which
    need whole dimensions.
    """
    shape = operation.shapes[0]
    dims = operation.argument(1, "dim", None)
    if dims in (None, []):
        dims = range(len(shape))
    elif isinstance(dims, int):
        dims = [dims]
    gone = set[int]()
    # a scalar has no dimension, though it may be reduced over "the last one"
    if shape:
        gone = {dim % len(shape) for dim in dims}
    text = _letters(shape) if contracted else _block_letters(shape, *gone)

    keeps_dims = len(operation.output) == len(shape)
    output = ""
    gone_letters = ""
    for dim, letter in enumerate(text):
        if dim not in gone:
            output += letter
            continue
        gone_letters += letter
        if keeps_dims:
            output += "."
    if not contracted:
        return Signature((text,), output)
    return Signature((text,), output, gone_letters, linear=ONE)


def _permutation(operation: Operation) -> Signature:
    text = _letters(operation.shapes[0])
    if operation.name == "permute":
        order = operation.args[1]
        output = "".join(text[dim] for dim in order)
        return Signature((text,), output, linear=ONE)

    # `t` exchanges the two dimensions of a matrix
    first = 0
    second = 1
    if operation.name == "transpose":
        first, second = operation.args[1:3]
    exchanged = list(text)
    exchanged[first] = text[second]
    exchanged[second] = text[first]
    return Signature((text,), "".join(exchanged), linear=ONE)


def _reshape(operation: Operation) -> Signature:
    """Return the signature of a reshape.

    Groups of dimensions with equal products map onto each other. The outermost of each group may be
    sharded.
    """
    source = operation.shapes[0]
    target = operation.output
    before = ["."] * len(source)
    after = ["."] * len(target)
    letters = iter(ascii_letters)
    i = 0
    j = 0
    while i < len(source) and j < len(target):
        # grow a group on either side until their products are equal
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
        # dimensions of one element cannot be cut: the outermost is the first larger one
        while first < i and source[first] == 1:
            first += 1
        while second < j and target[second] == 1:
            second += 1
        if source[first] > 1 and target[second] > 1:
            letter = next(letters)
            before[first] = letter
            after[second] = letter
        i += 1
        j += 1
    text = "".join(before)
    output = "".join(after)
    return Signature((text,), output, linear=ONE)


def _cut(operation: Operation) -> Signature:
    """slice, split and select: the dimension that they cut stays whole."""
    shape = operation.shapes[0]
    position = 2 if operation.name in ("split", "split_with_sizes", "chunk") else 1
    dim = operation.argument(position, "dim", 0) % len(shape)
    text = _block_letters(shape, dim)
    output = text
    if operation.name == "select":
        output = text[:dim] + text[dim + 1 :]
    return Signature((text,), output, linear=ONE)


def _concatenation(operation: Operation) -> Signature:
    dim = operation.argument(1, "dim", 0)
    text = _block_letters(operation.output, dim)
    count = len(operation.shapes)
    every = frozenset(range(count))
    return Signature((text,) * count, text, linear=(every,))


def _convolution(operation: Operation) -> Signature | None:
    if operation.argument(6, "groups", 1) != 1:
        return None
    # a rank would need the rows of its neighbors, so the image's own dimensions stay whole
    spatial = "." * (len(operation.output) - 2)
    return _weighted_sum(operation, "aY" + spatial, "ZY" + spatial, "aZ" + spatial)


def _loss_sum(operation: Operation) -> Signature:
    """Return the signature of the sum of cross entropies of rows.

    Over a sharded vocabulary it all-reduces each row's maximum, normalizer and gathered logit.
    """
    num_rows = operation.shapes[0][0]
    reduced_bytes = {"Y": 4.0 * 2 * num_rows}
    return Signature(("aY", "a"), "", "aY", reduced_bytes=reduced_bytes)


def _one_hot(operation: Operation) -> Signature:
    ids = _letters(operation.output[:-1])
    return Signature((ids,), ids + ".")


def _whole_reduction(operation: Operation) -> Signature:
    return _reduction(operation, contracted=False)


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
    **dict.fromkeys(("sum", "mean"), _reduction),
    **dict.fromkeys(
        ("argmax", "argmin", "amax", "amin", "max", "min", "any", "all"), _whole_reduction
    ),
    **dict.fromkeys(("transpose", "permute", "t"), _permutation),
    **dict.fromkeys((*SHAPED, "unsqueeze"), _reshape),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk"), _cut),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("conv2d", "conv1d"), _convolution),
    "linear": _linear,
    "addmm": lambda _: Signature(
        inputs=("Z", "ab", "bZ"),
        output="aZ",
        contracted="b",
        additive=frozenset({0}),
        linear=(frozenset({0, 1}),),
    ),
    "einsum": _einsum,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    # [batch, heads, length, size] turned by tables of cosines and sines; each rank has all
    # positions of its batch or heads
    "rotary": lambda _: Signature(("bh..", "....", "...."), "bh..", linear=ONE),
    "one_hot": _one_hot,
    "cat": _concatenation,
    "cross_entropy_sum": _loss_sum,
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
            num_keys = shapes[1][-2]
            return 4.0 * math.prod(shapes[0]) * num_keys
        case "einsum":
            if len(shapes) == 1:
                return 0.0
            texts, _ = _equation(operation)
            sizes: dict[str, int] = {}
            for text, shape in zip(texts, shapes, strict=True):
                sizes.update(zip(text, shape, strict=True))
            return 2.0 * math.prod(sizes.values())
    return 0.0


def operator_node(
    name: str,
    operation: Operation,
    inputs: Sequence[GraphNode],
    item_bytes: int,
    is_floating: bool = True,
) -> GraphNode:
    """Return a graph's node for an operator on these nodes.

    It has no signature if no rule is known for the operator.
    """
    op = operation.name
    handler = HANDLERS.get(op)
    signature = None
    if handler is not None:
        signature = handler(operation)

    flops = forward_flops(operation)
    backward = 0.0
    if op == "scaled_dot_product_attention":
        backward = 2 * flops
    if not backward:
        # one product more for each factor that has a gradient
        num_factors = 3 if op == "einsum" else 2
        backward = flops * sum(node.needs_gradient for node in inputs[:num_factors])
    passes_gradient = is_floating and op != "detach"
    needs_gradient = passes_gradient and any(node.needs_gradient for node in inputs)
    return GraphNode(
        name=name,
        kind="op",
        op=op,
        inputs=tuple(node.name for node in inputs),
        shape=operation.output,
        item_bytes=item_bytes,
        needs_gradient=needs_gradient,
        signature=signature,
        flops=flops,
        backward_flops=backward,
        is_alias=op in ALIASES,
    )


def next_name(op: str, counts: Counter[str]) -> str:
    """Return the name of an operator's next node, and count it in `counts`."""
    number = counts[op]
    counts[op] += 1
    return f"{op}_{number}" if number else op
