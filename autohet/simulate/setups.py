"""Setups of trainers that restart on a fleet.

A setup is the plan, its step time, and the seconds that state takes to and from storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autohet.control.planning.proposals import PlanProposal
from autohet.simulate.costs import Costs
from autohet.simulate.remembered_planning import RememberedPlanning, rename_nodes
from planner.cost.memory.training_bytes import optimizer_bytes_each
from planner.cost.prediction import Prediction
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet, Node, NodeType, node_of
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Plan
from planner.plans.redundancy import layer_named, stages_with_layers
from planner.strategies import plan_with

SYMMETRIC = "megatron"


@dataclass(frozen=True)
class Setup:
    """Plan on these nodes, with its times in seconds.

    `step_s`: one step, of which `sync_s` is exposed gradient synchronisation. `restore_s`: until
    the slowest node has read its shards from storage. `upload_s`: until all nodes have written one
    copy of the state. `snapshot_s`: until that copy is in host memory.
    """

    plan: Plan
    nodes: frozenset[str]
    step_s: float
    sync_s: float
    restore_s: float
    upload_s: float
    snapshot_s: float
    network_bytes_per_s: float
    restored_bytes: int
    searched_s: float


def make_setup(
    plan: Plan,
    prediction: Prediction,
    fleet: Fleet,
    spec: ModelSpec,
    costs: Costs,
    searched_s: float,
) -> Setup:
    each = optimizer_bytes_each(spec)
    by_worker: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for stage, names in stages_with_layers(pipeline):
            num_parameters = sum(layer_named(spec, name).parameters for name in names)
            whole = num_parameters * each
            for rank, worker in enumerate(stage.workers):
                by_worker[worker] = whole * stage.share(rank).fraction
    by_node: dict[str, float] = {}
    for worker, num_bytes in by_worker.items():
        node = node_of(worker)
        by_node[node] = by_node.get(node, 0.0) + num_bytes

    # Each pipeline holds the whole state once.
    model_bytes = sum(by_worker[worker] for worker in plan.pipelines[0].workers)
    used = [node.node_type for node in fleet.nodes if node.name in by_node]
    network = min(kind.inter_node_bytes_per_s for kind in used)
    return Setup(
        plan=plan,
        nodes=frozenset(by_node),
        step_s=prediction.step_time_s,
        sync_s=prediction.breakdown_s.get("grad_sync", 0.0),
        restore_s=max(by_node.values()) / costs.s3_bytes_per_s,
        upload_s=model_bytes / len(by_node) / costs.s3_bytes_per_s,
        snapshot_s=max(by_worker.values()) / costs.snapshot_bytes_per_s,
        network_bytes_per_s=network,
        restored_bytes=int(sum(by_node.values())),
        searched_s=searched_s,
    )


class MixedSetups:
    """Setups on all GPUs of the fleet under AutoHet's own plans.

    The candidates include the plans of those fleets that AutoHet met.
    """

    def __init__(self, planning: RememberedPlanning, costs: Costs) -> None:
        self._planning = planning
        self._costs = costs
        self._last: Plan | None = None

    def setup(self, nodes: Sequence[Node]) -> Setup | None:
        """Return the setup on these nodes; None if no plan fits the fleet."""
        fleet = Fleet(0, tuple(nodes))
        if len(fleet.workers) < self._planning.job.elastic.min_workers:
            return None
        try:
            found = _find_fastest(self._planning, fleet, self._last)
        except ConfigError:
            return None
        self._last = found.plan
        searched_s = self._costs.search_seconds(len(fleet.workers), waiting=True)
        return make_setup(
            found.plan, found.prediction, fleet, self._planning.inputs.spec, self._costs, searched_s
        )


class SymmetricSetups:
    """Setups on GPUs of one type, with equal pipelines of equal stages (Megatron's grid).

    A setup uses as many of the nodes as such a grid can use best; with `fixed`, exactly that many
    nodes or none.
    """

    def __init__(
        self, planning: RememberedPlanning, costs: Costs, kind: NodeType, fixed: int | None = None
    ) -> None:
        self._planning = planning
        self._costs = costs
        self.kind = kind
        self.fixed = fixed

    def setup(self, nodes: Iterable[Node]) -> Setup | None:
        kinds = {
            node.name: node.node_type for node in nodes if node.node_type.name == self.kind.name
        }
        names = sorted(kinds)
        number = len(names) if self.fixed is None else self.fixed
        if number > len(names):
            return None

        # The living nodes have the price of this moment, which `self.kind` has not.
        kind = kinds[names[0]] if names else self.kind
        found = grid(self._planning, kind, number)
        if found is None:
            return None

        plan, prediction, num_used = found
        used = names[:num_used]
        name_by_stand_in = dict(zip(_stand_ins(num_used), used, strict=True))
        plan = rename_nodes(plan, name_by_stand_in)
        fleet = Fleet(0, tuple(Node(name, kind) for name in used))
        spec = self._planning.inputs.spec
        return make_setup(plan, prediction, fleet, spec, self._costs, 0.0)


def _stand_ins(number: int) -> list[str]:
    """Return the names of the nodes in a remembered grid."""
    return [f"grid-{index:05d}" for index in range(number)]


def grid(
    planning: RememberedPlanning, kind: NodeType, number: int
) -> tuple[Plan, Prediction, int] | None:
    """Return the fastest symmetric plan of up to `number` nodes of one type.

    The answer is (plan on nodes grid-0.., prediction, nodes that it uses).
    """
    best: tuple[Plan, Prediction, int] | None = None
    for count in range(1, number + 1):
        key = (planning.kind_of(Node("", kind)), count)
        if key not in planning.memory.grids:
            fleet = Fleet(0, tuple(Node(name, kind) for name in _stand_ins(count)))
            request = planning.request(fleet, planning.make_cost(fleet))
            # A trainer that restarts from storage needs no second holder of its state.
            request = replace(request, min_node_disjoint_holders=1)
            try:
                answer = plan_with(SYMMETRIC, request)
                planning.memory.grids[key] = (answer.plan, answer.prediction, count)
            except ConfigError:
                planning.memory.grids[key] = None
        found = planning.memory.grids[key]
        if found is not None and (best is None or found[1].step_time_s < best[1].step_time_s):
            best = found
    return best


def _find_fastest(planning: RememberedPlanning, fleet: Fleet, current: Plan | None) -> PlanProposal:
    """Return the fastest known plan of the fleet, for a trainer that loads all its state again.

    If none is known, `current` is only the search's starting point.

    Raises:
        ConfigError: no plan exists for this fleet.
    """
    if current is None or planning.counts_of(fleet) in planning.memory.plans:
        return planning.answer(fleet, None)

    # Replanning needs a worker of the present plan that still lives.
    still_lives = any(worker in fleet.workers for worker in current.workers)
    return planning.answer(fleet, current if still_lives else None)
