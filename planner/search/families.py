"""Drafts of near-equal pipelines.

n pipelines share the groups of each node type as evenly as whole groups can be. A closed form ranks
all families (`closed_form.py`). Those ranked first are cut exactly (`cut.py`), in several orders of
their node types, and timed with the gradient sync that their placement leaves.

There are two placements. The same stages of all pipelines lie side by side: gradients are summed
inside nodes, and transfers share NICs. Or each pipeline is on nodes of its own, with the reverse.
Two or more families of different node types may also train beside each other, each with a depth and
microbatches of its own.
"""

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.search import limits
from planner.search.closed_form import Families, families, ranked
from planner.search.cut import Balancer, Cut
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits, steady_s
from planner.search.orders import Orders, neighbours, supply_of
from planner.search.problem import Request
from planner.search.shared_nodes import SharedNodes
from planner.search.side_by_side import SideBySide, Sync
from planner.search.stage_sums import Floats
from planner.search.tables import Tables


@dataclass(frozen=True)
class Proposal:
    """Draft with its estimated seconds a step.

    side_by_side: its pipelines are to lie side by side.
    """

    seconds: float
    draft: Draft
    side_by_side: bool


@dataclass(frozen=True)
class _Arranged:
    """Pipelines before they are cut.

    number: pipelines. pipelines: for each kind of pipeline, the rows of its stages and how many
    there are. sequences: sequences that the pipelines share.
    """

    number: int
    pipelines: tuple[tuple[tuple[int, ...], int], ...]
    sequences: float


@dataclass(frozen=True)
class _Cut:
    """Pipelines after they are cut.

    shapes: shape of each kind of pipeline. seconds: estimate of the steady state and the sync after
    it.
    """

    seconds: float
    arranged: _Arranged
    shapes: tuple[Shape, ...]

    def each(self) -> list[Shape]:
        pairs = zip(self.shapes, self.arranged.pipelines, strict=True)
        return [shape for shape, (_, number) in pairs for _ in range(number)]


def proposals_for(request: Request, tables: Tables) -> list[Proposal]:
    """Return the best drafts of either placement for a request, fastest first.

    Drafts that probably hold some layer on too few nodes come last, and only if the request is not
    brief.
    """
    every = families(tables, request.mixed_tp)
    holders = request.min_node_disjoint_holders
    known = (Estimator(tables), Balancer(tables))
    if holders < 2:
        return _proposed_of(request, tables, every, every, known)
    apart = every.take(np.flatnonzero(~_on_one_node(tables, every)))
    found = _proposed_of(request, tables, apart, every, known)
    if request.brief or len(apart.number) == len(every.number) or (found and request.is_late):
        return found
    others = _proposed_of(request, tables, every, every, known)
    seen = {(proposal.draft, proposal.side_by_side) for proposal in found}
    return [*found, *(each for each in others if (each.draft, each.side_by_side) not in seen)]


def _proposed_of(
    request: Request,
    tables: Tables,
    near_equal: Families,
    every: Families,
    known: tuple[Estimator, Balancer],
) -> list[Proposal]:
    """Return the best drafts of some families; any of `every` may train beside each other."""
    holders = request.min_node_disjoint_holders
    found = list[Proposal]()
    numbers = sorted(set(near_equal.number.tolist()))
    orders = tuple(_ordered(tables, numbers, _resources_in(tables, near_equal)))
    for side_by_side in (True, False):
        if found and request.is_late:
            break
        enough = near_equal.number >= max(holders, 1 + side_by_side)
        some = near_equal.take(np.flatnonzero(enough))
        parts = holders if side_by_side else max(1, int(every.number.max(initial=1)))
        options = DraftOptions(
            side_by_side,
            parts=parts,
            mixed_sizes=request.mixed_microbatch,
            keep=limits.DRAFTS * (4 if holders > 1 else 1),
            beside=every,
            orders=orders,
        )
        sync = SideBySide(request, tables, parts)
        drafter = Drafter(tables, some, sync, known, options)
        found += drafter.proposals(lambda: request.is_late)
    return sorted(found, key=lambda proposal: proposal.seconds)


def _resources_in(tables: Tables, some: Families) -> frozenset[int]:
    """Return the resources that some of the families use."""
    return frozenset(tables.kind(row).resource for row in some.rows[some.rows >= 0])


def _on_one_node(tables: Tables, some: Families) -> NDArray[np.bool_]:
    """Return (n,) True for families that use a node type of which the fleet has one node.

    Their near-equal pipelines have the same layers on that node: it alone holds some of them.
    """
    alone = np.array([len(resource.node_names) == 1 for resource in tables.resources])
    return np.asarray(((some.rows >= 0) & alone).any(axis=1))


@dataclass(frozen=True)
class DraftOptions:
    """Options of a drafter.

    side_by_side: the same stages of all pipelines lie side by side; else each pipeline is on nodes
    of its own, and only then may different families train beside each other. parts: of pipelines
    that lie side by side on nodes of their own. mixed_sizes: pipelines may differ in their
    microbatch. keep: maximum number of drafts. beside: families that may train beside each other
    (None: the drafter's). orders: equal pipelines whose stages follow each other in any order.
    """

    side_by_side: bool = False
    parts: int = 1
    mixed_sizes: bool = True
    keep: int = limits.DRAFTS
    beside: Families | None = None
    orders: tuple[_Arranged, ...] = ()


class Drafter:
    """Proposes drafts of one placement over one set of tables.

    sync: what follows the pipelines in this placement. known: estimator and balancer shared by both
    placements.
    """

    def __init__(
        self,
        tables: Tables,
        every: Families,
        sync: Sync,
        known: tuple[Estimator, Balancer] | None = None,
        options: DraftOptions | None = None,
    ):
        options = options or DraftOptions()
        self.tables = tables
        self.sync = sync
        self.estimator, self.balancer = known or (Estimator(tables), Balancer(tables))
        self.families = every
        self.beside = options.beside or every
        self.together = options.side_by_side
        self._orders = options.orders
        self.mixed_sizes = options.mixed_sizes
        self.keep = options.keep
        self._usable = _resources_in(tables, every)
        self._after: dict[tuple[int, Shape], float] = {}
        parts = options.parts if self.together else None
        self._shared = SharedNodes(self.estimator, parts)

    def proposals(self, is_late: Callable[[], bool] = lambda: False) -> list[Proposal]:
        """Return the best proposals, fastest first; `is_late` ends the search for more."""
        some = self.families
        found = list[Proposal]()
        in_pattern = list[_Cut]()
        quickest = ranked(self.tables, self.tables.batch, some, self.sync)
        for _ in range(0, limits.MOST_FAMILIES, limits.FAMILIES):
            if found and is_late():
                break
            most_s = limits.MAX_SLOWDOWN * min(
                (proposal.seconds for proposal in found), default=np.inf
            )
            if not (
                first := [f for f, s in itertools.islice(quickest, limits.FAMILIES) if s <= most_s]
            ):
                break
            arranged = [list(self._arranged(some, f, self.tables.batch)) for f in first]
            best = self._quickest(arranged)
            once = self._best_regrouped(best)
            cuts = [*best, *once, *self._best_regrouped(once)]
            in_pattern += cuts
            found += self._proposed(cuts)
        if not (found and is_late()):
            found += self._proposed(self._in_any_order(in_pattern))
        if not self.together and not (found and is_late()):
            found += self._proposed(self._divided())
        best_of = {p.draft: p for p in sorted(found, key=lambda proposal: -proposal.seconds)}
        return sorted(best_of.values(), key=lambda proposal: proposal.seconds)[: self.keep]

    def _proposed(self, cuts: list[_Cut]) -> list[Proposal]:
        first = sorted(cuts, key=lambda cut: cut.seconds)[: 2 * limits.DRAFTS]
        found = (self._proposal(cut.each()) for cut in first)
        return [proposal for proposal in found if proposal is not None]

    def _quickest(
        self, arranged: Sequence[Sequence[_Arranged]], most: int = limits.SHORTLIST
    ) -> list[_Cut]:
        """Return the best cut of each list, fastest first.

        A closed form ranks the pipelines of a list; what is known of links and sync ranks the
        `most` that come first.
        """
        best: dict[int, _Cut] = {}
        every = [(key, each) for key, some in enumerate(arranged) for each in some]
        for ahead in (
            (True, False) if self.tables.begun_ahead > 1 and every else (False,) * bool(every)
        ):
            cut_s, cuts = self._cut([each for _, each in every], ahead)
            seen = Counter[int]()
            for i in np.argsort(cut_s, kind="stable")[: np.isfinite(cut_s).sum()].tolist():
                key, each = every[i]
                seen[key] += 1
                if seen[key] > most:
                    continue
                shapes = tuple(cut.shape for cut in cuts[i])
                least_s = best[key].seconds if key in best else np.inf
                if (seconds := self._about_s(each, shapes, least_s)) < least_s:
                    best[key] = _Cut(seconds, each, shapes)
        return sorted(best.values(), key=lambda cut: cut.seconds)

    def _best_regrouped(self, cuts: list[_Cut]) -> list[_Cut]:
        """Return the best cut of each kind of regrouping of the first cuts, fastest first."""
        changed = [list(self._regrouped(cut.arranged)) for cut in cuts[: limits.SHORTLIST]]
        return self._quickest([variants for each in changed for variants in each])

    def _regrouped(self, arranged: _Arranged) -> Iterator[list[_Arranged]]:
        """Yield variants with some groups of one row replaced by groups of one other size.

        The replaced groups are at either end of their run, or inside it. Variants help if one
        degree leaves blocks that do not divide well, or more memory than early stages need, and if
        an end has much more to do than a block: a head, whose gradient a large group also sums
        sooner, or which lies beside the tied embedding.
        """
        tables = self.tables
        depth = max(len(rows) for rows, _ in arranged.pipelines)
        for row in dict.fromkeys(arranged.pipelines[0][0]):
            for other in self._other_degrees(row):
                variants = list[_Arranged]()
                for many, place in itertools.product(_steps(depth), ("first", "inside", "last")):
                    changed = [
                        (_with_groups(tables, rows, _Change(row, other, many, place)), n)
                        for rows, n in arranged.pipelines
                    ]
                    found = tuple((rows, n) for rows, n in changed if rows is not None)
                    if len(found) == len(changed) and all(
                        len(rows) <= tables.deepest for rows, _ in found
                    ):
                        variants.append(replace(arranged, pipelines=found))
                yield variants

    def _other_degrees(self, row: int) -> list[int]:
        """Return the rows of the same node type and microbatch size at other TP degrees."""
        tables = self.tables
        kind = self.tables.kind(row)
        node_type = tables.resources[kind.resource].node_type
        size = tables.rows[row].microbatch
        degrees = sorted({each.tp_degree for each in tables.kinds if each.group is None})
        found = [tables.row_by_use.get((node_type, degree, size)) for degree in degrees]
        return [each for each in found if each is not None and each != row]

    def _proposal(self, shapes: list[Shape]) -> Proposal | None:
        shapes = self._with_odd_one(shapes)
        draft = assign_microbatches(self.estimator, shapes, self.tables.batch) if shapes else None
        if draft is None or not draft_fits(self.estimator, draft):
            return None
        seconds = max(self.estimator.pipeline_s(*pipeline) for pipeline in set(draft.pipelines))
        for shape, microbatches in set(draft.pipelines):
            seconds = max(seconds, microbatches * self._shared.sent_s(len(shapes), shape.rows))
        return Proposal(seconds + self._after_s(len(shapes), set(shapes)), draft, self.together)

    def _after_s(self, number: int, shapes: Iterable[Shape]) -> float:
        """Return seconds of the sync after `number` pipelines."""
        return max(self._after_one_s(number, shape) for shape in shapes)

    def _after_one_s(self, number: int, shape: Shape) -> float:
        if (known := self._after.get((number, shape))) is None:
            known = self._after[number, shape] = self.sync.after_one_s(
                self.estimator, number, shape
            )
        return known

    def _with_odd_one(self, shapes: list[Shape]) -> list[Shape]:
        """Return shapes whose microbatches meet the batch; empty if they cannot.

        If microbatches of their size do not add up to the batch, the last pipeline gets the largest
        smaller size that divides it. A last pipeline of another family keeps its own size if the
        tables have no row of its kinds at the smaller size.
        """
        tables = self.tables
        size = self.estimator.microbatch(shapes[0])
        if tables.batch % size == 0:
            return shapes
        smaller = [b for b in tables.sizes if b < size and tables.batch % b == 0]
        if not smaller or not self.mixed_sizes or len(shapes) == 1:
            return []
        of_kind = {(row.kind, row.microbatch): r for r, row in enumerate(tables.rows)}
        rows = tuple(
            of_kind.get((tables.rows[row].kind, smaller[-1]), -1) for row in shapes[-1].rows
        )
        return shapes if -1 in rows else [*shapes[:-1], Shape(rows, shapes[-1].ends)]

    def _arranged(self, some: Families, f: int, sequences: float) -> Iterator[_Arranged]:
        """Yield the orders of a family's node types.

        Node types follow each other, in several orders. Each order also comes with one stage of the
        first type at the end, where the head is.
        """
        used = np.flatnonzero(some.rows[f] >= 0).tolist()
        number = int(some.number[f])
        groups = some.groups[f].tolist()
        speeds = {r: 1.0 / float(self.tables.sums.time_sums[some.rows[f, r], -1]) for r in used}
        shares = Counter(
            _shares(number, {r: groups[r] for r in used}, {} if self.together else speeds)
        )
        if any(not 0 < sum(share) <= self.tables.deepest for share in shares):
            return
        for order in itertools.islice(itertools.permutations(range(len(used))), limits.SHORTLIST):
            rows = {
                share: tuple(int(some.rows[f, used[j]]) for j in order for _ in range(share[j]))
                for share in shares
            }
            yield _Arranged(
                number, tuple((rows[share], n) for share, n in shares.items()), sequences
            )
            if len(order) > 1:
                turned = tuple(
                    ((*rows[share][1:], rows[share][0]), n) for share, n in shares.items()
                )
                yield _Arranged(number, turned, sequences)

    def _in_any_order(self, cuts: Sequence[_Cut]) -> list[_Cut]:
        """Return the best cuts of equal pipelines whose stages follow each other in any order.

        They are climbed to from the best orders and from `cuts`, by one stage at a time.
        """
        numbers = set(self.families.number.tolist())
        orders = self._quickest([[each] for each in self._orders if each.number in numbers])
        equal = [cut for cut in cuts if len(cut.arranged.pipelines) == 1]
        now = _best_of_each_number([*orders, *equal])
        found = [*orders]
        seen = {each.arranged.pipelines for each in now}
        spent = 0
        while now and spent < limits.CLIMBED_STAGES:
            further = list[_Cut]()
            for cut in now:
                changed = list[_Arranged]()
                for each in _changed(self.tables, cut.arranged, self._usable):
                    if each.pipelines not in seen:
                        seen.add(each.pipelines)
                        spent += len(each.pipelines[0][0])
                        changed.append(each)
                best = self._quickest([changed], limits.CLIMBED)
                further += [each for each in best if each.seconds < cut.seconds]
            found += further
            now = further
        return sorted(found, key=lambda cut: cut.seconds)

    def _divided(self) -> list[_Cut]:
        """Return cuts of two or more families beside each other.

        Each family has node types, TP degrees and a microbatch size of its own.
        """
        tables = self.tables
        number_of = len(self.tables.resources)
        speed = np.zeros(number_of)
        for row, whole_s in zip(tables.rows, tables.sums.time_sums[:, -1], strict=True):
            kind = tables.kinds[row.kind]
            speed[kind.resource] = max(speed[kind.resource], kind.count * row.microbatch / whole_s)
        arranged = list[list[_Arranged]]()
        for block in (
            b for n in range(1, number_of) for b in itertools.combinations(range(number_of), n)
        ):
            exactly = (self.beside.rows >= 0) == np.isin(np.arange(number_of), block)
            some = self.beside.take(np.flatnonzero(exactly.all(axis=1)))
            sequences = tables.batch * float(speed[list(block)].sum() / speed.sum())
            best: dict[int, int] = {}  # of as many pipelines, or up to twice as many
            kinds = len({number.bit_length() for number in some.number.tolist()})
            for i, _ in ranked(tables, sequences, some, self.sync):
                best.setdefault(int(some.number[i]).bit_length(), i)
                if len(best) == min(kinds, limits.SHORTLIST):
                    break
            arranged += [list(self._arranged(some, i, sequences)) for i in best.values()]
        return self._combined(self._or_regrouped(self._quickest(arranged)))

    def _or_regrouped(self, cuts: list[_Cut]) -> list[_Cut]:
        """Return the best of the cuts and their regroupings, fastest first.

        One each of the same node types and about as many pipelines.
        """
        every = [[v for some in self._regrouped(cut.arranged) for v in some] for cut in cuts]
        best = dict[tuple[frozenset[int], int], _Cut]()
        for cut in sorted([*cuts, *self._quickest(every)], key=lambda cut: cut.seconds):
            best.setdefault((self._resources_of(cut), cut.arranged.number.bit_length()), cut)
        return list(best.values())

    def _resources_of(self, cut: _Cut) -> frozenset[int]:
        return frozenset(
            self.tables.kind(row).resource for shape in cut.shapes for row in shape.rows
        )

    def _combined(self, cuts: list[_Cut]) -> list[_Cut]:
        """Return the fastest combinations of cuts with different node types, fastest first.

        Each combination has two or more cuts.
        """
        used = [self._resources_of(cut) for cut in cuts]
        found = list[_Cut]()
        most = 2 * limits.DRAFTS

        def extend(chosen: list[int], taken: frozenset[int]) -> None:
            if len(chosen) > 1:
                several = self._beside(
                    [cuts[i] for i in chosen], found[-1].seconds if len(found) == most else np.inf
                )
                bisect.insort(found, several, key=lambda cut: cut.seconds)
                del found[most:]
            for i in range(chosen[-1] + 1 if chosen else 0, len(cuts)):
                if not taken & used[i]:
                    extend([*chosen, i], taken | used[i])

        extend([], frozenset())
        return found

    def _beside(self, cuts: list[_Cut], most_s: float) -> _Cut:
        """Merge cuts of several families into one cut of the whole batch."""
        pipelines = tuple(pipeline for cut in cuts for pipeline in cut.arranged.pipelines)
        arranged = _Arranged(sum(n for _, n in pipelines), pipelines, self.tables.batch)
        shapes = tuple(shape for cut in cuts for shape in cut.shapes)
        return _Cut(self._about_s(arranged, shapes, most_s), arranged, shapes)

    def _about_s(self, arranged: _Arranged, shapes: Sequence[Shape], most_s: float) -> float:
        """Return seconds of the steady state, and of the sync after it.

        The sync is left out if the steady state alone takes `most_s`.
        """
        numbers = [(shape, n) for shape, (_, n) in zip(shapes, arranged.pipelines, strict=True)]
        seconds = steady_s(self.estimator, numbers, arranged.sequences)
        each = arranged.sequences / arranged.number
        for shape in shapes:
            microbatches = each / self.estimator.microbatch(shape)
            seconds = max(seconds, microbatches * self._shared.sent_s(arranged.number, shape.rows))
        return seconds + self._after_s(arranged.number, shapes) if seconds < most_s else seconds

    def _cut(self, arranged: list[_Arranged], ahead: bool) -> tuple[Floats, list[list[Cut]]]:
        """Cut the pipelines with equal shares of the batch.

        Returns (n,) seconds of the slowest pipeline of each entry, infinite if one cannot hold the
        model, and the cuts of each. ahead: early stages may work ahead.
        """
        pipelines = [rows for each in arranged for rows, _ in each.pipelines]
        begins = np.cumsum([0, *(len(each.pipelines) for each in arranged)])
        sequences = np.array(
            [each.sequences / each.number for each in arranged for _ in each.pipelines]
        )
        microbatches = np.maximum(
            sequences / [self.tables.rows[rows[0]].microbatch for rows in pipelines], 1.0
        )
        cuts = self.balancer.cut_each(pipelines, microbatches.tolist() if ahead else ())
        fill, bottleneck = np.array([(cut.fill_s, cut.bottleneck_s) for cut in cuts]).T
        seconds = fill + (microbatches - 1) * np.minimum(bottleneck, 1e300)
        return np.maximum.reduceat(seconds, begins[:-1]), [
            cuts[i:j] for i, j in itertools.pairwise(begins.tolist())
        ]


def _ordered(
    tables: Tables, numbers: Iterable[int], usable: Collection[int]
) -> Iterator[_Arranged]:
    """Yield equal pipelines with the best orders of stages, of each number and microbatch."""
    spent = 0
    for number, size in itertools.product(numbers, tables.sizes):
        if number * size > tables.batch or tables.batch % size:
            continue
        orders = Orders(tables, supply_of(tables, number, usable), size)
        spent += orders.work
        if spent > limits.ORDERED:
            return
        for rows in orders.found():
            yield _Arranged(number, ((rows, number),), tables.batch)


def _changed(tables: Tables, arranged: _Arranged, usable: Collection[int]) -> Iterator[_Arranged]:
    """Yield equal pipelines that differ from these in one stage, or in the places of two."""
    ((rows, number),) = arranged.pipelines
    for other in neighbours(tables, rows, supply_of(tables, number, usable)):
        yield replace(arranged, pipelines=((other, number),))


def _best_of_each_number(cuts: Sequence[_Cut]) -> list[_Cut]:
    """Return the cuts with the least seconds, one of each number of pipelines and depth."""
    best = dict[tuple[int, int], _Cut]()
    for cut in sorted(cuts, key=lambda cut: cut.seconds):
        ((rows, number),) = cut.arranged.pipelines
        best.setdefault((number, len(rows)), cut)
    return [*best.values()][: limits.CLIMBS]


def _steps(most: int) -> list[int]:
    """Return 1, 2, and on in steps of about a half, up to the first number of at least `most`."""
    out = [1]
    while out[-1] < most:
        out.append(out[-1] + max(1, out[-1] // 2))
    return out


@dataclass(frozen=True)
class _Change:
    """Change of groups: about `many` groups of `row` become groups of `other`.

    The new groups are fewer and larger, or more and smaller. place: "first" before the remaining
    groups of `row`, "last" after them, or "inside", with half of them before.
    """

    row: int
    other: int
    many: int
    place: str


def _with_groups(tables: Tables, rows: tuple[int, ...], change: _Change) -> tuple[int, ...] | None:
    """Return the rows with `change.many` groups of another size, on as many GPUs.

    None if there are too few groups.
    """
    row = change.row
    old, new = (tables.kind(each).tp_degree for each in (row, change.other))
    if new > old:
        taken = change.many * new // old
        given = change.many
    else:
        taken = -(-change.many * new // old)
        given = taken * old // new
    if (count := rows.count(row)) < taken:
        return None
    at = rows.index(row)
    rest = tuple(r for r in rows if r != row)
    left = (row,) * (count - taken)
    made = (change.other,) * given
    before = sum(r != row for r in rows[:at])
    early = {"first": 0, "inside": len(left) // 2, "last": len(left)}[change.place]
    if change.place == "inside" and not 0 < early < len(left):
        return None
    run = (*left[:early], *made, *left[early:])
    return (*rest[:before], *run, *rest[before:])


def _shares(number: int, groups: dict[int, int], speeds: dict[int, float]) -> list[tuple[int, ...]]:
    """Return the groups of each node type for each pipeline.

    Even shares come first. If speeds are given, the groups left over go to the slowest pipeline so
    far, the fastest groups first; otherwise to none.
    """
    shares = [[count // number for count in groups.values()] for _ in range(number)]
    if speeds:
        slowest = [
            (sum(n * speeds[r] for n, r in zip(share, groups, strict=True)), i)
            for i, share in enumerate(shares)
        ]
        heapq.heapify(slowest)
        for j, (r, count) in sorted(
            enumerate(groups.items()), key=lambda item: -speeds[item[1][0]]
        ):
            for _ in range(count % number):
                speed, i = heapq.heappop(slowest)
                shares[i][j] += 1
                heapq.heappush(slowest, (speed + speeds[r], i))
    return [tuple(share) for share in shares]
