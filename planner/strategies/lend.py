"""Nodes that change hands: a pipeline that lost workers, or any where nodes are free, takes a node with its groups as they are."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster import NodeType, node_of
from planner.search.cut import Balancer
from planner.search.draft import Estimator, Shape
from planner.search.tables import Tables
from planner.strategies.staged import Group, Stager

_ROUNDS = 3
_TAKEN_ON = 5  # free nodes at most that join pipelines: of more, new pipelines are made
_AT_ONCE = (1, 2)
_WORTH = 0.998
_MOVES = 300


@dataclass(frozen=True, slots=True)
class Crew:
    """The groups of one pipeline, in order, with their table rows. ends: its cut where that stays as it is, else None."""

    groups: tuple[Group, ...]
    rows: tuple[int, ...]
    ends: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """Who works where: all pipelines, and the workers of each node that none has yet."""

    crews: tuple[Crew, ...]
    free: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True)
class _Move:
    """Crew `receiver` becomes `taken`; crew `giver` becomes `left` (None: it has given all), or free node `free` is used."""

    receiver: int
    taken: Crew
    giver: int | None = None
    left: Crew | None = None
    free: int | None = None


class Lender:
    """Ranks moves of nodes by the steady state of the pipelines cut anew, without their gradient sync."""

    def __init__(self, tables: Tables, stager: Stager, batch: int, max_stages: int):
        self.tables, self.stager, self.batch, self.max_stages = tables, stager, batch, max_stages
        self.estimator = Estimator(tables)
        self.degrees = sorted({kind.tp_degree for kind in tables.kinds})
        self._known: dict[Crew, tuple[float, float]] = {}

    def rosters(self, roster: Roster) -> list[Roster]:
        """The roster itself, and what the most promising moves make of it, one after the other."""
        found = [roster]
        for _ in range(_ROUNDS + min(len(roster.free), _TAKEN_ON)):
            moves = list(itertools.islice(self.moves(found[-1]), _MOVES))
            if not moves:
                break
            self._measure([crew for move in moves for crew in (move.taken, move.left)] + list(found[-1].crews))
            before = self._seconds(found[-1])
            after = [self._made(found[-1], move) for move in moves]
            seconds = [self._seconds(made) for made in after]
            order = sorted(range(len(moves)), key=lambda i: (seconds[i], i))
            if seconds[order[0]] > before * _WORTH:
                break
            found += [after[i] for i in order[1::-1]]  # the best last: the next round begins there
        return found

    def moves(self, roster: Roster) -> Iterator[_Move]:
        """Free nodes to any pipeline; nodes of a pipeline to one that is to be cut anew. Of equal pipelines one is looked at."""
        by_number = list(enumerate(roster.crews))[::-1]
        receivers = {(crew.rows, crew.ends): q for q, crew in by_number}
        for q, crew in ((q, roster.crews[q]) for q in sorted(receivers.values())):
            for i, workers in enumerate(roster.free[: _AT_ONCE[-1]]):
                for degree in self.degrees:
                    node = tuple(workers[j : j + degree] for j in range(0, len(workers) - degree + 1, degree))
                    yield from (_Move(q, taken, free=i) for taken in self._with(crew, node))
            if crew.ends is not None:
                continue
            givers = {other.rows: p for p, other in by_number if p != q}
            for p in sorted(givers.values()):
                yield from self._lent(q, p, roster)

    def _lent(self, q: int, p: int, roster: Roster) -> Iterator[_Move]:
        """Of each sort of node that pipeline p has, the last one or two to pipeline q."""
        receiver, nodes = roster.crews[q], _nodes(roster.crews[p].groups)
        by_kind: dict[tuple[tuple[NodeType, int], ...], list[int]] = {}
        for i, node in enumerate(nodes):
            by_kind.setdefault(self._kind(node), []).append(i)
        size = self._size(roster.crews[p])
        for mine in by_kind.values():
            for count in _AT_ONCE:
                given = mine[-count:]
                if len(mine) < count or (len(nodes) == count and roster.crews[p].ends is not None):
                    continue
                rest = tuple(group for i, node in enumerate(nodes) if i not in given for group in node)
                left = self._crew(rest, size) if rest else None
                moved = tuple(group for i in given for group in nodes[i])
                yield from (_Move(q, taken, p, left) for taken in self._with(receiver, moved))

    def _with(self, crew: Crew, moved: tuple[Group, ...]) -> Iterator[Crew]:
        """The crew with these groups before its first, after its last, or between two sorts of nodes."""
        nodes = _nodes(crew.groups)
        if len(crew.groups) + len(moved) > self.max_stages:
            return
        for at in range(len(nodes) + 1):
            if 0 < at < len(nodes) and self._kind(nodes[at - 1]) == self._kind(nodes[at]):
                continue
            groups = (*itertools.chain(*nodes[:at]), *moved, *itertools.chain(*nodes[at:]))
            made = self._crew(groups, self._size(crew))
            if made is not None:
                yield made

    def _crew(self, groups: tuple[Group, ...], size: int) -> Crew | None:
        rows = self.stager.rows(groups, size)
        return None if rows is None else Crew(groups, rows)

    def _kind(self, node: Sequence[Group]) -> tuple[tuple[NodeType, int], ...]:
        return tuple((self.stager.fleet.node_of(group[0]).node_type, len(group)) for group in node)

    def _size(self, crew: Crew) -> int:
        return self.tables.rows[crew.rows[0]].microbatch

    def _made(self, roster: Roster, move: _Move) -> Roster:
        crews: list[Crew | None] = list(roster.crews)
        crews[move.receiver] = move.taken
        if move.giver is not None:
            crews[move.giver] = move.left
        free = tuple(node for i, node in enumerate(roster.free) if i != move.free)
        return replace(roster, crews=tuple(crew for crew in crews if crew is not None), free=free)

    def _measure(self, crews: Sequence[Crew | None]) -> None:
        """Seconds of the first and of each further microbatch; infinite where a crew cannot hold the model."""
        new = [c for c in dict.fromkeys(crews) if c is not None and c not in self._known]
        anew = [crew for crew in new if crew.ends is None and len(crew.rows) <= self.tables.num_blocks]
        self._known.update((c, self.estimator.affine(Shape(c.rows, c.ends))) for c in new if c.ends is not None)
        self._known.update((c, (np.inf, np.inf)) for c in new if c.ends is None)
        if anew:
            cuts = Balancer(self.tables, self.max_stages).cut_each([crew.rows for crew in anew])
            self._known.update(zip(anew, zip(cuts.fill_s, cuts.bottleneck_s, strict=True), strict=True))

    def _seconds(self, roster: Roster) -> float:
        """T with sum of b (1 + (T - fill) / bottleneck) = batch over the crews that can hold the model."""
        left, rate = float(self.batch), 0.0
        for crew in roster.crews:
            fill, step = self._known[crew]
            if np.isfinite(step):
                size = self._size(crew)
                left += size * (fill / step - 1)
                rate += size / step
        return left / rate if rate > 0 else np.inf


def _nodes(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Runs of groups on one node."""
    return [tuple(run) for _, run in itertools.groupby(groups, key=lambda group: node_of(group[0]))]
