"""What the controller asks of the planner: a plan for a fleet, or the advice to stay as it is. No Ray, no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autohet.runtime.job import Job
from planner.cluster import Fleet
from planner.cost import CostModel, Prediction
from planner.errors import ConfigError
from planner.model_spec import ModelSpec
from planner.plan import Plan, check_plan
from planner.strategies import Answer, Request, plan_with


@dataclass(frozen=True)
class Proposal:
    """A plan with what is predicted of it. `stay` says that the present plan is better kept, and `reason` why."""

    plan: Plan
    prediction: Prediction
    cost: CostModel
    idle: tuple[str, ...] = ()
    stay: bool = False
    reason: str = ""

    @property
    def predicted_step_s(self) -> float:
        return self.prediction.step_time_s

    @property
    def headline(self) -> str:
        pipelines = self.plan.pipelines
        shapes = " + ".join(str(len(pipeline.stages)) for pipeline in pipelines)
        noun = "pipeline" if len(pipelines) == 1 else "pipelines"
        return f"train on {len(pipelines)} {noun} ({shapes} stages, {len(self.plan.workers)} GPUs)"


class Planning:
    """The planner as one job uses it: its spec, profile and wishes are fixed, the fleet is the argument."""

    def __init__(
        self,
        job: Job,
        spec: ModelSpec,
        make_cost: Callable[[Fleet], CostModel],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.job = job
        self.spec = spec
        self.make_cost = make_cost
        self.clock = clock

    def propose(self, fleet: Fleet, current: Proposal | None, cause: str = "start") -> Proposal:
        """The best plan for `fleet`; after an arrival, the present plan where the move would not pay.

        Raises:
            ConfigError: no plan exists for this fleet (InfeasibleError), or the job's wishes are wrong.
        """
        cost = self.make_cost(fleet)
        fixed = self._fixed_plan(fleet, cost)
        if fixed is not None:
            return fixed
        answer = plan_with(self.job.parallelism.strategy, self.request(fleet, cost))
        proposal = self._proposal(answer, cost)
        if cause == "arrival" and current is not None:
            return self._weigh(proposal, current)
        return proposal

    def request(self, fleet: Fleet, cost: CostModel) -> Request:
        """The job's wishes as one planning problem."""
        wishes, training = self.job.parallelism, self.job.training
        return Request(
            fleet=cost.fleet,
            spec=self.spec,
            cost=cost,
            global_batch_sequences=training.global_batch_sequences,
            sequence_length=training.sequence_length,
            microbatch_sequences=wishes.microbatch_sequences,
            max_tp_degree=wishes.max_tp_degree,
            max_stages=wishes.max_pipeline_stages,
            objective=wishes.objective,
            max_usd_per_hour=wishes.max_usd_per_hour,
            min_node_disjoint_holders=max(wishes.redundancy, wishes.min_pipelines),
            time_limit_s=wishes.search_time_limit_s,
            clock=self.clock,
        )

    def _proposal(self, answer: Answer, cost: CostModel) -> Proposal:
        check_plan(answer.plan, self.spec.num_layers)
        idle = tuple(f"{', '.join(idle.workers)}: {idle.why}" for idle in answer.idle)
        return Proposal(answer.plan, answer.prediction, cost, idle)

    def _fixed_plan(self, fleet: Fleet, cost: CostModel) -> Proposal | None:
        """The plan that the job names, while all its workers are there."""
        path = self.job.parallelism.plan
        if path is None:
            return None
        try:
            plan = Plan.from_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read parallelism.plan '{path}': {error.strerror}") from None
        check_plan(plan, self.spec.num_layers)
        if not set(plan.workers) <= set(fleet.workers):
            return None
        return Proposal(plan, cost.predict(plan), cost)

    def _weigh(self, new: Proposal, current: Proposal) -> Proposal:
        """Whether a move pays within the horizon: steps gained by the faster plan against the steps that the move costs."""
        horizon = self.job.parallelism.horizon_s
        pause = 2.0 * current.predicted_step_s + 5.0
        before = horizon / current.predicted_step_s
        after = max(0.0, horizon - pause) / new.predicted_step_s
        if after > before:
            return new
        reason = (
            f"the best plan with it takes {new.predicted_step_s:.3g} s a step against {current.predicted_step_s:.3g} s now: over the next "
            f"{horizon:.0f} s it would do {after:.0f} steps instead of {before:.0f}"
        )
        return Proposal(current.plan, current.prediction, current.cost, current.idle, stay=True, reason=reason)
