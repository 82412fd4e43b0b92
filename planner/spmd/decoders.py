"""Graphs of decoder families from their specs by formula, equal to what capture reads from the
library's modules (tests/runtime/spmd/test_decoders.py), so that planning needs no torch.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner.model_spec import ModelSpec
from planner.spmd.graph import Graph, Node
from planner.spmd.operators import Operation, Ref, numbered, operator_node

LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
FAMILIES = LLAMA_LIKE | {"gpt2"}
WHOLE = -1


@dataclass(frozen=True)
class Decoder:
    """Graph of a decoder, and the dimensions along which its state may be cut.

    graph: sum of the losses of `ids` and `targets`.
    split_dims: dimension by parameter, WHOLE for none. They are the cuts of pipelines' tensor
    parallelism, so that state moves between plans of either kind.
    """

    graph: Graph
    split_dims: Mapping[str, int]


def decoder_graph(
    spec: ModelSpec, batch: int, sequence_length: int, precision: str
) -> Decoder | None:
    """Return the graph of a decoder for a microbatch of `batch` sequences.

    None if the spec is of no known family or has parameters that the family's formula lacks.
    """
    if spec.model_type not in FAMILIES:
        return None
    builder = (_Gpt2 if spec.model_type == "gpt2" else _Llama)(
        spec, batch, sequence_length, precision
    )
    builder.build()
    found = sum(math.prod(builder.nodes[name].shape) for name in builder.split_dims)
    if found != sum(layer.parameters for layer in (spec.embedding, *spec.blocks, spec.head)):
        return None
    return Decoder(
        Graph(list(builder.nodes.values()), most_units=spec.unreplicated_tp_degree),
        builder.split_dims,
    )


class _Builder:
    """Appends nodes; `op` and `parameter` give the name of what they made."""

    def __init__(self, spec: ModelSpec, batch: int, length: int, precision: str) -> None:
        self.spec, self.batch, self.length = spec, batch, length
        self.tokens = batch, length
        self.size = 4 if precision == "fp32" else 2
        self.hidden, self.num_heads = spec.hidden_size, spec.num_heads
        self.nodes: dict[str, Node] = {}
        self.split_dims: dict[str, int] = {}
        self._counts = Counter[str]()

    def leaf(self, kind: str, name: str, shape: tuple[int, ...], item_bytes: int) -> str:
        leaf = Node(name, kind, "", (), shape, item_bytes, kind == "parameter")  # type: ignore[arg-type]
        self.nodes.setdefault(name, leaf)
        return name

    def parameter(self, name: str, *shape: int, split: int = WHOLE) -> str:
        self.split_dims.setdefault(name, split)
        return self.leaf("parameter", name, shape, self.size)

    def op(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        *arguments: object,
        item_bytes: int = 0,
    ) -> str:
        """arguments: those after the first tensor, where a rule asks for them. item_bytes: of the
        output; the first input's where 0.
        """
        nodes = [self.nodes[name] for name in inputs]
        operation = Operation(
            op, tuple(node.shape for node in nodes), shape, (Ref(0), *arguments), {}
        )
        name = numbered(op, self._counts)
        self.nodes[name] = operator_node(name, operation, nodes, item_bytes or nodes[0].item_bytes)
        return name

    def like(self, op: str, *inputs: str, item_bytes: int = 0) -> str:
        """An operator whose output has the shape of its last input."""
        return self.op(op, inputs, self.nodes[inputs[-1]].shape, item_bytes=item_bytes)

    def embedding(self, path: str) -> str:
        table = self.parameter(f"{path}.weight", self.spec.vocab_size, self.hidden, split=0)
        return self.op(
            "embedding",
            (table, self.leaf("input", "ids", self.tokens, 8)),
            (*self.tokens, self.hidden),
        )

    def linear(self, x: str, weight: str, *bias: str) -> str:
        return self.op(
            "linear", (x, weight, *bias), (*self.nodes[x].shape[:-1], self.nodes[weight].shape[0])
        )

    def heads(self, x: str, heads: int, size: int) -> str:
        """[batch, length, heads, size]"""
        return self.op("view", (x,), (*self.tokens, heads, size))

    def across(self, x: str) -> str:
        """[batch, heads, length, size] of [batch, length, heads, size], or the other way round."""
        batch, first, second, size = self.nodes[x].shape
        return self.op("transpose", (x,), (batch, second, first, size), 1, 2)

    def attention(self, q: str, k: str, v: str) -> str:
        """[batch, length, width] of heads."""
        y = self.across(self.op("scaled_dot_product_attention", (q, k, v), self.nodes[q].shape))
        return self.op("reshape", (y,), (*self.tokens, math.prod(self.nodes[y].shape[2:])))

    def loss(self, x: str, embedding: str) -> None:
        spec = self.spec
        path = embedding if spec.tied_embeddings else "lm_head"
        logits = self.linear(
            x, self.parameter(f"{path}.weight", spec.vocab_size, self.hidden, split=0)
        )
        if self.size != 4:
            logits = self.like("to", logits, item_bytes=4)
        rows = self.batch * self.length
        logits = self.op("flatten", (logits,), (rows, spec.vocab_size))
        targets = self.op("flatten", (self.leaf("input", "targets", self.tokens, 8),), (rows,))
        self.op("cross_entropy_sum", (logits, targets), ())


class _Llama(_Builder):
    """Llama, Mistral, Qwen2 (biases of query, key and value), Qwen3 (norms of queries and keys)."""

    def build(self) -> None:
        x = self.embedding("model.embed_tokens")
        for number in range(len(self.spec.blocks)):
            path = f"model.layers.{number}"
            x = self.like(
                "add",
                x,
                self._attention(
                    self._norm(x, f"{path}.input_layernorm"), f"{path}.self_attn", number
                ),
            )
            x = self.like(
                "add",
                x,
                self._mlp(self._norm(x, f"{path}.post_attention_layernorm"), f"{path}.mlp", number),
            )
        self.loss(self._norm(x, "model.norm"), "model.embed_tokens")

    def _norm(self, x: str, path: str) -> str:
        """RMSNorm, computed in single precision."""
        shape = self.nodes[x].shape
        wide = x if self.size == 4 else self.like("to", x, item_bytes=4)
        mean = self.op("mean", (self.like("pow", wide),), (*shape[:-1], 1), [-1], True)
        y = self.op("mul", (wide, self.like("rsqrt", self.like("add", mean))), shape)
        y = y if self.size == 4 else self.like("to", y, item_bytes=self.size)
        return self.like("mul", self.parameter(f"{path}.weight", shape[-1]), y)

    def _projection(self, x: str, path: str, name: str, heads: int, size: int) -> str:
        """[batch, heads, length, size]"""
        weight = self.parameter(f"{path}.{name}_proj.weight", heads * size, self.hidden, split=0)
        bias = (
            (self.parameter(f"{path}.{name}_proj.bias", heads * size, split=0),)
            if self.spec.model_type == "qwen2"
            else ()
        )
        y = self.heads(self.linear(x, weight, *bias), heads, size)
        if self.spec.model_type == "qwen3" and name != "v":
            y = self._norm(y, f"{path}.{name}_norm")
        return self.across(y)

    def _rotated(self, x: str, size: int) -> str:
        cos, sin = (
            self.leaf("constant", f"constant_{at}", (1, 1, self.length, size), self.size)
            for at in range(2)
        )
        return self.op("rotary", (x, cos, sin), self.nodes[x].shape)

    def _attention(self, x: str, path: str, number: int) -> str:
        size, kv_heads = (
            self.spec.blocks[number].attention_width // self.num_heads,
            self.spec.num_kv_heads,
        )
        q = self._projection(x, path, "q", self.num_heads, size)
        k, v = (self._projection(x, path, name, kv_heads, size) for name in "kv")
        q, k = self._rotated(q, size), self._rotated(k, size)
        weight = self.parameter(
            f"{path}.o_proj.weight", self.hidden, self.num_heads * size, split=1
        )
        return self.linear(self.attention(q, k, v), weight)

    def _mlp(self, x: str, path: str, number: int) -> str:
        block = self.spec.blocks[number]
        attention = (
            2 * self.hidden * block.attention_width * (1 + self.spec.num_kv_heads / self.num_heads)
        )
        inner = round((block.matmul_parameters - attention) / (3 * self.hidden))
        gate, up = (
            self.parameter(f"{path}.{name}_proj.weight", inner, self.hidden, split=0)
            for name in ("gate", "up")
        )
        y = self.like("silu", self.linear(x, gate))
        y = self.like("mul", y, self.linear(x, up))
        return self.linear(
            y, self.parameter(f"{path}.down_proj.weight", self.hidden, inner, split=1)
        )


class _Gpt2(_Builder):
    def build(self) -> None:
        x = self.embedding("transformer.wte")
        positions = self.spec.embedding.parameters // self.hidden - self.spec.vocab_size
        table = self.parameter("transformer.wpe.weight", positions, self.hidden)
        place = self.leaf("constant", "constant_0", (1, self.length), 8)
        x = self.op(
            "add",
            (x, self.op("embedding", (table, place), (1, self.length, self.hidden))),
            (*self.tokens, self.hidden),
        )
        for number in range(len(self.spec.blocks)):
            path = f"transformer.h.{number}"
            x = self.like("add", self._attention(self._norm(x, f"{path}.ln_1"), f"{path}.attn"), x)
            x = self.like("add", x, self._mlp(self._norm(x, f"{path}.ln_2"), f"{path}.mlp", number))
        self.loss(self._norm(x, "transformer.ln_f"), "transformer.wte")

    def _norm(self, x: str, path: str) -> str:
        weight, bias = (
            self.parameter(f"{path}.{kind}", self.hidden) for kind in ("weight", "bias")
        )
        return self.op("layer_norm", (x, weight, bias), self.nodes[x].shape, [self.hidden])

    def _projection(self, x: str, path: str, features: int, is_row: bool = False) -> str:
        """The library's Conv1D, whose weight lies (in, out)."""
        width = self.nodes[x].shape[-1]
        rows = self.op("view", (x,), (self.batch * self.length, width))
        bias = self.parameter(f"{path}.bias", features, split=WHOLE if is_row else 0)
        weight = self.parameter(f"{path}.weight", width, features, split=0 if is_row else 1)
        y = self.op("addmm", (bias, rows, weight), (self.batch * self.length, features))
        return self.op("view", (y,), (*self.tokens, features))

    def _attention(self, x: str, path: str) -> str:
        packed = self._projection(x, f"{path}.c_attn", 3 * self.hidden)
        q, k, v = (
            self.op("split", (packed,), (*self.tokens, self.hidden), self.hidden, 2)
            for _ in range(3)
        )
        k, v, q = (
            self.across(self.heads(part, self.num_heads, self.hidden // self.num_heads))
            for part in (k, v, q)
        )
        return self._projection(self.attention(q, k, v), f"{path}.c_proj", self.hidden, is_row=True)

    def _mlp(self, x: str, path: str, number: int) -> str:
        """Append an MLP with GELU's tanh formula, operator by operator."""
        inner = round(
            (self.spec.blocks[number].matmul_parameters - 4 * self.hidden**2) / (2 * self.hidden)
        )
        x = self._projection(x, f"{path}.c_fc", inner)
        half = self.like("mul", x)
        y = self.like("add", x, self.like("mul", self.like("pow", x)))
        y = self.like("add", self.like("tanh", self.like("mul", y)))
        return self._projection(
            self.like("mul", half, y), f"{path}.c_proj", self.hidden, is_row=True
        )
