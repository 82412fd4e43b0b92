"""Questions of the controller to the planner, and its answers: a plan, or the advice to stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from autohet.runtime.job import Job
    from planner.cost.model import CostModel
    from planner.cost.prediction import Prediction
    from planner.inputs.cluster import Cluster
    from planner.inputs.fleet import Fleet, NodeBound
    from planner.plans.plan import Plan
    from planner.strategies.speeds import FleetSpeeds

MOST_LISTED = 8  # pipelines, in a sentence
Q = TypeVar("Q")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class PlanProposal:
    """Plan with its prediction.

    `stay` says that the present plan is better kept, and `reason` why. searched: False where the
    plan is the best repair of the plan before, with nothing else looked at.
    """

    plan: Plan
    prediction: Prediction
    cost: CostModel
    idle: tuple[str, ...] = ()
    stay: bool = False
    reason: str = ""
    searched: bool = True

    @property
    def predicted_step_s(self) -> float:
        return self.prediction.step_time_s

    @property
    def headline(self) -> str:
        if self.plan.spmd is not None:
            return f"train by one program on {len(self.plan.workers)} GPUs with shares of their own"
        depths = [len(pipeline.stages) for pipeline in self.plan.pipelines]
        if len(depths) <= MOST_LISTED:
            shapes = [str(depth) for depth in depths]
        else:
            shapes = [f"{number} x {depth}" for depth, number in Counter(depths).items()]
        noun = "pipeline" if len(depths) == 1 else "pipelines"
        gpus = f"{' + '.join(shapes)} stages, {len(self.plan.workers)} GPUs"
        return f"train on {len(depths)} {noun} ({gpus}{self._formats}){self._price_of_offload}"

    @property
    def _formats(self) -> str:
        """Return how many stages compute in another format than the job's, as part of a phrase."""
        stages = self.plan.stages
        counts = Counter(stage.compute for stage in stages if stage.compute is not None)
        phrase = ""
        for compute, number in sorted(counts.items()):
            phrase += f", {number} of {len(stages)} stages in {compute}"
        return phrase

    @property
    def _price_of_offload(self) -> str:
        if not self.plan.offloads:
            return ""
        update_s = self.prediction.breakdown_s["optimizer"]
        return (
            f", optimizer state in host memory, whose update takes {update_s:.3g} s of each step's"
            f" {self.predicted_step_s:.3g} s"
        )


@dataclass(frozen=True)
class PlanResult:
    """Answer of the planner, and the seconds that it took; where no plan exists, `why_not`."""

    proposal: PlanProposal | None
    why_not: str
    seconds: float


class Pending(Protocol[T_co]):
    """Answer to a question, computed while the caller does not wait."""

    def result(self) -> T_co | None:
        """Return the answer, or None while it is being computed.

        A search raises ConfigError where no plan exists.
        """

    def drop(self) -> None:
        """Drop the computation; its answer is not wanted any more."""


@dataclass(frozen=True)
class PendingCall(Generic[T]):
    """Pending answer that `result` looks up or computes in the caller's own time."""

    result: Callable[[], T | None]

    def drop(self) -> None:
        """No-op: nothing runs in the background."""


PendingSearch = Pending[PlanProposal]
"""Whole search while training continues."""


class Planner(Protocol):
    """Planner of one job: spec, profile and wishes are fixed, the fleet is the argument."""

    job: Job
    horizon_s: float
    move_s: float
    bound: NodeBound | None
    """Bound on the nodes of a fleet that may exist; a living fleet is within it."""

    def expect(self, horizon_s: float, move_s: float) -> None:
        """Set the expectations for the next plans.

        horizon_s: time until the fleet changes again. move_s: cost of a move without its bytes.
        """

    def propose(self, fleet: Fleet, current: PlanProposal | None) -> PlanProposal:
        """Return the plan that does the most work until the fleet is expected to change again.

        With a present plan that still can run, the answer may be to stay with it.

        Raises:
            ConfigError: no plan exists for this fleet (InfeasibleError), or the job's wishes are
            wrong.
        """

    def ask(
        self,
        fleet: Fleet,
        current: PlanProposal | None,
        *,
        redundant: bool = True,
        in_place: bool = False,
    ) -> PlanResult:
        """Run `propose` and time it; that no plan exists is returned, not raised.

        redundant: False where any plan that fits will do, even one without the wished-for copies.
        in_place: propose the whole pipelines of the present plan if they can train alone.
        """

    def predict(self, plan: Plan, fleet: Fleet) -> PlanProposal:
        """Return a plan that runs on this fleet, with its prediction; nothing is searched.

        Raises:
            ConfigError: the plan does not fit the fleet.
        """

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        """Return a pending, thorough `propose`, whose result the caller does not wait for."""

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        """Return a pending `work(planner, question)`, whose result the caller does not wait for."""

    def fleet_speeds(self, cluster: Cluster, also: Sequence[Mapping[str, int]]) -> FleetSpeeds:
        """Return the step times of the fleets that the cluster may become, whatever their price.

        also: fleets, by nodes by type, that are among them in any case.
        """

    def host_memory_lacks(self, proposal: PlanProposal) -> list[str]:
        """Return one sentence for each node type whose host memory is short."""

    def compute_s(self, proposal: PlanProposal, slowdowns: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of compute that each worker needs for a step.

        `slowdowns` holds the known slowdown of each node.
        """
