"""Synthetic models, layer times and fleets of the planner's benchmarks.

Rates are stated, and the same for every strategy.
"""

import math
import os
import time
from dataclasses import replace
from functools import cache, partial
from typing import Any

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.model_spec import Experts, LayerSpec, ModelSpec
from planner.spmd.graph import Decoder
from planner.strategies import Request

GIB = 2**30
# GPU type -> (FLOP/s reached, memory GiB, intra-node bytes/s a GPU, NIC bytes/s a node, $/h a node
# of 8): data sheets, EC2 list prices
TYPES = {
    "H100-80": (400e12, 80, 4.5e11, 4.0e11, 98.3),
    "A100-80": (170e12, 80, 3.0e11, 5.0e10, 41.0),
    "A100-40": (160e12, 40, 3.0e11, 5.0e10, 32.8),
    "L40S": (120e12, 48, 3.2e10, 5.0e10, 30.1),
    "T4": (30e12, 16, 1.6e10, 6.2e9, 7.8),
}


def model_spec(
    name: str, layers: int, width: int, mlp: int, vocab: int, kv_width: int
) -> ModelSpec:
    """Return a Llama-like model with fused attention."""
    parameters = 2 * width * width + 2 * width * kv_width + 3 * width * mlp
    block = LayerSpec(
        parameters + 2 * width, 2 * width, parameters, width, 8 * width + 3 * mlp, 4 * width
    )
    head = LayerSpec(vocab * width + width, width, vocab * width, 0, 0, 2 * width)
    embedding = LayerSpec(vocab * width, 0, 0, 0, 0, width)
    return ModelSpec(
        name,
        "llama",
        width,
        vocab,
        width // 128,
        8,
        mlp,
        False,
        8,
        embedding,
        (block,) * layers,
        head,
    )


def gshard_spec(name: str, layers: int, width: int, experts: int) -> ModelSpec:
    """Return a GShard mixture of experts as Alpa's benchmarks build it.

    Every second block routes each token to two experts; all inner widths are 8 * `width`; embedding
    and head are one matrix of 32,000 rows (alpa-projects/alpa, benchmark/alpa:
    suite_manual_moe.py for the sizes, util.py's compute_moe_parameter_count for the shapes). Biases
    are left out.
    """
    vocab = 32000
    heads = 16
    attention = 4 * width * width
    expert = 16 * width * width
    router = width * experts
    norms = 2 * width
    kept = 2 * 8 * width
    dense = LayerSpec(
        attention + expert + norms, norms, attention + expert, width, 4 * width + kept, 4 * width
    )
    routing = replace(
        dense,
        parameters=attention + experts * expert + router + norms,
        replicated_parameters=router + norms,
        matmul_parameters=attention + 2 * expert + router,
        split_activation_values=4 * width + 2 * kept,
        experts=Experts(experts, 2, experts * expert),
    )
    return ModelSpec(
        name,
        "gshard",
        width,
        vocab,
        heads,
        heads,
        8 * width,
        True,
        min(8, experts),
        LayerSpec(vocab * width, 0, 0, 0, 0, width),
        (routing, dense) * (layers // 2),
        LayerSpec(width, width, vocab * width, 0, 0, 2 * width),
    )


@cache
def llama_decoder(
    spec: ModelSpec, sequence_length: int, precision: str, microbatch: int
) -> Decoder | None:
    """Return the graph of the Llama with a spec's sizes; None: no Llama has its parameters."""
    if spec.model_type != "llama":
        return None
    # These import torch and transformers: three seconds.
    from autohet.runtime.job import ModelSection
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.family import COMPUTE_DTYPES
    from autohet.runtime.spmd.language_model import capture_decoder

    config = {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.blocks[0].attention_width // spec.num_heads,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    loaded = load_config(ModelSection(config=config))
    found = capture_decoder(loaded, microbatch, sequence_length, COMPUTE_DTYPES[precision])
    sizes = (math.prod(found.graph.by_name[name].shape) for name in found.split_dims)
    return found if sum(sizes) == spec.parameters else None


def tie_embeddings(spec: ModelSpec) -> ModelSpec:
    """Return the same model with the embedding's matrix as its head's."""
    return replace(spec, tied_embeddings=True, head=replace(spec.head, parameters=spec.hidden_size))


def profile_of(spec: ModelSpec, length: int, gpus: tuple[str, ...]) -> ProfileTable:
    """Return a profile of FLOPs over the rate, with a row for each kind of block.

    There is 6, 11 and 19% more work per GPU at TP 2, 4 and 8, and a tenth of a millisecond of
    launch.
    """
    extra = {1: 1.0, 2: 1.06, 4: 1.11, 8: 1.19}
    parts: list[tuple[str, LayerSpec | None]] = [("embedding", None), ("head", spec.head)]
    for kind in dict.fromkeys(spec.blocks):
        parts.append((f"block:{spec.blocks.index(kind)}", kind))
    rows = []
    for gpu in gpus:
        for tp, factor in extra.items():
            for size in (1, 2, 4, 8):
                for layer, part in parts:
                    flops = (part.forward_flops(length) if part else 1e9) * size
                    forward = flops / TYPES[gpu][0] / tp * factor + 1e-4
                    rows.append(
                        Measurement(
                            spec.name, gpu, "bf16", tp, length, size, layer, forward, 2 * forward
                        )
                    )
    return ProfileTable(rows)


def synthetic_fleet(counts: dict[str, int], gpus_per_node: int = 8) -> Fleet:
    """Return a fleet with `counts` GPUs of each type."""
    nodes: list[Node] = []
    for gpu, count in counts.items():
        _, memory, intra, inter, usd = TYPES[gpu]
        number = count // gpus_per_node
        price = usd * gpus_per_node / 8
        kind = NodeType(
            gpu.lower(), gpu, gpus_per_node, memory * GIB, intra, inter, price, False, "", number
        )
        nodes += [Node(f"{gpu.lower()}-{i}", kind) for i in range(number)]
    return Fleet(0, tuple(nodes))


def request_of(spec: ModelSpec, fleet: Fleet, batch: int, length: int, **wishes: Any) -> Request:
    gpus = fleet.gpu_types
    cost = CostModel(
        fleet,
        Workload(
            spec,
            length,
            "bf16",
            recompute="full",
            decoder=partial(llama_decoder, spec, length, "bf16"),
        ),
        Measurements(profile_of(spec, length, gpus)),
        framework_parameters(OURS, CostParameters()),
    )
    return Request(
        fleet,
        spec,
        cost,
        batch,
        length,
        clock=time.perf_counter,
        max_microbatch_sequences=4,
        **wishes,
    )


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


LLAMA_70B = model_spec("llama-70b", 80, 8192, 28672, 128256, 1024)
GSHARD_10B = gshard_spec("gshard-10b", 16, 1536, 32)
GPT_26 = model_spec("gpt-26", 26, 2048, 8192, 51200, 2048)
