"""Drafts of near-equal pipelines.

n pipelines share the groups of each node type as evenly as whole groups can be. A closed form ranks
all families (`closed_form.py`). Those ranked first are cut exactly (`cut.py`), in several orders of
their node types, and timed with the gradient sync that their placement leaves.

There are two placements. The same stages of all pipelines lie side by side: gradients are summed
inside nodes, and transfers share NICs. Or each pipeline is on nodes of its own, with the reverse.
Two or more families of different node types may also train beside each other, each with a depth and
microbatches of its own.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Bools
from planner.search.drafts.closed_form import Families, families, rank_families
from planner.search.drafts.combined_families import cut_combined_families
from planner.search.drafts.cut import Balancer
from planner.search.drafts.cut_ranking import CutRanking, SharedNodes, climb
from planner.search.drafts.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits
from planner.search.drafts.regroup import regroup
from planner.search.drafts.side_by_side import SideBySide
from planner.search.drafts.stagger import stagger
from planner.search.drafts.uncut import (
    CutPipelines,
    KnownOrders,
    UncutPipelines,
    uncut_family,
    uncut_in_best_orders,
)
from planner.search.drafts.unlike import uncut_in_divisions
from planner.search.problem import limits
from planner.search.problem.request import Request
from planner.search.problem.tables import Tables


@dataclass(frozen=True)
class Proposal:
    """Draft with its estimated seconds a step.

    side_by_side: its pipelines are to lie side by side.
    """

    seconds: float
    draft: Draft
    side_by_side: bool


def proposals_for(request: Request, tables: Tables, most_s: float = math.inf) -> list[Proposal]:
    """Return the best drafts of either placement for a request, fastest first.

    Drafts that probably hold some layer on too few nodes come last. most_s: none if the closed form
    of each family is above it.
    """
    every = families(tables)
    known = _Known.of(request, tables, every)
    if math.isfinite(most_s) and known.quickest_s() > most_s:
        return []
    holders = request.min_node_disjoint_holders
    unlike = uncut_in_divisions(tables, holders)
    if holders < 2:
        return _proposals_of(request, every, known, unlike)

    on_several_nodes = ~_on_one_node(tables, every)
    apart = every.take(np.flatnonzero(on_several_nodes))
    found = _proposals_of(request, apart, known, unlike)
    if on_several_nodes.all():
        return found
    if found and request.is_late:
        return found

    # a proposal counts as known if pipelines and placement are equal
    known_drafts = set()
    for proposal in found:
        known_drafts.add((proposal.draft, proposal.side_by_side))
    others = []
    for proposal in _proposals_of(request, every, known):
        if (proposal.draft, proposal.side_by_side) not in known_drafts:
            others.append(proposal)
    # these hold each layer on several nodes, too
    found += _staggered(known, others)
    return [*sorted(found, key=lambda each: each.seconds), *others]


@dataclass(frozen=True)
class _Known:
    """Caches that serve several sets of families of a request.

    every: families that may train beside each other. rankings: of either placement, the pipelines
    side by side first. orders: best orders by supply and microbatch.
    """

    tables: Tables
    every: Families
    rankings: tuple[CutRanking, CutRanking]
    orders: KnownOrders

    @classmethod
    def of(cls, request: Request, tables: Tables, every: Families) -> "_Known":
        estimator = Estimator(tables)
        balancer = Balancer(tables)
        holders = request.min_node_disjoint_holders
        most_pipelines = int(every.number.max(initial=1))

        def ranking(parts: int, shared: SharedNodes) -> CutRanking:
            return CutRanking(estimator, balancer, SideBySide(request, tables, parts), shared)

        side_by_side = ranking(holders, SharedNodes(estimator, holders))
        apart = ranking(max(1, most_pipelines), SharedNodes(estimator, None))
        return cls(tables, every, (side_by_side, apart), {})

    def quickest_s(self) -> float:
        """Return the least seconds of a family by the closed form; infinite without families."""
        fastest = []
        for ranking in self.rankings:
            ranked = rank_families(self.tables, self.tables.batch, self.every, ranking.sync)
            fastest += [seconds for _, seconds in itertools.islice(ranked, 1)]
        return min(fastest, default=math.inf)


def _staggered(known: _Known, proposals: list[Proposal]) -> list[Proposal]:
    """Return the best proposals in which the only node of a type holds unlike layers."""
    found = []
    for proposal in proposals:
        ranking = known.rankings[0 if proposal.side_by_side else 1]
        for shapes in stagger(known.tables, ranking.balancer, proposal.draft):
            staggered = _proposal_of(ranking, shapes, proposal.side_by_side)
            if staggered is not None:
                found.append(staggered)
    return sorted(found, key=lambda each: each.seconds)[: limits.DRAFTS]


def _proposal_of(ranking: CutRanking, shapes: list[Shape], side_by_side: bool) -> Proposal | None:
    """Return the estimate of pipelines of these shapes; None if memory or batch do not allow it."""
    estimator = ranking.estimator
    draft = assign_microbatches(estimator, shapes, ranking.tables.batch)
    if draft is None or not draft_fits(estimator, draft):
        return None

    number = len(shapes)
    seconds = estimator.draft_s(draft)
    for shape, microbatches in set(draft.pipelines):
        sent_s = microbatches * ranking.shared.sent_s(number, shape.rows)
        seconds = max(seconds, sent_s)
    return Proposal(seconds + ranking.after_s(number, set(shapes)), draft, side_by_side)


def _proposals_of(
    request: Request, near_equal: Families, known: _Known, unlike: Sequence[UncutPipelines] = ()
) -> list[Proposal]:
    """Return the best drafts of some families, and of unlike pipelines.

    Any known families may train beside each other.
    """
    tables = known.tables
    holders = request.min_node_disjoint_holders
    numbers = sorted(set(near_equal.number.tolist()))
    usable = _resources_in(tables, near_equal)
    orders = tuple(uncut_in_best_orders(tables, numbers, usable, known.orders))
    # the prediction refuses some of the drafts if each layer must lie on several nodes
    keep = limits.DRAFTS
    if holders > 1:
        keep *= 4

    found = list[Proposal]()
    for side_by_side, ranking in zip((True, False), known.rankings, strict=True):
        if found and request.is_late:
            break

        # one pipeline alone has no other at its side
        fewest = max(holders, 2 if side_by_side else 1)
        enough = np.flatnonzero(near_equal.number >= fewest)
        families = near_equal.take(enough)
        drafter = Drafter(ranking, families, side_by_side, keep, known.every, orders, unlike)
        found += drafter.proposals(lambda: request.is_late)
    return sorted(found, key=lambda proposal: proposal.seconds)


def _resources_in(tables: Tables, some: Families) -> frozenset[int]:
    """Return the resources that some of the families use."""
    used = np.unique(some.rows[some.rows >= 0])
    return frozenset(tables.kind(row).resource for row in used)


def _on_one_node(tables: Tables, some: Families) -> Bools:
    """Return (n,) True for families that use a node type of which the fleet has one node.

    Their near-equal pipelines have the same layers on that node: it alone holds some of them.
    """
    num_nodes = np.array([resource.num_nodes for resource in tables.resources])
    uses_alone = (some.rows >= 0) & (num_nodes == 1)
    return np.asarray(uses_alone.any(axis=1))


@dataclass(frozen=True)
class Drafter:
    """Proposes drafts of one placement over one set of tables.

    ranking: ranking of cuts in this placement. side_by_side: the same stages of all pipelines lie
    side by side; else each pipeline is on nodes of its own, and only then may different families
    train beside each other. keep: maximum number of drafts. beside: families that may train beside
    each other (None: the drafter's). orders: equal pipelines whose stages follow each other in any
    order. unlike: pipelines of two kinds, which do not lie side by side.
    """

    ranking: CutRanking
    families: Families
    side_by_side: bool = False
    keep: int = limits.DRAFTS
    beside: Families | None = None
    orders: tuple[UncutPipelines, ...] = ()
    unlike: Sequence[UncutPipelines] = ()

    @property
    def tables(self) -> Tables:
        return self.ranking.tables

    def proposals(self, is_late: Callable[[], bool] = lambda: False) -> list[Proposal]:
        """Return the best proposals, fastest first; `is_late` ends the search for more."""
        found = list[Proposal]()
        in_pattern = list[CutPipelines]()
        batch = self.tables.batch
        quickest = rank_families(self.tables, batch, self.families, self.ranking.sync)
        for _ in range(0, limits.MOST_FAMILIES, limits.FAMILIES):
            if found and is_late():
                break

            most_s = np.inf
            if found:
                fastest_s = min(proposal.seconds for proposal in found)
                most_s = limits.MAX_SLOWDOWN * fastest_s
            next_ones = itertools.islice(quickest, limits.FAMILIES)
            promising = [family for family, seconds in next_ones if seconds <= most_s]
            if not promising:
                break

            cuts = self._cuts_of_families(promising)
            in_pattern += cuts
            found += self._propose(cuts)

        if not (found and is_late()):
            found += self._propose(self._cuts_in_any_order(in_pattern))
        if not self.side_by_side and not (found and is_late()):
            found += self._propose(
                cut_combined_families(self.ranking, self.beside or self.families)
            )
            found += self._propose(self.ranking.fastest([[uncut] for uncut in self.unlike]))

        best_of = dict[Draft, Proposal]()
        for proposal in sorted(found, key=lambda proposal: -proposal.seconds):
            best_of[proposal.draft] = proposal  # the last one is the fastest
        fastest_first = sorted(best_of.values(), key=lambda proposal: proposal.seconds)
        return fastest_first[: self.keep]

    def _cuts_of_families(self, chosen: Sequence[int]) -> list[CutPipelines]:
        """Return the best cut of each family, and of its regroupings, once and twice regrouped."""
        alternatives = [self._uncut(family) for family in chosen]
        best = self.ranking.fastest(alternatives)
        once = self._best_regrouped(best)
        twice = self._best_regrouped(once)
        return [*best, *once, *twice]

    def _uncut(self, family: int) -> list[UncutPipelines]:
        """Return the pipelines of a family, once for each of several orders of its node types."""
        orders = uncut_family(
            self.tables,
            self.families,
            family,
            self.tables.batch,
            share_all=not self.side_by_side,  # side by side, all pipelines have the same stages
        )
        return list(orders)

    def _best_regrouped(self, cuts: list[CutPipelines]) -> list[CutPipelines]:
        """Return the best cut of each kind of regrouping of the first cuts, fastest first."""
        alternatives = list[list[UncutPipelines]]()
        for cut in cuts[: limits.SHORTLIST]:
            alternatives += regroup(self.tables, cut.uncut)
        return self.ranking.fastest(alternatives)

    def _cuts_in_any_order(self, in_pattern: Sequence[CutPipelines]) -> list[CutPipelines]:
        """Return the best cuts of equal pipelines whose stages follow each other in any order.

        They are climbed to from the best orders and from `in_pattern`, by one stage at a time.
        """
        numbers = set(self.families.number.tolist())
        ordered = [[uncut] for uncut in self.orders if uncut.number in numbers]
        orders = self.ranking.fastest(ordered)

        starts = list(orders)
        for cut in in_pattern:
            if len(cut.uncut.pipelines) == 1:
                starts.append(cut)
        climbed = climb(self.ranking, starts, _resources_in(self.tables, self.families))
        return sorted([*orders, *climbed], key=lambda cut: cut.seconds)

    def _propose(self, cuts: Sequence[CutPipelines]) -> list[Proposal]:
        """Return the proposals of the fastest cuts, as far as memory and batch allow."""
        found = []
        fastest_first = sorted(cuts, key=lambda cut: cut.seconds)
        for cut in fastest_first[: 2 * limits.DRAFTS]:
            shapes = self.with_odd_one(cut.shape_of_each())
            if not shapes:
                continue
            proposal = _proposal_of(self.ranking, shapes, self.side_by_side)
            if proposal is not None:
                found.append(proposal)
        return found

    def with_odd_one(self, shapes: list[Shape]) -> list[Shape]:
        """Return shapes whose microbatches meet the batch; empty if they cannot.

        If microbatches of their size do not add up to the batch, the last pipeline gets the largest
        smaller size that divides it. A last pipeline of another family keeps its own size if the
        tables have no row of its kinds at the smaller size.
        """
        tables = self.tables
        size = self.ranking.estimator.microbatch(shapes[0])
        if tables.batch % size == 0:
            return shapes

        smaller = []
        for possible in tables.sizes:
            if possible < size and tables.batch % possible == 0:
                smaller.append(possible)
        if not smaller or len(shapes) == 1:
            return []

        row_of = {(row.kind, row.microbatch): index for index, row in enumerate(tables.rows)}
        *others, last = shapes
        rows = list[int]()
        for row_index in last.rows:
            kind = tables.rows[row_index].kind
            smaller_row = row_of.get((kind, smaller[-1]))
            if smaller_row is None:
                return shapes
            rows.append(smaller_row)
        return [*others, Shape(tuple(rows), last.ends)]
