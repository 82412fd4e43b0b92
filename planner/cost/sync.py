"""Gradient sync of a plan.

Gradients are summed over holders layer by layer, over pipelines that are cut differently and may
have unequal TP degrees. Then all-reduces run side by side on shared links, and the updates follow.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cluster import Fleet, NodeType
from planner.communicators import workers_of_unit
from planner.cost.links import Links
from planner.cost.parameters import CostParameters
from planner.model_spec import ModelSpec
from planner.plan import Pipeline, Plan, Stage

SyncKind = tuple[str, float, str]
"""Name, slowdown and zone of a node type: its nodes may be in several zones at several prices."""


KnownRings = dict[tuple[object, ...], tuple[float, dict[SyncKind, float], dict[SyncKind, float]]]
"""Seconds of a ring, of a NIC and of a link inside a node by kind, by bytes and members."""

_REMEMBERED = 4096  # rings


@dataclass(frozen=True, slots=True)
class SyncJob:
    """All-reduce of `num_bytes` over `members` (worker names, each once).

    tied: True for the all-reduce of the shared embedding.
    """

    members: tuple[str, ...]
    num_bytes: float
    tied: bool = False


def sync_jobs(plan: Plan, spec: ModelSpec, parameters: CostParameters) -> tuple[SyncJob, ...]:
    """Return the all-reduces of a step, grouped by equal sets of holders.

    They are in order of their first layer; groups of one worker are left out.

    A tensor is cut into U units, U the parts of the stage with the most; a worker holds its share
    of them (`planner.plan.Stage.share`). Keys and values are cut into fewer if the model says so: a
    unit then lies on several ranks.
    """
    units = max(stage.num_parts for stage in plan.stages)
    width = parameters.sync_bytes_per_parameter
    union = spec.tied_embeddings and parameters.tied_sync == "union"
    bytes_by_members: dict[tuple[str, ...], float] = {}
    entries = (spec.embedding, *spec.blocks, spec.head)
    for first, last in _runs(plan, spec.num_layers):
        replicated = sum(entry.replicated_parameters for entry in entries[first : last + 1])
        count = sum(entry.parameters for entry in entries[first : last + 1]) - replicated
        shared = sum(entry.key_value_parameters for entry in entries[first : last + 1])
        if first == 0 and union:
            count -= spec.tied_parameters
        if (
            last == spec.num_layers + 1
            and spec.tied_embeddings
            and not union
            and len(plan.pipelines[0].stages) > 1
        ):
            count += spec.tied_parameters
        stages = [_stage_of(pipeline, first, spec.num_layers) for pipeline in plan.pipelines]
        if 0 < spec.key_value_units < units:
            _add(bytes_by_members, stages, spec.key_value_units, shared * width, 0.0)
            count -= shared
        _add(bytes_by_members, stages, units, count * width, replicated * width)
    jobs = [SyncJob(m, b) for m, b in bytes_by_members.items() if len(m) > 1 and b > 0]
    return tuple(jobs + _tied_jobs(plan, spec, units, width, union))


def _runs(plan: Plan, num_layers: int) -> list[tuple[int, int]]:
    """Return (first, last) entries that lie on the same stages everywhere.

    The embedding and the head are runs of their own.
    """
    starts = sorted({stage.first_layer + 1 for stage in plan.stages})
    ends = [start - 1 for start in starts[1:]] + [num_layers]
    return [(0, 0), *zip(starts, ends, strict=True), (num_layers + 1, num_layers + 1)]


def _add(
    found: dict[tuple[str, ...], float],
    stages: list[Stage],
    units: int,
    split_bytes: float,
    replicated_bytes: float,
) -> None:
    for unit in range(units):
        holders = dict[str, None]()
        for stage in stages:
            holders.update(dict.fromkeys(workers_of_unit(stage, unit, units)))
        members = tuple(holders)
        found[members] = found.get(members, 0.0) + (split_bytes + replicated_bytes) / units


def _tied_jobs(plan: Plan, spec: ModelSpec, units: int, width: float, union: bool) -> list[SyncJob]:
    if not spec.tied_embeddings:
        return []
    found: dict[tuple[str, ...], float] = {}
    groups = [[pipeline.stages[0], pipeline.stages[-1]] for pipeline in plan.pipelines]
    if union:
        groups = [list(itertools.chain.from_iterable(groups))]
    for stages in groups:
        _add(found, stages, units, spec.tied_parameters * width, 0.0)
    jobs = []
    for members, num_bytes in found.items():
        if len(members) > 1:
            jobs.append(SyncJob(members, num_bytes, tied=True))
    return jobs


def _stage_of(pipeline: Pipeline, layer: int, num_layers: int) -> Stage:
    """Return the stage that holds entry `layer`.

    Entries: 0 the embedding, 1.. the blocks, num_layers + 1 the head.
    """
    if layer == 0:
        return pipeline.stages[0]
    if layer == num_layers + 1:
        return pipeline.stages[-1]
    return next(s for s in pipeline.stages if s.first_layer <= layer - 1 < s.end_layer)


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """Times of a simulated all-reduce.

    spans: for each member, (start, end) of the load on its link to the others, as if the link
    carried one all-reduce after the other.
    """

    job: SyncJob
    start_s: float
    end_s: float
    spans: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Events after the pipelines.

    gradients_end_s, tied_end_s: when the last all-reduce of each sort ended; end_s: when the last
    update ended.
    """

    events: tuple[SyncEvent, ...]
    gradients_end_s: float
    tied_end_s: float
    update_start_s: Mapping[str, float]
    update_s: Mapping[str, float]
    end_s: float


@dataclass(frozen=True, slots=True)
class Ring:
    """Times of an all-reduce that runs alone.

    seconds: how long it takes. link_s: for each link that it uses, the part of that time for which
    the link would be full. link_of: for each member, the link to the others: its node's NIC, or its
    own link inside the node.
    """

    seconds: float
    link_s: Mapping[str, float]
    link_of: Mapping[str, str]


def simulate_sync(
    jobs: Sequence[SyncJob],
    ready_s: Mapping[str, float],
    update_s: Mapping[str, float],
    fleet: Fleet,
    links: Links,
    known: KnownRings | None = None,
) -> StepTimeline:
    """Simulate the all-reduces and updates after the pipelines.

    known: cache of rings over these links.

    Gradients are summed `side_by_side` as soon as pipelines let them, tied embeddings' after them.
    Updates start when all all-reduces have ended: the global norm needs every gradient.
    """
    events = list[SyncEvent]()
    free = dict(ready_s)
    carried = dict[str, float]()
    rings = Rings(fleet, links, {} if known is None else known)
    begin = max(ready_s.values())
    ends = {False: begin, True: begin}
    for tied in (False, True):
        mine = [job for job in jobs if job.tied == tied]
        summing = side_by_side(mine, [rings.of(job) for job in mine], free, carried)
        for event in summing:
            ends[tied] = max(ends[tied], event.end_s)
        events += summing
    summed = max(free.values())
    starts = dict.fromkeys(free, summed)
    return StepTimeline(
        tuple(events),
        ends[False],
        ends[True],
        starts,
        dict(update_s),
        summed + max(update_s.values()),
    )


def side_by_side(
    jobs: Sequence[SyncJob],
    rings: Sequence[Ring],
    free_s: dict[str, float],
    carried: dict[str, float],
) -> list[SyncEvent]:
    """Simulate all-reduces side by side: each starts when its last member is free.

    A start does not wait for other all-reduces of the members. free_s: when each worker is free;
    carried: when each link used before has carried all its load. Both are updated in place.

    An all-reduce ends when it would alone, and no sooner than each of its links has carried its
    share. Earlier all-reduces on the same links come first. So all have ended when the slowest
    all-reduce or the fullest link is done. Nothing can be sooner; if all start together, rates in
    proportion to what each still has to carry reach it.
    """
    starts = [max(free_s[worker] for worker in job.members) for job in jobs]
    events = list[SyncEvent]()
    for i in sorted(range(len(rings)), key=starts.__getitem__):
        start = starts[i]
        ring = rings[i]
        spans = dict[str, tuple[float, float]]()
        for link, seconds in ring.link_s.items():
            begin = max(carried.get(link, start), start)
            carried[link] = begin + seconds
            spans[link] = begin, carried[link]
        end = max(start + ring.seconds, *(last for _, last in spans.values()))
        span_of = {worker: spans[link] for worker, link in ring.link_of.items()}
        events.append(SyncEvent(jobs[i], start, end, span_of))
    for event in events:
        for worker in event.spans:
            free_s[worker] = max(free_s[worker], event.end_s)
    return events


def _kind(of: NodeType) -> SyncKind:
    return of.name, of.slowdown, of.zone


class Rings:
    """Rings of all-reduces that run alone, cached in `known`.

    A node's NIC carries a ring once, however many members are on the node. Between those members,
    each one's own link carries it.
    """

    def __init__(self, fleet: Fleet, links: Links, known: KnownRings):
        self._fleet = fleet
        self._links = links
        self._known = known

    def of(self, job: SyncJob) -> Ring:
        by_node: dict[str, list[str]] = {}
        for worker in job.members:
            by_node.setdefault(self._fleet.node_of(worker).name, []).append(worker)
        nodes = [(self._fleet.node_of(mine[0]).node_type, len(mine)) for mine in by_node.values()]
        seconds, nic_s, own_s = self._seconds(nodes, job.num_bytes)
        link_s = dict[str, float]()
        link_of = dict[str, str]()
        for (name, mine), (kind, count) in zip(by_node.items(), nodes, strict=True):
            if count > 1:
                link_s |= dict.fromkeys(mine, own_s[_kind(kind)])
            if len(nodes) > 1:
                link_s[name] = nic_s[_kind(kind)]
            link_of |= {worker: worker if len(nodes) == 1 else name for worker in mine}
        return Ring(seconds, link_s, link_of)

    def _seconds(
        self, nodes: list[tuple[NodeType, int]], num_bytes: float
    ) -> tuple[float, dict[SyncKind, float], dict[SyncKind, float]]:
        """Return seconds of a ring over these members.

        nodes: (node type, members) of each node. Result: seconds of the whole ring, then by node
        type the seconds of a NIC and of a link inside a node.
        """
        around = [(*_kind(kind), count) for kind, count in nodes]
        one_zone = len({kind.zone for kind, _ in nodes}) == 1
        key = (num_bytes, *(sorted(around) if one_zone else around))
        if key not in self._known:
            members = list[tuple[str, NodeType]]()
            for i, (kind, count) in enumerate(nodes):
                members += [(str(i), kind)] * count
            nic_s: dict[SyncKind, float] = {}
            own_s: dict[SyncKind, float] = {}
            number = len(members)
            for kind, _ in nodes:
                nic_s[_kind(kind)] = self._links.ring_link_s(kind, False, number, num_bytes)
                own_s[_kind(kind)] = self._links.ring_link_s(kind, True, number, num_bytes)
            self._known[key] = self._links.all_reduce_s(members, num_bytes), nic_s, own_s
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return self._known[key]
