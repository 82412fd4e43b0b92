"""What follows the pipelines in a step: gradient all-reduces side by side on shared links, then updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cluster import Fleet, NodeType
from planner.communication import Links
from planner.gradient_groups import SyncJob


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """One all-reduce as it ran. spans: (start, end) of what it takes of each member's own link, as if that did one after the other."""

    job: SyncJob
    start_s: float
    end_s: float
    spans: Mapping[str, tuple[float, float]]


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


@dataclass(frozen=True, slots=True)
class Ring:
    """One all-reduce by itself: how long it takes, and for how much of that each member's own link alone would be full."""

    seconds: float
    own_s: Mapping[str, float]


def simulate_sync(
    jobs: Sequence[SyncJob], ready_s: Mapping[str, float], update_s: Mapping[str, float], fleet: Fleet, links: Links
) -> StepTimeline:
    """Gradients are summed `side_by_side` as soon as pipelines let them, tied embeddings' after them. Updates start when all
    all-reduces have ended: the global norm needs every gradient."""
    flows = _crossing_workers(jobs, fleet)
    events, free = list[SyncEvent](), dict(ready_s)
    for tied in (False, True):
        mine = [job for job in jobs if job.tied == tied]
        events += side_by_side(mine, [_ring(job, fleet, links, flows[tied]) for job in mine], free)
    begin = max(ready_s.values())
    ends = {tied: max([begin, *(e.end_s for e in events if e.job.tied == tied)]) for tied in (False, True)}
    summed = max(free.values())
    starts = dict.fromkeys(free, summed)
    return StepTimeline(tuple(events), ends[False], ends[True], starts, dict(update_s), summed + max(update_s.values()))


def side_by_side(jobs: Sequence[SyncJob], rings: Sequence[Ring], free_s: dict[str, float]) -> list[SyncEvent]:
    """Each all-reduce starts when its last member is free, whatever else its members take part in. free_s: when each worker is free,
    kept up to date.

    It ends when it could by itself, and no sooner than each member's link, which what started before it uses as well, has carried its
    share. So all have ended when the slowest all-reduce or the fullest link is done: nothing can be sooner, and where all start
    together, rates in proportion to what each still has to carry reach it.
    """
    starts = [max(free_s[worker] for worker in ring.own_s) for ring in rings]
    events, carried = list[SyncEvent](), dict(free_s)
    for i in sorted(range(len(rings)), key=starts.__getitem__):
        start, ring, spans = starts[i], rings[i], dict[str, tuple[float, float]]()
        for worker, seconds in ring.own_s.items():
            begin = max(carried[worker], start)
            carried[worker] = begin + seconds
            spans[worker] = begin, carried[worker]
        end = max(start + ring.seconds, *(last for _, last in spans.values()))
        events.append(SyncEvent(jobs[i], start, end, spans))
    for event in events:
        for worker in event.spans:
            free_s[worker] = max(free_s[worker], event.end_s)
    return events


def _ring(job: SyncJob, fleet: Fleet, links: Links, crossing: Mapping[str, set[str]]) -> Ring:
    """A member's own link is as fast as if all members were on nodes like its own."""
    nodes = {worker: fleet.node_of(worker) for worker in job.members}
    members = sorted(((node.name, node.node_type) for node in nodes.values()), key=lambda m: m[0])
    flows = _flows(members, crossing)
    seconds = links.all_reduce_s(members, job.num_bytes, flows)
    alike = {(node.node_type, flows[node.name]) for node in nodes.values()}
    if len(alike) == 1:
        return Ring(seconds, dict.fromkeys(job.members, seconds))
    own = {
        (kind, n): min(seconds, links.all_reduce_s([(name, kind) for name, _ in members], job.num_bytes, n))
        for kind, n in alike
    }
    return Ring(seconds, {w: own[node.node_type, flows[node.name]] for w, node in nodes.items()})


def _crossing_workers(jobs: Sequence[SyncJob], fleet: Fleet) -> dict[bool, dict[str, set[str]]]:
    """Per sort of job: node -> its workers that take part in all-reduces over several nodes."""
    found: dict[bool, dict[str, set[str]]] = {False: {}, True: {}}
    for job in jobs:
        nodes = {worker: fleet.node_of(worker).name for worker in job.members}
        if len(set(nodes.values())) > 1:
            for worker, node in nodes.items():
                found[job.tied].setdefault(node, set()).add(worker)
    return found


def _flows(members: Sequence[tuple[str, NodeType]], crossing: Mapping[str, set[str]]) -> dict[str, float]:
    """Per node, rings that share its NIC with this one: workers of the node in such rings, over this ring's own workers there."""
    own: dict[str, int] = {}
    for node, _ in members:
        own[node] = own.get(node, 0) + 1
    if len(own) == 1:
        return dict.fromkeys(own, 1.0)
    return {node: len(crossing[node]) / count for node, count in own.items()}
