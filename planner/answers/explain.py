"""Explanation of a plan in sentences.

For each node type they say where it is, what limits it there, what its next best place would cost,
and what one more node would earn. Every figure comes from a new question: the prediction of the
plan with one thing changed, or a search on a fleet that differs in one thing. Nothing is taken from
the search's own reasons.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Plan
from planner.search.memory import cost_like
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Answer, Request
from planner.search.walk.judge import unacceptable
from planner.search.walk.moves import GpuGroup, Moves, groups_of
from planner.strategies.autohet_uneven import search_with_uneven, uneven_groups, uneven_stages
from planner.strategies.dispatch import dispatch_reason

FASTER = 1.1  # times the speed, to see what speed is worth
WIDER = 2.0  # times the bandwidth of its links, and times the memory
BINDS = 0.005  # of the step: what earns less binds nothing


@dataclass(frozen=True)
class NodeTypeUse:
    """Use of one node type in a plan, and its bottleneck.

    where: the type's stages, in words.
    gains: relative gain in speed of the whole plan if these nodes had FASTER times the speed, WIDER
    times the link bandwidth or WIDER times the memory (the last by a search).
    limit: the largest of these gains; "none" if no gain is above BINDS.
    next_best: alternative place of the type's groups, in words; None if there is none.
    next_best_slower: relative slow-down of that alternative, negative if it is faster; None if
    there is none.
    """

    node_type: str
    workers: int
    where: str
    gains: dict[str, float]
    limit: str
    next_best: str | None
    next_best_slower: float | None

    def sentence(self) -> str:
        """Return the explanation as text for the user."""
        meant = {
            "speed": (
                f"its speed binds ({self.gains['speed']:+.1%} if it were {FASTER - 1:.0%} faster)"
            ),
            "link": f"its links bind ({self.gains['link']:+.1%} with twice the bandwidth)",
            "memory": f"its memory binds ({self.gains['memory']:+.1%} with twice of it)",
            "none": "nothing of it binds: others end later",
        }
        text = f"{self.node_type} ({self.workers} GPUs): {self.where}; {meant[self.limit]}."
        if self.next_best is None or self.next_best_slower is None:
            return f"{text} There is no other place for it that fits."
        how = "slower" if self.next_best_slower >= 0 else "faster"
        return f"{text} Next best: {self.next_best}, {abs(self.next_best_slower):.1%} {how}."


@dataclass(frozen=True)
class OneMore:
    """Gain from one more node of a type, by a search on the larger fleet."""

    node_type: str
    tokens_per_s: float
    gained_tokens_per_s: float
    usd_per_million_tokens: float | None
    more_usd_per_million_tokens: float | None

    def sentence(self) -> str:
        """Return the gain as text for the user."""
        if abs(self.gained_tokens_per_s) < BINDS * self.tokens_per_s:
            return (
                f"One more {self.node_type}: nothing that a search finds"
                f" ({self.gained_tokens_per_s:+,.0f} tokens/s)."
            )
        text = (
            f"One more {self.node_type}: {self.gained_tokens_per_s:+,.0f} tokens/s"
            f" ({self.tokens_per_s:,.0f} in all)"
        )
        if self.usd_per_million_tokens is None or self.more_usd_per_million_tokens is None:
            return text + "."
        return (
            f"{text}, {self.usd_per_million_tokens:.3f} $/M tokens"
            f" ({self.more_usd_per_million_tokens:+.3f})."
        )


@dataclass(frozen=True)
class Explanation:
    """Explanation of one plan.

    uneven: sentences on the gain from stages with uneven shares, if it has some.
    zones: sentences on the data that it carries between zones.
    experts: sentences on the ways of tokens to experts, if there is a choice.
    """

    places: tuple[NodeTypeUse, ...]
    one_more: tuple[OneMore, ...]
    uneven: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        return [
            *self.uneven,
            *self.zones,
            *self.experts,
            *(place.sentence() for place in self.places),
            *(more.sentence() for more in self.one_more),
        ]

    def to_document(self) -> dict[str, Any]:
        return {
            "places": [asdict(place) for place in self.places],
            "one_more_node": [asdict(more) for more in self.one_more],
            "sentences": self.sentences(),
        }


def explain(request: Request, answer: Answer) -> Explanation:
    """Explain a search's answer to the request. Runs two searches per node type."""
    used = set(request.fleet.node_types_of(answer.plan.workers))
    places = [
        _place(request, answer, kind) for kind in request.cost.fleet.gpu_node_types if kind in used
    ]
    additions = []
    for kind in request.cost.fleet.gpu_node_types:
        one_more = _one_more(request, answer, kind)
        if one_more is not None:
            additions.append(one_more)

    uneven = (f"{answer.choice}.",) if uneven_stages(answer.plan) else ()
    dispatch = dispatch_reason(request.cost, answer.plan)
    experts = (f"{dispatch[0].upper()}{dispatch[1:]}.",) if dispatch else ()
    return Explanation(
        tuple(places),
        tuple(additions),
        uneven,
        tuple(_between_zones(answer.prediction)),
        experts,
    )


def _between_zones(prediction: Prediction) -> Iterator[str]:
    for each in prediction.transfers:
        found = each.to_document(prediction.step_time_s)
        yield (
            f"Between {each.zones[0]} and {each.zones[1]} go {found['gb_per_hour']:,.1f} GB/h for"
            f" {found['usd_per_hour']:.2f} $/h."
        )


def _place(request: Request, answer: Answer, kind: NodeType) -> NodeTypeUse:
    gains = _gains(request, answer, kind)
    most = max(gains, key=lambda name: gains[name])
    limit = most if gains[most] > BINDS else "none"
    words = None
    slower = None
    next_best = _next_best(request, answer.plan, kind)
    if next_best is not None:
        words, step_s = next_best
        slower = step_s / answer.prediction.step_time_s - 1
    return NodeTypeUse(
        kind.name,
        request.fleet.node_types_of(answer.plan.workers).count(kind),
        _where(request.fleet, answer.plan, kind),
        gains,
        limit,
        words,
        slower,
    )


def _where(fleet: Fleet, plan: Plan, kind: NodeType) -> str:
    """Describe the type's stages: number, blocks, pipelines and place (first, middle, last)."""
    blocks = list[int]()
    ends = set[str]()
    num_pipelines = 0
    num_alone = 0
    for pipeline in plan.pipelines:
        last = len(pipeline.stages) - 1
        mine = []
        for index, stage in enumerate(pipeline.stages):
            if kind in fleet.node_types_of(stage.workers):
                mine.append(index)
                blocks.append(stage.num_layers)
        if mine:
            num_pipelines += 1
        if len(mine) == len(pipeline.stages):
            num_alone += 1
            continue
        for index in mine:
            if index == 0:
                ends.add("first")
            elif index == last:
                ends.add("last")
            else:
                ends.add("middle")

    held = f"{blocks[0]}"
    if min(blocks) < max(blocks):
        held = f"{min(blocks)} to {max(blocks)}"
    parts = []
    if num_alone:
        parts.append(f"{num_alone} of them its own")
    if ends:
        order = " and ".join(end for end in ("first", "middle", "last") if end in ends)
        parts.append(f"{order} in the others" if num_alone else order)
    return (
        f"{len(blocks)} stages of {held} blocks in {num_pipelines} of"
        f" {len(plan.pipelines)} pipelines ({', '.join(parts)})"
    )


def _gains(request: Request, answer: Answer, kind: NodeType) -> dict[str, float]:
    """Return the relative gain in speed from a faster GPU, wider links and more memory.

    Speed and links: the same plan, predicted again. Memory may change the best plan, so its gain
    comes from a search.
    """
    cost = request.cost
    quick = replace(kind, slowdown=kind.slowdown / FASTER)
    linked = replace(
        kind,
        intra_node_bytes_per_s=WIDER * kind.intra_node_bytes_per_s,
        inter_node_bytes_per_s=WIDER * kind.inter_node_bytes_per_s,
    )
    large = replace(kind, gpu_memory_bytes=int(WIDER * kind.gpu_memory_bytes))

    step_s = answer.prediction.step_time_s
    gains = {}
    for name, other in (("speed", quick), ("link", linked)):
        varied = cost.with_node_types({kind: other})
        gains[name] = step_s / varied.predict(answer.plan).step_time_s - 1

    roomy = cost.with_node_types({kind: large})
    better = _search_from(replace(request, fleet=roomy.fleet, cost=roomy), answer.plan)
    gains["memory"] = 0.0
    if better is not None:
        gains["memory"] = max(0.0, step_s / better.prediction.step_time_s - 1)
    return gains


def _search_from(request: Request, seed: Plan) -> Answer | None:
    try:
        return search_with_uneven(replace(request, prove=False), [seed])
    except InfeasibleError:
        return None


def _next_best(request: Request, plan: Plan, kind: NodeType) -> tuple[str, float] | None:
    """Return the fastest plan with the type's groups elsewhere, in words, and its step time.

    The layers of changed pipelines are cut again and the microbatches are shared again.
    """
    tables = tables_of(replace(request, uneven=uneven_groups(request)))
    moves = Moves(tables, random.Random(0))
    found = []
    for words, change in _changes(request.fleet, kind):
        step_s = _changed_s(request, plan, moves, change)
        if step_s is not None:
            found.append((words, step_s))
    return min(found, key=lambda each: each[1], default=None)


def _changes(
    fleet: Fleet, kind: NodeType
) -> Iterator[tuple[str, Callable[[list[GpuGroup]], list[GpuGroup]]]]:
    """Yield each other place for a type's groups: in words, and as a change of a pipeline."""

    def split(groups: list[GpuGroup]) -> tuple[list[GpuGroup], list[GpuGroup]]:
        mine = [group for group in groups if fleet.node_of(group[0]).node_type == kind]
        others = [group for group in groups if group not in mine]
        return mine, others

    def to_front(groups: list[GpuGroup]) -> list[GpuGroup]:
        mine, others = split(groups)
        return mine + others

    def to_end(groups: list[GpuGroup]) -> list[GpuGroup]:
        mine, others = split(groups)
        return others + mine

    def without(groups: list[GpuGroup]) -> list[GpuGroup]:
        _, others = split(groups)
        return others

    yield "at the beginning of its pipelines", to_front
    yield "at the end of its pipelines", to_end
    yield "left idle", without


def _changed_s(
    request: Request, plan: Plan, moves: Moves, change: Callable[[list[GpuGroup]], list[GpuGroup]]
) -> float | None:
    """Return the step time of the plan with each pipeline's groups changed.

    None if the change has no effect, or if the plan may not be chosen.
    """
    made = []
    for pipeline in plan.pipelines:
        groups = change(groups_of(pipeline))
        if groups == groups_of(pipeline):
            made.append(pipeline)
        elif groups:
            cut = moves.cut(groups, pipeline.microbatch_sequences)
            if cut is None:
                return None
            made.append(cut)
    if not made or tuple(made) == plan.pipelines:
        return None
    shared = moves.share_batch(plan, made)
    if shared is None:
        return None
    ready = cost_like(request.cost, plan).stage_choices.working_ahead(shared)
    prediction = request.cost.predict(ready)
    if unacceptable(request, ready, prediction):
        return None
    return prediction.step_time_s


def _one_more(request: Request, answer: Answer, kind: NodeType) -> OneMore | None:
    """Search the fleet with one more node of a type, beginning with the current plan."""
    names = {node.name for node in request.fleet.nodes}
    number = 0
    while f"{kind.name}-{number}" in names:
        number += 1
    added = Node(f"{kind.name}-{number}", kind)
    fleet = replace(request.fleet, nodes=(*request.fleet.nodes, added))
    cost: CostModel = request.cost.with_fleet(fleet)
    better = _search_from(replace(request, fleet=fleet, cost=cost), answer.plan)
    if better is None:
        return None
    before = answer.prediction
    after = better.prediction
    usd = after.usd_per_million_tokens
    usd_before = before.usd_per_million_tokens
    more_usd = None
    if usd is not None and usd_before is not None:
        more_usd = usd - usd_before
    return OneMore(
        kind.name,
        after.tokens_per_s,
        after.tokens_per_s - before.tokens_per_s,
        usd,
        more_usd,
    )
