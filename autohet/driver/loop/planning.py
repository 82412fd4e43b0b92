"""Planner as one job uses it: a plan for a fleet, or the advice to stay as it is."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autohet.control.planning.outlook import MOST_S, MOVE_PRIOR_S
from autohet.control.planning.proposals import (
    Pending,
    PendingCall,
    PendingSearch,
    Planner,
    PlanProposal,
    PlanResult,
    Q,
    T,
)
from autohet.runtime.facts.planning import PlanningInputs, planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.step.precision import check_plan_formats
from planner.answers.repair import repair
from planner.answers.replan import MigrationCost, ReplanDecision, replan
from planner.cost.memory.host_memory import sentences
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, framework_parameters
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.cluster import Cluster
from planner.inputs.documents import read_text
from planner.inputs.fleet import Fleet, NodeBound
from planner.inputs.zones import ZoneTable
from planner.plans.plan import Plan
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import require_disjoint_holders
from planner.search.walk.judge import unacceptable
from planner.strategies import Answer, Request, plan_with
from planner.strategies.autohet_uneven import check_like_gpus
from planner.strategies.pareto import may_use_all
from planner.strategies.speeds import FleetSpeeds, fleet_speeds

REPLANNING_STRATEGY = "autohet"


@dataclass(frozen=True)
class Question:
    """Question of whether to stay with a plan, and else which plan to move to.

    thorough: as in `Planning.propose`.
    """

    plan: Plan
    request: Request
    horizon_s: float
    move_s: float
    thorough: bool | None


def chooses_nodes(request: Request) -> bool:
    """Return True if a search compares parts of the fleet, since the price decides."""
    return request.objective != "time" or not may_use_all(request)


def replanned(asked: Question) -> ReplanDecision:
    """Decide by the useful work until the fleet is expected to change again.

    The cost of a move is subtracted.
    """
    migration = MigrationCost(fixed_s=asked.move_s, horizon_s=asked.horizon_s)
    return replan(asked.plan, asked.request, migration=migration, thorough=asked.thorough)


class Planning:
    """Planner as one job uses it: spec, profile and wishes are fixed, the fleet is the argument."""

    def __init__(
        self, inputs: PlanningInputs, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.inputs = inputs
        self.job = inputs.job
        if self.job.elastic.has_goal:
            # The buyer chooses the nodes by price: a plan makes the most of them.
            wishes = replace(self.job.parallelism, objective="time")
            self.job = replace(self.job, parallelism=wishes)
        self.clock = clock
        self.horizon_s = inputs.job.parallelism.horizon_s or MOST_S
        self.move_s = MOVE_PRIOR_S
        self._max_transfer_share = inputs.job.parallelism.max_transfer_share
        self.bound: NodeBound | None = None
        """Bound on the nodes of a fleet that may exist; a living fleet is within it."""

    def expect(self, horizon_s: float, move_s: float) -> None:
        """Set the expectations for the next plans.

        horizon_s: time until the fleet changes again. move_s: cost of a move without its bytes.
        """
        self.horizon_s = horizon_s
        self.move_s = move_s

    def make_cost(self, fleet: Fleet, *, one_format: bool = False) -> CostModel:
        """Return the cost model of a fleet for the way in which this project's runtime runs a step.

        An emulated fleet has the emulated memory. one_format: stages that name no format compute in
        the job's precision, as in a plan that the job names.
        """
        parameters = framework_parameters(OURS, self.inputs.parameters)
        emulated = self.inputs.fleet(fleet)
        return self.inputs.cost_model(emulated, parameters=parameters, one_format=one_format)

    def propose(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        thorough: bool | None = None,
    ) -> PlanProposal:
        """Return the plan that does the most work until the fleet is expected to change again.

        With a present plan that still can run, the answer may be to stay with it. `redundant`
        False: any plan that fits will do, even one without the wished-for copies of each shard.
        `thorough`: whether a whole search is worth its time now; None: as `planner.answers.replan`
        sees fit.

        Raises:
            ConfigError: no plan exists for this fleet (InfeasibleError), or the job's wishes are
            wrong.
        """
        fixed = self._fixed_plan(fleet)
        if fixed is not None and _is_affordable(fixed, self.job):
            return _or_stay(fixed, current)

        cost = self.make_cost(fleet)
        request = self.request(fleet, cost)
        if redundant:
            self.require_nodes(fleet)
        else:
            request = replace(request, min_node_disjoint_holders=1)

        if current is None or not self.can_repair:
            answer = plan_with(self.job.parallelism.strategy, request)
            return _or_stay(self._proposal(answer, cost), current)
        if thorough is None and chooses_nodes(request):
            # A search among fleets takes long: it follows once the job trains on the repair.
            thorough = False
        question = self.question(current, request, thorough)
        return self.concluded(replanned(question), cost)

    @property
    def can_repair(self) -> bool:
        """True if the job's strategy can start from the present plan."""
        wishes = self.job.parallelism
        return wishes.strategy == REPLANNING_STRATEGY and not wishes.spmd

    def ask(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        in_place: bool = False,
    ) -> PlanResult:
        """Run `propose` and time it; that no plan exists is returned, not raised.

        in_place: propose the whole pipelines of the present plan if they can train alone.
        """
        started = self.clock()
        try:
            proposal = None
            if in_place and current is not None:
                proposal = self.keep_pipelines(fleet, current)
            if proposal is None:
                proposal = self.propose(fleet, current, redundant=redundant)
        except ConfigError as error:
            return PlanResult(None, str(error), self.clock() - started)
        return PlanResult(proposal, "", self.clock() - started)

    def keep_pipelines(self, fleet: Fleet, current: PlanProposal) -> PlanProposal | None:
        """Return the present plan without its broken pipelines; None if it may not be chosen."""
        return _whole_pipelines(self, fleet, current)

    def predict(self, plan: Plan, fleet: Fleet) -> PlanProposal:
        """Return a plan that runs on this fleet, with its prediction; nothing is searched.

        Raises:
            ConfigError: the plan does not fit the fleet.
        """
        is_fixed = self.job.parallelism.plan is not None
        cost = self.make_cost(fleet, one_format=is_fixed)
        return PlanProposal(plan, cost.predict(plan), cost)

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        """Return a pending, thorough `propose`, whose result the caller does not wait for."""
        return PendingCall(lambda: self.propose(fleet, current, thorough=True))

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        """Return a pending `work(self, question)`, whose result the caller does not wait for.

        `work` is a function of a module that asks this planner several things.
        """
        return PendingCall(lambda: work(self, question))

    def fleet_speeds(self, cluster: Cluster, also: Sequence[Mapping[str, int]]) -> FleetSpeeds:
        """Return the step times of the fleets that the cluster may become, whatever their price.

        also: fleets, by nodes by type, that are among them in any case.
        """
        kinds = tuple(replace(kind, usd_per_hour=None) for kind in cluster.node_types)
        fleet = replace(cluster, node_types=kinds).fleet()
        request = replace(self.request(fleet, self.make_cost(fleet)), bound=cluster.bound)
        return fleet_speeds(self.job.parallelism.strategy, request, also)

    def host_memory_lacks(self, proposal: PlanProposal) -> list[str]:
        """Return one sentence for each node type whose host memory is short."""
        nodes = proposal.cost.memory_of.host_memory(proposal.plan, self.inputs.kept)
        return sentences(nodes)

    def compute_s(self, proposal: PlanProposal, slowdowns: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of compute that each worker needs for a step.

        `slowdowns` holds the known slowdown of each node.
        """
        plan = proposal.plan
        factors = {}
        for worker in plan.workers:
            node = proposal.cost.fleet.node_of(worker)
            factors[worker] = slowdowns.get(node.name, 1.0)
        if plan.spmd is not None:
            return _spmd_compute_s(proposal, factors)

        found: dict[str, float] = {}
        for pipeline in plan.pipelines:
            for index, stage in enumerate(pipeline.stages):
                parts_s = proposal.cost.stages.seconds(pipeline, index, rated=True)
                microbatch_s = sum(parts_s)
                seconds = pipeline.num_sequences / pipeline.microbatch_sequences * microbatch_s
                # A tensor-parallel group is as fast as its slowest member.
                slowdown = max(factors[worker] for worker in stage.workers)
                for worker in stage.workers:
                    found[worker] = seconds * slowdown
        return found

    def require_nodes(self, fleet: Fleet) -> None:
        """Raise InfeasibleError in the job's terms, before a search would raise it in its own."""
        wishes = self.job.parallelism
        wanted = max(wishes.redundancy, wishes.min_pipelines)
        num_nodes = sum(bool(node.workers) for node in fleet.nodes)
        if num_nodes < wanted:
            # The larger wish is the one to lower.
            name = "min_pipelines" if wishes.min_pipelines == wanted else "redundancy"
            raise InfeasibleError(
                f"parallelism.{name} is {wanted}, so that each layer needs as many nodes, and the"
                f" fleet has {num_nodes}: lower it, or add nodes"
            )

    def question(self, current: PlanProposal, request: Request, thorough: bool | None) -> Question:
        """Return the question for `replanned`, to be answered here or in another process."""
        return Question(
            plan=current.plan,
            request=request,
            horizon_s=self.horizon_s,
            move_s=self.move_s,
            thorough=thorough,
        )

    def concluded(self, decision: ReplanDecision, cost: CostModel) -> PlanProposal:
        """Turn the answer of `replanned` into a proposal for the fleet of this cost model."""
        proposal = self._proposal(decision.answer, cost)
        return replace(
            proposal,
            stay=decision.kind == "stay",
            reason=decision.reason,
            searched=decision.searched,
        )

    def request(self, fleet: Fleet, cost: CostModel) -> Request:
        """Return the job's wishes as one planning problem."""
        wishes = self.job.parallelism
        training = self.job.training
        return Request(
            fleet=cost.fleet,
            spec=self.inputs.spec,
            cost=cost,
            global_batch_sequences=training.global_batch_sequences,
            sequence_length=training.sequence_length,
            microbatch_sequences=wishes.microbatch_sequences,
            max_tp_degree=wishes.max_tp_degree,
            max_stages=wishes.max_pipeline_stages,
            objective=wishes.objective,
            max_usd_per_hour=wishes.max_usd_per_hour,
            max_zones=wishes.max_zones,
            max_transfer_share=self._max_transfer_share,
            bound=self.bound,
            min_node_disjoint_holders=max(wishes.redundancy, wishes.min_pipelines),
            time_limit_s=wishes.search_time_limit_s,
            clock=self.clock,
            spmd=wishes.spmd,
        )

    def _proposal(self, answer: Answer, cost: CostModel) -> PlanProposal:
        check_plan(answer.plan, self.inputs.spec.num_layers)
        idle = [f"{', '.join(group.workers)}: {group.why}" for group in answer.idle]
        return PlanProposal(
            plan=answer.plan, prediction=answer.prediction, cost=cost, idle=tuple(idle)
        )

    def read_fixed_plan(self) -> Plan | None:
        """Return the plan that the job names; None if it names none.

        Raises:
            ConfigError: it cannot be read, does not suit the model, or keeps a layer on fewer nodes
            than the job asks for.
        """
        wishes = self.job.parallelism
        spec = self.inputs.spec
        path = wishes.plan
        if path is None:
            return None
        plan = Plan.from_json(read_text(path, "parallelism.plan"))

        check_plan(
            plan,
            spec.num_layers,
            max_tp_degree=spec.max_tp_degree,
            limited_by=spec.limit_of_parts,
        )
        wanted = max(wishes.redundancy, wishes.min_pipelines)
        try:
            require_disjoint_holders(plan, None, spec.num_layers, wanted)
        except InfeasibleError as error:
            raise ConfigError(
                f"parallelism.plan '{path}': {error}; lay its pipelines on other nodes, or lower"
                " min_pipelines and redundancy"
            ) from None
        return plan

    def _fixed_plan(self, fleet: Fleet) -> PlanProposal | None:
        """Return the plan that the job names, if all its workers are there; else None.

        Raises:
            ConfigError: it mixes GPU types in a stage with experts, or a GPU type has no units for
            the format of its stage.
        """
        plan = self.read_fixed_plan()
        if plan is None:
            return None
        is_whole = set(plan.workers) <= set(fleet.workers)
        if not is_whole:
            return None

        check_like_gpus(plan, fleet, self.inputs.spec)
        check_plan_formats(self.job, plan, fleet)
        if self.job.training.offload == "optimizer" and plan.spmd is None:
            plan = plan.with_offloading()

        cost = self.make_cost(fleet, one_format=True)
        return PlanProposal(plan, cost.predict(plan), cost)


def _is_affordable(fixed: PlanProposal, job: Job) -> bool:
    """Return True unless the plan that the job names costs more than the job's bound now."""
    bound = job.parallelism.max_usd_per_hour
    usd = fixed.prediction.usd_per_hour
    return bound is None or usd is None or usd <= bound


def _or_stay(proposal: PlanProposal, current: PlanProposal | None) -> PlanProposal:
    """Return the advice to stay if the proposed plan is the present one."""
    if current is None or current.plan != proposal.plan:
        return proposal
    return replace(proposal, stay=True, reason="staying: the plan is the present one")


def _whole_pipelines(
    planning: Planning, fleet: Fleet, current: PlanProposal
) -> PlanProposal | None:
    """Return the present plan without its broken pipelines, which nobody has searched.

    Its workers go on with the stages that they have. None if it may not be chosen; the wish for
    copies on several nodes is left to the search that follows.
    """
    if not planning.can_repair or current.plan.spmd is not None:
        return None
    planning.require_nodes(fleet)
    cost = planning.make_cost(fleet)
    request = planning.request(fleet, cost)
    request = replace(request, min_node_disjoint_holders=1, needs_staging_room=False)
    alive = set(fleet.workers)
    plan = repair(current.plan, request, alive, in_place=True)
    if plan is None:
        return None
    cuts_last = any(pipeline.last_microbatch_sequences for pipeline in plan.pipelines)
    if cuts_last and _may_compile(planning.job):
        return None
    prediction = cost.predict(plan)
    if unacceptable(request, plan, prediction) is not None:
        return None
    idle = sorted(alive - set(plan.workers))
    names = (f"{', '.join(idle)}: a worker of their pipeline is lost",) if idle else ()
    return PlanProposal(plan, prediction, cost, names, searched=False)


def _may_compile(job: Job) -> bool:
    """Return True if code may be compiled for one shape of microbatches."""
    training = job.training
    if training.compile_blocks != "auto":
        return training.compile_blocks
    return training.device != "cpu" and job.emulation is None


def _spmd_compute_s(proposal: PlanProposal, factors: Mapping[str, float]) -> dict[str, float]:
    """Return `Planning.compute_s` of a plan of one program; factors: slowdown by worker."""
    found = {}
    passes = proposal.plan.pipelines[0].num_microbatches
    work = proposal.cost.programs.work_by_worker(proposal.plan)
    for worker, (forward_s, backward_s) in work.items():
        found[worker] = passes * (forward_s + backward_s) * factors[worker]
    return found


def make_planning(
    job: Job,
    clock: Callable[[], float] = time.perf_counter,
    zones: ZoneTable | None = None,
) -> Planning:
    """Return the planner for a job. Raises ConfigError where model, profile or links are wrong."""
    return Planning(planning_inputs(job, zones=zones), clock)
