"""SPMD programs on a fleet, with the cost model's layer times and links.

It makes devices and collectives of them, and predicts the cost of a plan of one program.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cluster import NodeType
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.spmd.costs import CostTable, Device, SpmdCluster, Term, Wire, Work, ring_collectives
from planner.spmd.decoder import Decoder
from planner.spmd.graph import Graph
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Program, explain_tensors

if TYPE_CHECKING:
    from planner.cost.model import CostModel

STATE_BYTES = {"fp32": 16.0, "bf16": 18.0, "fp16": 18.0}
"""Bytes of a parameter: fp32 weight, gradient and AdamW's two moments, and the 16-bit copy."""


def decoder_of(cost: "CostModel", microbatch: int) -> Decoder:
    """Return the model's graph.

    Raises:
        InfeasibleError: none is known, or the model can have none.
    """
    decoder = cost.decoder(microbatch)
    if decoder is None:
        raise InfeasibleError(
            f"no graph is known of model '{cost.spec.name}' (type {cost.spec.model_type}), so it"
            " has no SPMD program. Use a strategy with pipelines (autohet, metis, fasop)"
        )
    return decoder


def table_of(
    cost: "CostModel", graph: Graph, workers: Sequence[str], microbatch: int, passes: int
) -> CostTable:
    """Return the cost of instructions on these workers, in this order."""
    kinds = [cost.fleet.node_of(worker).node_type for worker in workers]
    even = max(1, microbatch // len(workers))
    known = {kind: _device(cost, kind, graph, microbatch, even) for kind in dict.fromkeys(kinds)}
    devices = tuple(
        Device(worker, *known[kind]) for worker, kind in zip(workers, kinds, strict=True)
    )
    members = [
        (cost.fleet.node_of(worker).name, kind) for worker, kind in zip(workers, kinds, strict=True)
    ]
    n = len(workers)
    size = cost.stage_formats.inside_bytes(microbatch, cost.precision)
    wait_s = cost.links.all_reduce_s(members, 1.0)
    link = (
        np.inf
        if n == 1
        else 2 * (n - 1) / n * size / (cost.links.all_reduce_s(members, size) - wait_s)
    )
    hops = 2 * max(1.0, float(np.ceil(np.log2(n))))
    cluster = SpmdCluster(devices, ring_collectives(n, float(link), wait_s / hops))
    return CostTable(graph, cluster, STATE_BYTES[cost.precision], passes)


def _device(
    cost: "CostModel", kind: NodeType, graph: Graph, microbatch: int, even: int
) -> tuple[float, float, float, float]:
    """FLOP/s, memory, (infinite) memory bandwidth and seconds of a launch: the line through the
    model's times at one sequence and at an even share.
    """
    sizes = (1, max(2, even))
    times = [cost.layers.costs(kind, 1, size) for size in sizes]
    one, more = (float(t.forward_s.sum() + t.backward_s.sum()) for t in times)
    slope = (more - one) / (sizes[1] - sizes[0])
    if slope <= 0:
        slope = more / sizes[1]
    flops = sum(node.flops + node.backward_flops for node in graph.nodes) / microbatch
    launches = sum(node.kind == "op" and not node.is_alias for node in graph.nodes)
    memory = times[0].limit_bytes - times[0].fixed_bytes
    return flops / slope, memory, float("inf"), max(0.0, one - slope) / launches


def _placed(cost: "CostModel", plan: Plan) -> tuple[CostTable, PlacedProgram]:
    """A plan's program over the model's graph, and what its instructions cost.

    ConfigError where it is none of this model.
    """
    (pipeline,) = plan.pipelines
    assert plan.spmd is not None
    placed = plan.spmd.placed(decoder_of(cost, pipeline.microbatch_sequences).graph)
    return (
        table_of(
            cost,
            placed.graph,
            plan.workers,
            pipeline.microbatch_sequences,
            pipeline.num_microbatches,
        ),
        placed,
    )


def breakdown_of_program(
    cost: "CostModel", plan: Plan
) -> tuple[dict[str, float], dict[str, int], tuple[str, ...]]:
    """Seconds of a step by what they are spent on, one after the other; bytes by worker; what is
    estimated. ConfigError where the plan is none of this model.
    """
    table, placed = _placed(cost, plan)
    shares = placed.shares
    loads = [i for i in placed.program.instructions if i.op == "load"]
    sync_s = table.seconds(
        (
            *(term for load in loads for term in table.terms(load)),
            *table.final_terms(placed.program),
        ),
        shares,
    )
    seconds: dict[type[Term], float] = {Work: 0.0, Wire: 0.0}
    for term, count in table.counted(placed.program).items():
        seconds[type(term)] += count * table.seconds((term,), shares)
    kinds = [cost.fleet.node_of(worker).node_type for worker in plan.workers]
    state = Program(
        tuple(load for load in loads if placed.graph.by_name[load.tensor].kind == "parameter")
    )
    layers = [cost.layers.costs(kind, 1, 1) for kind in kinds]
    whole_s = np.array([each.update_s.sum() for each in layers])
    held = table.program_bytes(state, shares) / sum(
        table.bytes_of(load)[1] for load in state.instructions
    )
    used = table.program_bytes(placed.program, shares)
    breakdown = {
        "pipeline": seconds[Work],
        "collectives": max(0.0, seconds[Wire] - sync_s),
        "grad_sync": sync_s,
        "optimizer": float((held * whole_s).max()),
        "overhead": cost.parameters.step_overhead_s,
    }
    by_worker = {
        w: int(b + cost.worker_memory.fixed_bytes(kind))
        for w, b, kind in zip(plan.workers, used, kinds, strict=True)
    }
    return (
        breakdown,
        by_worker,
        tuple(dict.fromkeys(note for each in layers for note in each.estimated)),
    )


def explain_program(cost: "CostModel", plan: Plan, *, by_tensor: bool) -> dict[str, Any]:
    """`notes`: what has no rule.

    `program`, if asked for: one entry a tensor, its shape, layouts and the instructions that yield
    them.
    """
    placed = _placed(cost, plan)[1]
    found: dict[str, Any] = {"notes": list(placed.graph.notes)}
    return found | ({"program": explain_tensors(placed.graph, placed.program)} if by_tensor else {})


def work_by_worker(cost: "CostModel", plan: Plan) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds of one microbatch's operators on each worker, as if no node were
    slowed down.
    """
    table, placed = _placed(cost, plan)
    counted = table.counted(placed.program).items()
    works = [(term, count / table.passes) for term, count in counted if isinstance(term, Work)]
    total = sum(
        (count * table.work_s(term, placed.shares) for term, count in works),
        np.zeros(len(plan.workers)),
    )
    slowdown = np.array([cost.fleet.node_of(worker).node_type.slowdown for worker in plan.workers])
    forward = sum(node.flops for node in placed.graph.nodes)
    backward = sum(node.backward_flops for node in placed.graph.nodes)
    part = forward / (forward + backward)
    return {
        w: (float(s * part), float(s * (1 - part)))
        for w, s in zip(plan.workers, total / slowdown, strict=True)
    }
