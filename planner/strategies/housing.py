"""Stages exchanged between nodes of one type, so that no NIC is left with sums for long after the pipelines' end.

A node's NIC carries the sums of what its stages hold one after the other, as they become ready (`planner.cost.sync`): early
stages are ready last and have no time, late ones have. So a node should have some of both, or all stages of a layer, whose sum then stays
inside.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cluster import Fleet, Node, NodeType
from planner.cost.model import CostModel
from planner.plan import Plan

_ROUNDS = 200
_OTHERS = 12
_SOON_S = 1e-4  # times the pipelines: what is done so soon after their end needs no exchange
_Place = tuple[int, int]  # pipeline, stage


def housed(plan: Plan, cost: CostModel, fleet: Fleet) -> Plan:
    """The plan with stages exchanged as long as the last NIC is done sooner. What transfers gain or lose is not looked at."""
    houses = _Houses(plan, cost, fleet)
    houses.exchange()
    return houses.plan()


@dataclass(frozen=True)
class _Sum:
    """What some stages sum: when they are ready, seconds after the pipelines' end, and what each NIC takes."""

    start_s: float
    nic_s: dict[NodeType, float]
    holders: int


class _Houses:
    """Where each stage is, and when each node's NIC is done."""

    def __init__(self, plan: Plan, cost: CostModel, fleet: Fleet):
        self._before, simulation = plan, cost.simulate(plan)
        self._pipelines_s = max(timeline.total_s for timeline in simulation.pipelines)
        stages = {(p, s): stage for p, each in enumerate(plan.pipelines) for s, stage in enumerate(each.stages)}
        self._gpus = {place: len(stage.workers) for place, stage in stages.items()}
        self._there: dict[Node, set[_Place]] = {}
        for place, stage in stages.items():
            self._there.setdefault(fleet.node_of(stage.workers[0]), set()).add(place)
        place_of = {worker: place for place, stage in stages.items() for worker in stage.workers}
        found = dict[frozenset[_Place], tuple[float, float]]()  # start, bytes
        for event in simulation.sync.events:
            places = frozenset(place_of[worker] for worker in event.job.members)
            start_s, num_bytes = found.get(places, (event.start_s, 0.0))
            found[places] = start_s, num_bytes + event.job.num_bytes
        ordered = sorted(found.items(), key=lambda item: -item[1][0])  # a NIC's last first
        types = {node.node_type for node in self._there}
        self._sums = [
            _Sum(
                start_s - self._pipelines_s,
                {kind: cost.links.ring_link_s(kind, False, len(places), num_bytes) for kind in types}, len(places),
            )
            for places, (start_s, num_bytes) in ordered
        ]  # fmt: skip
        self._held: dict[_Place, list[int]] = {place: [] for place in stages}
        for i, (places, _) in enumerate(ordered):
            for place in places:
                self._held[place].append(i)
        self._late = {node: self._late_s(node, places) for node, places in self._there.items()}

    def _late_s(self, node: Node, places: set[_Place]) -> float:
        """When the NIC of a node with these stages is done: it carries, after any moment, all that is ready from then on."""
        here = Counter(i for place in places for i in self._held[place])
        carried, late = 0.0, -self._pipelines_s
        for i in sorted(here):
            each = self._sums[i]
            if here[i] < each.holders:
                carried += each.nic_s[node.node_type]
                late = max(late, each.start_s + carried)
        return late

    def exchange(self) -> None:
        """Between the node that is done last and another, as long as that helps one; then the next."""
        settled = set[Node]()
        for _ in range(_ROUNDS):
            waiting = [
                node for node, late in self._late.items() if node not in settled and late > _SOON_S * self._pipelines_s
            ]
            if not waiting:
                return
            last = max(waiting, key=self._late.__getitem__)
            if self._relieve(last):
                settled.clear()
            else:
                settled.add(last)

    def _relieve(self, last: Node) -> bool:
        """The exchange after which the later of the two nodes is done soonest, if that is sooner than before."""
        kind, best, least = last.node_type, None, self._late[last] * (1 - 1e-6)
        others = [node for node in self._there if node.node_type == kind and self._late[node] < least]
        for other in sorted(others, key=self._late.__getitem__)[:_OTHERS]:
            for given, taken in self._exchanges(sorted(self._there[last]), sorted(self._there[other])):
                mine = (self._there[last] - set(given)) | set(taken)
                late = self._late_s(last, mine)
                if late < least:
                    theirs = (self._there[other] - set(taken)) | set(given)
                    late = max(late, self._late_s(other, theirs))
                    if late < least:
                        best, least = (other, mine, theirs), late
        if best is None:
            return False
        for node, places in ((last, best[1]), (best[0], best[2])):
            self._there[node], self._late[node] = places, self._late_s(node, places)
        return True

    def _exchanges(
        self, mine: Sequence[_Place], theirs: Sequence[_Place]
    ) -> Iterator[tuple[list[_Place], list[_Place]]]:
        """A stage for one on as many GPUs, or for several smaller ones, the latest ready or the earliest."""
        for one in mine:
            yield from (([one], [other]) for other in theirs if self._gpus[other] == self._gpus[one])
            yield from (([one], several) for several in self._as_large(one, theirs))
        for other in theirs:
            yield from ((several, [other]) for several in self._as_large(other, mine))

    def _as_large(self, one: _Place, smaller: Sequence[_Place]) -> Iterator[list[_Place]]:
        among = sorted((place for place in smaller if self._gpus[place] < self._gpus[one]), key=lambda place: place[1])
        for ordered in (among, among[::-1]):
            several, left = list[_Place](), self._gpus[one]
            for place in ordered:
                if self._gpus[place] <= left:
                    several.append(place)
                    left -= self._gpus[place]
            if several and not left:
                yield several

    def plan(self) -> Plan:
        workers = dict[_Place, tuple[str, ...]]()
        for node, places in self._there.items():
            free = iter(node.workers)
            for place in sorted(places, key=lambda place: (-self._gpus[place], place)):
                workers[place] = tuple(next(free) for _ in range(self._gpus[place]))
        pipelines = (
            replace(each, stages=tuple(replace(stage, workers=workers[p, s]) for s, stage in enumerate(each.stages)))
            for p, each in enumerate(self._before.pipelines)
        )
        return replace(self._before, pipelines=tuple(pipelines))
