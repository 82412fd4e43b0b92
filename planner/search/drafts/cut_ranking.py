"""Estimates by which cuts of pipelines are ranked: steady state, shared NICs and gradient sync."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from planner.arrays import Floats
from planner.search.drafts.cut import Balancer, Cut
from planner.search.drafts.draft import Estimator, Shape, steady_s
from planner.search.drafts.side_by_side import Sync
from planner.search.drafts.uncut import CutPipelines, UncutPipelines, uncut_neighbours
from planner.search.problem import limits


class SharedNodes:
    """Seconds of a stage's transfers if pipelines share nodes, cached.

    parts: parts whose pipelines lie side by side, stage by stage; None if each pipeline is on nodes
    of its own as far as there are enough.
    """

    def __init__(self, estimator: Estimator, parts: int | None):
        self._estimator = estimator
        self._parts = parts
        self._sent: dict[tuple[int, tuple[int, ...]], float] = {}

    def sent_s(self, number: int, rows: tuple[int, ...]) -> float:
        """Return the most seconds that a stage of `number` pipelines sends for a microbatch.

        All pipelines on a node send at once. 0 if no node has stages of several pipelines.
        """
        key = number, rows
        if key not in self._sent:
            self._sent[key] = self._new_sent_s(number, rows)
        return self._sent[key]

    def _new_sent_s(self, number: int, rows: tuple[int, ...]) -> float:
        by_row = {row: self._on_one_node(number, row) for row in set(rows)}
        sharing = [by_row[row] for row in rows]
        if max(sharing) == 1:
            return 0.0

        on_nodes_of_many = () if self._parts is None else sharing
        alone = self._estimator.transfers(rows, on_nodes_of_many)
        most_s = 0.0
        before_s = 0.0
        for at, both_s in enumerate(alone):
            after_s = both_s * max(sharing[at], sharing[at + 1])
            most_s = max(most_s, before_s + after_s)
            before_s = after_s
        most_s = max(most_s, before_s)  # the last stage has one boundary
        # over each boundary a stage sends one way only: half of the seconds of both ways
        return most_s / 2

    def _on_one_node(self, number: int, row: int) -> int:
        """Return the pipelines whose stages of a row share a node."""
        tables = self._estimator.tables
        places = self._parts
        if places is None:
            resource = tables.resources[tables.kind(row).resource]
            places = len(resource.node_names)
        several = -(-number // places)
        return min(several, int(tables.groups_a_node[row]))


class CutRanking:
    """Cuts pipelines of one placement, and ranks the cuts by their estimated seconds.

    sync: what follows the pipelines in this placement. shared: what pipelines send that share
    nodes in this placement.
    """

    def __init__(self, estimator: Estimator, balancer: Balancer, sync: Sync, shared: SharedNodes):
        self.tables = estimator.tables
        self.estimator = estimator
        self.balancer = balancer
        self.sync = sync
        self.shared = shared
        self._after: dict[tuple[int, Shape], float] = {}

    def fastest(
        self,
        alternatives: Sequence[Sequence[UncutPipelines]],
        most: int = limits.SHORTLIST,
        most_s: float = np.inf,
    ) -> list[CutPipelines]:
        """Return the best cut of each list of alternatives, fastest first.

        A closed form ranks the pipelines of a list; what is known of links and sync ranks the
        `most` that come first. Cuts that take `most_s` are left out.
        """
        every = list[UncutPipelines]()
        list_of = list[int]()
        for number, some in enumerate(alternatives):
            every += some
            list_of += [number] * len(some)
        if not every:
            return []

        best: dict[int, CutPipelines] = {}  # by list of alternatives
        ways = [False]
        if self.tables.begun_ahead > 1:
            ways = [True, False]
        for ahead in ways:
            cut_s, cuts = self._cut(every, ahead)
            fastest_first = np.argsort(cut_s, kind="stable").tolist()
            num_whole = int(np.isfinite(cut_s).sum())
            num_seen = Counter[int]()

            for index in fastest_first[:num_whole]:
                number = list_of[index]
                num_seen[number] += 1
                known_s = best[number].seconds if number in best else most_s
                # links and sync are not known yet, and only add to the seconds of a cut
                if num_seen[number] > most or cut_s[index] >= known_s:
                    continue

                uncut = every[index]
                shapes = tuple(cut.shape for cut in cuts[index])
                seconds = self.about_s(uncut, shapes, known_s)
                if seconds < known_s:
                    best[number] = CutPipelines(seconds, uncut, shapes)
        return sorted(best.values(), key=lambda cut: cut.seconds)

    def about_s(self, uncut: UncutPipelines, shapes: Sequence[Shape], most_s: float) -> float:
        """Return seconds of the steady state, and of the sync after it.

        The sync is left out if the steady state alone takes `most_s`.
        """
        numbers = []
        for shape, (_, number) in zip(shapes, uncut.pipelines, strict=True):
            numbers.append((shape, number))
        seconds = steady_s(self.estimator, numbers, uncut.sequences)

        sequences = uncut.sequences_each
        for shape in shapes:
            microbatches = sequences / self.estimator.microbatch(shape)
            sent_s = microbatches * self.shared.sent_s(uncut.number, shape.rows)
            seconds = max(seconds, sent_s)

        # most cuts end here, and the sync takes longest to estimate
        if seconds >= most_s:
            return seconds
        return seconds + self.after_s(uncut.number, shapes)

    def after_s(self, number: int, shapes: Iterable[Shape]) -> float:
        """Return seconds of the sync after `number` pipelines."""
        return max(self._after_one_s(number, shape) for shape in shapes)

    def _after_one_s(self, number: int, shape: Shape) -> float:
        known_s = self._after.get((number, shape))
        if known_s is None:
            known_s = self.sync.after_one_s(self.estimator, number, shape)
            self._after[number, shape] = known_s
        return known_s

    def _cut(self, every: Sequence[UncutPipelines], ahead: bool) -> tuple[Floats, list[list[Cut]]]:
        """Cut the pipelines with equal shares of the batch.

        Returns (n,) seconds of the slowest pipeline of each entry, infinite if one cannot hold the
        model, and the cuts of each. ahead: early stages may work ahead.
        """
        pipelines = list[tuple[int, ...]]()
        sequences = list[float]()
        sizes = list[int]()
        begins = list[int]()
        for uncut in every:
            begins.append(len(pipelines))
            for rows, _ in uncut.pipelines:
                pipelines.append(rows)
                sequences.append(uncut.sequences_each)
                first_row = self.tables.rows[rows[0]]
                sizes.append(first_row.microbatch)

        microbatches = np.maximum(np.array(sequences) / sizes, 1.0)
        counts = microbatches.tolist() if ahead else []
        cuts = self.balancer.cut_each(pipelines, counts)

        fill_s = np.array([cut.fill_s for cut in cuts])
        bottleneck_s = np.array([cut.bottleneck_s for cut in cuts])
        # zero times infinity is no number: one microbatch after a bottleneck that does not exist
        finite_s = np.minimum(bottleneck_s, 1e300)
        pipeline_s = fill_s + (microbatches - 1) * finite_s
        slowest_s = np.maximum.reduceat(pipeline_s, begins)

        cuts_of_each = []
        for begin, uncut in zip(begins, every, strict=True):
            end = begin + len(uncut.pipelines)
            cuts_of_each.append(cuts[begin:end])
        return slowest_s, cuts_of_each


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

            faster += ranking.fastest([changed], limits.CLIMBED, cut.seconds)
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
