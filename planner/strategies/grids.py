"""The strategies `megatron` and `varuna`: the best symmetric grid under our cost model."""

from planner.errors import InfeasibleError
from planner.search.cost_tables import tables_of
from planner.search.draft import Estimator
from planner.search.judge import choose, idle_workers, why_infeasible
from planner.search.problem import Answer, Request, SearchReport, check_request
from planner.strategies.symmetric import grids_of, ranked_grids

_CANDIDATES = 8


def search_megatron(request: Request) -> Answer:
    """TP x PP x DP with an equal split of the layers."""
    return _search("megatron", request, request.max_tp_degree or request.spec.max_tp_degree, balanced=False)


def search_varuna(request: Request) -> Answer:
    """PP x DP without tensor parallelism, cut-points balanced by compute."""
    return _search("varuna", request, 1, balanced=True)


def _search(name: str, request: Request, max_tp: int, *, balanced: bool) -> Answer:
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    grids = grids_of(request, tables, max_tp=max_tp, balanced=balanced)
    ranked = ranked_grids(request, tables, grids, Estimator(tables), _CANDIDATES)
    best, rejected = choose(request, [plan for _, plan in ranked])
    if best is None:
        raise InfeasibleError(why_infeasible(request, tables, rejected))
    report = SearchReport(request.clock() - begin, len(ranked), None, None)
    return Answer(name, best.plan, best.prediction, report, tuple(rejected), idle_workers(request, tables, best.plan))
