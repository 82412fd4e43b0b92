"""Small planning problems built by hand: fleets, a model and a profile whose numbers are easy to
reason about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.strategies import Request

GIB = 2**30
SECONDS_PER_BLOCK = {"A100": 1e-3, "A10G": 2e-3, "T4": 4e-3}
MEMORY_GIB = {"A100": 24.0, "A10G": 24.0, "T4": 16.0}


def model(num_layers: int = 8, width: int = 256, vocab: int = 32000) -> ModelSpec:
    parameters = 12 * width * width
    block = LayerSpec(parameters, 2 * width, parameters, width, 16 * width, 6 * width)
    head = LayerSpec(vocab * width + width, width, vocab * width, 0, 0, 2 * width)
    return ModelSpec(
        "tiny",
        "llama",
        width,
        vocab,
        8,
        8,
        4 * width,
        False,
        8,
        LayerSpec(vocab * width, 0, 0, 0, 0, width),
        (block,) * num_layers,
        head,
    )


def profile(
    seconds: Mapping[str, float] = SECONDS_PER_BLOCK,
    degrees: Sequence[int] = (1, 2, 4),
    sequence_length: int = 128,
) -> ProfileTable:
    """A block takes 0.2 + microbatch units, the embedding a fifth and the head half as much again;
    TP divides by tp^0.9.
    """
    rows = []
    for gpu, unit in seconds.items():
        for tp in degrees:
            for size in (1, 2, 4, 8):
                for layer, weight in (("embedding", 0.2), ("block", 1.0), ("head", 1.5)):
                    forward = (0.2 + weight * size / tp**0.9) * unit
                    rows.append(
                        Measurement(
                            "tiny",
                            gpu,
                            "fp32",
                            tp,
                            sequence_length,
                            size,
                            layer,
                            forward,
                            2 * forward,
                            forward / 10,
                        )
                    )
    return ProfileTable(rows)


def fleet(
    *types: tuple[str, int, int], memory_gib: Mapping[str, float] = MEMORY_GIB, usd: float = 1.0
) -> Fleet:
    """A fleet of (GPU type, nodes, GPUs a node); nodes are named after the type."""
    nodes: list[Node] = []
    for gpu, count, gpus in types:
        node_type = NodeType(
            gpu.lower(),
            gpu,
            gpus,
            int(memory_gib[gpu] * GIB),
            1e11,
            1.25e9,
            usd * gpus,
            False,
            "",
            count,
        )
        nodes += [Node(f"{gpu.lower()}-{i}", node_type) for i in range(count)]
    return Fleet(0, tuple(nodes))


def with_nics(of: Fleet, bytes_per_s: Mapping[str, float]) -> Fleet:
    """The fleet with other networks between its nodes, by GPU type."""
    kinds = {
        n.node_type: replace(n.node_type, inter_node_bytes_per_s=bytes_per_s[n.node_type.gpu_type])
        for n in of.nodes
    }
    return Fleet(
        of.generation, tuple(replace(node, node_type=kinds[node.node_type]) for node in of.nodes)
    )


def inside(of: Fleet, bytes_per_s: float) -> Fleet:
    """The fleet with such links between the GPUs of a node."""
    nodes = (
        replace(n, node_type=replace(n.node_type, intra_node_bytes_per_s=bytes_per_s))
        for n in of.nodes
    )
    return Fleet(of.generation, tuple(nodes))


def with_gpus(of: Fleet, name: str, num_gpus: int) -> Fleet:
    """The fleet where one node has so many GPUs left."""
    left = (
        replace(n, node_type=replace(n.node_type, num_gpus=num_gpus)) if n.name == name else n
        for n in of.nodes
    )
    return Fleet(of.generation, tuple(left))


def slowed(of: Fleet, name: str, slowdown: float) -> Fleet:
    """The fleet with one node as much slower than others of its type."""
    slow = {
        n.name: replace(n, node_type=replace(n.node_type, slowdown=slowdown))
        for n in of.nodes
        if n.name == name
    }
    return Fleet(of.generation, tuple(slow.get(node.name, node) for node in of.nodes))


def request(
    of: Fleet, batch: int, spec: ModelSpec | None = None, framework: str = OURS, **wishes: object
) -> Request:
    spec = spec or model()
    parameters = framework_parameters(framework, CostParameters())
    cost = CostModel(of, Workload(spec, 128, "fp32"), Measurements(profile()), parameters)
    return Request(of, spec, cost, batch, 128, **wishes)  # type: ignore[arg-type]


DEMO = (("A100", 2, 1), ("A10G", 3, 1), ("T4", 2, 1))
