"""Seconds of a plan's step: exact, by simulation, and lower bounds without one.

A step is every pipeline's 1F1B as events (`schedule`), the gradient sync that its stages' ends
allow (`links.sync`), then the updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.basis import CostBasis
from planner.cost.eviction import evict_oldest
from planner.cost.links.boundaries import BoundaryCosts
from planner.cost.links.sync import KnownRings, Rings, StepTimeline, simulate_sync
from planner.cost.memory.full_shard import overlapped_s
from planner.cost.memory.plan_memory import PlanMemory
from planner.cost.memory.stage_terms import sharing_of
from planner.cost.schedule import PipelineTimes, ends_of_stages, pipeline_bound_s
from planner.cost.stage_costs import StageCosts
from planner.plans.plan import Pipeline, Plan, Stage

# ends of stages: of 80 stages 3 KB, where a timeline of all actions would take megabytes
_PIPELINES = 1024


@dataclass(frozen=True)
class Simulation:
    """Simulated step.

    ends_s: for each pipeline (of `plan.pipelines`), when its stages have ended. sync: the gradient
    sync and updates after them.
    """

    ends_s: tuple[tuple[float, ...], ...]
    sync: StepTimeline
    step_time_s: float


class StepTimes:
    """Step times of plans on one fleet.

    memory: gives the all-reduces of a plan. rings: cache of all-reduces that run alone, which may
    be shared by fleets.
    """

    def __init__(
        self,
        basis: CostBasis,
        stages: StageCosts,
        boundaries: BoundaryCosts,
        memory: PlanMemory,
        rings: KnownRings,
    ) -> None:
        self._fleet = basis.fleet
        self._links = basis.links
        self._parameters = basis.parameters
        self._forward_passes = basis.workload.spec.forward_passes
        self._stages = stages
        self._boundaries = boundaries
        self._memory = memory
        self._rings = rings
        self._ends: dict[tuple[object, int], tuple[float, ...]] = {}

    def simulate(self, plan: Plan) -> Simulation:
        """Simulate one step: every pipeline's 1F1B, then gradient sync, then updates."""
        ends_s = tuple(self._ends_of_stages(plan, pipeline) for pipeline in plan.pipelines)
        ends: dict[str, float] = {}
        for pipeline, stage_ends_s in zip(plan.pipelines, ends_s, strict=True):
            for stage, end_s in zip(pipeline.stages, stage_ends_s, strict=True):
                ends.update(dict.fromkeys(stage.workers, end_s))

        updates = dict[str, float]()
        sharing = sharing_of(plan)
        for pipeline in plan.pipelines:
            every_terms = self._stages.every_terms(pipeline, sharing)
            for stage, terms in zip(pipeline.stages, every_terms, strict=True):
                updates.update(dict.fromkeys(stage.workers, terms.update_s))

        # with all of it shared out, gradients are reduced beside the backward (`pipeline_times`)
        jobs = () if self._parameters.full_shard else self._memory.sync_jobs(plan)
        sync = simulate_sync(jobs, ends, updates, self._fleet, self._links, self._rings)
        return Simulation(ends_s, sync, sync.end_s + self._parameters.step_overhead_s)

    def breakdown(self, simulation: Simulation) -> dict[str, float]:
        """Return the seconds of a simulated step by part."""
        sync = simulation.sync
        pipelines_end_s = max(max(ends_s) for ends_s in simulation.ends_s)
        gradients_end_s = max(pipelines_end_s, sync.gradients_end_s)
        sums_end_s = max(gradients_end_s, sync.tied_end_s)
        return {
            "pipeline": pipelines_end_s,
            "grad_sync": max(0.0, sync.gradients_end_s - pipelines_end_s),
            "tied_embedding_sync": max(0.0, sync.tied_end_s - gradients_end_s),
            "optimizer": sync.end_s - sums_end_s,
            "overhead": self._parameters.step_overhead_s,
        }

    def pipelines_s(self, plan: Plan) -> list[float]:
        """Return the seconds at which each pipeline has done its part of a step."""
        return [max(self._ends_of_stages(plan, pipeline)) for pipeline in plan.pipelines]

    def pipelines_at_least_s(self, plan: Plan) -> float:
        """Return a lower bound of the slowest pipeline's part of a step, without simulating it."""
        return max(self._bound_s(plan, pipeline) for pipeline in plan.pipelines)

    def work_at_least_s(self, plan: Plan) -> float:
        """Return a lower bound of the step time from stages' work alone."""
        return max(map(self._work_s, plan.pipelines)) * (1 - 1e-9)

    def step_by_work_at_least_s(self, plan: Plan) -> float:
        """Return a lower bound of the step time from stages' work and gradient sums alone.

        It holds for any number of microbatches in flight.
        """
        return self._step_at_least_s(plan, list(map(self._work_s, plan.pipelines)))

    def _work_s(self, pipeline: Pipeline) -> float:
        slowest_s = 0.0
        before_s = 0.0
        for terms in self._stages.every_terms(pipeline):
            work_s = terms.forward_s + terms.backward_s
            slowest_s = max(slowest_s, before_s + pipeline.num_microbatches * work_s)
            before_s += work_s
        return max(slowest_s, before_s)

    def step_at_least_s(self, plan: Plan) -> float:
        """Return a lower bound of the step time, without simulating it."""
        return self._step_at_least_s(plan, [self._bound_s(plan, each) for each in plan.pipelines])

    def _step_at_least_s(self, plan: Plan, ends_s: Sequence[float]) -> float:
        """Return a lower bound of the step time if no pipeline ends before `ends_s`.

        The first stage of a pipeline ends last. Its gradients are summed after that, then those of
        a tied embedding, and no update starts before: each sum takes as long as its ring alone.
        """
        slowest = max(range(len(ends_s)), key=ends_s.__getitem__)
        if self._parameters.full_shard:
            return ends_s[slowest]

        # it goes backward last, so that the sums of its gradients start last
        first_stage = plan.pipelines[slowest].stages[0]
        rings = Rings(self._fleet, self._links, self._rings)
        gradients_s = 0.0
        tied_s = 0.0
        for job in self._memory.sync_jobs(plan):
            if first_stage.workers[0] not in job.members:
                continue
            seconds = rings.of(job).seconds
            if job.tied:
                tied_s = max(tied_s, seconds)
            else:
                gradients_s = max(gradients_s, seconds)

        sharing = sharing_of(plan)
        update_s = 0.0
        for pipeline in plan.pipelines:
            for terms in self._stages.every_terms(pipeline, sharing):
                update_s = max(update_s, terms.update_s)
        # a little less, since the simulation adds the same seconds in another order
        return (ends_s[slowest] + (gradients_s + tied_s) + update_s) * (1 - 1e-9)

    def _bound_s(self, plan: Plan, pipeline: Pipeline) -> float:
        return pipeline_bound_s(self.pipeline_times(plan, pipeline), pipeline.num_microbatches)

    def _ends_of_stages(self, plan: Plan, pipeline: Pipeline) -> tuple[float, ...]:
        times = self.pipeline_times(plan, pipeline)
        key = (times, pipeline.num_microbatches)
        known = self._ends.get(key)
        if known is None:
            known = self._ends[key] = ends_of_stages(times, pipeline.num_microbatches)
            evict_oldest(self._ends, _PIPELINES)
        return known

    def pipeline_times(self, plan: Plan, pipeline: Pipeline) -> PipelineTimes:
        """Return stage and boundary seconds of one pipeline of a plan.

        NICs are shared with the plan's other pipelines.
        """
        forward_s = list[float]()
        backward_s = list[float]()
        every_terms = self._stages.every_terms(pipeline)
        for stage, terms in zip(pipeline.stages, every_terms, strict=True):
            forward = terms.forward_s
            backward = terms.backward_s
            if self._parameters.full_shard:
                forward, backward = self._gathered_s(plan, stage, forward, backward)
            forward_s.append(forward)
            backward_s.append(backward)

        send_forward, send_backward = self._boundaries.of(plan, pipeline)
        return PipelineTimes(
            forward_s=tuple(forward_s),
            backward_s=tuple(backward_s),
            send_forward_s=tuple(self._forward_passes * seconds for seconds in send_forward),
            send_backward_s=send_backward,
            transfers=self._parameters.transfers,
            most_in_flight=pipeline.most_in_flight,
        )

    def _gathered_s(
        self, plan: Plan, stage: Stage, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Return seconds of a microbatch in a stage that gathers weights and reduces gradients.

        Both run beside its work.
        """
        all_reduce_s = 0.0
        for job in self._memory.sync_jobs(plan):
            if stage.workers[0] in job.members:
                members = self._fleet.members_of(job.members)
                all_reduce_s += self._links.all_reduce_s(members, job.num_bytes)
        return overlapped_s(forward_s, backward_s, all_reduce_s, stage.num_layers)
