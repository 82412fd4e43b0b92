"""Request of a search and its answer."""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet, NodeBound, node_of
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Plan
from planner.plans.shares import UnevenGroup

Objective = Literal["time", "cost", "pareto"]
NOT_LOOKED_AT = "not looked at"
"""Begin of the reason why a part of a search is among the rejected ones; see `with_cut`."""
TIME_IS_OVER = f"{NOT_LOOKED_AT}: the time limit was over"


def no_clock() -> float:
    """Clock of a search that is not timed.

    It never reaches a time limit, so equal input gives equal plans.
    """
    return 0.0


@dataclass(frozen=True)
class Request:
    """Planning problem: the fleet, the model, and the limits on plans.

    cost: the cost model of this fleet and model spec. microbatch_sequences fixes the size of every
    pipeline's microbatch (None: choose). max_tp_degree limits the TP degree. max_usd_per_hour
    limits the price of the nodes in use; bound limits their number, if the fleet has more than can
    exist at one time.

    max_zones limits the zones that a plan lies in. max_transfer_share limits the price of data
    between zones, as a share of the price of the plan's nodes; it holds if anything cheaper fits.
    min_node_disjoint_holders=2 asks that every layer lie on two nodes at least.

    clock: seconds from any start; without it neither limit of time has an effect and `seconds` is
    0. time_limit_s ends `metis`, `fasop` and `hap`, and gives `autohet` a number of fleets to
    compare: what `autohet` does is counted, so that a busy machine finds the same plan. deadline_s:
    reading of `clock` at which every strategy ends with the best plan so far, and says what it has
    not looked at; for a user who cannot wait longer.

    uneven: groups of GPUs that stages may use with shares of their own
    (`planner.strategies.autohet_uneven`). spmd: `autohet` may answer with one SPMD program on
    uneven shares if that is faster (`planner.spmd`).

    needs_staging_room: refuse a plan whose state a node's host memory cannot take in a change of
    plans. If this refuses all plans, a search runs again without it: a job that can train today is
    not refused for a change that may never come.

    proposed: drafts by fleet and assumption, if requests on parts of one fleet share them: a part
    that is compared by its drafts is often searched in full afterwards.

    prove: prove a lower bound of the step time, which takes up to a second. brief: `autohet` judges
    its first drafts and makes no walk, a tenth of the work: enough to compare many fleets.
    """

    fleet: Fleet
    spec: ModelSpec
    cost: CostModel
    global_batch_sequences: int
    sequence_length: int
    microbatch_sequences: int | None = None
    max_microbatch_sequences: int = 64
    max_tp_degree: int | None = None
    max_stages: int | None = None
    objective: Objective = "time"
    max_usd_per_hour: float | None = None
    bound: NodeBound | None = None
    max_zones: int | None = None
    max_transfer_share: float | None = None
    min_node_disjoint_holders: int = 1
    time_limit_s: float = 60.0
    clock: Callable[[], float] = no_clock
    deadline_s: float = math.inf
    prove: bool = True
    brief: bool = False
    spmd: bool = False
    uneven: tuple[UnevenGroup, ...] = ()
    needs_staging_room: bool = True
    proposed: dict[Hashable, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def is_late(self) -> bool:
        """True once the deadline has passed."""
        return self.clock() >= self.deadline_s

    @property
    def highest_tp_degree(self) -> int:
        """The highest TP degree that the request and the model allow."""
        of_model = self.spec.max_tp_degree
        return min(of_model, self.max_tp_degree or of_model)

    def workers_beside(self, known: Collection[str]) -> tuple[str, ...]:
        """Return the fleet's workers that are not among `known`."""
        return tuple(worker for worker in self.fleet.workers if worker not in known)

    @property
    def deepest(self) -> int:
        """The most stages that a pipeline may have."""
        return min(self.max_stages or self.spec.num_layers, self.spec.num_layers)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """Report of a search.

    lower_bound_s holds for every plan of the searched family under this cost model. gap = step_time
    / lower_bound - 1. Both are None if nothing is proved. proof: a sentence on that. fleets: parts
    of the fleet that the price limit and the file's bounds leave to choose from, if a search
    chooses among them; fleets_searched: those that were looked at. cut: what a deadline left out,
    as "12 of 24 drafts"; empty if the search came to its end.
    """

    seconds: float
    plans_evaluated: int
    lower_bound_s: float | None
    gap: float | None
    proof: str = "no lower bound (this strategy computes none)"
    fleets_searched: int = 1
    fleets: int = 1
    cut: str = ""

    def to_document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rejected:
    """Alternative that the search considered and left, and why.

    lacks_memory_s: the step's seconds of a plan that does not fit; else infinite.
    """

    what: str
    why: str
    lacks_memory_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Idle:
    """Workers of the fleet that the plan leaves unused, and why."""

    workers: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Answer:
    """Answer of a search: the plan found with its prediction.

    choice: a sentence on why it was chosen. candidates: other plans that the search kept, namely
    the results of its walks and the drafts that ranked first. without_formats: prediction of the
    best plan without the GPU types that lack units for the job's precision, if it was searched.
    """

    strategy: str
    plan: Plan
    prediction: Prediction
    search: SearchReport
    rejected: tuple[Rejected, ...] = ()
    idle: tuple[Idle, ...] = ()
    front: Sequence["Answer"] = field(default=())
    candidates: tuple[Plan, ...] = ()
    choice: str = ""
    without_formats: Prediction | None = None

    @property
    def step_time_s(self) -> float:
        return self.prediction.step_time_s

    @property
    def known_workers(self) -> set[str]:
        """Workers that the plan uses or that are reported as idle."""
        known = set(self.plan.workers)
        for idle in self.idle:
            known.update(idle.workers)
        return known

    @property
    def used_nodes(self) -> frozenset[str]:
        """Names of the nodes that the plan uses."""
        return frozenset(node_of(worker) for worker in self.plan.workers)

    def with_front(self, change: Callable[["Answer"], "Answer"]) -> "Answer":
        """Return the answer with each answer of its front changed."""
        front = [change(each) for each in self.front]
        return replace(self, front=tuple(front))

    def add_reason(self, why: str) -> "Answer":
        """Return the answer with one more reason in `choice`."""
        return replace(self, choice=f"{self.choice}; {why}" if self.choice else why)

    def add_idle(self, workers: tuple[str, ...], why: str) -> "Answer":
        """Return the answer with further idle workers, if there are any."""
        return replace(self, idle=(*self.idle, Idle(workers, why))) if workers else self

    def add_rejected(self, *rejected: Rejected) -> "Answer":
        """Return the answer with further alternatives that were left."""
        return replace(self, rejected=(*self.rejected, *rejected))


Search = Callable[[Request], Answer]


def with_cut(request: Request, answer: Answer) -> Answer:
    """Return an answer that says in `search.cut` and `choice` what a limit of time left out."""
    left_out = [each.what for each in answer.rejected if each.why.startswith(NOT_LOOKED_AT)]
    if not left_out and not request.is_late:
        return answer

    cut = ", ".join(dict.fromkeys(left_out)) or "the last parts of the search"
    says = f"the time limit ended the search, so a better plan may exist; not looked at: {cut}"

    def mark(each: Answer) -> Answer:
        report = replace(each.search, cut=cut)
        return replace(each, search=report)

    return mark(answer).with_front(mark).add_reason(says)


def check_request(request: Request) -> None:
    """Raise ConfigError for numbers that no fleet could meet."""
    for name in ("global_batch_sequences", "sequence_length"):
        value = getattr(request, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")

    batch = request.global_batch_sequences
    size = request.microbatch_sequences
    if size is not None and batch % size:
        whole = batch // size
        below = whole * size or size
        above = (whole + 1) * size
        raise ConfigError(
            f"global_batch_sequences {batch} is not divisible by microbatch_sequences {size};"
            f" the nearest batches that are: {below} and {above}"
        )


def narrow_to(request: Request, fleet: Fleet) -> Request:
    """Return the request on a part of its fleet; layer times and predictions are shared."""
    return replace(request, fleet=fleet, cost=request.cost.with_fleet(fleet))
