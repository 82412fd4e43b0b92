"""Bytes of a whole plan.

They are what each of its workers needs, and they limit how many microbatches its stages keep in
flight.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.cost.eviction import evict_oldest
from planner.cost.links.boundaries import BoundaryCosts
from planner.cost.links.sync import SyncJob, sync_jobs
from planner.cost.memory.host_memory import (
    HostMemory,
    Kept,
    by_node,
    may_lack,
    staged_bytes,
    why_not_offloaded,
    why_not_staged,
)
from planner.cost.memory.stage_terms import RankBytes, Sharing, sharing_of
from planner.cost.parameters import CostParameters
from planner.cost.stage_costs import StageCosts
from planner.inputs.fleet import NodeType, node_of
from planner.plans.communicators import communicators_at_most
from planner.plans.in_flight import one_each, working_ahead
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Recompute, Stage
from planner.plans.shares import ALIKE, slowest_s, whole_shares

_REMEMBERED = 16  # plans, each asked for several times in a row


JobsAndBytes = tuple[tuple[SyncJob, ...], Mapping[str, float]]
"""All-reduces of a plan and the bytes of each worker's communicators."""
Synced = dict[object, JobsAndBytes]
"""Those of plans by their stages: the same on any fleet."""


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
        # the runtime stages state in host memory only when plans change
        self.may_lack_host_memory = False
        if parameters.elastic:
            some_node_may = any(may_lack(kind) for kind in stages.fleet.node_types)
            self.may_lack_host_memory = parameters.offload_optimizer or some_node_may

    def by_worker(self, plan: Plan) -> dict[str, int]:
        """Return peak bytes of every worker."""
        found = dict[str, int]()
        for worker, rank, in_flight in self._ranks(plan):
            found[worker] = int(rank.held_bytes + in_flight * rank.activation_bytes)
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
        for worker, rank, _ in self._ranks(plan):
            if self._stages.fleet.gpu_type(worker) == "CPU":
                continue
            room = rank.room_bytes - taken.get(worker, 0.0)
            moved = rank.host_bytes or staged_bytes(rank.state_bytes, room)
            node = node_of(worker)
            found[node] = found.get(node, 0.0) + moved
        return found

    def offloaded_by_node(self, plan: Plan) -> dict[str, float]:
        """Return the bytes that the workers of a plan keep in each node's host memory.

        They are masters and moments, and inputs of blocks.
        """
        found = dict[str, float]()
        if self._uses_host_memory(plan):
            for worker, rank, in_flight in self._ranks(plan):
                node = node_of(worker)
                num_bytes = rank.host_bytes + in_flight * rank.moved_bytes
                found[node] = found.get(node, 0.0) + num_bytes
        return found

    def _uses_host_memory(self, plan: Plan) -> bool:
        if plan.offloads or self.parameters.offload_optimizer:
            return True
        return any(self._stages.recompute_of(stage) == "offload" for stage in plan.stages)

    def not_offloaded(self, plan: Plan) -> str | None:
        """Explain why a node's host memory does not hold the plan's part; None if each does.

        None also if the size of the memory is unknown.
        """
        return self._first_reason(plan, self.offloaded_by_node(plan), why_not_offloaded)

    def not_staged(self, plan: Plan) -> str | None:
        """Explain why some node's host memory does not hold the staged state.

        None if each node's does, or if no node's host memory is known.
        """
        kept = self.offloaded_by_node(plan)
        keeps_state = bool(kept) and self.parameters.elastic
        if not self.may_lack_host_memory and not keeps_state:
            return None

        def why(kind: NodeType, node: str, num_bytes: float) -> str | None:
            return why_not_staged(kind, node, num_bytes, kept.get(node, 0.0))

        return self._first_reason(plan, self.staged_by_node(plan), why)

    def _first_reason(
        self,
        plan: Plan,
        bytes_by_node: Mapping[str, float],
        why: Callable[[NodeType, str, float], str | None],
    ) -> str | None:
        """Return the first node's reason against its bytes; None if no node has one."""
        kinds = dict(self._stages.fleet.members_of(plan.workers)) if bytes_by_node else {}
        reasons = (why(kinds[node], node, size) for node, size in bytes_by_node.items())
        return next((reason for reason in reasons if reason is not None), None)

    def host_memory(self, plan: Plan, kept: Kept) -> tuple[HostMemory, ...]:
        """Return host memory of the nodes in use for which its size is known.

        Empty for a plan of one SPMD program, and if the job never changes plans.
        """
        if not self.parameters.elastic or plan.spmd is not None:
            return ()
        state = {worker: rank.state_bytes for worker, rank, _ in self._ranks(plan)}
        moved = self.staged_by_node(plan)
        offloaded = self.offloaded_by_node(plan)
        fleet = self._stages.fleet
        found = []
        for node in by_node(plan, fleet, self.spec, state, moved, kept):
            offloaded_bytes = offloaded.get(node.node, 0.0)
            found.append(replace(node, offloaded_bytes=offloaded_bytes))
        return tuple(found)

    def _ranks(self, plan: Plan) -> Iterator[tuple[str, RankBytes, int]]:
        """Yield every worker, its bytes, and its microbatches in flight, in plan order."""
        sharing = sharing_of(plan)
        for pipeline in plan.pipelines:
            terms = self._stages.every_terms(pipeline, sharing)
            for i, stage in enumerate(pipeline.stages):
                in_flight = pipeline.in_flight(i)
                for worker, rank in zip(stage.workers, terms[i].ranks, strict=True):
                    yield worker, rank, in_flight

    def sync_jobs(self, plan: Plan) -> tuple[SyncJob, ...]:
        """Return `planner.cost.links.sync.sync_jobs` of a plan, cached."""
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

        def choose(pipeline: Pipeline) -> Pipeline:
            first = replace(pipeline, most_in_flight=())
            stages = []
            for i, stage in enumerate(pipeline.stages):
                tp_shares = self._shares(first, i, sharing, taken)
                stages.append(replace(stage, tp_shares=tp_shares))
            return replace(pipeline, stages=tuple(stages))

        return plan.map_pipelines(choose)

    def _shares(
        self, pipeline: Pipeline, index: int, sharing: Sharing, taken: Mapping[str, float]
    ) -> tuple[int, ...]:
        stage = pipeline.stages[index]
        if not stage.tp_shares:
            return ()
        seconds = self._stages.seconds_of_shares(pipeline, index, sharing, _most_of(taken, stage))
        found = whole_shares(
            seconds, len(stage.workers), self.spec.max_tp_degree, self.spec.key_value_units
        )
        if not found:
            return stage.tp_shares

        # other shares move state, which a small gain does not pay for
        own_s = slowest_s(seconds, stage.tp_shares)
        is_quicker = slowest_s(seconds, found) < (1 - ALIKE) * own_s
        return found if is_quicker else stage.tp_shares

    def with_choices(self, plan: Plan, choices: Sequence[Recompute], shard: bool) -> Plan:
        """Return the plan with the first recomputation choice with which each stage fits.

        shard: share optimizer state out. A stage fits with as few microbatches in flight as 1F1B
        allows. It gets the last choice if it fits with none.
        """
        ways = [_with_choice(plan, choice, shard) for choice in choices]
        # sharing depends on `shard` alone, so that any of them has it
        sharing = sharing_of(ways[0])
        taken = self._communicator_bytes(plan)
        pipelines = []
        for number, first in enumerate(ways[0].pipelines):
            candidates = [way.pipelines[number] for way in ways]
            stages = []
            for i in range(len(first.stages)):
                stages.append(self._first_that_fits(candidates, i, sharing, taken))
            pipelines.append(replace(first, stages=tuple(stages)))
        return replace(plan, pipelines=tuple(pipelines))

    def _first_that_fits(
        self,
        candidates: Sequence[Pipeline],
        index: int,
        sharing: Sharing,
        taken: Mapping[str, float],
    ) -> Stage:
        """Return the stage `index` of the first pipeline in which it fits, else of the last."""
        for pipeline in candidates:
            stage = pipeline.stages[index]
            terms = self._stages.terms(pipeline, index, sharing)
            room = terms.room(_most_of(taken, stage))
            if room >= pipeline.in_flight(index):
                return stage
        return candidates[-1].stages[index]

    def working_ahead(self, plan: Plan, most: int) -> Plan:
        """Return the plan with as many microbatches in flight as fit in memory.

        most: the most by which each stage may keep more than the next.
        """
        sharing = sharing_of(plan)
        taken = self._communicator_bytes(plan)

        def choose(pipeline: Pipeline) -> Pipeline:
            depth = len(pipeline.stages)
            there_s, back_s = self._boundaries.of(plan, pipeline)
            both_s = [there + back for there, back in zip(there_s, back_s, strict=True)]
            rooms = []
            every_terms = self._stages.every_terms(pipeline, sharing)
            for stage, terms in zip(pipeline.stages, every_terms, strict=True):
                room = terms.room(_most_of(taken, stage))
                # a stage that holds all microbatches has room for any number
                if room >= pipeline.num_microbatches:
                    room = most * depth
                rooms.append(room)
            numbers = working_ahead(both_s, rooms, most)
            # plans leave 1F1B's own numbers out
            most_in_flight = () if numbers == one_each(depth) else numbers
            if most_in_flight == pipeline.most_in_flight:
                return pipeline
            return replace(pipeline, most_in_flight=most_in_flight)

        return plan.map_pipelines(choose)

    def _communicator_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Return communicator bytes of each worker; empty if communicators are not counted."""
        return self._jobs(plan)[1] if self.parameters.communicator_bytes else {}

    def _jobs(self, plan: Plan) -> JobsAndBytes:
        """Return a plan's all-reduces and the bytes of its workers' communicators.

        They depend on its stages alone.
        """
        # what is summed depends on neither formats, recomputation nor microbatches
        parts = []
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                parts.append((stage.first_layer, stage.num_layers, stage.workers, stage.tp_shares))
        key = tuple(parts)
        known = self._synced.get(key)
        if known is None:
            known = self._synced[key] = self._new_jobs(plan)
            evict_oldest(self._synced, _REMEMBERED)
        return known

    def _new_jobs(self, plan: Plan) -> JobsAndBytes:
        jobs = sync_jobs(plan, self.spec, self.parameters)
        sums = Counter[str]()
        for job in jobs:
            sums.update(job.members)

        taken = {}
        for worker, number in communicators_at_most(plan, sums).items():
            taken[worker] = number * self.parameters.communicator_bytes
        return jobs, taken


def _most_of(taken: Mapping[str, float], stage: Stage) -> float:
    """Return bytes that a stage's communicators take.

    If its workers have equal shares, one worker's bytes; else the most.
    """
    workers = stage.workers if stage.tp_shares else stage.workers[:1]
    return max(taken.get(worker, 0.0) for worker in workers)


def _with_choice(plan: Plan, recompute: Recompute, shard: bool) -> Plan:
    """Return the plan with one choice for all stages and 1F1B's microbatches in flight."""
    by_1f1b = plan.map_pipelines(lambda pipeline: replace(pipeline, most_in_flight=()))
    return by_1f1b.map_stages(
        lambda stage: replace(stage, recompute=recompute, shard_optimizer=shard)
    )
