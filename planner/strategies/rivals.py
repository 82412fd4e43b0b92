"""What the other searches find: seeds of ours, so that no comparison under one cost model ever ends below them.

They cost milliseconds to a second and look where columns do not: at grids over a part of the fleet, at groups without pipelines, at
fleets without their slowest types.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from planner.cluster import Fleet, NodeType
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.search.cost_tables import FEW_GPUS, microbatch_sizes, tables_of
from planner.search.draft import Estimator
from planner.search.narrow import narrowed
from planner.search.problem import Answer, Request
from planner.search.tables import Tables
from planner.strategies.engine import COLUMNS_GPUS
from planner.strategies.refine import FAR_BEHIND
from planner.strategies.symmetric import grids_of, ranked_grids

Search = Callable[[Request], Answer]
MOST_GPUS = 128  # beyond, they take longer than what they find is worth
_GRIDS = 4
_SHARES = 4
_SHALLOW = 8
_LATE_GPUS, _LATE_ORDERS = 512, 24
TIME_SHARE = 0.5  # of the request's limit


def rival_plans(request: Request) -> list[Plan]:
    """One plan of each other search on the whole fleet and on its fastest types; none where a search finds none."""
    if len(request.fleet.workers) > MOST_GPUS:
        return []
    begin, found = request.clock(), []
    for search, asked in _rounds(request):
        if request.clock() - begin > TIME_SHARE * request.time_limit_s:
            break
        try:
            found.append(search(asked).plan)
        except InfeasibleError:
            continue
    return found


def late_rivals(request: Request) -> list[Plan]:
    """For fleets of more than `MOST_GPUS`, up to `_LATE_GPUS`: one plan of `hap`, and if it finds one, so that a few GPUs hold the
    model, one of `fasop`'s with a few stages. On other models both take seconds and found nothing."""
    from planner.strategies.fasop import search_fasop
    from planner.strategies.hap import search_hap

    found = list[Plan]()
    if MOST_GPUS < len(request.fleet.workers) <= _LATE_GPUS:
        shallow = replace(request, max_stages=min(_SHALLOW, request.max_stages or _SHALLOW))
        with suppress(InfeasibleError):
            found.append(search_hap(request).plan)
            found.append(search_fasop(shallow, _LATE_ORDERS).plan)
    return found


def _rounds(request: Request) -> Iterator[tuple[Search, Request]]:
    from planner.strategies.fasop import search_fasop
    from planner.strategies.hap import search_hap

    for asked in (request, *_narrowed(request)):
        yield from (
            (search, asked) for search in ((search_hap,) if _shared_equally(request) else (search_hap, search_fasop))
        )


def _shared_equally(request: Request) -> bool:
    """On 17 to 64 GPUs of several node types `fasop` takes a fifth of the time, and finds nothing better in 120 random fleets but one,
    where pipelines cannot have equal shares of each node type."""
    if not FEW_GPUS < len(request.fleet.workers) <= COLUMNS_GPUS:
        return False
    counts = Counter(node.node_type for node in request.fleet.nodes for _ in node.workers)
    return len(counts) > 1 and math.gcd(*counts.values()) >= _SHARES


def grids(request: Request, tables: Tables, estimator: Estimator) -> list[Plan]:
    """The best symmetric grids, equal and balanced, on the whole fleet and on its fastest types, by the tables; none that is
    far behind the first."""
    if len(request.fleet.workers) > MOST_GPUS:
        return []
    found = best_grids(request, tables, estimator, _GRIDS)
    for asked in _narrowed(request):
        smaller = tables_of(asked)
        found += best_grids(asked, smaller, Estimator(smaller), _GRIDS)
    most = FAR_BEHIND * min((seconds for seconds, _ in found), default=0.0)
    return [plan for seconds, plan in found if seconds <= most]


def best_grids(request: Request, tables: Tables, estimator: Estimator, keep: int) -> list[tuple[float, Plan]]:
    """The `keep` best of `megatron`'s, and as many of `varuna`'s, with tensor parallelism as well."""
    out: list[tuple[float, Plan]] = []
    most = request.max_tp_degree or request.spec.max_tp_degree
    for balanced in (False, True):
        all_grids = grids_of(request, tables, max_tp=most, balanced=balanced)
        out += ranked_grids(request, tables, all_grids, estimator, keep)
    return out


def _narrowed(request: Request) -> list[Request]:
    return [
        narrowed(request, fleet)
        for fleet in fastest_types(request)
        if fleet.workers and len(fleet.workers) >= request.min_node_disjoint_holders
    ]


def fastest_types(request: Request) -> list[Fleet]:
    """The fleet without its slowest type of GPU, without its two slowest, ..., down to the fastest alone."""
    seconds: dict[str, float] = {}
    kinds: dict[str, NodeType] = {node.node_type.gpu_type: node.node_type for node in request.fleet.nodes}
    size = microbatch_sizes(request)[0]
    for gpu_type, kind in kinds.items():
        costs = request.cost.layer_costs(kind, 1, size)
        seconds[gpu_type] = float(costs.forward_s[1:-1].sum() + costs.backward_s[1:-1].sum())
    ordered = sorted(seconds, key=lambda name: (seconds[name], name))
    return [
        Fleet(
            request.fleet.generation, tuple(n for n in request.fleet.nodes if n.node_type.gpu_type in ordered[:count])
        )
        for count in range(1, len(ordered))
    ]
