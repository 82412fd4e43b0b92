"""Climb of the estimates of equal pipelines by one stage at a time."""

from collections.abc import Collection, Sequence

from planner.search.drafts.cut_ranking import CutRanking
from planner.search.drafts.uncut import CutPipelines, UncutPipelines, uncut_neighbours
from planner.search.problem import limits


def climb(
    ranking: CutRanking, starts: Sequence[CutPipelines], usable: Collection[int]
) -> list[CutPipelines]:
    """Return cuts of equal pipelines that are faster than the start from which they were reached.

    The best start of each number of pipelines and depth is changed by one stage, and its best
    change again, until no change is faster. usable: resources that a stage may use.
    """
    found = list[CutPipelines]()
    now = _best_of_each_number(starts)
    seen = {cut.uncut.pipelines for cut in now}
    num_stages = 0
    while now and num_stages < limits.CLIMBED_STAGES:
        faster = list[CutPipelines]()
        for cut in now:
            changed = list[UncutPipelines]()
            for uncut in uncut_neighbours(ranking.tables, cut.uncut, usable):
                # several ways lead to the same pipelines
                if uncut.pipelines in seen:
                    continue
                seen.add(uncut.pipelines)
                num_stages += uncut.depth
                changed.append(uncut)

            best = ranking.fastest([changed], limits.CLIMBED)
            for each in best:
                if each.seconds < cut.seconds:
                    faster.append(each)
        found += faster
        now = faster
    return found


def _best_of_each_number(cuts: Sequence[CutPipelines]) -> list[CutPipelines]:
    """Return the cuts with the least seconds, one of each number of pipelines and depth."""
    best = dict[tuple[int, int], CutPipelines]()
    for cut in sorted(cuts, key=lambda cut: cut.seconds):
        uncut = cut.uncut
        best.setdefault((uncut.number, uncut.depth), cut)
    fastest_first = list(best.values())
    return fastest_first[: limits.CLIMBS]
