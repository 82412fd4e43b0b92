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

from planner.cost.model import CostModel
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.fleet import Fleet, NodeType, node_of
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.shares import UnevenGroup
from planner.search.autohet import draft, improve
from planner.search.bounds.bound import Proof
from planner.search.memory import (
    cost_like,
    fewest_shared,
    levels,
    proof_for,
    search_with_memory,
    with_room_or_without,
)
from planner.search.problem import limits
from planner.search.problem.cost_tables import microbatch_sizes, tables_of
from planner.search.problem.request import TIME_IS_OVER, Answer, Rejected, Request, check_request
from planner.search.problem.tables import Tables
from planner.search.uneven_groups import gain, uneven_group
from planner.search.walk.moves import GpuGroup, Moves, groups_of

OUTSIDE = "no lower bound (none holds for the uneven stages that this fleet may have)"


def search_with_uneven(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Search like `search_with_memory`, but take uneven stages if they are clearly faster.

    Raises:
        InfeasibleError: no plan fits.
    """
    check_request(request)
    known = list(seeds)
    return with_room_or_without(lambda asked: _search(asked, known), request)


def _search(request: Request, known: list[Plan]) -> Answer:
    groups = uneven_groups(request)
    if not groups:
        return _with_proof(request, search_with_memory(request, known))
    known_even = [plan for plan in known if not uneven_stages(plan)]
    even = None
    refused = InfeasibleError("")
    try:
        even = search_with_memory(replace(request, prove=False), known_even)
    except InfeasibleError as error:
        refused = error

    asked = replace(request, uneven=groups)
    if even is not None and request.is_late:
        skipped = Rejected("stages of uneven shares", TIME_IS_OVER)
        return _with_proof(request, replace(even, rejected=(*even.rejected, skipped)))

    found = _search_uneven(asked, even, known)
    if found is None and even is None:
        raise refused
    return _with_proof(asked, _choose(even, found))


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
    sizes = microbatch_sizes(request)
    size = sizes[len(sizes) // 2]
    found = []
    for mix in _candidate_mixes(request):
        group = uneven_group(request.cost, mix, size)
        if group is not None and gain(request.cost, group, size) >= limits.MIN_SPEEDUP:
            found.append(group)
    return tuple(found)


def _candidate_mixes(request: Request) -> list[tuple[NodeType, ...]]:
    """Return the node types of each candidate's GPUs, one entry per GPU."""
    types = request.cost.fleet.gpu_node_types
    mixes: list[tuple[NodeType, ...]] = []
    for kind in types:
        is_power_of_two = kind.num_gpus & (kind.num_gpus - 1) == 0
        if not is_power_of_two:
            mixes.append((kind,) * 3)

    if _may_mix(request.cost):
        for one, other in itertools.combinations(types, 2):
            if _are_joined(one, other):
                mixes += _mixes_of(one, other)

    most = request.spec.max_tp_degree
    if request.max_tp_degree:
        most = min(most, request.max_tp_degree)
    return [mix for mix in mixes if len(mix) <= most]


def _mixes_of(one: NodeType, other: NodeType) -> Iterator[tuple[NodeType, ...]]:
    """Yield every mix of GPUs of two nodes that is small enough to be tried."""
    for num_ones in range(1, one.num_gpus + 1):
        for num_others in range(1, other.num_gpus + 1):
            if num_ones + num_others <= limits.UNEVEN_GPUS:
                yield (one,) * num_ones + (other,) * num_others


def check_like_gpus(plan: Plan, fleet: Fleet, spec: ModelSpec) -> None:
    """Check that the GPUs of each stage that routes tokens to experts are of one type.

    With all-to-all one rank alone routes each token, so types may differ.

    Raises:
        ConfigError: a stage mixes types; see `uneven_groups` for the reason.
    """
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            blocks = spec.blocks[stage.first_layer : stage.end_layer]
            routes_tokens = any(block.has_experts for block in blocks)
            if not routes_tokens or stage.expert_dispatch == "all_to_all":
                continue
            types = sorted(fleet.gpu_types_of(stage.workers))
            if len(types) > 1:
                raise ConfigError(
                    f"stage {number} of pipeline {index} routes tokens to experts on"
                    f" {' and '.join(types)}, whose kernels may round a router's scores"
                    " differently; give each such stage GPUs of one type, or"
                    " expert_dispatch: all_to_all"
                )


def _may_mix(cost: CostModel) -> bool:
    """Return True if stages that route tokens to experts, if there are any, may use all-to-all."""
    sums_only = cost.choices.expert_dispatch == "sum"
    for block in cost.spec.blocks:
        if block.has_experts and (block.experts is None or sums_only):
            return False
    return True


def _are_joined(one: NodeType, other: NodeType) -> bool:
    """Return True if unlike GPUs reach each other as fast as GPUs of one node.

    That must also hold while all GPUs of their nodes communicate at the same time.
    """
    if one.gpu_type == other.gpu_type:
        return False
    fastest_inside = max(one.intra_node_bytes_per_s, other.intra_node_bytes_per_s)
    link_of_one = one.inter_node_bytes_per_s / one.num_gpus
    link_of_other = other.inter_node_bytes_per_s / other.num_gpus
    return min(link_of_one, link_of_other) >= fastest_inside


def uneven_stages(plan: Plan) -> list[Stage]:
    """Return the stages that have uneven shares."""
    return [stage for stage in plan.stages if stage.tp_shares]


def _search_uneven(request: Request, even: Answer | None, known: Sequence[Plan]) -> Answer | None:
    """Return the best plan that may have uneven stages; None if none fits.

    The search begins with the best plans of even stages.
    """
    begin = list(known)
    if even is not None:
        begin = [even.plan, *even.candidates[: limits.UNEVEN], *known]
    for cost in _costs(request, even):
        asked = replace(request, cost=cost, prove=False)
        try:
            moves = Moves(tables_of(asked), random.Random(0))
            starts = [*begin, *plans_with_group(moves, begin)]
            found = improve(draft(asked, starts))
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
    if request.cost.choices.is_fixed:
        return [request.cost]
    return [request.cost.with_assumption(each) for each in levels(request)]


def plans_with_group(moves: Moves, plans: Sequence[Plan]) -> list[Plan]:
    """Return plans that have the GPUs of one uneven group as a stage, the quickest by drafts.

    The group replaces the stages that most of its GPUs were in, or is a pipeline of its own.
    """
    found: set[Plan] = set()
    for plan in plans:
        for group in _members(moves.tables):
            found.update(_with_group(moves, plan, group))

    def by_draft(plan: Plan) -> tuple[float, str]:
        # the document breaks ties, as a set has no order
        return _draft_s(moves, plan), plan.to_json()

    return sorted(found, key=by_draft)[: limits.DRAFTS]


def _members(tables: Tables) -> Iterator[GpuGroup]:
    """Yield GPUs of the first nodes of each uneven group's types."""
    names = {resource.node_type: resource.node_names for resource in tables.resources}
    groups = dict.fromkeys(kind.group for kind in tables.kinds if kind.group)
    for group in groups:
        names_by_kind = [names[kind] for kind in group.nodes]
        choices = itertools.product(*names_by_kind)
        for nodes in itertools.islice(choices, limits.SHORTLIST):
            gpus: list[str] = []
            for node, kind in zip(nodes, group.nodes, strict=True):
                number = group.kinds.count(kind)
                gpus += [f"{node}/{gpu}" for gpu in range(number)]
            yield tuple(gpus)


def _with_group(moves: Moves, plan: Plan, group: GpuGroup) -> Iterator[Plan]:
    """Yield the plan with a group as a stage of the pipeline that has most of its GPUs.

    Stages that lose a GPU to the group are dropped, in other pipelines too.
    """
    taken = set(group)
    left: list[list[GpuGroup]] = []
    hits: list[int] = []
    for pipeline in plan.pipelines:
        left.append([each for each in groups_of(pipeline) if taken.isdisjoint(each)])
        hits.append(len(taken.intersection(pipeline.workers)))

    taker = hits.index(max(hits))
    giver = plan.pipelines[taker]
    mine = left[taker]
    place = 0
    for index, each in enumerate(groups_of(giver)):
        if not taken.isdisjoint(each):
            place = index
            break

    others: list[tuple[Pipeline, list[GpuGroup]]] = []
    for index, pipeline in enumerate(plan.pipelines):
        if index != taker and left[index]:
            others.append((pipeline, left[index]))

    as_stage = [[*mine[:place], group, *mine[place:]]]
    as_pipeline = [mine, [group]]
    for changed in (as_stage, as_pipeline):
        for size in moves.tables.sizes:
            found = _cut_again(moves, changed, size, others)
            shared = None if found is None else moves.share_batch(plan, found)
            if shared is not None:
                yield shared


def _cut_again(
    moves: Moves,
    changed: Sequence[list[GpuGroup]],
    size: int,
    others: Sequence[tuple[Pipeline, list[GpuGroup]]],
) -> list[Pipeline] | None:
    """Return pipelines over `changed` groups and over what is left of the others.

    None if the model does not fit the groups of one of them.
    """
    found = [moves.cut(groups, size) for groups in changed if groups]
    for pipeline, groups in others:
        is_whole = groups == groups_of(pipeline)
        found.append(pipeline if is_whole else moves.cut(groups, pipeline.microbatch_sequences))
    pipelines = []
    for cut in found:
        if cut is None:
            return None
        pipelines.append(cut)
    return pipelines


def _draft_s(moves: Moves, plan: Plan) -> float:
    """Estimate the step time from the tables, without gradient sync.

    It is infinite if no pipeline has a shape in the tables.
    """
    seconds = []
    for pipeline in plan.pipelines:
        shape = moves.shape(pipeline)
        if shape:
            seconds.append(moves.estimator.way(shape).step_s(pipeline.num_microbatches))
    return max(seconds, default=math.inf)


def _choose(even: Answer | None, found: Answer | None) -> Answer:
    """Return the plan with uneven stages if it is clearly faster, with a reason either way."""
    if found is None:
        assert even is not None
        return even
    stages = uneven_stages(found.plan)
    if even is None:
        return replace(found, choice="no plan of even stages fits") if stages else found
    if not stages:
        return min(even, found, key=lambda each: each.prediction.step_time_s)
    even_s = even.prediction.step_time_s
    found_s = found.prediction.step_time_s
    if found_s * limits.MIN_SPEEDUP > even_s:
        why = (
            f"{found_s:.4g} s a step, not {limits.MIN_SPEEDUP - 1:.0%} faster than even ones with"
            f" {even_s:.4g} s"
        )
        slower = Rejected("stages of uneven shares", why)
        return replace(even, rejected=(*even.rejected, slower))
    why = (
        f"with even stages alone the step would be {even_s / found_s - 1:.1%} longer"
        f" ({even_s:.4g} s)"
    )
    return replace(found, choice=f"{sentence(stages)}: {why}")


def sentence(stages: Sequence[Stage]) -> str:
    """Describe the stages that have uneven shares."""
    first = stages[0]
    shares = [
        f"{share} to {worker}" for worker, share in zip(first.workers, first.tp_shares, strict=True)
    ]
    text = (
        f"layers {first.first_layer} to {first.end_layer - 1} are cut into {first.num_parts} parts,"
        f" {', '.join(shares)}"
    )
    if len(stages) > 1:
        text += f", and {len(stages) - 1} more stages have uneven shares"
    return text


def _with_proof(request: Request, answer: Answer) -> Answer:
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
    groups = {group.kinds for group in request.uneven}
    stages = uneven_stages(plan)
    if not groups and not stages:
        return True  # the fleet has no GPUs for such stages

    # if keys and values are cut into fewer parts, it matters which rank has which part
    units = request.spec.key_value_units
    cuts_alike = units == 0 or units >= request.spec.max_tp_degree
    if not cuts_alike or any(len(set(kinds)) > 1 for kinds in groups):
        return False

    for stage in stages:
        nodes = set(map(node_of, stage.workers))
        kinds = request.fleet.node_types_of(stage.workers)
        if len(nodes) > 1 or kinds not in groups:
            return False
    return True
