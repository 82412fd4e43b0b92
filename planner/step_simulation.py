"""What follows the pipelines in a step: gradient all-reduces on shared links, then updates, as events per worker."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.cluster import Fleet, NodeType
from planner.communication import Links
from planner.gradient_groups import SyncJob


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One all-reduce as it ran."""

    job: SyncJob
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Events after the pipelines. gradients_end_s, tied_end_s: when the last all-reduce of each sort ended; end_s:
    the last update."""

    events: tuple[SyncEvent, ...]
    gradients_end_s: float
    tied_end_s: float
    update_start_s: Mapping[str, float]
    update_s: Mapping[str, float]
    end_s: float


def simulate_sync(
    jobs: Sequence[SyncJob], ready_s: Mapping[str, float], update_s: Mapping[str, float], fleet: Fleet, links: Links
) -> StepTimeline:
    """Each all-reduce starts when its members have finished their backwards and the all-reduces before it in `in_order`; a NIC is
    shared by the rings that cross it. Updates start when all all-reduces have ended: the global norm needs every gradient."""
    flows = _crossing_workers(jobs, fleet)
    seconds = [_ring_s(job, fleet, links, flows[job.tied]) for job in jobs]
    events, free = [], dict(ready_s)
    for tied in (False, True):
        mine = [i for i, job in enumerate(jobs) if job.tied == tied]
        for i, start in in_order([jobs[i].members for i in mine], [seconds[i] for i in mine], free):
            events.append(SyncEvent(jobs[mine[i]], start, start + seconds[mine[i]]))
    begin = max(ready_s.values())
    ends = {tied: max([begin, *(e.end_s for e in events if e.job.tied == tied)]) for tied in (False, True)}
    summed = max(free.values())
    starts = dict.fromkeys(free, summed)
    return StepTimeline(tuple(events), ends[False], ends[True], starts, dict(update_s), summed + max(update_s.values()))


def in_order(
    members: Sequence[Sequence[str]], seconds: Sequence[float], free_s: dict[str, float]
) -> Iterator[tuple[int, float]]:
    """(all-reduce, start) in the order in which they run: next is the one that can start first, among equals the one whose
    busiest member has most left to do (list scheduling; an open shop's longest machine is hardly ever idle). free_s: when each
    worker is free, kept up to date."""
    left = dict.fromkeys(free_s, 0.0)
    for workers, each in zip(members, seconds, strict=True):
        for worker in workers:
            left[worker] += each

    def key(i: int) -> tuple[float, float, int]:
        return max(free_s[w] for w in members[i]), -max(left[w] for w in members[i]), i

    heap = [key(i) for i in range(len(members))]
    heapq.heapify(heap)
    while heap:
        found = heapq.heappop(heap)
        start, _, i = now = key(found[2])
        if now > found:  # a member has been busy since: starts only ever rise, and so do keys
            heapq.heappush(heap, now)
            continue
        for worker in members[i]:
            free_s[worker], left[worker] = start + seconds[i], left[worker] - seconds[i]
        yield i, start


def _ring_s(job: SyncJob, fleet: Fleet, links: Links, crossing: Mapping[str, set[str]]) -> float:
    members = sorted(((fleet.node_of(w).name, fleet.node_of(w).node_type) for w in job.members), key=lambda m: m[0])
    return links.all_reduce_s(members, job.num_bytes, _flows(members, crossing))


def _crossing_workers(jobs: Sequence[SyncJob], fleet: Fleet) -> dict[bool, dict[str, set[str]]]:
    """Per sort of job: node -> its workers that take part in all-reduces over several nodes."""
    found: dict[bool, dict[str, set[str]]] = {False: {}, True: {}}
    for job in jobs:
        nodes = {worker: fleet.node_of(worker).name for worker in job.members}
        if len(set(nodes.values())) > 1:
            for worker, node in nodes.items():
                found[job.tied].setdefault(node, set()).add(worker)
    return found


def _flows(members: Sequence[tuple[str, NodeType]], crossing: Mapping[str, set[str]]) -> float:
    """Rings that share the busiest NIC of this one: workers of a node in such rings, over this ring's own workers
    there."""
    own: dict[str, int] = {}
    for node, _ in members:
        own[node] = own.get(node, 0) + 1
    if len(own) == 1:
        return 1.0
    return max(len(crossing[node]) / count for node, count in own.items())
