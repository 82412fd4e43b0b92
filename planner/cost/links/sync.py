"""Gradient sync of a plan.

Gradients are summed over holders layer by layer, over pipelines that are cut differently and may
have unequal TP degrees. Then all-reduces run side by side on shared links, and the updates follow.

What overlaps: an all-reduce starts when the last of its members has finished its own last backward,
whatever else its members take part in, so sums of late stages run while early stages still drain.
What does not: a worker's own last backward and its sums (over gloo, on CPUs, the runtime starts a
bucket inside the last backward; there the sync is over-predicted by one backward at most). No
worker updates before all sums have ended: the vote that commits a step needs every gradient.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planner.cost.eviction import evict_oldest
from planner.cost.links.traffic import Links
from planner.cost.parameters import CostParameters
from planner.inputs.fleet import Fleet, Member, NodeType
from planner.plans.communicators import workers_of_unit
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage

SyncKind = tuple[str, float, str]
"""Name, slowdown and zone of a node type: its nodes may be in several zones at several prices."""


class RingTimes(NamedTuple):
    """Seconds of a ring, and those for which it fills a NIC and a link inside a node, by kind."""

    seconds: float
    nic_s: dict[SyncKind, float]
    own_s: dict[SyncKind, float]


KnownRings = dict[tuple[object, ...], RingTimes]
"""Times of rings by bytes and members."""

_BytesByMembers = dict[tuple[str, ...], float]
_REMEMBERED = 4096  # rings, and stages


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
    of them (`planner.plans.plan.Stage.share`). Keys and values are cut into fewer if the model says
    so: a unit then lies on several ranks.
    """
    units = plan.num_parts
    width = parameters.sync_bytes_per_parameter
    union = spec.tied_embeddings and parameters.tied_sync == "union"
    has_ends_apart = len(plan.pipelines[0].stages) > 1
    layers = spec.layers
    head = spec.num_layers + 1
    bytes_by_members: _BytesByMembers = {}
    for first, last in _runs(plan, spec.num_layers):
        run = layers[first : last + 1]
        replicated = sum(layer.replicated_parameters for layer in run)
        count = sum(layer.parameters for layer in run) - replicated
        key_value = sum(layer.key_value_parameters for layer in run)

        # the embedding counts the tied tensor, the head does not, though another stage has a copy;
        # a union sums all copies at once, in `_tied_jobs`
        if first == 0 and union:
            count -= spec.tied_parameters
        if last == head and spec.tied_embeddings and has_ends_apart and not union:
            count += spec.tied_parameters

        stages = [_stage_of(pipeline, first, spec.num_layers) for pipeline in plan.pipelines]
        if 0 < spec.key_value_units < units:
            _add(bytes_by_members, stages, spec.key_value_units, key_value * width)
            count -= key_value
        _add(bytes_by_members, stages, units, count * width, replicated * width)

    jobs = []
    for members, num_bytes in bytes_by_members.items():
        if len(members) > 1 and num_bytes > 0:
            jobs.append(SyncJob(members, num_bytes))
    return tuple(jobs + _tied_jobs(plan, spec, units, width, union))


def _runs(plan: Plan, num_layers: int) -> list[tuple[int, int]]:
    """Return (first, last) entries that lie on the same stages everywhere.

    The embedding and the head are runs of their own.
    """
    embedding = (0, 0)
    head = (num_layers + 1, num_layers + 1)
    starts = sorted({stage.first_layer + 1 for stage in plan.stages})
    ends = [start - 1 for start in starts[1:]] + [num_layers]
    return [embedding, *zip(starts, ends, strict=True), head]


def _add(
    found: _BytesByMembers,
    stages: list[Stage],
    units: int,
    split_bytes: float,
    replicated_bytes: float = 0.0,
) -> None:
    """Add to `found` the bytes that each set of workers sums, for a run of layers on `stages`.

    replicated_bytes: of tensors that each rank has whole; every unit sums its part of them.
    """
    unit_bytes = (split_bytes + replicated_bytes) / units
    by_stage = [_workers_by_unit(stage, units) for stage in stages]
    for holders in zip(*by_stage, strict=True):
        # both ends of a model may be one stage
        members = tuple(dict.fromkeys(itertools.chain.from_iterable(holders)))
        found[members] = found.get(members, 0.0) + unit_bytes


@lru_cache(maxsize=_REMEMBERED)
def _workers_by_unit(stage: Stage, units: int) -> tuple[tuple[str, ...], ...]:
    """Return the workers of a stage that hold each unit: searches ask again and again."""
    return tuple(workers_of_unit(stage, unit, units) for unit in range(units))


def _tied_jobs(plan: Plan, spec: ModelSpec, units: int, width: float, union: bool) -> list[SyncJob]:
    if not spec.tied_embeddings:
        return []
    groups = list[list[Stage]]()
    for pipeline in plan.pipelines:
        ends = [pipeline.stages[0], pipeline.stages[-1]]
        if union and groups:
            groups[0].extend(ends)
        else:
            groups.append(ends)

    found: _BytesByMembers = {}
    for stages in groups:
        _add(found, stages, units, spec.tied_parameters * width)
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
    block = layer - 1
    return next(s for s in pipeline.stages if s.first_layer <= block < s.end_layer)


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
    rings = Rings(fleet, links, {} if known is None else known)
    free = dict(ready_s)
    carried = dict[str, float]()
    begin = max(ready_s.values())
    ends = {False: begin, True: begin}
    events = list[SyncEvent]()
    for tied in (False, True):
        mine = [job for job in jobs if job.tied == tied]
        alone = [rings.of(job) for job in mine]
        for event in side_by_side(mine, alone, free, carried):
            ends[tied] = max(ends[tied], event.end_s)
            events.append(event)

    summed = max(free.values())
    return StepTimeline(
        events=tuple(events),
        gradients_end_s=ends[False],
        tied_end_s=ends[True],
        update_start_s=dict.fromkeys(free, summed),
        update_s=dict(update_s),
        end_s=summed + max(update_s.values()),
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
    # links serve first what starts first
    order = sorted(range(len(rings)), key=starts.__getitem__)
    for i in order:
        start = starts[i]
        ring = rings[i]
        end = start + ring.seconds
        spans = dict[str, tuple[float, float]]()
        for link, seconds in ring.link_s.items():
            begin = max(carried.get(link, start), start)
            until = begin + seconds
            carried[link] = until
            spans[link] = begin, until
            end = max(end, until)
        span_of = {worker: spans[link] for worker, link in ring.link_of.items()}
        events.append(SyncEvent(jobs[i], start, end, span_of))

    # not before: no start waits for the other all-reduces
    for event in events:
        for worker in event.spans:
            free_s[worker] = max(free_s[worker], event.end_s)
    return events


def _kind(of: NodeType) -> SyncKind:
    return of.name, of.slowdown, of.zone


@dataclass(frozen=True)
class Rings:
    """Rings of all-reduces that run alone, cached in `known`.

    A node's NIC carries a ring once, however many members are on the node. Between those members,
    each one's own link carries it.
    """

    fleet: Fleet
    links: Links
    known: KnownRings

    def of(self, job: SyncJob) -> Ring:
        """Return the ring of an all-reduce."""
        by_node: dict[str, list[str]] = {}
        kinds: dict[str, NodeType] = {}
        for worker in job.members:
            node = self.fleet.node_of(worker)
            by_node.setdefault(node.name, []).append(worker)
            kinds[node.name] = node.node_type
        nodes = [(kinds[name], len(mine)) for name, mine in by_node.items()]
        times = self._times(nodes, job.num_bytes)
        is_one_node = len(nodes) == 1

        link_s = dict[str, float]()
        link_of = dict[str, str]()
        for name, mine in by_node.items():
            kind = _kind(kinds[name])
            if len(mine) > 1:
                link_s |= dict.fromkeys(mine, times.own_s[kind])
            if is_one_node:
                link_of |= {worker: worker for worker in mine}
            else:
                link_s[name] = times.nic_s[kind]
                link_of |= dict.fromkeys(mine, name)
        return Ring(times.seconds, link_s, link_of)

    def _times(self, nodes: list[tuple[NodeType, int]], num_bytes: float) -> RingTimes:
        """Return the times of a ring over these members.

        nodes: (node type, members) of each node.
        """
        around = [(*_kind(kind), count) for kind, count in nodes]
        # the order round the ring counts only for the latency between zones
        is_one_zone = len({kind.zone for kind, _ in nodes}) == 1
        if is_one_zone:
            around.sort()
        key = (num_bytes, *around)
        if key not in self.known:
            members = list[Member]()
            for i, (kind, count) in enumerate(nodes):
                members += [(str(i), kind)] * count
            number = len(members)

            nic_s: dict[SyncKind, float] = {}
            own_s: dict[SyncKind, float] = {}
            for kind, _ in nodes:
                nic_s[_kind(kind)] = self.links.ring_link_s(kind, False, number, num_bytes)
                own_s[_kind(kind)] = self.links.ring_link_s(kind, True, number, num_bytes)
            seconds = self.links.all_reduce_s(members, num_bytes)
            self.known[key] = RingTimes(seconds, nic_s, own_s)
            evict_oldest(self.known, _REMEMBERED)
        return self.known[key]
