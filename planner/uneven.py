"""Stages of uneven shares in plans of `autohet`: the fleets that may use them, and their search.

A fleet may use them if the number of a node's GPUs is no power of two (it lost one), or if unlike
nodes are joined by links as fast as those inside. The best plan of even stages is then searched
first. A second search begins with that plan and with groups of uneven shares among the others. Its
plan is taken if its step is shorter by `limits.MIN_SPEEDUP`.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planner.cluster import Fleet, NodeType
from planner.cost.model import CostModel
from planner.cost.uneven import UnevenGroup, gain, uneven_group
from planner.errors import ConfigError, InfeasibleError
from planner.model_spec import ModelSpec
from planner.plan import Plan, Stage
from planner.search import limits
from planner.search.autohet import drafted, improved
from planner.search.bound import Proof
from planner.search.cost_tables import microbatch_sizes, tables_of
from planner.search.memory import (
    cost_like,
    fewest_shared,
    levels,
    proof_for,
    search_with_memory,
    with_room_or_without,
)
from planner.search.moves import GpuGroup, Moves, groups_of
from planner.search.problem import TIME_IS_OVER, Answer, Rejected, Request, check_request
from planner.search.tables import Tables

OUTSIDE = "nothing is proved: there may be uneven stages, for which the bound does not hold"


def search_with_uneven(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Search like `search_with_memory`, but take uneven stages if they are clearly faster.

    Raises:
        InfeasibleError: no plan fits.
    """
    check_request(request)
    known = list(seeds)
    return with_room_or_without(lambda asked: _searched(asked, known), request)


def _searched(request: Request, known: list[Plan]) -> Answer:
    groups = uneven_groups(request)
    if not groups:
        return _proved(request, search_with_memory(request, known))
    even = None
    refused = InfeasibleError("")
    try:
        even = search_with_memory(
            replace(request, prove=False), [plan for plan in known if not uneven_stages(plan)]
        )
    except InfeasibleError as error:
        refused = error
    asked = replace(request, uneven=groups)
    if even is not None and request.is_late:
        skipped = Rejected("stages of uneven shares", TIME_IS_OVER)
        return _proved(request, replace(even, rejected=(*even.rejected, skipped)))
    found = _found(asked, even, known)
    if found is None and even is None:
        raise refused
    return _proved(asked, _chosen(even, found))


def uneven_groups(request: Request) -> tuple[UnevenGroup, ...]:
    """Return the groups of GPUs that may be a stage with uneven shares.

    Candidates are three GPUs of a node whose GPU count is no power of two (five to seven GPUs would
    have the same largest share as four), and some mixes of unlike nodes that are joined. Only
    groups that are clearly faster than any even part of them are returned. Unlike GPUs are mixed
    for a model with experts only if tokens may go to them by all-to-all, which such stages then
    use. By a sum, each rank decides by its own scores which experts a token goes to, and kernels of
    unlike GPUs may round these differently.
    """
    if not request.cost.parameters.uneven_shares:
        return ()
    spec = request.spec
    sizes = microbatch_sizes(request)
    most = min(spec.max_tp_degree, request.max_tp_degree or spec.max_tp_degree)
    types = [kind for kind in request.cost.fleet.node_types if kind.num_gpus]
    may_mix = _may_mix(request.cost)
    mixes: list[tuple[NodeType, ...]] = [
        (kind,) * 3 for kind in types if kind.num_gpus & (kind.num_gpus - 1)
    ]
    for one, other in itertools.combinations(types, 2):
        if may_mix and _joined(one, other):
            numbers = itertools.product(range(1, one.num_gpus + 1), range(1, other.num_gpus + 1))
            mixes += [(one,) * i + (other,) * j for i, j in numbers if i + j <= limits.UNEVEN_GPUS]
    size = sizes[len(sizes) // 2]
    fitting = [mix for mix in mixes if request.min_tp_degree <= len(mix) <= most]
    groups = [uneven_group(request.cost, mix, size) for mix in fitting]
    found = [group for group in groups if group is not None]
    return tuple(each for each in found if gain(request.cost, each, size) >= limits.MIN_SPEEDUP)


def check_like_gpus(plan: Plan, fleet: Fleet, spec: ModelSpec) -> None:
    """Check that the GPUs of each stage that routes tokens to experts are of one type.

    With all-to-all one rank alone routes each token, so types may differ.

    Raises:
        ConfigError: a stage mixes types; see `uneven_groups` for the reason.
    """
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            end = stage.first_layer + stage.num_layers
            if not any(block.has_experts for block in spec.blocks[stage.first_layer : end]):
                continue
            if stage.expert_dispatch == "all_to_all":
                continue
            types = sorted({fleet.gpu_type(worker) for worker in stage.workers})
            if len(types) > 1:
                raise ConfigError(
                    f"stage {number} of pipeline {index} routes tokens to experts on"
                    f" {' and '.join(types)}, whose kernels may round a router's scores"
                    " differently; give each such stage GPUs of one type, or"
                    " expert_dispatch: all_to_all"
                )


def _may_mix(cost: CostModel) -> bool:
    """Return True if stages that route tokens to experts, if there are any, may use all-to-all."""
    routing = [block for block in cost.spec.blocks if block.has_experts]
    known = all(block.experts is not None for block in routing)
    return not routing or (known and cost.choices.expert_dispatch != "sum")


def _joined(one: NodeType, other: NodeType) -> bool:
    """Return True if unlike GPUs reach each other as fast as GPUs of one node.

    That must also hold while all GPUs of their nodes communicate at the same time.
    """
    inside = max(kind.intra_node_bytes_per_s for kind in (one, other))
    return (
        one.gpu_type != other.gpu_type
        and min(kind.inter_node_bytes_per_s / kind.num_gpus for kind in (one, other)) >= inside
    )


def uneven_stages(plan: Plan) -> list[Stage]:
    """Return the stages that have uneven shares."""
    return [stage for stage in plan.stages if stage.tp_shares]


def _found(request: Request, even: Answer | None, known: Sequence[Plan]) -> Answer | None:
    """The best plan that may have uneven stages, searched from the best ones without; None where
    none fits.
    """
    begin = [*known] if even is None else [even.plan, *even.candidates[: limits.WALKS], *known]
    for cost in _costs(request, even):
        asked = replace(request, cost=cost, prove=False)
        try:
            moves = Moves(tables_of(asked), random.Random(0), request.mixed_microbatch)
            found = improved(drafted(asked, [*begin, *plans_with_group(moves, begin)]))
        except InfeasibleError:
            continue
        plan = fewest_shared(request.cost, found.plan)
        return replace(found, plan=plan, prediction=request.cost.predict(plan))
    return None


def _costs(request: Request, even: Answer | None) -> list[CostModel]:
    """Return one cost model for each search, with its choices for saving memory.

    They are the choices of the even plan, or all allowed ones if there is no even plan.
    """
    if even is not None:
        return [cost_like(request.cost, even.plan)]
    fixed = request.cost.choices.is_fixed
    return [request.cost] if fixed else [request.cost.assuming(each) for each in levels(request)]


def plans_with_group(moves: Moves, plans: Sequence[Plan]) -> list[Plan]:
    """The plans with the GPUs of one uneven group as a stage, where most of them were and as a
    pipeline of their own; those that drafts say are quickest.
    """
    made: set[Plan] = set()
    for plan in plans:
        for group in _members(moves.tables):
            made.update(_with_group(moves, plan, group))
    return sorted(made, key=lambda plan: (_draft_s(moves, plan), plan.to_json()))[: limits.DRAFTS]


def _members(tables: Tables) -> Iterator[GpuGroup]:
    """GPUs of the first nodes of each uneven group's types."""
    names = {resource.node_type: resource.node_names for resource in tables.resources}
    for group in dict.fromkeys(kind.group for kind in tables.kinds if kind.group):
        for nodes in itertools.islice(
            itertools.product(*(names[kind] for kind in group.nodes)), limits.SHORTLIST
        ):
            numbers = [group.kinds.count(kind) for kind in group.nodes]
            gpus: list[str] = []
            for node, number in zip(nodes, numbers, strict=True):
                gpus += [f"{node}/{gpu}" for gpu in range(number)]
            yield tuple(gpus)


def _with_group(moves: Moves, plan: Plan, group: GpuGroup) -> Iterator[Plan]:
    taken = set(group)
    left = [
        [of for of in groups_of(pipeline) if taken.isdisjoint(of)] for pipeline in plan.pipelines
    ]
    hit = [len(taken.intersection(pipeline.workers)) for pipeline in plan.pipelines]
    taker = hit.index(max(hit))
    giver = plan.pipelines[taker]
    mine = left[taker]
    place = next((i for i, of in enumerate(groups_of(giver)) if not taken.isdisjoint(of)), 0)
    pairs = list(zip(plan.pipelines, left, strict=True))
    others = [pair for i, pair in enumerate(pairs) if i != taker and pair[1]]
    for changed in ([[*mine[:place], group, *mine[place:]]], [mine, [group]]):
        for size in moves.tables.sizes if moves.mixed_sizes else [giver.microbatch_sequences]:
            made = [moves.cut(groups, size) for groups in changed if groups]
            made += [
                p if groups == groups_of(p) else moves.cut(groups, p.microbatch_sequences)
                for p, groups in others
            ]
            whole = [pipeline for pipeline in made if pipeline is not None]
            shared = moves.shared(plan, whole) if len(whole) == len(made) else None
            if shared is not None:
                yield shared


def _draft_s(moves: Moves, plan: Plan) -> float:
    """Estimate the step time from the tables, without gradient sync.

    It is infinite if no pipeline has a shape in the tables.
    """
    shapes = [(moves.shape(pipeline), pipeline.num_microbatches) for pipeline in plan.pipelines]
    return max(
        (moves.estimator.pipeline_s(shape, count) for shape, count in shapes if shape),
        default=math.inf,
    )


def _chosen(even: Answer | None, found: Answer | None) -> Answer:
    """The plan with uneven stages where it is clearly faster; either says so of the other."""
    stages = uneven_stages(found.plan) if found is not None else []
    if even is None:
        assert found is not None
        return replace(found, choice="no plan of even stages fits") if stages else found
    if found is None:
        return even
    if not stages:
        return min(even, found, key=lambda each: each.prediction.step_time_s)
    even_s = even.prediction.step_time_s
    found_s = found.prediction.step_time_s
    if found_s * limits.MIN_SPEEDUP > even_s:
        why = (
            f"{found_s:.4g} s a step, not {limits.MIN_SPEEDUP - 1:.0%} faster than even ones with"
            f" {even_s:.4g} s"
        )
        return replace(even, rejected=(*even.rejected, Rejected("stages of uneven shares", why)))
    why = (
        f"with even stages alone the step would be {even_s / found_s - 1:.1%} longer"
        f" ({even_s:.4g} s)"
    )
    return replace(found, choice=f"{sentence(stages)}: {why}")


def sentence(stages: Sequence[Stage]) -> str:
    """Describe the stages that have uneven shares."""
    first = stages[0]
    held = ", ".join(
        f"{share} to {worker}" for worker, share in zip(first.workers, first.tp_shares, strict=True)
    )
    more = f", and {len(stages) - 1} more stages have uneven shares" if len(stages) > 1 else ""
    return (
        f"layers {first.first_layer} to {first.end_layer - 1} are cut into {first.num_parts} parts,"
        f" {held}{more}"
    )


def _proved(request: Request, answer: Answer) -> Answer:
    """Return the answer with a lower bound that also covers plans with uneven stages.

    If the bound does not hold, the answer says that nothing is proved.
    """
    if not is_bounded(request, answer.plan):
        proof = Proof(None, None, OUTSIDE)
    elif request.uneven and request.prove:
        proof = proof_for(request, answer.prediction.step_time_s)
    else:
        return answer
    report = replace(
        answer.search, lower_bound_s=proof.lower_bound_s, gap=proof.gap, proof=proof.says
    )
    return replace(answer, search=report)


def is_bounded(request: Request, plan: Plan) -> bool:
    """Return True if the bound holds for a plan and all others with the request's uneven groups.

    On one node the rows of the tables are the least time of any shares. For groups over several
    nodes there are no such rows.
    """
    spec = request.spec
    groups = {group.kinds for group in request.uneven}
    node_of = request.fleet.node_of
    nodes = [list(map(node_of, stage.workers)) for stage in uneven_stages(plan)]
    if not groups and not nodes:
        return True  # the fleet has no GPUs for such stages
    cut = (
        spec.key_value_units == 0 or spec.key_value_units >= spec.max_tp_degree
    )  # else it matters which part is whose
    inside = (
        cut
        and all(len(set(kinds)) == 1 for kinds in groups)
        and all(len({node.name for node in each}) == 1 for each in nodes)
    )
    return inside and all(tuple(node.node_type for node in each) in groups for each in nodes)
