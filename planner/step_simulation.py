"""What follows the pipelines in a step: gradient all-reduces on shared links, then updates, as events per worker."""

from collections.abc import Mapping, Sequence
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
    """Each all-reduce starts when its members have finished their backwards and earlier all-reduces; a NIC is shared
    by the rings that cross it. Updates start when all all-reduces have ended: the global norm needs every gradient."""
    free = dict(ready_s)
    flows = _crossing_workers(jobs, fleet)
    events: list[SyncEvent] = []
    for job in sorted(jobs, key=lambda job: (job.tied, max(ready_s[w] for w in job.members))):
        members = sorted(((fleet.node_of(w).name, fleet.node_of(w).node_type) for w in job.members), key=lambda m: m[0])
        share = _flows(members, flows[job.tied])
        start = max(free[worker] for worker in job.members)
        end = start + links.all_reduce_s(members, job.num_bytes, share)
        events.append(SyncEvent(job, start, end))
        free.update(dict.fromkeys(job.members, end))
    begin = max(ready_s.values())
    ends = {tied: max([begin, *(e.end_s for e in events if e.job.tied == tied)]) for tied in (False, True)}
    summed = max(free.values())
    starts = dict.fromkeys(free, summed)
    return StepTimeline(tuple(events), ends[False], ends[True], starts, dict(update_s), summed + max(update_s.values()))


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
