"""Redundancy report: live copies of training state, counted by the nodes that hold them.

It says which layers of a plan would be lost with a node. If optimizer state is sharded
(`Stage.shard_optimizer`), weights still have live copies, but masters and moments exist once. Each
holder that is lost takes a part of them, which is restored from copies of snapshots. Such a layer
counts as held by one node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, node_of
from planner.plans.communicators import workers_of_unit
from planner.plans.model_spec import LayerSpec, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage

EMBEDDING = "embedding"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one layer: slice `part` of `parts` equal slices by tensor parallelism.

    layer: "embedding", "head" or a block's number.
    """

    layer: str
    part: int
    parts: int

    def __str__(self) -> str:
        if self.parts == 1:
            return self.layer
        return f"{self.layer} ({self.part + 1}/{self.parts})"


@dataclass(frozen=True, slots=True)
class RedundancyReport:
    """Redundancy of a plan's training state.

    lost_by_node: shards that only this node holds, by node.
    weakest: the fewest nodes that hold any shard.
    sharded: layers whose optimizer state is sharded, so that losing any holder loses a part of it.
    """

    lost_by_node: dict[str, tuple[Shard, ...]]
    weakest: int
    sharded: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return one line per node that holds the last copy of something."""
        lines = []
        for node, shards in self.lost_by_node.items():
            if shards:
                layers = list(dict.fromkeys(shard.layer for shard in shards))
                lines.append(
                    f"losing {node} loses {len(shards)} shards of {len(layers)} layers"
                    f" ({', '.join(_spans(layers))})"
                )
        if self.sharded:
            lines.append(
                f"optimizer state of {len(self.sharded)} layers ({', '.join(_spans(self.sharded))})"
                " is shared out over their holders: what a lost node had of it comes from copies"
                " of snapshots"
            )
        return lines or ["no single node holds the last copy of a layer"]


def redundancy(plan: Plan, fleet: Fleet, num_layers: int) -> RedundancyReport:
    """Count the live holders of each shard. Shards are cut as by the stage with the most parts."""
    holders = holders_by_shard(plan, fleet, num_layers)
    nodes = dict.fromkeys(fleet.node_of(worker).name for worker in plan.workers)
    lost_by_node: dict[str, list[Shard]] = {node: [] for node in nodes}
    sharded = _shared_out(plan)
    # as keys of a dictionary: each layer once, in the model's order
    sharded_in_order = dict[str, None]()
    counts = []
    for shard, held in holders.items():
        if len(held) == 1:
            (only,) = held
            lost_by_node[only].append(shard)
        if shard.layer in sharded:
            sharded_in_order[shard.layer] = None
            # any lost holder of sharded optimizer state takes a part of it
            counts.append(1)
        else:
            counts.append(len(held))

    lost = {node: tuple(shards) for node, shards in lost_by_node.items()}
    return RedundancyReport(lost, min(counts, default=0), tuple(sharded_in_order))


def fewest_holders(plan: Plan, fleet: Fleet, num_layers: int) -> int:
    """Return `redundancy(...).weakest` without the holders of each shard.

    Layers between the same starts of stages have the same holders. A group that lies on one node
    holds all parts there.
    """
    if _shared_out(plan):
        return 1
    runs = []
    for start in plan.cuts:
        # the head is behind the last block
        runs.append([each.stage_of(start) or each.stages[-1] for each in plan.pipelines])
    # embedding and head
    runs.append(plan.first_stages)
    runs.append(plan.last_stages)

    parts = plan.num_parts
    nodes = {stage: _nodes_of(stage.workers, fleet) for stage in plan.stages}
    fewest = len(fleet.nodes)
    for stages in runs:
        if all(len(nodes[stage]) == 1 or _is_whole(stage) for stage in stages):
            holders = set().union(*(nodes[stage] for stage in stages))
            fewest = min(fewest, len(holders))
        else:
            fewest = min(fewest, _fewest_of_parts(stages, parts, fleet))
    return fewest


def _fewest_of_parts(stages: Sequence[Stage], parts: int, fleet: Fleet) -> int:
    """Return the fewest nodes that hold any one part of what these stages hold together."""
    numbers = []
    for part in range(parts):
        names = set[str]()
        for stage in stages:
            names |= _nodes_of(_workers_of_part(stage, part, parts), fleet)
        numbers.append(len(names))
    return min(numbers)


def _nodes_of(workers: Iterable[str], fleet: Fleet | None) -> set[str]:
    """Return the names of the workers' nodes, without a fleet as the workers' names have them."""
    if fleet is None:
        return set(map(node_of, workers))
    return {fleet.node_of(worker).name for worker in workers}


def _is_whole(stage: Stage) -> bool:
    return stage.spmd is not None and stage.spmd.is_whole


def _workers_of_part(stage: Stage, part: int, parts: int) -> tuple[str, ...]:
    if _is_whole(stage):
        return stage.workers
    return workers_of_unit(stage, part, parts)


def holders_by_shard(plan: Plan, fleet: Fleet | None, num_layers: int) -> dict[Shard, set[str]]:
    """Return the names of the nodes that hold each shard.

    Shards are in the order of the model's layers. Without a fleet the names of the workers name
    their nodes.
    """
    parts = plan.num_parts
    found: dict[Shard, set[str]] = {}
    for pipeline in plan.pipelines:
        for stage, layers in stages_with_layers(pipeline):
            for part in range(parts):
                workers = _workers_of_part(stage, part, parts)
                nodes = _nodes_of(workers, fleet)
                for layer in layers:
                    shard = Shard(layer, part, parts)
                    found.setdefault(shard, set()).update(nodes)

    ordered = sorted(found, key=lambda shard: (_rank(shard.layer, num_layers), shard.part))
    return {shard: found[shard] for shard in ordered}


def layers_of(stage: Stage, index: int, num_stages: int) -> list[str]:
    """Return the names of the layers of a stage, the `index`-th of its pipeline."""
    names = [str(layer) for layer in range(stage.first_layer, stage.end_layer)]
    if index == 0:
        names.insert(0, EMBEDDING)
    if index == num_stages - 1:
        names.append(HEAD)
    return names


def stages_with_layers(pipeline: Pipeline) -> list[tuple[Stage, list[str]]]:
    """Return the stages of a pipeline, each with the names of its layers."""
    num_stages = len(pipeline.stages)
    return [
        (stage, layers_of(stage, index, num_stages)) for index, stage in enumerate(pipeline.stages)
    ]


def layer_named(spec: ModelSpec, name: str) -> LayerSpec:
    """Return the layer that has this name in `layers_of`."""
    if name == EMBEDDING:
        return spec.embedding
    if name == HEAD:
        return spec.head
    return spec.blocks[int(name)]


def sharded_layers(plan: Plan) -> frozenset[str]:
    """Return the names of the layers whose optimizer state is sharded over their holders.

    It is if one stage that holds the layer says so.
    """
    found: set[str] = set()
    for pipeline in plan.pipelines:
        for stage, layers in stages_with_layers(pipeline):
            if stage.shard_optimizer:
                found.update(layers)
    return frozenset(found)


def _shared_out(plan: Plan) -> frozenset[str]:
    """Return `sharded_layers`; empty for a single pipeline, whose layers have one holder each."""
    if len(plan.pipelines) == 1:
        return frozenset()
    return sharded_layers(plan)


def require_disjoint_holders(plan: Plan, fleet: Fleet | None, num_layers: int, wanted: int) -> None:
    """Check that every shard lies on `wanted` nodes.

    Raises:
        InfeasibleError: a shard lies on fewer; it names the first such shard.
    """
    sharded = _shared_out(plan)
    for shard, held in holders_by_shard(plan, fleet, num_layers).items():
        if wanted > 1 and shard.layer in sharded:
            raise InfeasibleError(
                f"optimizer state of layer {shard} is shared out over its holders, so it lies once,"
                f" but {wanted} nodes are asked for (min_pipelines or redundancy)"
            )
        if len(held) < wanted:
            raise InfeasibleError(
                f"layer {shard} lies on {len(held)} node ({', '.join(sorted(held))}), but {wanted}"
                " are asked for (min_pipelines or redundancy)"
            )


def _rank(layer: str, num_layers: int) -> int:
    if layer == EMBEDDING:
        return -1
    if layer == HEAD:
        return num_layers
    return int(layer) if layer.isdigit() else 0


def _spans(layers: Iterable[str]) -> list[str]:
    """Return layers with runs of consecutive blocks as one: 0, 1, 2, 5 -> 0-2, 5."""
    runs: list[list[str]] = []
    for layer in layers:
        if runs and _follows(runs[-1][-1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    spans = []
    for run in runs:
        if len(run) == 1:
            spans.append(run[0])
        else:
            spans.append(f"{run[0]}-{run[-1]}")
    return spans


def _follows(before: str, layer: str) -> bool:
    are_blocks = before.isdigit() and layer.isdigit()
    return are_blocks and int(layer) == int(before) + 1
