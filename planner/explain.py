"""Explanation of a plan in sentences.

For each node type they say where it is, what limits it there, what its next best place would cost,
and what one more node would earn. Every figure comes from a new question: the prediction of the
plan with one thing changed, or a search on a fleet that differs in one thing. Nothing is taken from
the search's own reasons.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster import Fleet, Node, NodeType
from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.search.cost_tables import tables_of
from planner.search.judge import unacceptable
from planner.search.memory import cost_like
from planner.search.moves import GpuGroup, Moves, groups_of
from planner.search.problem import Answer, Request
from planner.strategies.dispatch import dispatch_reason
from planner.uneven import search_with_uneven, uneven_groups, uneven_stages

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
            "places": [
                {name: getattr(place, name) for name in NodeTypeUse.__dataclass_fields__}
                for place in self.places
            ],
            "one_more_node": [
                {name: getattr(more, name) for name in OneMore.__dataclass_fields__}
                for more in self.one_more
            ],
            "sentences": self.sentences(),
        }


def explain(request: Request, answer: Answer) -> Explanation:
    """Explain a search's answer to the request. Runs two searches per node type."""
    used = {request.fleet.node_of(worker).node_type for worker in answer.plan.workers}
    kinds = [kind for kind in request.cost.fleet.node_types if kind.num_gpus]
    dispatch = dispatch_reason(request.cost, answer.plan)
    return Explanation(
        tuple(_place(request, answer, kind) for kind in kinds if kind in used),
        tuple(more for kind in kinds if (more := _one_more(request, answer, kind)) is not None),
        (f"{answer.choice}.",) if uneven_stages(answer.plan) else (),
        tuple(_between_zones(answer.prediction)),
        (f"{dispatch[0].upper()}{dispatch[1:]}.",) if dispatch else (),
    )


def _between_zones(prediction: Prediction) -> Iterator[str]:
    for each in prediction.transfers:
        found = each.to_document(prediction.step_time_s)
        yield (
            f"Between {each.zones[0]} and {each.zones[1]} go {found['gb_per_hour']:,.1f} GB/h for"
            f" {found['usd_per_hour']:.2f} $/h."
        )


def _place(request: Request, answer: Answer, kind: NodeType) -> NodeTypeUse:
    gains, best = _gains(request, answer, kind), _next_best(request, answer.plan, kind)
    most = max(gains, key=lambda name: gains[name])
    return NodeTypeUse(
        kind.name,
        sum(request.fleet.node_of(worker).node_type == kind for worker in answer.plan.workers),
        _where(request.fleet, answer.plan, kind),
        gains,
        most if gains[most] > BINDS else "none",
        None if best is None else best[0],
        None if best is None else best[1] / answer.prediction.step_time_s - 1,
    )


def _where(fleet: Fleet, plan: Plan, kind: NodeType) -> str:
    """Describe the type's stages: number, blocks, pipelines and place (first, middle, last)."""
    blocks = list[int]()
    ends = set[str]()
    pipelines = 0
    alone = 0
    for pipeline in plan.pipelines:
        types = [
            {fleet.node_of(worker).node_type for worker in stage.workers}
            for stage in pipeline.stages
        ]
        mine = [i for i, found in enumerate(types) if kind in found]
        pipelines = pipelines + bool(mine)
        alone = alone + (len(mine) == len(pipeline.stages))
        blocks += [pipeline.stages[i].num_layers for i in mine]
        for i in mine if len(mine) < len(pipeline.stages) else ():
            if i == 0:
                ends.add("first")
            elif i == len(pipeline.stages) - 1:
                ends.add("last")
            else:
                ends.add("middle")
    held = f"{min(blocks)} to {max(blocks)}" if min(blocks) < max(blocks) else f"{blocks[0]}"
    text = (
        f"{len(blocks)} stages of {held} blocks in {pipelines} of {len(plan.pipelines)} pipelines"
    )
    order = " and ".join(end for end in ("first", "middle", "last") if end in ends)
    parts = [f"{alone} of them its own"] if alone else []
    if order:
        parts.append(f"{order} in the others" if alone else order)
    return f"{text} ({', '.join(parts)})"


def _gains(request: Request, answer: Answer, kind: NodeType) -> dict[str, float]:
    """Return the relative gain in speed from a faster GPU, wider links and more memory.

    Speed and links: the same plan, predicted again. Memory may change the best plan, so its gain
    comes from a search.
    """
    step_s = answer.prediction.step_time_s
    cost = request.cost
    quick = replace(kind, slowdown=kind.slowdown / FASTER)
    linked = replace(
        kind,
        intra_node_bytes_per_s=WIDER * kind.intra_node_bytes_per_s,
        inter_node_bytes_per_s=WIDER * kind.inter_node_bytes_per_s,
    )
    found = {
        name: step_s / cost.varied({kind: other}).predict(answer.plan).step_time_s - 1
        for name, other in (("speed", quick), ("link", linked))
    }
    large = cost.varied({kind: replace(kind, gpu_memory_bytes=int(WIDER * kind.gpu_memory_bytes))})
    better = _searched(replace(request, fleet=large.fleet, cost=large), answer.plan)
    return found | {
        "memory": 0.0 if better is None else max(0.0, step_s / better.prediction.step_time_s - 1)
    }


def _searched(request: Request, seed: Plan) -> Answer | None:
    try:
        return search_with_uneven(replace(request, prove=False), [seed])
    except InfeasibleError:
        return None


def _next_best(request: Request, plan: Plan, kind: NodeType) -> tuple[str, float] | None:
    """Return the fastest plan with the type's groups elsewhere, in words, and its step time.

    The layers of changed pipelines are cut again and the microbatches are shared again.
    """
    tables = tables_of(replace(request, uneven=uneven_groups(request)))
    moves = Moves(tables, random.Random(0), request.mixed_microbatch)
    found = []
    for words, change in _changes(request.fleet, kind):
        step_s = _changed_s(request, plan, moves, change)
        if step_s is not None:
            found.append((words, step_s))
    return min(found, key=lambda each: each[1], default=None)


def _changes(
    fleet: Fleet, kind: NodeType
) -> Iterator[tuple[str, Callable[[list[GpuGroup]], list[GpuGroup]]]]:
    def parted(groups: list[GpuGroup]) -> tuple[list[GpuGroup], list[GpuGroup]]:
        mine = [group for group in groups if fleet.node_of(group[0]).node_type == kind]
        return mine, [group for group in groups if group not in mine]

    yield "at the beginning of its pipelines", lambda groups: parted(groups)[0] + parted(groups)[1]
    yield "at the end of its pipelines", lambda groups: parted(groups)[1] + parted(groups)[0]
    yield "left idle", lambda groups: parted(groups)[1]


def _changed_s(
    request: Request, plan: Plan, moves: Moves, change: Callable[[list[GpuGroup]], list[GpuGroup]]
) -> float | None:
    """Step time of the plan with each pipeline's groups changed; None where that is the plan itself
    or may not be.
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
    shared = moves.shared(plan, made)
    if shared is None:
        return None
    ready = cost_like(request.cost, plan).stage_choices.working_ahead(shared)
    prediction = request.cost.predict(ready)
    return None if unacceptable(request, ready, prediction) else prediction.step_time_s


def _one_more(request: Request, answer: Answer, kind: NodeType) -> OneMore | None:
    """Search the fleet with one more node of a type, beginning with the current plan."""
    names = {node.name for node in request.fleet.nodes}
    name = next(name for i in range(len(names) + 1) if (name := f"{kind.name}-{i}") not in names)
    fleet = replace(request.fleet, nodes=(*request.fleet.nodes, Node(name, kind)))
    cost: CostModel = request.cost.on(fleet)
    better = _searched(replace(request, fleet=fleet, cost=cost), answer.plan)
    if better is None:
        return None
    before = answer.prediction
    after = better.prediction
    usd = after.usd_per_million_tokens
    was = before.usd_per_million_tokens
    return OneMore(
        kind.name,
        after.tokens_per_s,
        after.tokens_per_s - before.tokens_per_s,
        usd,
        None if usd is None or was is None else usd - was,
    )
