"""Choices for the stages of a plan that a search leaves open.

They are number formats, uneven shares, savings of memory, the way of tokens to experts, and the
number of microbatches in flight.
"""

from dataclasses import dataclass, replace

from planner.cost.basis import CostBasis
from planner.cost.layers.expert_dispatch import DispatchCosts
from planner.cost.layers.layer_costs import Assumed
from planner.cost.memory.plan_memory import PlanMemory
from planner.cost.stage_costs import StageCosts
from planner.plans.in_flight import MOST_AHEAD
from planner.plans.plan import COMPUTE_FORMATS, Pipeline, Plan, Stage


@dataclass(frozen=True)
class StageChoices:
    """Choices for plans on one fleet.

    assumed: recomputation and sharing of optimizer state among which stages may choose.
    """

    basis: CostBasis
    stages: StageCosts
    memory: PlanMemory
    dispatch: DispatchCosts
    assumed: Assumed

    def working_ahead(self, plan: Plan, most: int = MOST_AHEAD) -> Plan:
        """Return the plan as it would be run.

        Each stage computes in the format of its GPU types. Shares of uneven stages follow what
        their GPUs can carry. Stages then get what they do for memory, if there is a choice
        (`Assumed.choices`), and those with experts the faster way of tokens to them. State goes to
        host memory if all plans have it there. Last, if transfers run beside the work, stages keep
        as many microbatches in flight as fit, at most `most` more at each stage than at the next.
        """
        if self.basis.parameters.offload_optimizer:
            plan = plan.with_offloading()
        owns_matrices = self.basis.workload.spec.uses_muon and len(plan.pipelines) > 1
        if owns_matrices:
            # Muon's matrices have one owner each, so their state is shared out.
            plan = plan.map_stages(lambda stage: replace(stage, shard_optimizer=True))
        # shares depend on formats, and what fits in memory on both
        plan = self.with_formats(plan)
        plan = self.memory.with_shares(plan)
        choices = self.assumed.choices
        if choices:
            shard = owns_matrices or self.assumed.holders > 1
            plan = self.memory.with_choices(plan, choices, shard)
        plan = self.with_dispatch(plan)
        if self.basis.parameters.transfers != "none":
            return plan
        return self.memory.working_ahead(plan, most)

    def ways_ahead(self, plan: Plan) -> list[Plan]:
        """Return the plan for each number by which stages may keep more microbatches than the next.

        Fewest in flight first; each plan once.
        """
        ways = [self.working_ahead(plan, most) for most in range(1, MOST_AHEAD + 1)]
        return list(dict.fromkeys(ways))

    def with_formats(self, plan: Plan) -> Plan:
        """Return the plan with the format of each stage's GPU types, where not the precision."""
        if not self.basis.formats.by_type or plan.spmd is not None:
            return plan
        return plan.map_stages(self._with_format)

    def _with_format(self, stage: Stage) -> Stage:
        unnamed = replace(stage, compute=None)
        compute = self.basis.formats.of(unnamed)
        # a plan names formats only where they differ from the job's precision
        if compute == self.basis.workload.precision:
            return unnamed
        for each in COMPUTE_FORMATS:
            if each == compute:
                return replace(stage, compute=each)
        return unnamed

    def with_dispatch(self, plan: Plan) -> Plan:
        """Return the plan with an allowed way of tokens to experts for each stage.

        Stages of unlike GPUs use all-to-all (`planner.strategies.autohet_uneven.check_like_gpus`).
        """
        if self.dispatch.allowed == "sum" or plan.spmd is not None:
            return plan

        def choose(pipeline: Pipeline) -> Pipeline:
            stages = [self._with_dispatch(pipeline, i) for i in range(len(pipeline.stages))]
            return replace(pipeline, stages=tuple(stages))

        return plan.map_pipelines(choose)

    def _with_dispatch(self, pipeline: Pipeline, index: int) -> Stage:
        by_sum, sending = self._ways_of(pipeline.stages[index])
        if not self.dispatch.applies(by_sum):
            return by_sum
        if self.dispatch.allowed == "all_to_all" or self.dispatch.mixes_types(by_sum):
            return sending
        if self.dispatch_gain_s(pipeline, index) <= 0:
            return by_sum
        # its buffers take room that a sum does not need
        terms = self.stages.terms(_with_stage(pipeline, index, sending), index)
        return sending if terms.room(0.0) >= pipeline.in_flight(index) else by_sum

    def _ways_of(self, stage: Stage) -> tuple[Stage, Stage]:
        """Return the stage with a sum, and with all-to-all.

        The latter is sequence parallel if it can be: its ranks then have their parts of the tokens
        already. A sum carries the same bytes either way.
        """
        was_cut = stage.sequence_parallel and stage.expert_dispatch != "all_to_all"
        by_sum = replace(stage, expert_dispatch=None, sequence_parallel=was_cut)
        recompute = self.basis.workload.recompute_of(stage)
        may_cut = self.basis.parameters.may_cut_sequence and recompute != "selective"
        is_cut = was_cut or may_cut
        sending = replace(by_sum, expert_dispatch="all_to_all", sequence_parallel=is_cut)
        return by_sum, sending

    def dispatch_gain_s(self, pipeline: Pipeline, index: int) -> float:
        """Return the seconds that all-to-all saves over a sum in one stage.

        They are those of a microbatch in both passes.
        """
        by_sum, sending = self._ways_of(pipeline.stages[index])
        by_sum_s = self._both_passes_s(_with_stage(pipeline, index, by_sum), index)
        sending_s = self._both_passes_s(_with_stage(pipeline, index, sending), index)
        return by_sum_s - sending_s

    def _both_passes_s(self, pipeline: Pipeline, index: int) -> float:
        forward_s, backward_s = self.stages.seconds(pipeline, index)
        return forward_s + backward_s


def _with_stage(pipeline: Pipeline, index: int, stage: Stage) -> Pipeline:
    """Return the pipeline with another stage in a place."""
    stages = (*pipeline.stages[:index], stage, *pipeline.stages[index + 1 :])
    return replace(pipeline, stages=stages)
