"""The training state of an SPMD plan in `recovery`'s layout: a parameter's units are those of the axis that it may be cut along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autohet.runtime.layout import STATE_KINDS, state_name
from planner.spmd.graph import Graph
from planner.spmd.plan import SpmdPlan
from recovery.state.layout import Layout, ShardId, TensorSpec


def split_dims(graph: Graph, plan: SpmdPlan | None = None) -> dict[str, int]:
    """The dimension along which each parameter's state may be cut, for good: where `plan` cuts it, else its first. Later plans of the
    same run are searched with these pinned, so that units keep their meaning whatever the ratios."""
    found = {node.name: dims[0] for node in graph.parameters if (dims := graph.dims(node.name))}
    stored = {} if plan is None else plan.program.storage
    return found | {name: layout.dim for name, layout in stored.items() if layout.kind == "sharded" and name in found}


def state_specs(graph: Graph, dims: Mapping[str, int]) -> dict[str, TensorSpec]:
    """Every tensor of training state: fp32 masters and Adam's moments."""
    specs = {}
    for node in graph.parameters:
        dim = dims.get(node.name)
        cuts = (0, 1) if dim is None else graph.cuts(node.name, dim)
        for kind in STATE_KINDS:
            name = state_name(kind, node.name)
            specs[name] = TensorSpec(name, node.shape, "float32", dim, cuts)
    return specs


def layout_of_spmd_plan(plan: SpmdPlan, workers: Sequence[str], dims: Mapping[str, int]) -> Layout:
    """Who holds which units: rank j of the plan is workers[j]."""
    specs = state_specs(plan.graph, dims)
    shards: dict[str, frozenset[ShardId]] = {}
    for rank, worker in enumerate(workers):
        held: set[ShardId] = set()
        for name, layout in plan.program.storage.items():
            if plan.graph.by_name[name].kind != "parameter":
                continue
            for kind in STATE_KINDS:
                spec = specs[state_name(kind, name)]
                if layout.kind == "sharded":
                    assert layout.dim == spec.split_dim, f"{name} is cut along {layout.dim}, its state along {spec.split_dim}"
                    units: Sequence[int] = plan.units(name, layout.dim, rank)
                else:
                    units = range(spec.num_units)
                held.update(ShardId(spec.name, unit) for unit in units)
        shards[worker] = frozenset(held)
    return Layout(specs, shards)
