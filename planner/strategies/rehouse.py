"""Which stages share a node: neighbours of one pipeline, whose transfers then stay inside, or the same stage of several pipelines, whose
gradients are then summed inside. Early stages end last and have no time for sums, late ones have: so each node type has its own answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.cluster import Fleet, NodeType
from planner.plan import Plan, Stage
from planner.search.place import Nodes

_TOGETHER = (1, 2, 4, 8)


def rehoused(plan: Plan, fleet: Fleet) -> Iterator[Plan]:
    """Plans in which the stages on one node type are handed out to its nodes anew, the same stages of so many pipelines side by side."""
    kinds = [[fleet.node_of(stage.workers[0]).node_type for stage in p.stages] for p in plan.pipelines]
    for kind in dict.fromkeys(kind for each in kinds for kind in each):
        places = [(p, s) for p, each in enumerate(kinds) for s, other in enumerate(each) if other == kind]
        for together in _TOGETHER:
            if together <= len(plan.pipelines):
                ordered = sorted(places, key=lambda place: (place[0] // together, place[1], place[0]))
                groups = _handed_out(fleet, kind, [plan.pipelines[p].stages[s].tp_degree for p, s in ordered])
                if groups is not None:
                    yield _with_groups(plan, dict(zip(ordered, groups, strict=True)))


def _handed_out(fleet: Fleet, kind: NodeType, degrees: Sequence[int]) -> list[tuple[str, ...]] | None:
    """Workers of each group, node after node; None where they cannot be packed so."""
    nodes = Nodes([node.name for node in fleet.nodes if node.node_type == kind], kind.num_gpus, frozenset())
    last, out = None, list[tuple[str, ...]]()
    for degree in degrees:
        found = nodes.take(degree, last, 0)
        if found is None:
            return None
        last, workers = found
        out.append(workers)
    return out


def _with_groups(plan: Plan, groups: dict[tuple[int, int], tuple[str, ...]]) -> Plan:
    def moved(p: int, s: int, stage: Stage) -> Stage:
        return replace(stage, workers=groups.get((p, s), stage.workers))

    pipelines = (
        replace(pipeline, stages=tuple(moved(p, s, stage) for s, stage in enumerate(pipeline.stages)))
        for p, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=tuple(pipelines))
