"""Build the search's tables from the cost model.

They have one row for each way to use a node type at each microbatch size.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.arrays import Floats
from planner.cost.layers.layer_costs import LayerCosts
from planner.cost.model import CostModel
from planner.errors import InfeasibleError
from planner.inputs.cluster import GIB
from planner.inputs.fleet import NodeType
from planner.search.problem.request import Request
from planner.search.problem.stage_sums import Row
from planner.search.problem.tables import Kind, Resource, Tables
from planner.search.uneven_groups import group_costs


def tables_of(request: Request, sizes: Sequence[int] = ()) -> Tables:
    """Return the tables of a request.

    sizes: microbatch sizes (empty: all that the request allows). InfeasibleError names the tightest
    limit if no GPU can hold any part of the model.
    """
    cost = request.cost
    resources = _resources(request)
    kinds = (*_even_kinds(request, resources), *_uneven_kinds(request, resources))

    rows = []
    for index, kind in enumerate(kinds):
        node_type = resources[kind.resource].node_type
        for size in sizes or microbatch_sizes(request):
            costs = _costs(cost, kind, node_type, size)
            holds_a_block = _block_bytes(costs) <= costs.limit_bytes
            if holds_a_block:
                rows.append(_row(cost, costs, index, size, kind.tp_degree))
    if not rows:
        raise InfeasibleError(_no_block(request, resources, kinds))

    near_s = _boundaries(cost, resources, kinds, rows, near=True)
    apart_s = _boundaries(cost, resources, kinds, rows, near=False)
    return Tables(
        request.spec.name,
        request.global_batch_sequences,
        request.sequence_length,
        request.deepest,
        resources,
        kinds,
        tuple(rows),
        near_s,
        apart_s,
        cost.parameters.transfers,
        2 * cost.parameters.stage_overhead_s,
    )


def microbatch_sizes(request: Request) -> list[int]:
    """Return the divisors of the batch and powers of two, or the size asked for."""
    if request.microbatch_sequences is not None:
        return [request.microbatch_sequences]
    batch = request.global_batch_sequences
    top = min(request.max_microbatch_sequences, batch)

    sizes = []
    for size in range(1, top + 1):
        divides = batch % size == 0
        is_power_of_two = size & (size - 1) == 0
        if divides or is_power_of_two:
            sizes.append(size)
    return sizes


def _resources(request: Request) -> tuple[Resource, ...]:
    by_type: dict[NodeType, list[str]] = {}
    for node in request.fleet.nodes:
        if node.node_type.num_gpus > 0:
            by_type.setdefault(node.node_type, []).append(node.name)
    if not by_type:
        raise InfeasibleError("the fleet has no GPU; at least one is needed")
    return tuple(Resource(node_type, tuple(names)) for node_type, names in by_type.items())


def _even_kinds(request: Request, resources: tuple[Resource, ...]) -> Iterator[Kind]:
    """Yield the kinds of equal shares: each power of two of each node's GPUs."""
    for index, resource in enumerate(resources):
        node_gpus = resource.node_type.num_gpus
        degree = 1
        while degree <= min(request.highest_tp_degree, node_gpus):
            groups_a_node = node_gpus // degree
            yield Kind(index, degree, resource.num_nodes * groups_a_node)
            degree *= 2


def _uneven_kinds(request: Request, resources: tuple[Resource, ...]) -> Iterator[Kind]:
    """Yield the kinds of the request's uneven groups."""
    node_types = [resource.node_type for resource in resources]
    for group in request.uneven:
        index = node_types.index(group.kinds[0])
        size = len(group.kinds)
        groups_a_node = node_types[index].num_gpus // size

        # no drafts are made of a group over several nodes
        nodes = resources[index].num_nodes if len(group.nodes) == 1 else 0
        yield Kind(index, size, nodes * groups_a_node, group)


def _costs(cost: CostModel, kind: Kind, node_type: NodeType, size: int) -> LayerCosts:
    if kind.group is not None:
        return group_costs(cost, kind.group, size)
    return cost.layers.costs(node_type, kind.tp_degree, size)


def _row(cost: CostModel, costs: LayerCosts, kind: int, size: int, tp_degree: int) -> Row:
    """Return a table row with peaks and borders folded into its bytes.

    The peak of equal blocks becomes part of what every stage holds. The excess of embedding and
    head over it becomes part of their state; a stage with both needs only the larger. Both borders
    of a stage are part of what it holds; the embedding and the head take one off each.
    """
    common = float(costs.peak_bytes[1:-1].max())
    ends = [0, -1]  # embedding and head
    further = np.maximum(costs.peak_bytes[ends] - common, 0.0)
    state = costs.state_bytes.copy()
    state[ends] += further - costs.border_bytes

    # a stage with embedding and head holds the tied tensor once
    tied = float(costs.state_bytes[0] * cost.spec.tied_share())
    update_s = costs.update_s.sum()
    sync_bytes = max(costs.sync_bytes.sum(), 1.0)
    return Row(
        kind=kind,
        microbatch=size,
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        state_bytes=state,
        activation_bytes=costs.activation_bytes,
        sync_bytes=costs.sync_bytes,
        fixed_bytes=costs.fixed_bytes + common + 2 * costs.border_bytes,
        limit_bytes=costs.limit_bytes,
        tied_bytes=tied + float(further.min()),
        tied_sync_bytes=cost.layers.tied_sync_bytes(tp_degree),
        update_s_a_byte=float(update_s / sync_bytes),
    )


def _block_bytes(costs: LayerCosts) -> float:
    """Return bytes of a worker that holds the smallest block alone."""
    held = costs.state_bytes + costs.activation_bytes
    smallest = held[1:-1].min()
    peak = costs.peak_bytes[1:-1].max()
    return float(smallest + peak) + costs.fixed_bytes


def _no_block(request: Request, resources: tuple[Resource, ...], kinds: tuple[Kind, ...]) -> str:
    size = microbatch_sizes(request)[0]
    found = []
    for kind in kinds:
        node_type = resources[kind.resource].node_type
        costs = request.cost.layers.costs(node_type, kind.tp_degree, size)
        need = _block_bytes(costs)
        over = need - costs.limit_bytes
        found.append((over, need, node_type.name, kind.tp_degree, costs.limit_bytes))
    over, need, name, tp, limit = min(found)

    remedies = ["larger GPUs", "a higher TP degree", "a shorter sequence"]
    remedy = request.cost.choices.remedy
    if remedy:
        remedies.append(remedy)
    return (
        f"one layer with microbatch {size} needs {need / GIB:.2f} GiB a GPU on node type '{name}'"
        f" at TP {tp}, which has {limit / GIB:.2f} GiB: {over / GIB:.2f} GiB too little. Use"
        f" {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _boundaries(
    cost: CostModel,
    resources: tuple[Resource, ...],
    kinds: tuple[Kind, ...],
    rows: list[Row],
    *,
    near: bool,
) -> Floats:
    """Return (rows, rows) seconds of a boundary between two groups, both directions together.

    near: the groups are on one node; else on two. Infinite if there are no such groups, or if the
    rows have different microbatch sizes.
    """
    out = np.full((len(rows), len(rows)), np.inf)
    between_s = cost.boundaries.between_s
    for i, j in itertools.combinations_with_replacement(range(len(rows)), 2):
        size = rows[i].microbatch
        if rows[j].microbatch != size:
            continue

        a = kinds[rows[i].kind]
        b = kinds[rows[j].kind]
        one = resources[a.resource]
        other = resources[b.resource]
        if near:
            exists = one is other and a.gpus + b.gpus <= one.node_type.num_gpus
        else:
            exists = one is not other or one.num_nodes > 1
        if not exists:
            continue

        here = one.node_type
        there = other.node_type
        forth_s = between_s(here, there, size, same_node=near, tp_degree=b.tp_degree)
        back_s = between_s(there, here, size, same_node=near, tp_degree=a.tp_degree)
        out[i, j] = forth_s + back_s
        out[j, i] = out[i, j]
    return out


def ring_rate(
    cost: CostModel, members: Sequence[tuple[str, NodeType]], flows: float | Mapping[str, float]
) -> tuple[float, float]:
    """Return (latency, seconds a byte) of one all-reduce over workers (node name, node type).

    flows: as for `Links.all_reduce_s`.
    """
    # the seconds are linear in the bytes, so that two sizes give both numbers
    low_s = cost.links.all_reduce_s(members, 1e9, flows=flows)
    high_s = cost.links.all_reduce_s(members, 2e9, flows=flows)
    latency_s = 2 * low_s - high_s
    return latency_s, (high_s - low_s) / 1e9
