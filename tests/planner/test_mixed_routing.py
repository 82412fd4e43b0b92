"""Stages that route tokens to experts on unlike GPUs: proposed with all-to-all, where they pay."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.layers.layer_costs import MemoryChoices
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import ConfigError, InfeasibleError
from planner.plans.model_spec import Experts, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.memory import search_with_memory
from planner.strategies import Request, plan_with
from planner.strategies.autohet_uneven import check_like_gpus, uneven_groups
from planner.strategies.dispatch import dispatch_reason
from tests.planner.cases import fleet, model, profile, with_nics

pytestmark = pytest.mark.thorough
LENGTH, LAYERS = 1024, 4
FAST_AND_SLOW = (("A100", 1, 1), ("A10G", 1, 2))
NETWORK = 4e11
"""Bytes/s of a node's NIC: its GPUs reach each other no faster."""


def spec_of(experts: Experts) -> ModelSpec:
    """Blocks with experts, whose weights are most of the model."""
    spec = model(LAYERS, 1024)
    block = spec.blocks[0]
    whole = replace(block, experts=experts, parameters=block.parameters + experts.parameters)
    return replace(spec, blocks=(whole,) * LAYERS)


SPARSE = spec_of(Experts(16, 1, 1 << 27))


def asked(
    types: Any = FAST_AND_SLOW,
    batch: int = 2,
    *,
    way: str = "auto",
    spec: ModelSpec = SPARSE,
    gib: float = 10.0,
    **wishes: Any,
) -> Request:
    of = fleet(*types, memory_gib=dict.fromkeys(("A100", "A10G", "T4"), gib))
    of = with_nics(of, dict.fromkeys(("A100", "A10G", "T4"), NETWORK))
    cost = CostModel(
        of,
        Workload(spec, LENGTH, "fp32"),
        Measurements(profile(sequence_length=LENGTH)),
        framework_parameters(OURS, CostParameters()),
        choices=MemoryChoices(expert_dispatch=way),  # type: ignore[arg-type]
    )
    return Request(of, spec, cost, batch, LENGTH, prove=False, **wishes)


def partitions(items: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """All ways to part the items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for number in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, number):
            left = [item for item in rest if item not in chosen]
            for others in partitions(left):
                yield [[first, *chosen], *others]


def cuts_of(num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for inner in itertools.combinations(range(1, LAYERS), num_stages - 1):
        yield list(itertools.pairwise((0, *inner, LAYERS)))


def stages_of(groups: Sequence[Sequence[str]]) -> Iterator[tuple[Stage, ...]]:
    """All stages of a pipeline on these groups, in this order."""
    shares = []
    for group in groups:
        divided = itertools.product(range(1, 8), repeat=len(group))
        found = [each for each in divided if sum(each) in (4, 8) and len(set(each)) > 1]
        shares.append([*found, ()] if len(group) != 3 else found)
    for cut in cuts_of(len(groups)):
        for chosen in itertools.product(*shares):
            yield tuple(
                Stage(first, end - first, tuple(group), tp_shares=tp_shares)
                for (first, end), group, tp_shares in zip(cut, groups, chosen, strict=True)
            )


def every_plan(request: Request) -> Iterator[Plan]:
    """All plans of all GPUs, or of some, with microbatches of one size."""
    batch, size = request.global_batch_sequences, request.microbatch_sequences
    assert size is not None
    workers = request.fleet.workers
    subsets = (c for n in range(1, len(workers) + 1) for c in itertools.combinations(workers, n))
    for used in subsets:
        for pipelines in partitions(used):
            orders = [
                [
                    list(order)
                    for groups in partitions(members)
                    for order in itertools.permutations(groups)
                ]
                for members in pipelines
            ]
            for chosen in itertools.product(*orders):
                yield from _with_counts(request, batch // size, list(map(stages_of, chosen)))


def _with_counts(request: Request, count: int, choices: list[Any]) -> Iterator[Plan]:
    size = request.microbatch_sequences
    assert size is not None
    for stages in itertools.product(*choices):
        for counts in itertools.product(range(1, count + 1), repeat=len(stages)):
            if sum(counts) == count:
                made = zip(stages, counts, strict=True)
                pipelines = tuple(Pipeline(each, number, size) for each, number in made)
                yield Plan("tiny", count * size, size, LENGTH, pipelines)


def best_s(request: Request) -> float:
    """Step time of the best of all plans, as they would be run."""
    found = float("inf")
    for plan in every_plan(request):
        ready = request.cost.stage_choices.working_ahead(plan)
        try:
            check_like_gpus(ready, request.fleet, request.spec)
        except ConfigError:
            continue
        predicted = request.cost.predict(ready)
        if predicted.fits:
            found = min(found, predicted.step_time_s)
    return found


def mixed_stages(request: Request, plan: Plan) -> list[Stage]:
    return [stage for stage in plan.stages if request.cost.dispatch.mixes_types(stage)]


def test_one_fast_and_two_slow_gpus_share_the_experts_of_a_stage_as_brute_force_does() -> None:
    """The model is too large for one GPU, and one sequence at a time keeps no pipeline busy."""
    request = asked(microbatch_sequences=2)
    answer = plan_with("autohet", request)
    (stage,) = mixed_stages(request, answer.plan)
    assert stage.expert_dispatch == "all_to_all"
    assert stage.tp_shares
    check_like_gpus(answer.plan, request.fleet, request.spec)
    assert answer.prediction.fits
    assert answer.prediction.step_time_s <= best_s(request) * (1 + 1e-9)
    assert "all-to-all in 1 stages of unlike GPUs" in dispatch_reason(request.cost, answer.plan)


def test_a_job_that_sums_or_unknown_experts_mix_no_gpus() -> None:
    assert uneven_groups(asked(microbatch_sequences=2))
    assert not uneven_groups(asked(way="sum", microbatch_sequences=2))
    blocks = tuple(
        replace(block, experts=None, matmul_parameters=block.parameters // 8)
        for block in SPARSE.blocks
    )
    unknown = replace(SPARSE, blocks=blocks)
    assert blocks[0].has_experts
    assert not uneven_groups(asked(spec=unknown, microbatch_sequences=2))


def test_unlike_gpus_send_tokens_even_where_a_sum_is_faster() -> None:
    """Wrong: each rank routes by scores that kernels of its own round."""
    slow = asked(spec=spec_of(Experts(16, 12, 1 << 27)), microbatch_sequences=2)
    workers = slow.fleet.workers
    stage = Stage(0, LAYERS, workers, tp_shares=(2, 1, 1))
    plan = Plan("tiny", 2, 2, LENGTH, (Pipeline((stage,), 1, 2),))
    assert slow.cost.stage_choices.dispatch_gain_s(plan.pipelines[0], 0) < 0
    (ready,) = slow.cost.stage_choices.working_ahead(plan).stages
    assert ready.expert_dispatch == "all_to_all"


def random_request(seed: int, way: str) -> Request:
    draw = random.Random(seed)
    names = draw.sample(("A100", "A10G", "T4"), draw.choice((2, 2, 3)))
    types = tuple((name, draw.randint(1, 2), draw.choice((1, 2))) for name in names)
    experts = Experts(draw.choice((8, 16, 64)), draw.choice((1, 2, 4)), 1 << draw.choice((26, 27)))
    return asked(
        types, draw.choice((2, 4, 8)), way=way, spec=spec_of(experts), gib=draw.choice((6, 10, 16))
    )


def gain_of_mixing(seed: int) -> float | None:
    """Step time without unlike GPUs in stages over that with them; None: no plan fits without."""
    request = random_request(seed, "auto")
    answer = plan_with("autohet", request)
    check_like_gpus(answer.plan, request.fleet, request.spec)
    try:
        without = search_with_memory(request)
    except InfeasibleError:
        return None
    return without.prediction.step_time_s / answer.prediction.step_time_s


@pytest.mark.parametrize("seed", range(4))
def test_a_random_fleet_is_never_slower_for_its_mixes(seed: int) -> None:
    try:
        gain = gain_of_mixing(seed)
    except InfeasibleError:
        pytest.skip("no plan fits at all")
    assert gain is None or gain >= 1 - 1e-9
