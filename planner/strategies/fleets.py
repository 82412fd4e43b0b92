"""Search for the nodes to use, if their price or number is bounded or is the objective.

A fleet is compared by the best of its first drafts (`Request.brief`); only the finalists are
searched in full. If there are few fleets, all are compared. Else a climb starts from the smallest
fleets (objective: the least dollars per token) or from the largest that the bounds allow
(objective: the fastest step). It moves from the best known fleet to neighbours with a node more,
less or exchanged, until no neighbour is better. Budgets are counts, so that the same request has
the same answer on a busy machine.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.cluster import Fleet, Node, NodeType, node_of
from planner.errors import InfeasibleError
from planner.search import limits
from planner.search.problem import Answer, Request, narrowed

Search = Callable[[Request], Answer]
TypeCounts = tuple[int, ...]
AnswerValue = Callable[[Answer], float]


class FleetSpace:
    """Parts of a request's fleet within its price limit and its bound on nodes, as numbers of nodes
    by machine: node types that are equal in all but name are one machine.
    """

    def __init__(self, request: Request):
        self.request = request
        by_machine: dict[NodeType, list[Node]] = {}
        standing = dict(request.bound.standing) if request.bound else {}
        for node in sorted(request.fleet.nodes, key=lambda n: n.node_type.name not in standing):
            if node.node_type.num_gpus:
                by_machine.setdefault(_machine(node.node_type), []).append(node)
        self.nodes = tuple(tuple(nodes) for nodes in by_machine.values())
        self.most: TypeCounts = tuple(map(len, self.nodes))
        self.machines = tuple(by_machine)
        self._machine_of = {
            node.name: index for index, nodes in enumerate(self.nodes) for node in nodes
        }
        self.answered: dict[tuple[TypeCounts, bool], Answer | InfeasibleError] = {}
        """Outcome of each search of a fleet, by numbers of nodes and `brief`: all comparisons of
        this space's fleets ask for the same ones.
        """

    def fleet(self, counts: TypeCounts) -> Fleet:
        chosen = {n.name for count, nodes in zip(counts, self.nodes) for n in nodes[:count]}
        kept = tuple(node for node in self.request.fleet.nodes if node.name in chosen)
        return Fleet(self.request.fleet.generation, kept)

    def counts_of(self, names: Iterable[str]) -> TypeCounts:
        """Return the numbers of nodes by machine among nodes of these names."""
        numbers = Counter(self._machine_of[name] for name in names)
        return tuple(numbers[index] for index in range(len(self.machines)))

    def price(self, counts: TypeCounts) -> float:
        return sum(count * (kind.usd_per_hour or 0.0) for count, kind in zip(counts, self.machines))

    def gpus(self, counts: TypeCounts) -> int:
        return sum(count * kind.num_gpus for count, kind in zip(counts, self.machines))

    def allows(self, counts: TypeCounts) -> bool:
        if not any(counts) or any(not 0 <= n <= most for n, most in zip(counts, self.most)):
            return False
        limit = self.request.max_usd_per_hour
        bound = self.request.bound
        if limit is not None and self.price(counts) > limit * (1 + 1e-9):
            return False
        if bound is None:
            return True
        return bound.allows(Counter(node.node_type.name for node in self.fleet(counts).nodes))

    def number(self) -> int:
        """Count the allowed fleets; if they are very many, return the number of combinations."""
        every = self.all(limits.COUNTED_FLEETS)
        return math.prod(n + 1 for n in self.most) - 1 if every is None else len(every)

    def all(self, most: int) -> list[TypeCounts] | None:
        """Every fleet that is allowed, or None where there are more than `most` combinations."""
        if math.prod(number + 1 for number in self.most) > most:
            return None
        every = itertools.product(*(range(number + 1) for number in self.most))
        return [counts for counts in every if self.allows(counts)]

    def filled(self, counts: TypeCounts, order: Sequence[int]) -> TypeCounts:
        """Add as many nodes as are allowed, machine by machine in this order."""
        found = list(counts)
        for machine in order:
            while self.allows((*found[:machine], found[machine] + 1, *found[machine + 1 :])):
                found[machine] += 1
        return tuple(found)

    def is_largest(self, counts: TypeCounts) -> bool:
        return not any(self.allows(more) for more in _one_more(counts))


def _machine(kind: NodeType) -> NodeType:
    return replace(kind, name="", max_nodes=1, spot=False)


def _one_more(counts: TypeCounts) -> Iterator[TypeCounts]:
    for index in range(len(counts)):
        yield (*counts[:index], counts[index] + 1, *counts[index + 1 :])


@dataclass
class FleetSearch:
    """Compares fleets of one request by their drafts, within a budget of GPUs and fleets.

    is_complete: each fleet that was not looked at is a part of one that was.
    """

    search: Search
    space: FleetSpace
    value: AnswerValue
    answers: dict[TypeCounts, Answer | None] = field(default_factory=dict)
    spent_gpus: int = 0
    refusal: InfeasibleError | None = None
    begin_s: float = 0.0
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.begin_s = self.space.request.clock()

    @property
    def budget_gpus(self) -> float:
        return self.space.request.time_limit_s * limits.FLEET_GPUS_A_SECOND

    @property
    def is_over(self) -> bool:
        if self.space.request.is_late and any(self.answers.values()):
            return True
        enough = len(self.answers) >= limits.FEWEST_FLEETS
        return enough and self.spent_gpus >= self.budget_gpus

    def look(self, counts: TypeCounts) -> float:
        """The value of a fleet's best draft, infinite where it has none or the budget is spent."""
        if counts not in self.answers:
            if self.is_over or sum(counts) < self.space.request.min_node_disjoint_holders:
                return math.inf
            self.draft(counts)
            self.spent_gpus += self.space.gpus(counts)
        answer = self.answers[counts]
        return math.inf if answer is None else self.value(answer)

    def draft(self, counts: TypeCounts) -> Answer | None:
        """Return a fleet's best draft, whatever the budget; None if it has none."""
        if counts not in self.answers:
            self.answers[counts] = self._answer(counts, brief=True)
        return self.answers[counts]

    def _answer(self, counts: TypeCounts, *, brief: bool) -> Answer | None:
        answered = self.space.answered
        if (counts, brief) not in answered:
            answered[counts, brief] = self._outcome(counts, brief)
        outcome = answered[counts, brief]
        if isinstance(outcome, Answer):
            return outcome
        if self.refusal is None or self.space.is_largest(counts):
            self.refusal = outcome
        return None

    def _outcome(self, counts: TypeCounts, brief: bool) -> Answer | InfeasibleError:
        part = narrowed(self.space.request, self.space.fleet(counts))
        asked = replace(part, objective="time", prove=False, brief=brief)
        try:
            return self.search(asked)
        except InfeasibleError as error:
            return error

    def finish(self, also: TypeCounts | None = None) -> list[Answer]:
        """The answers, those of the finalists, and of the fleet `also`, from a full search.

        Fleets whose drafts use the same nodes are one finalist, unless too few others are left: a
        draft that leaves nodes idle may be behind what a full search makes of them.
        """
        finite = [counts for counts in self.answers if math.isfinite(self.look(counts))]
        ranked = sorted(finite, key=lambda counts: (self.look(counts), self.space.gpus(counts)))
        by_nodes: dict[frozenset[str], TypeCounts] = {}
        for counts in ranked:
            by_nodes.setdefault(self._used(counts), counts)
        unlike = [*by_nodes.values()]
        alike = [counts for counts in ranked if counts not in unlike]
        for counts in [*unlike, *alike][: limits.FINALISTS]:
            if self.space.request.is_late:
                break
            if self.look(counts) <= limits.FINAL_BEHIND * self.look(ranked[0]):
                self.search_in_full(counts)
        if also is not None and not self.space.request.is_late:
            self.search_in_full(also)
        return [answer for answer in self.answers.values() if answer is not None]

    def _used(self, counts: TypeCounts) -> frozenset[str]:
        """Nodes of a fleet's plan, by which fleets with idle nodes are told from others."""
        answer = self.answers[counts]
        assert answer is not None
        return frozenset(map(node_of, answer.plan.workers))

    def search_in_full(self, counts: TypeCounts) -> Answer | None:
        """Return the answer of a full search of a fleet; keep it if it is the best known."""
        full = self._answer(counts, brief=False)
        before = self.answers.get(counts)
        if full is not None and (before is None or self.value(full) < self.value(before)):
            self.answers[counts] = full
        return full

    def climb(
        self, starts: Sequence[TypeCounts], neighbours: Callable[[TypeCounts], Iterator[TypeCounts]]
    ) -> None:
        """Climb from the best of the starts to better neighbours, until the best has none."""
        for counts in starts:
            self.look(counts)
        expanded: set[TypeCounts] = set()
        while not self.is_over:
            best = min(self.answers, key=self.look, default=None)
            if best is None or best in expanded or not math.isfinite(self.look(best)):
                return
            expanded.add(best)
            for counts in neighbours(best):
                if self.space.allows(counts):
                    self.look(counts)


def cheapest(search: Search, space: FleetSpace, value: AnswerValue) -> FleetSearch:
    """Compare fleets by dollars per token, small fleets first.

    The overhead of a fleet (gradient sums and waiting) grows with its size.
    """
    found = FleetSearch(search, space, value)
    none = (0,) * len(space.most)
    small = [*_one_more(none), *itertools.chain.from_iterable(map(_one_more, _one_more(none)))]
    starts = sorted({counts for counts in small if space.allows(counts)}, key=space.gpus)
    found.climb(starts, lambda counts: _around(space, counts))
    size = 4
    while not any(found.answers.values()) and size <= 2 * max(space.most) and not found.is_over:
        times = [tuple(size * number for number in one) for one in _one_more(none)]
        wanted = [tuple(map(min, each, space.most)) for each in (*times, (size,) * len(none))]
        found.climb([c for c in wanted if space.allows(c)], lambda c: _around(space, c))
        size *= 2
    return found


def fastest(search: Search, space: FleetSpace, value: AnswerValue) -> FleetSearch:
    """Compare the largest fleets that are allowed by their step: a node more makes none slower."""
    found = FleetSearch(search, space, value)
    every = space.all(limits.DRAFTED_FLEETS * 4)
    largest = None if every is None else [c for c in every if space.is_largest(c)]
    if largest is not None and len(largest) <= limits.FEWEST_FLEETS:
        found.climb(largest, lambda counts: iter(()))
        return found
    machines = range(len(space.most))
    orders = itertools.islice(itertools.permutations(machines), limits.FEWEST_FLEETS // 2)
    none = (0,) * len(space.most)
    starts = dict.fromkeys(space.filled(none, order) for order in orders)
    found.climb([counts for counts in starts if any(counts)], lambda c: _exchanged(space, c))
    return found


def _around(space: FleetSpace, counts: TypeCounts) -> Iterator[TypeCounts]:
    """A node more, one less, one for one of another machine, twice as many, half as many."""
    yield from _one_more(counts)
    for index, number in enumerate(counts):
        if number:
            fewer = (*counts[:index], number - 1, *counts[index + 1 :])
            yield fewer
            yield from _one_more(fewer)
            for other in (min(2 * number, space.most[index]), number // 2):
                yield (*counts[:index], other, *counts[index + 1 :])


def _exchanged(space: FleetSpace, counts: TypeCounts) -> Iterator[TypeCounts]:
    """Yield fleets with one or half of a machine's nodes less, filled up with other machines."""
    machines = range(len(counts))
    for index, number in enumerate(counts):
        for fewer in sorted({number - 1, number // 2} - {number}):
            if fewer < 0:
                continue
            left = (*counts[:index], fewer, *counts[index + 1 :])
            for first in machines:
                if first != index:
                    order = [first, *(m for m in machines if m not in (first, index))]
                    yield space.filled(left, order)
