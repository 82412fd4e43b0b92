"""The search's tables from the cost model: one row for each way to use a node type at each microbatch size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from planner.cluster import NodeType
from planner.cost.model import CostModel, LayerCosts
from planner.errors import InfeasibleError
from planner.model_spec import ModelSpec
from planner.search.problem import Request
from planner.search.tables import Kind, Resource, Row, Tables

GIB = 2**30


def tables_of(request: Request, sizes: Sequence[int] = ()) -> Tables:
    """Tables of a request, of these microbatch sizes (none: of all that it allows). InfeasibleError names the tightest
    limit where no GPU can hold any part of the model."""
    cost = request.cost
    resources = _resources(request)
    kinds = tuple(_kinds(request, resources))
    if not kinds:
        raise InfeasibleError(_no_kind(request))
    rows = []
    for index, kind in enumerate(kinds):
        node_type = resources[kind.resource].node_type
        for size in sizes or microbatch_sizes(request):
            costs = cost.layer_costs(node_type, kind.tp_degree, size)
            if _block_bytes(costs) <= costs.limit_bytes:
                tied = _tied_bytes(cost, kind, node_type, size)
                rows.append(_row(costs, index, size, tied, cost.tied_sync_bytes(kind.tp_degree)))
    if not rows:
        raise InfeasibleError(_no_block(request, resources, kinds))
    return Tables(
        request.spec.name, request.global_batch_sequences, request.sequence_length, request.deepest,
        resources, kinds, tuple(rows), _boundary(cost, resources, kinds, rows), cost.parameters.transfers,
        stage_overhead_s=2 * cost.stage_overhead_s,
        crossing_s=_crossing(cost, resources, kinds, rows), least_boundary_s=_least_boundary(cost, resources, kinds, rows),
        least_ring_s=_least_ring(cost, resources, request.min_node_disjoint_holders > 1),
    )  # fmt: skip


def microbatch_sizes(request: Request) -> list[int]:
    """Divisors of the batch and powers of two, or the size asked for."""
    if request.microbatch_sequences is not None:
        return [request.microbatch_sequences]
    batch = request.global_batch_sequences
    top = min(request.max_microbatch_sequences, batch)
    return [size for size in range(1, top + 1) if batch % size == 0 or size & (size - 1) == 0]


def _resources(request: Request) -> tuple[Resource, ...]:
    by_type: dict[NodeType, list[str]] = {}
    for node in request.fleet.nodes:
        if node.node_type.num_gpus > 0:
            by_type.setdefault(node.node_type, []).append(node.name)
    if not by_type:
        raise InfeasibleError("the fleet has no GPU; at least one is needed")
    return tuple(Resource(node_type, tuple(names)) for node_type, names in by_type.items())


def _kinds(request: Request, resources: tuple[Resource, ...]) -> Iterator[Kind]:
    top = min(request.spec.max_tp_degree, request.max_tp_degree or request.spec.max_tp_degree)
    for index, resource in enumerate(resources):
        degree = 1
        while degree <= min(top, resource.node_type.num_gpus):
            if degree >= request.min_tp_degree:
                yield Kind(index, degree, len(resource.node_names) * (resource.node_type.num_gpus // degree))
            degree *= 2


def _no_kind(request: Request) -> str:
    most = max(node.node_type.num_gpus for node in request.fleet.nodes)
    return (
        f"min_tp_degree is {request.min_tp_degree}, but the largest node has {most} GPUs and"
        f" the model allows TP {request.spec.max_tp_degree}"
        f" (max_tp_degree {request.max_tp_degree}); lower min_tp_degree"
    )


def _row(costs: LayerCosts, kind: int, size: int, tied: float, tied_sync: float) -> Row:
    """The peaks of equal blocks become part of what every stage holds, the excess of embedding and head part of these, of which a
    stage with both needs the larger only. So do both borders of a stage: the embedding and the head take one off each."""
    common = float(costs.peak_bytes[1:-1].max())
    state = costs.state_bytes.copy()
    further = np.maximum(costs.peak_bytes[[0, -1]] - common, 0.0)
    state[[0, -1]] += further - costs.border_bytes
    return Row(
        kind=kind, microbatch=size, forward_s=costs.forward_s, backward_s=costs.backward_s, state_bytes=state,
        activation_bytes=costs.activation_bytes, sync_bytes=costs.sync_bytes,
        fixed_bytes=costs.fixed_bytes + common + 2 * costs.border_bytes, limit_bytes=costs.limit_bytes,
        tied_bytes=tied + float(further.min()), tied_sync_bytes=tied_sync,
        update_s_a_byte=float(costs.update_s.sum() / max(costs.sync_bytes.sum(), 1.0)),
    )  # fmt: skip


def _tied_bytes(cost: CostModel, kind: Kind, node_type: NodeType, size: int) -> float:
    """State bytes of the tied tensor, which a stage with embedding and head holds once."""
    if not cost.spec.tied_embeddings:
        return 0.0
    state = cost.layer_costs(node_type, kind.tp_degree, size).state_bytes[0]
    return float(state * cost.spec.tied_parameters / max(1, cost.spec.embedding.parameters))


def _block_bytes(costs: LayerCosts) -> float:
    """Of a worker with the smallest block alone."""
    block = (costs.state_bytes + costs.activation_bytes)[1:-1].min()
    return float(block + costs.peak_bytes[1:-1].max()) + costs.fixed_bytes


def _no_block(request: Request, resources: tuple[Resource, ...], kinds: tuple[Kind, ...]) -> str:
    size = microbatch_sizes(request)[0]
    found = []
    for kind in kinds:
        node_type = resources[kind.resource].node_type
        costs = request.cost.layer_costs(node_type, kind.tp_degree, size)
        need = _block_bytes(costs)
        found.append((need - costs.limit_bytes, need, node_type.name, kind.tp_degree, costs.limit_bytes))
    over, need, name, tp, limit = min(found)
    return (
        f"one layer with microbatch {size} needs {need / GIB:.2f} GiB a GPU on node type '{name}' at TP {tp},"
        f" which has {limit / GIB:.2f} GiB:"
        f" {over / GIB:.2f} GiB too little. Use larger GPUs, a higher TP degree, a shorter sequence or recomputation"
    )


_Pair = Callable[[int, int], float]


def _boundary(
    cost: CostModel, resources: tuple[Resource, ...], kinds: tuple[Kind, ...], rows: list[Row], near: bool | None = None
) -> _Pair:
    """Both directions of a boundary. near: whether both groups lie on one node; None: where two groups of one node type fit into one."""

    def seconds(one: int, other: int) -> float:
        a, b = kinds[rows[one].kind], kinds[rows[other].kind]
        sender, receiver = resources[a.resource].node_type, resources[b.resource].node_type
        fits = a.resource == b.resource and a.tp_degree + b.tp_degree <= sender.num_gpus
        if (near and not fits) or (
            near is False and a.resource == b.resource and len(resources[a.resource].node_names) < 2
        ):
            return np.inf
        same, size = fits if near is None else near, rows[one].microbatch
        there = cost.boundary_s(sender, receiver, size, same_node=same, tp_degree=b.tp_degree)
        return there + cost.boundary_s(receiver, sender, size, same_node=same, tp_degree=a.tp_degree)

    return seconds


def _least_boundary(
    cost: CostModel, resources: tuple[Resource, ...], kinds: tuple[Kind, ...], rows: list[Row]
) -> _Pair:
    near, apart = (_boundary(cost, resources, kinds, rows, near) for near in (True, False))
    return lambda one, other: min(near(one, other), apart(one, other))


def _crossing(
    cost: CostModel, resources: tuple[Resource, ...], kinds: tuple[Kind, ...], rows: list[Row]
) -> Callable[[int], float]:
    """Both directions of a boundary between equal groups on two nodes; a node of one node type has none."""

    def seconds(row: int) -> float:
        kind = kinds[rows[row].kind]
        resource = resources[kind.resource]
        node, same = resource.node_type, len(resource.node_names) == 1
        return 2 * cost.boundary_s(node, node, rows[row].microbatch, same_node=same, tp_degree=kind.tp_degree)

    return seconds


def ring_rate(
    cost: CostModel, members: Sequence[tuple[str, NodeType]], flows: float | Mapping[str, float]
) -> tuple[float, float]:
    """(latency, seconds a byte) of one all-reduce over workers (node name, node type); `flows` as for `CostModel.sync_s`."""
    low, high = (cost.sync_s(members, size, flows=flows) for size in (1e9, 2e9))
    return 2 * low - high, (high - low) / 1e9


def _least_ring(
    cost: CostModel, resources: tuple[Resource, ...], apart: bool
) -> Callable[[int, float, int, int], float]:
    """Between nodes the NIC carries all that a worker's group holds; unless holders must be `apart`, some of it may be summed inside the
    node meanwhile, where each other member takes a GPU that the group leaves. No latency: rings of one worker may wait for it together."""
    overhead = cost.parameters.step_overhead_s

    @cache
    def update_s(resource: int, degree: int) -> float:
        return _least_update(cost, resources[resource].node_type, degree)

    held_once = cache(partial(_held_once, cost.spec))

    def seconds(resource: int, num_bytes: float, degree: int, pipelines: int) -> float:
        update, kind = num_bytes * update_s(resource, degree) + overhead, resources[resource].node_type
        if pipelines < 2 or not num_bytes:
            return update
        summed = cost.links.ring_link_s(kind, False, pipelines, num_bytes * held_once(degree))
        if not apart and pipelines <= 1 + kind.num_gpus - degree:  # of which a node that has the group may hold a layer
            summed = 1.0 / (1.0 / summed + 1.0 / cost.links.ring_link_s(kind, True, pipelines, num_bytes))
        return summed + update

    return seconds


def _held_once(spec: ModelSpec, degree: int) -> float:
    """Bytes of what a group holds over its workers' own, of the layer that has most of it on every worker."""
    tied = spec.tied_parameters
    layers = (spec.embedding, *spec.blocks, replace(spec.head, parameters=spec.head.parameters + tied))
    return min(layer.parameters / max(layer.parameters_per_worker(degree), 1.0) for layer in layers if layer.parameters)


def _least_update(cost: CostModel, kind: NodeType, degree: int) -> float:
    """Seconds of update a gradient byte, of the layer that has least of them."""
    layers = cost.layer_costs(kind, degree, 1)
    held = layers.sync_bytes > 0
    return float((layers.update_s[held] / layers.sync_bytes[held]).min()) if held.any() else 0.0

