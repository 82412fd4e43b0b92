"""Bytes of a whole plan.

They are what each of its workers needs, and they limit how many microbatches its stages keep in
flight.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.cluster import node_of
from planner.communicators import communicators_at_most
from planner.cost.boundaries import BoundaryCosts
from planner.cost.host_memory import (
    HostMemory,
    Kept,
    by_node,
    may_lack,
    staged_bytes,
    why_not_offloaded,
    why_not_staged,
)
from planner.cost.parameters import CostParameters
from planner.cost.stage_costs import RankBytes, Sharing, StageCosts, sharing_of
from planner.cost.sync import SyncJob, sync_jobs
from planner.cost.uneven import ALIKE, slowest_s, whole_shares
from planner.in_flight import one_each, working_ahead
from planner.model_spec import ModelSpec
from planner.plan import Pipeline, Plan, Recompute, Stage

_REMEMBERED = 16  # plans, each asked for several times in a row


Synced = dict[object, tuple[tuple[SyncJob, ...], Mapping[str, float]]]
"""All-reduces and bytes of communicators by a plan's stages: the same on any fleet."""


class PlanMemory:
    """Memory of plans on the fleet of `stages` and `boundaries`.

    synced: cache of plans' all-reduces and communicator bytes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: CostParameters,
        stages: StageCosts,
        boundaries: BoundaryCosts,
        synced: Synced,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        self._stages = stages
        self._boundaries = boundaries
        self._synced = synced
        kinds = {node.node_type for node in stages.fleet.nodes}
        self.may_lack_host_memory = parameters.elastic and (
            parameters.offload_optimizer or any(map(may_lack, kinds))
        )

    def by_worker(self, plan: Plan) -> dict[str, int]:
        """Return peak bytes of every worker."""
        found = dict[str, int]()
        sharing = sharing_of(plan)
        for pipeline in plan.pipelines:
            terms = self._stages.every_terms(pipeline, sharing)
            for i, stage in enumerate(pipeline.stages):
                for worker, rank in zip(stage.workers, terms[i].ranks, strict=True):
                    found[worker] = int(
                        rank.held_bytes + pipeline.in_flight(i) * rank.activation_bytes
                    )
        for worker, num_bytes in self._communicator_bytes(plan).items():
            found[worker] += int(num_bytes)
        return found

    def staged_by_node(self, plan: Plan) -> dict[str, float]:
        """Return the bytes of state that a change of plans puts into each node's host memory.

        The state comes from the node's devices. If state is in host memory, the new plan's is
        beside it. A worker on the CPU has its state there.
        """
        found = dict[str, float]()
        taken = self._communicator_bytes(plan)
        for worker, rank in self._ranks(plan):
            if self._stages.fleet.gpu_type(worker) != "CPU":
                node = node_of(worker)
                room = rank.room_bytes - taken.get(worker, 0.0)
                moved = rank.host_bytes or staged_bytes(rank.state_bytes, room)
                found[node] = found.get(node, 0.0) + moved
        return found

    def offloaded_by_node(self, plan: Plan) -> dict[str, float]:
        """Return the bytes of masters and moments that a plan keeps in each node's host memory."""
        found = dict[str, float]()
        if plan.offloads or self.parameters.offload_optimizer:
            for worker, rank in self._ranks(plan):
                node = node_of(worker)
                found[node] = found.get(node, 0.0) + rank.host_bytes
        return found

    def not_offloaded(self, plan: Plan) -> str | None:
        """Explain why a node's host memory does not hold the plan's state; None if each does.

        None also if the size of the memory is unknown.
        """
        for node, num_bytes in self.offloaded_by_node(plan).items():
            worker = next(worker for worker in plan.workers if node_of(worker) == node)
            why = why_not_offloaded(self._stages.fleet.node_of(worker).node_type, node, num_bytes)
            if why is not None:
                return why
        return None

    def not_staged(self, plan: Plan) -> str | None:
        """Explain why some node's host memory does not hold the staged state.

        None if each node's does, or if no node's host memory is known.
        """
        kept = self.offloaded_by_node(plan)
        if not self.may_lack_host_memory and not (kept and self.parameters.elastic):
            return None
        fleet = self._stages.fleet
        kinds = {node_of(worker): fleet.node_of(worker).node_type for worker in plan.workers}
        why = (
            why_not_staged(kinds[node], node, num_bytes, kept.get(node, 0.0))
            for node, num_bytes in self.staged_by_node(plan).items()
        )
        return next((each for each in why if each is not None), None)

    def host_memory(self, plan: Plan, kept: Kept) -> tuple[HostMemory, ...]:
        """Return host memory of the nodes in use for which its size is known.

        Empty for a plan of one SPMD program, and if the job never changes plans.
        """
        if not self.parameters.elastic or plan.spmd is not None:
            return ()
        state = {worker: rank.state_bytes for worker, rank in self._ranks(plan)}
        moved = self.staged_by_node(plan)
        offloaded = self.offloaded_by_node(plan)
        found = by_node(plan, self._stages.fleet, self.spec, state, moved, kept)
        return tuple(replace(node, offloaded_bytes=offloaded.get(node.node, 0.0)) for node in found)

    def _ranks(self, plan: Plan) -> Iterator[tuple[str, RankBytes]]:
        sharing = sharing_of(plan)
        for pipeline in plan.pipelines:
            terms = self._stages.every_terms(pipeline, sharing)
            for stage, each in zip(pipeline.stages, terms, strict=True):
                yield from zip(stage.workers, each.ranks, strict=True)

    def sync_jobs(self, plan: Plan) -> tuple[SyncJob, ...]:
        """Return `planner.cost.sync.sync_jobs` of a plan, cached."""
        return self._jobs(plan)[0]

    def with_shares(self, plan: Plan) -> Plan:
        """Return the plan with the fastest shares that fit in each stage of uneven shares.

        A stage fits with as few microbatches in flight as 1F1B allows. It keeps its own shares if
        they fit and are as fast, and if no shares fit.
        """
        if not any(stage.tp_shares for stage in plan.stages):
            return plan
        sharing = sharing_of(plan)
        taken = self._communicator_bytes(plan)
        pipelines = []
        for pipeline in plan.pipelines:
            first = replace(pipeline, most_in_flight=())
            stages = (
                replace(s, tp_shares=self._shares(first, i, sharing, taken))
                for i, s in enumerate(pipeline.stages)
            )
            pipelines.append(replace(pipeline, stages=tuple(stages)))
        return replace(plan, pipelines=tuple(pipelines))

    def _shares(
        self, pipeline: Pipeline, index: int, sharing: Sharing, taken: Mapping[str, float]
    ) -> tuple[int, ...]:
        stage = pipeline.stages[index]
        spec = self.spec
        if not stage.tp_shares:
            return ()
        seconds = self._stages.seconds_of_shares(pipeline, index, sharing, _most_of(taken, stage))
        found = whole_shares(seconds, len(stage.workers), spec.max_tp_degree, spec.key_value_units)
        is_quicker = found and slowest_s(seconds, found) < (1 - ALIKE) * slowest_s(
            seconds, stage.tp_shares
        )
        return found if is_quicker else stage.tp_shares

    def with_choices(self, plan: Plan, choices: Sequence[Recompute], shard: bool) -> Plan:
        """Return the plan with the first recomputation choice with which each stage fits.

        shard: share optimizer state out. A stage fits with as few microbatches in flight as 1F1B
        allows. It gets the last choice if it fits with none.
        """
        ways = [_saying(plan, choice, shard) for choice in choices]
        sharing = sharing_of(ways[0])
        taken = self._communicator_bytes(plan)
        pipelines = []
        for number, first in enumerate(ways[0].pipelines):
            several = [way.pipelines[number] for way in ways]
            stages = []
            for i, last in enumerate(several[-1].stages):
                fitting = (w.stages[i] for w in several if self._fits(w, i, sharing, taken))
                stages.append(next(fitting, last))
            pipelines.append(replace(first, stages=tuple(stages)))
        return replace(plan, pipelines=tuple(pipelines))

    def _fits(
        self, pipeline: Pipeline, index: int, sharing: Sharing, taken: Mapping[str, float]
    ) -> bool:
        terms = self._stages.terms(pipeline, index, sharing)
        most = _most_of(taken, pipeline.stages[index])
        return terms.room(most) >= pipeline.in_flight(index)

    def working_ahead(self, plan: Plan, most: int) -> Plan:
        """Return the plan with as many microbatches in flight as fit in memory.

        most: the most by which each stage may keep more than the next.
        """
        sharing = sharing_of(plan)
        taken = self._communicator_bytes(plan)
        pipelines = (
            replace(p, most_in_flight=self._most_in_flight(plan, p, sharing, taken, most))
            for p in plan.pipelines
        )
        return replace(plan, pipelines=tuple(pipelines))

    def _most_in_flight(
        self,
        plan: Plan,
        pipeline: Pipeline,
        sharing: Sharing,
        taken: Mapping[str, float],
        most: int,
    ) -> tuple[int, ...]:
        depth = len(pipeline.stages)
        both = [
            there + back for there, back in zip(*self._boundaries.of(plan, pipeline), strict=True)
        ]
        terms = self._stages.every_terms(pipeline, sharing)
        room = [
            each.room(_most_of(taken, stage))
            for stage, each in zip(pipeline.stages, terms, strict=True)
        ]
        # a stage that holds all microbatches has room for any number
        room = [most * depth if have >= pipeline.num_microbatches else have for have in room]
        numbers = working_ahead(both, room, most)
        return () if numbers == one_each(depth) else numbers

    def _communicator_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Return communicator bytes of each worker; empty if communicators are not counted."""
        return self._jobs(plan)[1] if self.parameters.communicator_bytes else {}

    def _jobs(self, plan: Plan) -> tuple[tuple[SyncJob, ...], Mapping[str, float]]:
        """Return a plan's all-reduces and the bytes of its workers' communicators.

        They depend on its stages alone.
        """
        parts = []
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                parts.append((stage.first_layer, stage.num_layers, stage.workers, stage.tp_shares))
        key = tuple(parts)
        known = self._synced.get(key)
        if known is None:
            jobs = sync_jobs(plan, self.spec, self.parameters)
            numbers = communicators_at_most(
                plan, Counter(worker for job in jobs for worker in job.members)
            )
            each = self.parameters.communicator_bytes
            known = self._synced[key] = (
                jobs,
                {worker: number * each for worker, number in numbers.items()},
            )
            if len(self._synced) > _REMEMBERED:
                del self._synced[next(iter(self._synced))]
        return known


def _most_of(taken: Mapping[str, float], stage: Stage) -> float:
    """Return bytes that a stage's communicators take.

    If its workers have equal shares, one worker's bytes; else the most.
    """
    workers = stage.workers if stage.tp_shares else stage.workers[:1]
    return max(taken.get(worker, 0.0) for worker in workers)


def _saying(plan: Plan, recompute: Recompute, shard: bool) -> Plan:
    """Return the plan with one choice for all stages and 1F1B's microbatches in flight."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = [
            replace(stage, recompute=recompute, shard_optimizer=shard) for stage in pipeline.stages
        ]
        pipelines.append(replace(pipeline, stages=tuple(stages), most_in_flight=()))
    return replace(plan, pipelines=tuple(pipelines))
