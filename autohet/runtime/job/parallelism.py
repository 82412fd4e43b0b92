"""The `parallelism` section: limits and wishes for the planner."""

from dataclasses import dataclass
from typing import Literal

from autohet.runtime.job.requirements import require, require_at_least, require_positive
from planner.plans.plan import ComputeFormat

GIB = 1 << 30

DEFAULT_STRATEGY = "autohet"
MAX_TRANSFER_SHARE = 0.05
"""Limit on the price of data between zones over that of the nodes, unless the job sets `max_zones`.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelismSection:
    """Limits and wishes for the planner."""

    strategy: str = DEFAULT_STRATEGY
    """Name of the search that chooses the plan."""
    spmd: bool = False
    """Let `autohet` choose one SPMD program on uneven shares over pipelines, if that is faster."""
    microbatch_sequences: int | None = None
    """Sequences in a microbatch; null: the planner chooses."""
    max_tp_degree: int | None = None
    """Largest tensor-parallel degree; null: the largest that model and node allow."""
    max_pipeline_stages: int | None = None
    """Largest number of stages of a pipeline; null: the number of layers."""
    min_pipelines: int = 1
    """Fewest pipelines, each of which has one copy of the model.

    2: every shard has live holders on two nodes, so that one death costs no work. 1: a shard that
    one node alone holds is copied to another node in rounds.
    """
    redundancy: int = 1
    """Nodes that must hold each shard of the training state live.

    A shard that one node alone holds is copied to another unless `checkpoint.replicate_every_steps`
    is 0.
    """
    objective: Literal["time", "cost"] = "time"
    """Objective of the planner; time: least step time; cost: least money per token."""
    max_usd_per_hour: float | None = None
    """Bound on the price of the nodes used, in dollars an hour; null: no bound.

    It is held while prices move, and covers idle nodes too where the job buys its nodes.
    """
    max_zones: int | None = None
    """Limit on the zones that a plan may span.

    null: any number, if data between the zones costs at most 5% of the plan's nodes. With
    `objective: cost` the price per token decides instead.
    """
    compute_formats: Literal["auto", "off"] | dict[str, ComputeFormat] = "auto"
    """Number format in which each GPU type computes, in jobs of `training.precision: bf16`.

    auto: types without bf16 (T4, V100) compute in fp16. off: such types are left out. A mapping of
    GPU types to fp32, bf16, fp16 or fp8 names some; the others are as under auto. Only a mapping
    chooses fp8: products in 8 bits, on types that have such units. Masters, moments and gradient
    sums are fp32 in all of them, and weights that `model.adapter` leaves untrained are stored in
    bf16. Jobs with `parallelism.spmd` have one format.
    """
    expert_dispatch: Literal["auto", "sum", "all_to_all"] = "auto"
    """Way in which tokens reach their experts in a tensor-parallel group, for mixtures of experts.

    sum: each rank computes its experts for all tokens, and a sum over the group adds their outputs.
    all_to_all: each rank routes its part of the tokens and sends them to the owners of their
    experts. auto: the planner chooses for each stage by predicted time.
    """
    memory_reserve_bytes: int = 1 * GIB
    """Bytes of memory that the plan leaves free on each GPU.

    They cover context, library workspace and fragmentation; communicators are counted apart.
    """
    search_time_limit_s: float = 10.0
    """Time limit of one search for a plan, in seconds."""
    horizon_s: float | None = None
    """Seconds until the fleet is expected to change again; a move must earn its cost within them.

    null: estimated from a prior and from how long nodes of each type have lived in this run
    (autohet/control/planning/outlook.py).
    """
    profile: str | None = None
    """Path of a profile table; null: the bundled measurements."""
    links: str | None = None
    """Path of a link table; null: labels and catalogue."""
    plan: str | None = None
    """Path of a plan to run as it is while all its workers are there; null: the planner chooses.

    While it costs more than `max_usd_per_hour`, the planner chooses too. It is refused if it keeps
    a layer on fewer nodes than `min_pipelines` or `redundancy` ask for.
    """

    def __post_init__(self) -> None:
        _check_strategy(self.strategy)
        for name in (
            "microbatch_sequences",
            "max_tp_degree",
            "max_pipeline_stages",
            "min_pipelines",
            "max_zones",
        ):
            require_at_least(f"parallelism.{name}", getattr(self, name), 1)
        require_at_least("parallelism.redundancy", self.redundancy, 1)
        require_at_least("parallelism.memory_reserve_bytes", self.memory_reserve_bytes, 0)
        require_positive("parallelism.search_time_limit_s", self.search_time_limit_s)
        require_positive("parallelism.horizon_s", self.horizon_s)
        require_positive("parallelism.max_usd_per_hour", self.max_usd_per_hour)

    @property
    def named_formats(self) -> dict[str, ComputeFormat]:
        """Formats that `compute_formats` names, by GPU type as the job writes it."""
        return {} if isinstance(self.compute_formats, str) else self.compute_formats

    @property
    def max_transfer_share(self) -> float | None:
        """Limit on the price of data between zones, as a fraction of the price of a plan's nodes.

        None: no limit, since the job sets `max_zones` or its objective is not time.
        """
        if self.max_zones is not None or self.objective != "time":
            return None
        return MAX_TRANSFER_SHARE


def _check_strategy(strategy: str) -> None:
    if strategy == DEFAULT_STRATEGY:
        return
    # Every worker loads the job, and the searches take half a second to import.
    from planner.strategies import STRATEGIES

    names = ", ".join(STRATEGIES)
    require(
        strategy in STRATEGIES,
        f"parallelism.strategy is '{strategy}', which does not exist; choose one of: {names}",
    )
