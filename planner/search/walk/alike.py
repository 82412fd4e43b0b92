"""Plans that are alike: equal but for the names of equal nodes and of GPUs on one node."""

from collections.abc import Hashable, Mapping
from dataclasses import fields
from operator import attrgetter

from planner.inputs.fleet import NodeType, node_of
from planner.plans.plan import Plan, Stage

_Seen = dict[str, tuple[int, int]]
_STAGE_FIELDS = [each.name for each in fields(Stage)]
_STAGE_FIELDS.remove("workers")
_REST = attrgetter(*_STAGE_FIELDS)


class Likeness:
    """Keys that are equal for plans that are alike, so that one prediction serves all of them.

    node_types: node type of each node. in_flight: plans that differ in the microbatches that
    stages keep in flight are not alike; False if these numbers follow from the rest of a plan.
    """

    def __init__(self, node_types: Mapping[str, NodeType], *, in_flight: bool):
        distinct = list(dict.fromkeys(node_types.values()))
        self._kinds = {name: distinct.index(kind) for name, kind in node_types.items()}
        self._num_kinds = len(distinct)
        self._in_flight = in_flight

    def key(self, plan: Plan) -> Hashable:
        """Return the key of a plan: nodes of a type are numbered in the order of their first use.

        Plans of one key have equal predictions, up to rounding and the names of workers.
        """
        seen: _Seen = {}
        used = [0] * self._num_kinds
        pipelines: list[Hashable] = []
        for pipeline in plan.pipelines:
            stages = []
            for stage in pipeline.stages:
                stages.append(self._stage_key(stage, seen, used))  # numbers new nodes

            count = pipeline.num_microbatches
            most = pipeline.most_in_flight if self._in_flight else ()
            size = pipeline.microbatch_sequences
            pipelines.append((count, size, most, *stages))
        return tuple(pipelines)

    def _stage_key(self, stage: Stage, seen: _Seen, used: list[int]) -> Hashable:
        nodes = []
        for worker in stage.workers:
            name = node_of(worker)
            if name not in seen:
                kind = self._kinds[name]
                seen[name] = (kind, used[kind])
                used[kind] += 1
            nodes.append(seen[name])
        # a stage's workers count by their nodes alone: GPUs of one node are equal
        return (tuple(nodes), *_REST(stage))
