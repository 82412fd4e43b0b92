"""Scenarios of the recovery benchmark, and each policy's schedule.

A scenario is the plans of a real model before and after a change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from autohet.bench.recovery.content import known_checksums
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from planner.inputs.fleet import node_of
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from recovery.state.holdings import Holding, Source, require_restorable_step
from recovery.state.layout import Layout, ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.schedule import TIERS, TransferSchedule, WorkerPart, schedule

NUM_LAYERS = 12
STEP = 20
CHECKPOINT_STEP = 16
STORAGE = "checkpoint"
POLICIES = ("local_first", "s3_only", "restart_local")
StageOf = tuple[int, tuple[str, ...]]


@dataclass(frozen=True)
class RestoreScenario:
    """Change of the fleet.

    Pipelines are tuples of (number of layers, workers). Workers in `leaving` still give their state
    if `cause` is a notice.
    """

    name: str
    what: str
    cause: str
    before: tuple[tuple[StageOf, ...], ...]
    after: tuple[tuple[StageOf, ...], ...]

    def plan(self, pipelines: tuple[tuple[StageOf, ...], ...]) -> Plan:
        found = []
        for stages in pipelines:
            first = 0
            placed = []
            for layers, workers in stages:
                placed.append(Stage(first, layers, workers))
                first += layers
            found.append(Pipeline(tuple(placed), num_microbatches=8, microbatch_sequences=1))
        plan = Plan("bench", 8 * len(found), 1, 128, tuple(found))
        check_plan(plan, first)
        return plan

    @property
    def plan_before(self) -> Plan:
        return self.plan(self.before)

    @property
    def plan_after(self) -> Plan:
        return self.plan(self.after)

    @property
    def givers(self) -> tuple[str, ...]:
        """Workers whose live memory counts.

        They are those that stay and, after a notice, those that leave.
        """
        workers = self.plan_before.workers
        if self.cause == "notice":
            return workers
        stay = set(self.plan_after.workers)
        return tuple(worker for worker in workers if worker in stay)

    @property
    def participants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.givers, *self.plan_after.workers)))


def _one(layers: int, name: str) -> StageOf:
    return layers, (f"{name}/0",)


def _pair(layers: int, name: str) -> StageOf:
    return layers, (f"{name}/0", f"{name}/1")


_TWO_BY_TWO = ((_one(6, "n0"), _one(6, "n1")), (_one(6, "n2"), _one(6, "n3")))
_ONE_BY_FOUR = (tuple(_one(3, f"n{node}") for node in range(4)),)
_ONE_BY_THREE = (tuple(_one(4, f"n{node}") for node in range(3)),)

_SCENARIOS = (
    RestoreScenario(
        "a",
        "a node leaves; its layers live in another pipeline",
        "death",
        _TWO_BY_TWO,
        ((_one(6, "n0"), _one(6, "n1")), (_one(12, "n2"),)),
    ),
    RestoreScenario(
        "b",
        "a node leaves that held the only copy of some layers",
        "death",
        _ONE_BY_FOUR,
        _ONE_BY_THREE,
    ),
    RestoreScenario(
        "b_notice",
        "the same with notice: it gives its state before it goes",
        "notice",
        _ONE_BY_FOUR,
        _ONE_BY_THREE,
    ),
    RestoreScenario(
        "c",
        "half the fleet leaves; the faster survivor takes more layers",
        "death",
        _TWO_BY_TWO,
        ((_one(8, "n0"), _one(4, "n3")),),
    ),
    RestoreScenario(
        "d",
        "all leave; a new fleet comes",
        "death",
        _TWO_BY_TWO,
        ((_one(6, "m0"), _one(6, "m1")), (_one(6, "m2"), _one(6, "m3"))),
    ),
    RestoreScenario(
        "e",
        "two nodes arrive and form a second pipeline",
        "arrival",
        ((_one(6, "n0"), _one(6, "n1")),),
        _TWO_BY_TWO,
    ),
    RestoreScenario(
        "f",
        "tensor parallelism of degree 2 becomes a longer pipeline without",
        "arrival",
        ((_pair(6, "n0"), _pair(6, "n1")),),
        (((4, ("n0/0",)), (4, ("n0/1",)), (2, ("n1/0",)), (2, ("n1/1",))),),
    ),
)

SCENARIOS: Mapping[str, RestoreScenario] = {scenario.name: scenario for scenario in _SCENARIOS}


def config_of_size(state_bytes: float) -> PreTrainedConfig:
    """Return a Llama of 12 layers and 8 heads with about `state_bytes` of state.

    The state is fp32 masters and Adam moments.
    """
    # A layer has 4 h^2 of attention and 3 h i of MLP, i = 2.75 h; 12 bytes of state a parameter.
    parameters = state_bytes / 12
    exact = math.sqrt(parameters / (12.25 * NUM_LAYERS))
    # eight heads of an even width
    hidden = max(16, 16 * round(exact / 16))
    return load_config(
        ModelSection(
            config={
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": hidden * 11 // 4,
                "num_hidden_layers": NUM_LAYERS,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "vocab_size": 256,
                "max_position_embeddings": 128,
                "tie_word_embeddings": False,
            }
        )
    )


def policy_schedule(
    policy: str,
    scenario: RestoreScenario,
    config: PreTrainedConfig,
    links: LinkRates,
    *,
    checked: bool = True,
) -> tuple[Layout, Layout, TransferSchedule]:
    """Return the layouts before and after, and the policy's schedule for every participant.

    Without `checked` the schedule is not executed, and the contents are not made for their
    checksums (which takes a minute per hundred GB). The state is of STEP; the newest checkpoint, on
    its writers' disks too, of CHECKPOINT_STEP.
    """
    before = layout_of_plan(scenario.plan_before, config)
    after = layout_of_plan(scenario.plan_after, config)
    nodes = {worker: node_of(worker) for worker in (*before.workers, *after.workers)}
    durable = Holding(Source("s3", "", STORAGE, CHECKPOINT_STEP), before.shards)

    live = []
    disks = []
    for worker in before.workers:
        if worker not in scenario.givers:
            continue
        shards = before.shards_by_worker[worker]
        live.append(Holding(Source("worker", nodes[worker], worker, STEP), shards))
        source = Source("disk", nodes[worker], worker, CHECKPOINT_STEP)
        checksums = known_checksums(before, worker, CHECKPOINT_STEP) if checked else {}
        disks.append(Holding(source, shards, checksums))

    if policy == "local_first":
        holdings = [*live, *disks, durable]
        step = require_restorable_step(after.shards, holdings)
        after_nodes = {worker: nodes[worker] for worker in after.workers}
        return before, after, schedule(after, after_nodes, holdings, step, links)

    parts = []
    for worker in after.workers:
        held = [durable]
        if policy == "restart_local":
            own_disks = [disk for disk in disks if disk.source.node == nodes[worker]]
            held = [*own_disks, durable]
        parts.append(_alone(after, worker, nodes[worker], held, links))
    return before, after, _together(parts, nodes, links)


def _alone(
    layout: Layout, worker: str, node: str, holdings: list[Holding], links: LinkRates
) -> tuple[WorkerPart, dict[str, int]]:
    """Return the part of a worker that reads its whole state by itself, and the bytes by tier."""
    mine = replace(layout, shards_by_worker={worker: layout.shards_by_worker[worker]})
    found = schedule(mine, {worker: node}, holdings, CHECKPOINT_STEP, links)
    return found.parts[worker], dict(found.bytes_by_tier)


def _together(
    parts: list[tuple[WorkerPart, dict[str, int]]],
    nodes: Mapping[str, str],
    links: LinkRates,
) -> TransferSchedule:
    """Combine all workers' own reads, which run at once, into one schedule.

    A node's workers share its disk and its link to storage.
    """
    by_node: dict[str, dict[str, float]] = {}
    totals = dict.fromkeys(TIERS, 0)
    for part, tiers in parts:
        node = nodes[part.worker]
        lanes = by_node.setdefault(node, {"disk": 0.0, "s3": 0.0})
        lanes["disk"] += tiers["disk"] / links.disk_bytes_per_s
        lanes["s3"] += tiers["s3"] / links.s3(node)
        for tier in TIERS:
            totals[tier] += tiers[tier]

    bound = max((max(lanes.values()) for lanes in by_node.values()), default=0.0)
    parts_by_worker = {part.worker: part for part, _ in parts}
    return TransferSchedule(CHECKPOINT_STEP, parts_by_worker, bound, bound, totals)


def missing_shards(scenario: RestoreScenario, before: Layout) -> frozenset[ShardId]:
    """Return the shards that no giver holds."""
    held = set[ShardId]()
    for worker in scenario.givers:
        held |= before.shards_by_worker[worker]
    return before.shards - held
