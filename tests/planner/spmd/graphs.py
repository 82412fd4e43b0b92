"""Graphs by hand: small ones for judges, and the models of HAP's artefact, without torch."""

import math
import random
from dataclasses import dataclass, field

from planner.spmd.graph import Graph, GraphNode, Signature
from planner.spmd.search import ProgramSearch

ONE = (frozenset({0}),)


@dataclass
class Builder:
    """Appends nodes; each method gives the name of what it made."""

    nodes: list[GraphNode] = field(default_factory=list)

    def add_node(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        signature: Signature | None,
        flops: float = 0.0,
        alias: bool = False,
    ) -> str:
        name = f"{op}_{len(self.nodes)}"
        needs = any(self._node(i).needs_gradient for i in inputs) and op != "count"
        backward = flops * sum(self._node(i).needs_gradient for i in inputs[:2])
        self.nodes.append(
            GraphNode(name, "op", op, inputs, shape, 4, needs, signature, flops, backward, alias)
        )
        return name

    def _node(self, name: str) -> GraphNode:
        return next(node for node in reversed(self.nodes) if node.name == name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._node(name).shape

    def leaf(self, kind: str, *shape: int) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(GraphNode(name, kind, "", (), shape, 4, kind == "parameter"))  # type: ignore[arg-type]
        return name

    def linear(self, x: str, features: int, bias: bool = True) -> str:
        shape = self.shape(x)
        inputs = (
            x,
            self.leaf("parameter", features, shape[-1]),
            *((self.leaf("parameter", features),) if bias else ()),
        )
        letters = "abcdefg"[: len(shape) - 1] + "K"
        additive = frozenset({2} if bias else ())
        signature = Signature(
            (letters, "ZK", *(("Z",) if bias else ())),
            letters[:-1] + "Z",
            "K",
            additive,
            (frozenset({0}) | additive,),
            factored=True,
        )
        return self.add_node(
            "linear", inputs, (*shape[:-1], features), signature, 2.0 * math.prod(shape) * features
        )

    def unary(self, x: str, op: str = "gelu") -> str:
        letters = "abcdefg"[: len(self.shape(x))]
        return self.add_node(op, (x,), self.shape(x), Signature((letters,), letters))

    def add(self, x: str, y: str) -> str:
        letters = "abcdefg"[: len(self.shape(x))]
        return self.add_node(
            "add",
            (x, y),
            self.shape(x),
            Signature((letters, letters), letters, linear=(frozenset({0, 1}),)),
        )

    def norm(self, x: str) -> str:
        shape = self.shape(x)
        letters = "abcdefg"[: len(shape) - 1] + "."
        inputs = (x, self.leaf("parameter", shape[-1]), self.leaf("parameter", shape[-1]))
        return self.add_node("norm", inputs, shape, Signature((letters, ".", "."), letters))

    def reshape(self, x: str, shape: tuple[int, ...], before: str, after: str) -> str:
        return self.add_node(
            "view", (x,), shape, Signature((before,), after, linear=ONE), alias=True
        )

    def attention(self, x: str, heads: int) -> str:
        batch, tokens, width = self.shape(x)
        split = (batch, tokens, heads, width // heads)
        parts = [self.reshape(self.linear(x, width), split, "abh", "abh.") for _ in range(3)]
        mixed = self.add_node(
            "attention",
            tuple(parts),
            split,
            Signature(("a.h.",) * 3, "a.h."),
            4.0 * batch * tokens**2 * width,
        )
        return self.linear(self.reshape(mixed, (batch, tokens, width), "abh.", "abh"), width)

    def embedding(self, ids: str, vocabulary: int, width: int) -> str:
        weight = self.leaf("parameter", vocabulary, width)
        letters = "abcdefg"[: len(self.shape(ids))]
        return self.add_node(
            "embedding",
            (weight, ids),
            (*self.shape(ids), width),
            Signature(("YZ", letters), letters + "Z", "Y"),
        )

    def loss(self, x: str) -> str:
        shape = self.shape(x)
        if len(shape) == 3:
            x = self.reshape(x, (shape[0] * shape[1], shape[2]), "a.b", "ab")
        rows = self.shape(x)[0]
        return self.add_node(
            "loss",
            (x, self.leaf("input", rows)),
            (),
            Signature(("aY", "a"), "", "aY", reduced_bytes={"Y": 8.0 * rows}),
        )

    def experts(self, x: str, experts: int, hidden: int, capacity: int) -> str:
        """Dispatch, two expert products and combination as einsums, the gates as one operator along
        the batch.
        """
        batch, tokens, width = self.shape(x)
        gates = self.add_node(
            "gates",
            (self.linear(x, experts, False),),
            (batch, tokens, experts, capacity),
            Signature(("a..",), "a..."),
        )
        cost = 2.0 * batch * tokens * experts * capacity * width
        inside = self._einsum(
            (gates, x), ("gsec", "gsm"), "egcm", (experts, batch, capacity, width), cost
        )
        for size in (hidden, width):
            weight = self.leaf("parameter", experts, self.shape(inside)[-1], size)
            shape = (experts, batch, capacity, size)
            inside = self._einsum(
                (inside, weight),
                ("egcm", "emh"),
                "egch",
                shape,
                2.0 * math.prod(shape) * self.shape(inside)[-1],
            )
        return self._einsum((gates, inside), ("gsec", "egcm"), "gsm", (batch, tokens, width), cost)

    def _einsum(
        self,
        inputs: tuple[str, str],
        texts: tuple[str, str],
        output: str,
        shape: tuple[int, ...],
        flops: float,
    ) -> str:
        contracted = "".join(sorted(set("".join(texts)) - set(output)))
        return self.add_node(
            "einsum",
            inputs,
            shape,
            Signature(texts, output, contracted, linear=(frozenset({0}), frozenset({1}))),
            flops,
        )

    def convolution(self, x: str, channels: int, kernel: int = 3) -> str:
        batch, before, height, width = self.shape(x)
        inputs = (
            x,
            self.leaf("parameter", channels, before, kernel, kernel),
            self.leaf("parameter", channels),
        )
        shape = (batch, channels, height, width)
        signature = Signature(
            ("aY..", "ZY..", "Z"), "aZ..", "Y", frozenset({2}), (frozenset({0, 2}),)
        )
        return self.add_node(
            "conv2d", inputs, shape, signature, 2.0 * math.prod(shape) * before * kernel**2
        )

    def pool(self, x: str) -> str:
        batch, channels, height, width = self.shape(x)
        return self.add_node(
            "pool", (x,), (batch, channels, height // 2, width // 2), Signature(("ab..",), "ab..")
        )

    def pool_to(self, x: str, size: int) -> str:
        """Adaptive pooling: of a smaller image it repeats values."""
        batch, channels = self.shape(x)[:2]
        return self.add_node(
            "pool", (x,), (batch, channels, size, size), Signature(("ab..",), "ab..")
        )

    def graph(self) -> Graph:
        return Graph(self.nodes)


def transformer(
    layers: int,
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    *,
    classes: int = 10,
    vocabulary: int = 0,
    experts: int = 0,
) -> Graph:
    """ViT-like, or BERT-like with a vocabulary; with `experts` every second block has a mixture of
    so many.
    """
    b = Builder()
    if vocabulary:
        x = b.embedding(b.leaf("input", batch, tokens), vocabulary, width)
    else:
        x = b.linear(b.leaf("input", batch, tokens, 48), width)
    for layer in range(layers):
        x = b.add(x, b.attention(b.norm(x), heads))
        y = b.norm(x)
        if experts and layer % 2:
            y = b.experts(y, experts, 4 * width, max(1, 2 * tokens // experts))
        else:
            y = b.linear(b.unary(b.linear(y, 4 * width)), width)
        x = b.add(x, y)
    b.loss(b.linear(b.norm(x), vocabulary or classes))
    return b.graph()


def vgg19(batch: int) -> Graph:
    """On 32 x 32 images, as HAP's artefact: after five pools one value a channel."""
    b = Builder()
    x = b.leaf("input", batch, 3, 32, 32)
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            x = b.unary(b.convolution(x, channels), "relu")
        x = b.pool(x)
    x = b.reshape(b.pool_to(x, 7), (batch, 512 * 49), "ab..", "ab")
    for features in (4096, 4096):
        x = b.unary(b.linear(x, features), "relu")
    b.loss(b.linear(x, 1000))
    return b.graph()


def random_graph(rng: random.Random) -> Graph:
    """A few operators over one input, with a residual or a mixture at times."""
    b = Builder()
    x = b.leaf("input", rng.choice((4, 6)), 4, rng.choice((4, 6)))
    for _ in range(rng.randint(1, 2)):
        match rng.randrange(4):
            case 0:
                x = b.linear(x, rng.choice((4, 8)), rng.random() < 0.5)
            case 1:
                x = b.add(x, b.unary(x))
            case 2:
                x = b.add(x, b.linear(x, b.shape(x)[-1], False))
            case 3:
                x = b.linear(b.unary(b.linear(x, 8, False)), 4, False)
    b.loss(x)
    return b.graph()


def count_states(search: ProgramSearch) -> list[int]:
    """Return a list that gets the number of states of each segment that the search solves."""
    seen: list[int] = []
    solve = search._solve

    def counting(first, last, costs):
        solved = solve(first, last, costs)
        seen.append(sum(map(len, solved.back)))
        return solved

    search._solve = counting  # type: ignore[method-assign]
    return seen
