"""Cuts of two or more families beside each other.

Each family has node types, TP degrees and a microbatch size of its own, and a share of the batch.
"""

import bisect
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from planner.arrays import Floats
from planner.search.drafts.closed_form import Families, rank_families
from planner.search.drafts.cut_ranking import CutRanking
from planner.search.drafts.draft import Shape
from planner.search.drafts.orders import StageRows
from planner.search.drafts.regroup import regroup
from planner.search.drafts.uncut import CutPipelines, UncutPipelines, size_class, uncut_family
from planner.search.problem import limits
from planner.search.problem.tables import Tables


def cut_combined_families(ranking: CutRanking, every: Families) -> list[CutPipelines]:
    """Return the fastest combinations of families without a common node type, fastest first."""
    tables = ranking.tables
    speeds = _speed_of_each_resource(tables)
    resources = range(len(tables.resources))

    alternatives = list[list[UncutPipelines]]()
    for num_types in range(1, len(resources)):
        for used in itertools.combinations(resources, num_types):
            some = _families_on(every, used)
            # each family gets as much of the batch as its GPUs are fast
            speed = speeds[list(used)].sum()
            share = float(speed / speeds.sum())
            sequences = tables.batch * share
            for family in _fastest_of_each_size(ranking, some, sequences):
                uncut = uncut_family(tables, some, family, sequences, share_all=True)
                alternatives.append(list(uncut))

    cuts = ranking.fastest(alternatives)
    best = _best_of_each_use(ranking, cuts)
    return _combine(ranking, best)


def _speed_of_each_resource(tables: Tables) -> Floats:
    """Return (R,) sequences a second of a resource's groups, each with a whole model, at best."""
    speeds = np.zeros(len(tables.resources))
    whole_model_s = tables.sums.time_sums[:, -1]
    for row, model_s in zip(tables.rows, whole_model_s, strict=True):
        kind = tables.kinds[row.kind]
        speed = kind.count * row.microbatch / model_s
        speeds[kind.resource] = max(speeds[kind.resource], speed)
    return speeds


def _families_on(every: Families, resources: Sequence[int]) -> Families:
    """Return the families that use exactly these resources."""
    num_resources = every.rows.shape[1]
    wanted = np.isin(np.arange(num_resources), resources)
    used = every.rows >= 0
    is_exact = (used == wanted).all(axis=1)
    return every.take(np.flatnonzero(is_exact))


def _fastest_of_each_size(ranking: CutRanking, some: Families, sequences: float) -> Collection[int]:
    """Return the index of the fastest family of each size class of its number of pipelines.

    Few and many pipelines are both kept, since it is not known yet what lies beside them.
    """
    numbers = some.number.tolist()
    classes = {size_class(number) for number in numbers}
    wanted = min(len(classes), limits.SHORTLIST)

    best: dict[int, int] = {}
    fastest_first = rank_families(ranking.tables, sequences, some, ranking.sync)
    for family, _ in fastest_first:
        best.setdefault(size_class(numbers[family]), family)
        if len(best) == wanted:
            break
    return best.values()


def _best_of_each_use(ranking: CutRanking, cuts: Sequence[CutPipelines]) -> list[CutPipelines]:
    """Return the best of the cuts and their regroupings, fastest first.

    There is one cut for each set of node types and size class of the number of pipelines.
    """
    tables = ranking.tables
    alternatives = list[list[UncutPipelines]]()
    for cut in cuts:
        variants = itertools.chain.from_iterable(regroup(tables, cut.uncut))
        alternatives.append(list(variants))

    every = [*cuts, *ranking.fastest(alternatives)]
    best = dict[tuple[frozenset[int], int], CutPipelines]()
    for cut in sorted(every, key=lambda cut: cut.seconds):
        key = (cut.resources(tables), size_class(cut.uncut.number))
        best.setdefault(key, cut)
    return list(best.values())


def _combine(ranking: CutRanking, cuts: Sequence[CutPipelines]) -> list[CutPipelines]:
    """Return the fastest combinations of two or more cuts without a common node type."""
    used = [cut.resources(ranking.tables) for cut in cuts]
    fastest = list[CutPipelines]()
    most = 2 * limits.DRAFTS

    def extend(chosen: list[int], taken: frozenset[int]) -> None:
        """Add the chosen cuts, and all combinations that begin with them."""
        if len(chosen) > 1:
            is_full = len(fastest) == most
            most_s = fastest[-1].seconds if is_full else np.inf
            together = [cuts[index] for index in chosen]
            merged = _merge(ranking, together, most_s)
            bisect.insort(fastest, merged, key=lambda cut: cut.seconds)
            del fastest[most:]

        begin = chosen[-1] + 1 if chosen else 0
        for index in range(begin, len(cuts)):
            if taken.isdisjoint(used[index]):
                extend([*chosen, index], taken | used[index])

    extend([], frozenset())
    return fastest


def _merge(ranking: CutRanking, cuts: Sequence[CutPipelines], most_s: float) -> CutPipelines:
    """Merge cuts of several families into one cut of the whole batch."""
    pipelines = list[tuple[StageRows, int]]()
    shapes = list[Shape]()
    number = 0
    for cut in cuts:
        pipelines += cut.uncut.pipelines
        shapes += cut.shapes
        number += cut.uncut.number

    uncut = UncutPipelines(number, tuple(pipelines), ranking.tables.batch)
    seconds = ranking.about_s(uncut, shapes, most_s)
    return CutPipelines(seconds, uncut, tuple(shapes))
