"""Our plans against every possible plan, on random small cases."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from autohet.bench.planner.synthetic import model_spec, request_of, synthetic_fleet, tie_embeddings
from planner.errors import InfeasibleError
from planner.search.bounds.bound import Bound
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.strategies import Request, plan_with

ResultRow = dict[str, Any]


def exhaustive_rows(cases: int = 100) -> Iterator[ResultRow]:
    """Compare random small cases with every possible plan; seeds are the case numbers."""
    yield _against_every_plan("random small cases", small_case, cases)


def further_rows(cases: int = 100) -> Iterator[ResultRow]:
    """Compare further random small cases, with seeds from 1000 on, with every possible plan."""
    yield _against_every_plan("further small cases", small_case, cases, 1000)


def apart_rows(cases: int = 100) -> Iterator[ResultRow]:
    """Compare cases in which each layer must be on two nodes with every possible plan."""
    yield _against_every_plan(
        "small cases with a tied embedding, each layer on two nodes", tied_case, cases
    )


def _against_every_plan(
    what: str, case: Callable[[random.Random], Request], cases: int, first: int = 0
) -> ResultRow:
    """Compare our plans with the exhaustive search on feasible random cases, from one seed on."""
    ratios = list[float]()
    within = 0
    valid = 0
    begin = time.process_time()
    for seed in itertools.count(first):
        request = case(random.Random(seed))
        try:
            judge, ours = plan_with("exhaustive", request), plan_with("autohet", request)
        except InfeasibleError:
            continue
        ratio = ours.prediction.step_time_s / judge.prediction.step_time_s
        ratios.append(ratio)
        within += ours.search.gap is None or ratio <= 1 + ours.search.gap + 1e-9
        valid += proved_s(request) <= judge.prediction.step_time_s * (1 + 1e-9)
        if len(ratios) == cases:
            break
    return {
        "on": f"{cases} {what} against exhaustive",
        "optimal": sum(ratio <= 1 + 1e-6 for ratio in ratios),
        "within_gap": within,
        "bound_holds": valid,
        "mean_ratio": fmean(ratios),
        "worst_ratio": max(ratios),
        "reach": limits.PLAIN,
        "cpu_s": round(time.process_time() - begin, 1),
    }


def proved_s(request: Request) -> float:
    """Return the lower bound as it is, however far below any plan."""
    return Bound(tables_of(request)).seconds()


def small_case(rng: random.Random, is_tied: bool = False) -> Request:
    """Return a random case: two to four GPUs of one or two types, two to four blocks.

    It has two to six sequences.
    """
    gpus = rng.sample(["A100-40", "L40S", "T4"], rng.choice([1, 2]))
    per_node = rng.choice([1, 2])
    nodes = [1, 2] if per_node * len(gpus) < 4 else [1]
    counts = {gpu: per_node * rng.choice(nodes) for gpu in gpus}
    spec = model_spec("small", rng.randint(2, 4), 512, 2048, 8000, 512)
    request = request_of(
        tie_embeddings(spec) if is_tied else spec,
        synthetic_fleet(counts, per_node),
        rng.randint(2, 6),
        512,
    )
    return replace(request, max_microbatch_sequences=2)


def tied_case(rng: random.Random) -> Request:
    """Return a case as `small_case` does, infeasible on one node."""
    return replace(small_case(rng, is_tied=True), min_node_disjoint_holders=2)
