"""`autohet bench planner`, second half: search times, plan quality and bounds.

Rows have CPU seconds, of this process and its children, as well as wall seconds, since the machine
may be shared. Sailor's fleets need the folder of published measurements (AUTOHET_MEASUREMENTS,
default `shared` next to the checkout); if it is absent, their row says so. The other fleets' layer
times are synthetic.
"""

import itertools
import math
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any

from autohet.bench.planner.accuracy import measurements_folder
from autohet.bench.planner.fleets import fleet_rows
from autohet.bench.planner.sailor import (
    MODELS,
    SAILOR,
    SailorSync,
    load_judge,
    sailor_tables,
    verdict,
)
from autohet.bench.planner.synthetic import (
    GPT_26,
    GSHARD_10B,
    LLAMA_70B,
    cpu_seconds,
    model_spec,
    request_of,
    synthetic_fleet,
    tied,
)
from planner.answers.replan import replan
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.plans.plan import Plan
from planner.search.autohet import placements
from planner.search.bounds.bound import Bound
from planner.search.drafts.closed_form import families
from planner.search.drafts.families import Drafter
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.tables import Tables
from planner.search.walk.improve import Improver, Judge, tries_for
from planner.search.walk.moves import Moves
from planner.strategies import Answer, Request, plan_with

ResultRow = dict[str, Any]
_RUNS = 3


def timed(work: Callable[[], Any]) -> tuple[Any, ResultRow]:
    """Return the result of `work` and {"wall_s", "cpu_s", "peak_mib"}.

    CPU seconds include child processes; the peak is that of this process so far.
    """
    wall = time.perf_counter()
    cpu = cpu_seconds()
    result = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return result, {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(cpu_seconds() - cpu, 3),
        "peak_mib": peak,
    }


def fastest_search(ask: Callable[[], Request]) -> tuple[Answer, ResultRow]:
    """Run the same search three times, as `timed`, and return the fastest run.

    The machine may be shared. Each run has a cost model of its own, since one would remember
    predictions.
    """
    runs = [timed(partial(plan_with, "autohet", ask())) for _ in range(_RUNS)]
    result, cost = min(runs, key=lambda run: float(run[1]["wall_s"]))
    return result, cost | {"fastest_of": _RUNS}


# ---- Sailor's fleets under Sailor's formulas ----


def sailor_rows() -> Iterator[ResultRow]:
    folder = measurements_folder()
    if folder is None:
        yield {
            "on": "Sailor's fleets",
            "skipped": "no folder of published measurements; set AUTOHET_MEASUREMENTS",
        }
        return
    module = load_judge(folder)
    for model, batch in MODELS.items():
        judge = module.Judge(folder / "data" / "sailor", model)
        for counts, theirs in SAILOR.items():
            search = partial(
                _under_sailors_formulas, module, judge, sailor_tables(judge, model, batch, counts)
            )
            best, cost = timed(search)
            sailor_s, sailor_cpu_s = theirs[model]
            yield {
                "on": f"Sailor {model} {counts[0]} A100 + {counts[1]} V100",
                "judge": "Sailor's formulas",
                "step_time_s": best,
                "sailor_step_time_s": sailor_s,
                "ratio": None if best is None else round(best / sailor_s, 4),
                "sailor_search_s": sailor_cpu_s,
                "reach": 1.0,
            } | cost


def _under_sailors_formulas(module: Any, judge: Any, tables: Tables) -> float | None:
    """Search under Sailor's formulas; return the best plan's step time by them."""

    def seconds(plan: Plan) -> float:
        found = verdict(module, judge, plan.to_document())
        return float(found["step_time_s"]) if found["fits"] else math.inf

    proposals = Drafter(
        tables, families(tables, mixed_tp=True), SailorSync(judge, tables)
    ).proposals()
    plans = [plan for each in proposals for plan in placements(tables, each, (1,))]
    starts = sorted(plans, key=seconds)[: limits.WALKS]
    tries = tries_for(sum(resource.num_gpus for resource in tables.resources))
    improver = Improver(Moves(tables, random.Random(0)), Judge(seconds))
    found = seconds(improver.best_of(starts, tries)) if starts else math.inf
    return found if math.isfinite(found) else None


def metis_rows() -> Iterator[ResultRow]:
    """Return the rows of Metis's sizes: 16, 32 and 64 GPUs of two types, 26 layers.

    The times of its published code are 5-15, 30-332 and 9-124 s.
    """
    for gpus, theirs in ((16, 4.8), (32, 29.7), (64, 9.4)):
        fleet = synthetic_fleet({"A100-40": gpus // 2, "T4": gpus // 2})
        ask = partial(request_of, GPT_26, fleet, 128, 1024, time_limit_s=20)
        row = _against(ask, "metis", f"Metis's case, {gpus} GPUs of two types, 26 layers", theirs)
        yield row | {"reach_s": 0.5}


def metis_experts_rows() -> Iterator[ResultRow]:
    """Return the rows of Metis's second model, a GShard mixture of experts, on the same GPUs.

    Metis publishes no profile of it, so the layer times follow from FLOPs (`synthetic.profile_of`).
    """
    for gpus in (16, 32, 64):
        fleet = synthetic_fleet({"A100-40": gpus // 2, "T4": gpus // 2})
        ask = partial(request_of, GSHARD_10B, fleet, 1024, 1024, time_limit_s=20)
        case = (
            f"GShard 10B in {len(GSHARD_10B.blocks)} layers by formulas, {gpus} GPUs of two types"
        )
        row = _against(ask, "metis", case, None)
        yield row | {"reach": 1.0}


def _against(
    ask: Callable[[], Request], other: str, on: str, published_s: float | None
) -> ResultRow:
    ours, cost = fastest_search(ask)
    row = {"on": on, "published_search_s": published_s} | _facts(ours) | cost
    try:
        theirs, spent = timed(lambda: plan_with(other, ask()))
    except InfeasibleError as error:
        return row | {other: str(error)}
    ratio = ours.prediction.step_time_s / theirs.prediction.step_time_s
    return row | {
        f"{other}_step_time_s": theirs.prediction.step_time_s,
        f"{other}_cpu_s": spent["cpu_s"],
        "ratio": ratio,
    }


def _facts(answer: Answer) -> ResultRow:
    search = answer.search
    return {
        "step_time_s": answer.prediction.step_time_s,
        "lower_bound_s": search.lower_bound_s,
        "gap": search.gap,
        "plans_evaluated": search.plans_evaluated,
        "idle_gpus": sum(len(item.workers) for item in answer.idle),
    }


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
        tied(spec) if is_tied else spec, synthetic_fleet(counts, per_node), rng.randint(2, 6), 512
    )
    return replace(request, max_microbatch_sequences=2)


def tied_case(rng: random.Random) -> Request:
    """Return a case as `small_case` does, infeasible on one node."""
    return replace(small_case(rng, is_tied=True), min_node_disjoint_holders=2)


def scale_rows(sizes: tuple[int, ...] = (256, 1024, 4096)) -> Iterator[ResultRow]:
    """Search fleets of four types with an 80-layer 70B model, and of three types.

    The three types have 256 GPUs each.
    """
    four = ("H100-80", "A100-80", "A100-40", "L40S")
    for gpus, reach in zip(sizes, (3.0, 10.0, 60.0), strict=False):
        fleet = synthetic_fleet({gpu: gpus // 4 for gpu in four})
        answer, cost = fastest_search(partial(request_of, LLAMA_70B, fleet, gpus * 4, 4096))
        yield (
            {"on": f"{gpus} GPUs of four types, 70B", "reach_s": reach, "reach_gap": 0.02}
            | _facts(answer)
            | cost
        )
    answer, cost = fastest_search(
        partial(request_of, LLAMA_70B, synthetic_fleet(dict.fromkeys(four[:3], 256)), 3072, 4096)
    )
    yield (
        {"on": "three types, 256 GPUs each, 70B", "reach_s": 15.0, "reach_gap": 0.02}
        | _facts(answer)
        | cost
    )


def replan_rows() -> Iterator[ResultRow]:
    """Replan after one node of 256 GPUs leaves, then search in full.

    The full search runs once the job trains on the repair.
    """
    four = ("H100-80", "A100-80", "A100-40", "L40S")
    fleet = synthetic_fleet(dict.fromkeys(four, 64))
    before = plan_with("autohet", request_of(LLAMA_70B, fleet, 1024, 4096))
    smaller = Fleet(1, fleet.nodes[:-1])
    request = request_of(LLAMA_70B, smaller, 1024, 4096)
    decision, cost = timed(lambda: replan(before.plan, request))
    yield {
        "on": "replan, one of 32 nodes (256 GPUs) leaves",
        "reach_s": 0.3,
        "kind": decision.kind,
        "before_s": before.prediction.step_time_s,
        "step_time_s": decision.answer.prediction.step_time_s,
        "migration_s": decision.migration_s,
    } | cost
    again, cost = timed(lambda: replan(decision.answer.plan, request, thorough=True))
    yield {
        "on": "a whole search while that repair trains, horizon an hour",
        "kind": again.kind,
        "before_s": decision.answer.prediction.step_time_s,
        "step_time_s": again.answer.prediction.step_time_s,
        "migration_s": again.migration_s,
    } | cost


SEARCH_PARTS: Mapping[str, Callable[[], Iterator[ResultRow]]] = {
    "sailor": sailor_rows,
    "metis": metis_rows,
    "metis_experts": metis_experts_rows,
    "fleets": fleet_rows,
    "exhaustive": exhaustive_rows,
    "further": further_rows,
    "apart": apart_rows,
    "scale": scale_rows,
    "replan": replan_rows,
}


def search_rows(part: str) -> list[ResultRow]:
    """Return the rows of a part of SEARCH_PARTS, one measurement each.

    No measurement includes the import of scipy, which takes half a second.
    """
    import_module("scipy.optimize")
    return list(SEARCH_PARTS[part]())
