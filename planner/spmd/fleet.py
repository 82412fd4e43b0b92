"""SPMD programs on a fleet: devices and collectives by the cost model's own layer times and links, and what a plan of one program takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cluster import NodeType
from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.spmd.costs import CostTable, Device, Floats, SpmdCluster, Wire, Work, ring_collectives
from planner.spmd.decoders import FAMILIES, Decoder
from planner.spmd.graph import Graph
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import explain

if TYPE_CHECKING:
    from planner.cost.model import CostModel

STATE_BYTES = {"fp32": 16.0, "bf16": 18.0, "fp16": 18.0}
"""Of a parameter: fp32 weight, gradient and AdamW's two moments, and the copy that computes."""


def decoder_of(cost: "CostModel", microbatch: int) -> Decoder:
    """The model's graph; InfeasibleError where none is known."""
    decoder = cost.decoder(microbatch)
    if decoder is None:
        raise InfeasibleError(
            f"no graph is known of model '{cost.spec.name}' (type {cost.spec.model_type}), so it has no SPMD program; known types:"
            f" {', '.join(sorted(FAMILIES))}. Use a strategy with pipelines (autohet, metis, fasop)"
        )
    return decoder


def table_of(cost: "CostModel", graph: Graph, workers: Sequence[str], microbatch: int, passes: int) -> CostTable:
    """What instructions cost on these workers, in this order."""
    kinds = [cost.fleet.node_of(worker).node_type for worker in workers]
    even = max(1, microbatch // len(workers))
    known = {kind: _device(cost, kind, graph, microbatch, even) for kind in dict.fromkeys(kinds)}
    devices = tuple(Device(worker, *known[kind]) for worker, kind in zip(workers, kinds, strict=True))
    members = [(cost.fleet.node_of(worker).name, kind) for worker, kind in zip(workers, kinds, strict=True)]
    n = len(workers)
    size = cost.activation_message_bytes(microbatch)
    wait_s = cost.sync_s(members, 1.0)
    link = np.inf if n == 1 else 2 * (n - 1) / n * size / (cost.sync_s(members, size) - wait_s)
    hops = 2 * max(1.0, float(np.ceil(np.log2(n))))
    cluster = SpmdCluster(devices, ring_collectives(n, float(link), wait_s / hops))
    return CostTable(graph, cluster, STATE_BYTES[cost.precision], passes)


def _device(cost: "CostModel", kind: NodeType, graph: Graph, microbatch: int, even: int) -> tuple[float, float, float, float]:
    """FLOP/s, memory, (infinite) memory bandwidth and seconds of a launch: the line through the model's times at one sequence and at an
    even share."""
    sizes = (1, max(2, even))
    times = [cost.layer_costs(kind, 1, size) for size in sizes]
    one, more = (float(t.forward_s.sum() + t.backward_s.sum()) for t in times)
    slope = (more - one) / (sizes[1] - sizes[0])
    if slope <= 0:
        slope = more / sizes[1]
    flops = sum(node.flops + node.backward_flops for node in graph.nodes) / microbatch
    launches = sum(node.kind == "op" and not node.is_alias for node in graph.nodes)
    memory = times[0].limit_bytes - times[0].fixed_bytes
    return flops / slope, memory, float("inf"), max(0.0, one - slope) / launches


def predict_program(cost: "CostModel", plan: Plan) -> Prediction:
    """A plan of one program, costed. ConfigError where it is none of this model."""
    (pipeline,) = plan.pipelines
    workers, size = plan.workers, pipeline.microbatch_sequences
    assert plan.spmd is not None
    placed = plan.spmd.placed(decoder_of(cost, size).graph)
    table = table_of(cost, placed.graph, workers, size, pipeline.num_microbatches)
    compute_s, wire_s, sync_s = _parts(table, placed)
    update_s = _update_s(cost, table, placed, workers)
    step = compute_s + wire_s + sync_s + update_s + cost.parameters.step_overhead_s
    kinds = {worker: cost.fleet.node_of(worker).node_type for worker in workers}
    used = table.program_bytes(placed.program, placed.shares)
    tokens = pipeline.num_sequences * cost.sequence_length
    usd = cost.usd_per_hour(plan)
    estimated = [note for kind in dict.fromkeys(kinds.values()) for note in cost.layer_costs(kind, 1, 1).estimated]
    return Prediction(
        step_time_s=step,
        sequences_per_s=pipeline.num_sequences / step,
        tokens_per_s=tokens / step,
        usd_per_hour=usd,
        usd_per_million_tokens=None if usd is None else usd / 3600 * step / tokens * 1e6,
        breakdown_s={
            "pipeline": compute_s, "collectives": wire_s, "grad_sync": sync_s, "optimizer": update_s,
            "overhead": cost.parameters.step_overhead_s,
        },
        memory_bytes_by_worker={w: int(b + cost.fixed_bytes(kinds[w])) for w, b in zip(workers, used, strict=True)},
        memory_limit_bytes_by_worker={w: int(cost.limit_bytes(kind)) for w, kind in kinds.items()},
        estimated=tuple(dict.fromkeys(estimated)),
        plan=plan,
        tied_embeddings=cost.spec.tied_embeddings,
    )  # fmt: skip


def explain_program(cost: "CostModel", plan: Plan, *, by_tensor: bool) -> dict[str, Any]:
    """`notes`: what has no rule. `program`, if asked for: one entry a tensor, its shape, layouts and the instructions that yield them."""
    assert plan.spmd is not None
    graph = decoder_of(cost, plan.pipelines[0].microbatch_sequences).graph
    found: dict[str, Any] = {"notes": list(graph.notes)}
    return found | ({"program": explain(graph, plan.spmd.placed(graph).program)} if by_tensor else {})


def _parts(table: CostTable, placed: PlacedProgram) -> tuple[float, float, float]:
    """Seconds of operators, of the program's collectives, and of the sum of replicated parameters' gradients."""
    shares, loads = placed.shares, [i for i in placed.program.instructions if i.op == "load"]
    sync = [term for load in loads for term in table.terms(load)] + list(table.final_terms(placed.program))
    counted = table.counted(placed.program)
    wire_s = sum(count * table.seconds((term,), shares) for term, count in counted.items() if isinstance(term, Wire))
    compute_s = sum(count * table.seconds((term,), shares) for term, count in counted.items() if isinstance(term, Work))
    sync_s = table.seconds(sync, shares)
    return compute_s, max(0.0, wire_s - sync_s), sync_s


def _update_s(cost: "CostModel", table: CostTable, placed: PlacedProgram, workers: Sequence[str]) -> float:
    """AdamW on what each device holds, at its node type's rate."""
    held, whole = np.zeros(len(workers)), 0.0
    for name, layout in placed.program.storage.items():
        node = placed.graph.by_name[name]
        if node.kind == "parameter":
            share: Floats | float = 1.0
            if layout.kind == "sharded":
                share = placed.shares.of(placed.graph.axes[name, layout.dim].name)
            whole += node.num_bytes
            held += node.num_bytes * share
    rates = [float(cost.layer_costs(cost.fleet.node_of(worker).node_type, 1, 1).update_s.sum()) for worker in workers]
    return float((held / whole * np.array(rates)).max())


def work_by_worker(cost: "CostModel", plan: Plan) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds of one microbatch's operators on each worker, as if no node were slowed down."""
    (pipeline,) = plan.pipelines
    assert plan.spmd is not None
    placed = plan.spmd.placed(decoder_of(cost, pipeline.microbatch_sequences).graph)
    table = table_of(cost, placed.graph, plan.workers, pipeline.microbatch_sequences, 1)
    total = np.zeros(len(plan.workers))
    for term, count in table.counted(placed.program).items():
        if isinstance(term, Work):
            share: Floats | float = 1.0 if term.axis is None else placed.shares.of(term.axis)
            total += count * table.work_s(term, share)
    slowdown = np.array([cost.fleet.node_of(worker).node_type.slowdown for worker in plan.workers])
    forward = sum(node.flops for node in placed.graph.nodes)
    part = forward / sum(node.flops + node.backward_flops for node in placed.graph.nodes)
    return {w: (float(s * part), float(s * (1 - part))) for w, s in zip(plan.workers, total / slowdown, strict=True)}
