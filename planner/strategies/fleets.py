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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.search.problem import limits
from planner.search.problem.request import Answer, Request, Search, narrow_to

TypeCounts = tuple[int, ...]
AnswerValue = Callable[[Answer], float]


class FleetSpace:
    """Parts of a request's fleet within its price limit and its bound on nodes.

    A part is told by its numbers of nodes by machine: node types that are equal in all but name are
    one machine.
    """

    def __init__(self, request: Request):
        self.request = replace(request, proposed={})
        by_machine = _nodes_by_machine(request)
        self.nodes = list(by_machine.values())
        self.machines = tuple(by_machine)
        self.most: TypeCounts = tuple(len(nodes) for nodes in self.nodes)
        self.none: TypeCounts = (0,) * len(self.nodes)
        """The empty fleet."""

        self._machine_of: dict[str, int] = {}
        for index, nodes in enumerate(self.nodes):
            for node in nodes:
                self._machine_of[node.name] = index

        self.answered: dict[tuple[TypeCounts, bool], Answer | InfeasibleError] = {}
        """Outcome of each search of a fleet, by numbers of nodes and `brief`.

        All comparisons of this space's fleets ask for the same ones.
        """

    def fleet(self, counts: TypeCounts) -> Fleet:
        chosen = set[str]()
        for count, nodes in zip(counts, self.nodes, strict=True):
            for node in nodes[:count]:
                chosen.add(node.name)

        # in the order of the whole fleet, on which placements depend
        whole = self.request.fleet
        kept = tuple(node for node in whole.nodes if node.name in chosen)
        return Fleet(whole.generation, kept)

    def counts_of(self, names: Iterable[str]) -> TypeCounts:
        """Return the numbers of nodes by machine among nodes of these names."""
        counts = [0] * len(self.machines)
        for name in names:
            machine = self._machine_of[name]
            counts[machine] += 1
        return tuple(counts)

    def price(self, counts: TypeCounts) -> float:
        machines = zip(counts, self.machines, strict=True)
        return sum(count * (machine.usd_per_hour or 0.0) for count, machine in machines)

    def gpus(self, counts: TypeCounts) -> int:
        machines = zip(counts, self.machines, strict=True)
        return sum(count * machine.num_gpus for count, machine in machines)

    def allows(self, counts: TypeCounts) -> bool:
        if not any(counts):
            return False
        for number, most in zip(counts, self.most, strict=True):
            if not 0 <= number <= most:
                return False

        limit = self.request.max_usd_per_hour
        if limit is not None and self.price(counts) > limit * (1 + 1e-9):
            return False
        bound = self.request.bound
        if bound is None:
            return True
        return bound.allows_fleet(self.fleet(counts))

    def keep_allowed(self, fleets: Iterable[TypeCounts]) -> list[TypeCounts]:
        """Return those of some fleets that are allowed."""
        return [counts for counts in fleets if self.allows(counts)]

    @property
    def num_combinations(self) -> int:
        """Number of fleets, allowed or not, with the empty one."""
        return math.prod(most + 1 for most in self.most)

    def number(self) -> int:
        """Count the allowed fleets; if they are very many, return the number of combinations."""
        every = self.all(limits.COUNTED_FLEETS)
        if every is None:
            return self.num_combinations - 1
        return len(every)

    def all(self, most: int) -> list[TypeCounts] | None:
        """Return every allowed fleet, or None if there are more than `most` combinations."""
        if self.num_combinations > most:
            return None
        ranges = [range(number + 1) for number in self.most]
        return self.keep_allowed(itertools.product(*ranges))

    def fill(self, counts: TypeCounts, order: Sequence[int]) -> TypeCounts:
        """Add as many nodes as are allowed, machine by machine in this order."""
        found = counts
        for machine in order:
            more = with_count(found, machine, found[machine] + 1)
            while self.allows(more):
                found = more
                more = with_count(found, machine, found[machine] + 1)
        return found

    def is_largest(self, counts: TypeCounts) -> bool:
        return not any(self.allows(more) for more in _one_more(counts))


def _nodes_by_machine(request: Request) -> dict[NodeType, list[Node]]:
    standing = dict(request.bound.standing) if request.bound else {}

    # of equal nodes those that stand come first, so that no part of the fleet buys others instead
    nodes = sorted(request.fleet.nodes, key=lambda node: node.node_type.name not in standing)
    found: dict[NodeType, list[Node]] = {}
    for node in nodes:
        if node.node_type.num_gpus:
            machine = replace(node.node_type, name="", max_nodes=1, spot=False)
            found.setdefault(machine, []).append(node)
    return found


def with_count(counts: TypeCounts, index: int, number: int) -> TypeCounts:
    """Return the fleet with `number` nodes of one machine."""
    return (*counts[:index], number, *counts[index + 1 :])


def _one_more(counts: TypeCounts) -> Iterator[TypeCounts]:
    for index, number in enumerate(counts):
        yield with_count(counts, index, number + 1)


def thinned_counts(most_by_kind: Sequence[int], most_fleets: int) -> list[list[int]]:
    """Return the numbers of nodes of each kind for at most `most_fleets` fleets.

    Every second number of the widest is left out until they are few.
    """
    steps = [list(range(most + 1)) for most in most_by_kind]
    while True:
        sizes = [len(numbers) for numbers in steps]
        is_few = math.prod(sizes) <= most_fleets
        if is_few or max(sizes) <= 3:
            return steps
        widest = sizes.index(max(sizes))
        numbers = steps[widest]
        steps[widest] = sorted({*numbers[::2], numbers[-1]})


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
    def found(self) -> list[Answer]:
        """Answers of the fleets that have one."""
        return [answer for answer in self.answers.values() if answer is not None]

    @property
    def budget_gpus(self) -> float:
        return self.space.request.time_limit_s * limits.FLEET_GPUS_A_SECOND

    @property
    def is_over(self) -> bool:
        if self.space.request.is_late and self.found:
            return True

        # a few fleets are looked at even if each is larger than the budget
        enough = len(self.answers) >= limits.FEWEST_FLEETS
        return enough and self.spent_gpus >= self.budget_gpus

    def look(self, counts: TypeCounts) -> float:
        """Return the value of a fleet's best draft.

        Infinite if it has none, or if it would have to be searched and the budget is spent.
        """
        if counts not in self.answers:
            # a layer lies on no more nodes than there are
            has_too_few_nodes = sum(counts) < self.space.request.min_node_disjoint_holders
            if self.is_over or has_too_few_nodes:
                return math.inf
            self.draft(counts)
            self.spent_gpus += self.space.gpus(counts)

        answer = self.answers[counts]
        return math.inf if answer is None else self.value(answer)

    def draft(self, counts: TypeCounts) -> Answer | None:
        """Return a fleet's best draft, whatever the budget; None if it has none."""
        answer = self._answer(counts, brief=True)
        self.answers.setdefault(counts, answer)
        return answer

    def _answer(self, counts: TypeCounts, *, brief: bool) -> Answer | None:
        answered = self.space.answered
        if (counts, brief) not in answered:
            answered[counts, brief] = self._outcome(counts, brief)
        outcome = answered[counts, brief]
        if isinstance(outcome, Answer):
            return outcome

        # the refusal of a largest fleet says most: more nodes would not help
        if self.refusal is None or self.space.is_largest(counts):
            self.refusal = outcome
        return None

    def _outcome(self, counts: TypeCounts, brief: bool) -> Answer | InfeasibleError:
        part = narrow_to(self.space.request, self.space.fleet(counts))
        # a bound takes up to a second, longer than the drafts of a fleet
        asked = replace(part, objective="time", prove=False, brief=brief)
        try:
            return self.search(asked)
        except InfeasibleError as error:
            return error

    def finish(self, also: TypeCounts | None = None) -> list[Answer]:
        """Return the answers, those of the finalists and of the fleet `also` from a full search.

        Fleets whose drafts use the same nodes are one finalist, unless too few others are left: a
        draft that leaves nodes idle may be behind what a full search makes of them.
        """
        request = self.space.request
        unlike: dict[frozenset[str], TypeCounts] = {}
        alike = []
        for counts, answer in self._rank():
            if answer.used_nodes in unlike:
                alike.append(counts)
            else:
                unlike[answer.used_nodes] = counts

        finalists = [*unlike.values(), *alike][: limits.FINALISTS]
        for counts in finalists:
            if request.is_late:
                break
            # the best one as it is now: its own full search may have lowered its value
            if self.look(counts) <= limits.FINAL_BEHIND * self.look(finalists[0]):
                self.search_in_full(counts)
        if also is not None and not request.is_late:
            self.search_in_full(also)
        return self.found

    def _rank(self) -> list[tuple[TypeCounts, Answer]]:
        """Return the fleets with an answer, the best first, and of equal ones the smallest."""
        found = []
        for counts, answer in self.answers.items():
            if answer is not None and math.isfinite(self.value(answer)):
                found.append((counts, answer))
        return sorted(found, key=lambda each: (self.value(each[1]), self.space.gpus(each[0])))

    def search_in_full(self, counts: TypeCounts) -> Answer | None:
        """Return the answer of a full search of a fleet; keep it if it is the best known."""
        full = self._answer(counts, brief=False)
        if full is None:
            return None

        before = self.answers.get(counts)
        if before is None or self.value(full) < self.value(before):
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
            if best is None or best in expanded:
                return
            if not math.isfinite(self.look(best)):
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

    def around(counts: TypeCounts) -> Iterator[TypeCounts]:
        return _around(space, counts)

    singles = list(_one_more(space.none))
    small = [*singles]
    for one in singles:
        small += _one_more(one)
    starts = set(space.keep_allowed(small))
    found.climb(sorted(starts, key=space.gpus), around)

    # the model may be too large for one or two nodes
    size = 4
    while not found.found and size <= 2 * max(space.most) and not found.is_over:
        found.climb(_starts_of_size(space, size), around)
        size *= 2
    return found


def _starts_of_size(space: FleetSpace, size: int) -> list[TypeCounts]:
    """Return the allowed fleets of `size` nodes of one machine, or of every machine.

    They have all nodes of a machine that has fewer.
    """
    every = []
    wanted = []
    for index, most in enumerate(space.most):
        number = min(size, most)
        every.append(number)
        wanted.append(with_count(space.none, index, number))
    return space.keep_allowed([*wanted, tuple(every)])


def fastest(search: Search, space: FleetSpace, value: AnswerValue) -> FleetSearch:
    """Compare the largest fleets that are allowed by their step: a node more makes none slower."""
    found = FleetSearch(search, space, value)
    every = space.all(limits.DRAFTED_FLEETS * 4)
    if every is not None:
        largest = [counts for counts in every if space.is_largest(counts)]
        if len(largest) <= limits.FEWEST_FLEETS:
            for counts in largest:
                found.look(counts)
            return found

    # too many to look at each: climb from those that are filled with one machine after the other
    machines = range(len(space.most))
    orders = itertools.islice(itertools.permutations(machines), limits.FEWEST_FLEETS // 2)
    starts = dict[TypeCounts, None]()  # several orders may fill the same fleet
    for order in orders:
        filled = space.fill(space.none, order)
        if any(filled):
            starts[filled] = None
    found.climb(list(starts), lambda counts: _exchange_nodes(space, counts))
    return found


def _around(space: FleetSpace, counts: TypeCounts) -> Iterator[TypeCounts]:
    """Yield the neighbours of a fleet.

    They have a node more, one less, one for one of another machine, and twice or half as many of a
    machine.
    """
    yield from _one_more(counts)
    for index, number in enumerate(counts):
        if not number:
            continue

        fewer = with_count(counts, index, number - 1)
        yield fewer
        yield from _one_more(fewer)

        twice = min(2 * number, space.most[index])
        yield with_count(counts, index, twice)
        yield with_count(counts, index, number // 2)


def _exchange_nodes(space: FleetSpace, counts: TypeCounts) -> Iterator[TypeCounts]:
    """Yield fleets with one or half of a machine's nodes less, filled up with other machines."""
    for index, number in enumerate(counts):
        others = list(range(len(counts)))
        others.remove(index)
        for fewer in sorted({number - 1, number // 2}):
            if not 0 <= fewer < number:
                continue

            left = with_count(counts, index, fewer)
            for first in others:
                rest = list(others)
                rest.remove(first)
                yield space.fill(left, [first, *rest])
