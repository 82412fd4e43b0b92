"""`autohet bench planner --full`: random fleets.

Our search is compared with the other searches, and the fleet with the same fleet without one of its
node types.
"""

import random
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from autohet.bench.planner.synthetic import (
    GPT_26,
    LLAMA_70B,
    TYPES,
    cpu_seconds,
    model_spec,
    request_of,
    synthetic_fleet,
    tie_embeddings,
)
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.model_spec import ModelSpec
from planner.search.problem.request import narrow_to
from planner.strategies import Request, plan_with

ResultRow = dict[str, Any]
CASES = 20
OTHERS = ("megatron", "varuna", "fasop", "hap")


def fleet_rows(cases: int = CASES) -> Iterator[ResultRow]:
    """Yield two rows, over all fleets that hold their model; seeds are the case numbers."""
    over_others = list[float]()
    over_fewer = list[float]()
    spent = 0.0
    gaps = list[float]()

    begin = cpu_seconds()
    for seed in range(cases):
        request = random_case(random.Random(seed))
        start = cpu_seconds()
        answer = _answer(request, "autohet")
        spent += cpu_seconds() - start
        if answer is None:
            continue
        step, gap = answer
        gaps.append(gap)

        others = _steps_s([_answer(request, other) for other in OTHERS])
        if others:
            over_others.append(step / min(others))
        fewer = _steps_s([_answer(less, "autohet") for less in _without_one(request)])
        if fewer:
            over_fewer.append(step / min(fewer))

    yield {
        "on": (
            f"{len(gaps)} random fleets of 17 to 128 GPUs of two to four types: our step time over"
            " the best other search's"
        ),
        "ratio": max(over_others),
        "mean_ratio": fmean(over_others),
        "best_ratio": min(over_others),
        "mean_gap": fmean(gaps),
        "search_cpu_s": round(spent / cases, 2),
        "cpu_s": round(cpu_seconds() - begin, 1),
    }
    yield {
        "on": (
            f"{len(over_fewer)} of them: our step time over that of the fleet without one of its"
            " node types"
        ),
        "ratio": max(over_fewer),
        "slower_with_more": sum(ratio > 1 + 1e-4 for ratio in over_fewer),
        "reach": 1.01,
    }


def random_case(rng: random.Random) -> Request:
    """Return a random model of 1 to 70B parameters on whole nodes of 4 or 8 GPUs.

    The batch is half to four sequences per GPU.
    """
    per_node = rng.choice([4, 8])
    gpus = rng.randint(17, 128)
    kinds = rng.sample(sorted(TYPES), rng.choice([2, 3, 3, 4]))
    nodes_each = gpus // len(kinds) // per_node
    counts = {}
    for kind in kinds:
        nodes = max(1, nodes_each + rng.choice([-1, 0, 1]))
        counts[kind] = per_node * nodes

    specs = [
        GPT_26,
        _llama("llama-7b", 32, 4096, 11008),
        _llama("llama-13b", 40, 5120, 13824),
        LLAMA_70B,
    ]
    spec = rng.choice(specs)
    if rng.random() < 0.3:
        spec = tie_embeddings(spec)
    batch = max(8, int(sum(counts.values()) * rng.choice([0.5, 1, 2, 4])))
    fleet = synthetic_fleet(counts, per_node)
    return request_of(spec, fleet, batch, rng.choice([1024, 2048, 4096]))


def _llama(name: str, layers: int, width: int, mlp: int) -> ModelSpec:
    return model_spec(name, layers, width, mlp, 32000, 1024)


def _steps_s(answers: Iterable[tuple[float, float] | None]) -> list[float]:
    """Return the step times of the answers that there are."""
    return [answer[0] for answer in answers if answer is not None]


def _answer(request: Request, strategy: str) -> tuple[float, float] | None:
    try:
        found = plan_with(strategy, request)
    except InfeasibleError:
        return None
    return found.prediction.step_time_s, found.search.gap or 0.0


def _without_one(request: Request) -> Iterator[Request]:
    for left_out in request.fleet.node_types:
        nodes = tuple(node for node in request.fleet.nodes if node.node_type != left_out)
        yield narrow_to(request, Fleet(request.fleet.generation, nodes))
