"""Builds each worker's order: layout, restore step, transfer schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autohet.driver.checkpoints.replication_price import (
    CopiedTraining,
    RoundSpacing,
    RoundTraffic,
    spacing_of,
    traffic_of,
)
from autohet.driver.control.observation import Observation
from autohet.driver.planning.outlook import MOST_S
from autohet.driver.planning.proposals import PlanProposal
from autohet.runtime.job import Job
from autohet.runtime.layout import layout_of_plan
from autohet.runtime.loss_scale import LossScales
from autohet.runtime.messages import GenerationOrder, WorkerReport
from autohet.runtime.models import family_of
from planner.cluster import Fleet
from planner.plan import Plan
from planner.zones import EC2_ZONES, ZoneTable
from recovery.checkpoint.commit import assign_writers
from recovery.errors import NotRestorable
from recovery.peers.replication_targets import Peer, ReplicationTarget, replication_targets
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source, require_restorable_step, restorable_step
from recovery.state.layout import Layout, ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.schedule import TransferSchedule, schedule

MIN_REPLICATION_BYTES_PER_S = (
    8e6  # a shard server gives up peers that are slower than a quarter of this
)

# of the time until a node leaves: a restore that would take more asks it only for what nobody else
# has
URGENT = 0.25


@dataclass(frozen=True)
class Book:
    """Orders of one generation for every participant.

    `schedule` is None when the state is made from the seed (or pretrained weights). replication:
    the copies to other nodes; None where no node alone holds anything.
    """

    orders: Mapping[str, GenerationOrder]
    start_step: int
    schedule: TransferSchedule | None
    descent: Descent
    replication: Replication | None = None


@dataclass(frozen=True)
class Replication:
    """Copies to other nodes in one generation.

    lacking: a sentence where nodes that alone hold something may copy it nowhere; else empty.
    """

    traffic: RoundTraffic
    spacing: RoundSpacing
    zones: ZoneTable
    lacking: str = ""

    def sentences(self) -> list[str]:
        return [sentence for sentence in (self.spacing.why, self.lacking) if sentence]

    def to_document(self) -> dict[str, Any]:
        """Return the replication part of the event `plan`.

        It holds the bytes of a round between zones, and US dollars per hour.
        """
        by_zones = []
        for pair, num_bytes in sorted(self.traffic.bytes_by_zones.items()):
            usd_per_gb = self.zones.usd_per_gb(*pair)
            by_zones.append({"zones": list(pair), "bytes": num_bytes, "usd_per_gb": usd_per_gb})
        return {
            "every_steps": self.spacing.every_steps,
            "bytes": self.traffic.num_bytes,
            "usd_per_hour": round(self.spacing.usd_per_hour, 4),
            "by_zones": by_zones,
        }


@dataclass(frozen=True)
class OrderTerms:
    """Terms of a generation's orders that the state does not decide.

    last_step: steps of the whole run; None while the rows of the data set are not counted.
    step_timeout_s: deadline of a step. change_s: expected time until a node leaves. evaluated:
    steps whose loss on the evaluation rows is known. loss_scales: those of the run so far.
    """

    last_step: int | None
    step_timeout_s: float | None = None
    change_s: float = MOST_S
    evaluated: Collection[int] = ()
    loss_scales: LossScales = field(default_factory=LossScales)


class OrderBuilder:
    """Builder of orders that knows every generation's layout, first step and parent.

    Pure but for that memory.
    """

    def __init__(
        self,
        job: Job,
        model_config: Any,
        pace: Callable[[PlanProposal], Mapping[str, Any]] | None = None,
        driver: str = "",
        layouts: Callable[[Plan], Layout] | None = None,
        zones: ZoneTable | None = None,
    ) -> None:
        self.job = job
        self.zones = zones or EC2_ZONES
        self.model_config = model_config
        self._pace = pace
        self.driver = driver
        if layouts is None:
            # This imports the library's modules. A decision imports nothing.
            family_of(model_config).parameter_specs(model_config)
            layouts = partial(layout_of_plan, config=model_config)
        self._layout = layouts
        self._planned: tuple[Plan, Layout] | None = None
        self._layouts: dict[int, Layout] = {}
        self.ancestry = Ancestry()
        self._bad: frozenset[tuple[Source, ShardId]] = frozenset()
        self._slow: dict[str, float] = {}
        self._joined: dict[str, float] = {}
        """Join time of each node that the last orders knew.

        A node that comes later may have the name of one that is gone.
        """
        self._begun = False

    def confirm(self) -> None:
        """Note that a generation has its state, or has run a step.

        From now on the state must be found, never drawn anew.
        """
        self._begun = True

    def _layout_of_plan(self, plan: Plan) -> Layout:
        """Return a plan's layout, which is cached for the plan that was asked about last.

        A plan that is checked for inventories is the one that orders are written for next.
        """
        if self._planned is None or self._planned[0] != plan:
            self._planned = (plan, self._layout(plan))
        return self._planned[1]

    def live_holdings(self, seen: Observation, workers: Collection[str]) -> list[Holding]:
        """Return what living processes hold whole.

        Each holding is at its step and in its generation's layout.
        """
        found = []
        for worker in workers:
            report = seen.reports.get(worker)
            if (
                report is None
                or report.live_generation not in self._layouts
                or worker in seen.losses
            ):
                continue
            if not report.whole:
                continue
            found.append(self._live(report, seen.node_of(worker)))
        for worker, report in seen.reports.items():
            if worker not in seen.losses and report.broken and report.broken.arrived:
                found.append(self._arrived(report, seen.node_of(report.worker)))
        return found

    def _live(self, report: WorkerReport, node: str) -> Holding:
        assert report.live_generation is not None
        source = Source("worker", node, report.worker, report.step, report.live_generation)
        return Holding(
            source, self._layouts[report.live_generation].shards_by_worker[report.worker]
        )

    def _arrived(self, report: WorkerReport, node: str) -> Holding:
        """Return what an interrupted restore had brought to a worker.

        It is as good as live state, and often comes from a node that is gone now.
        """
        assert report.broken is not None
        broken = report.broken
        live = report.live_generation
        # Where both are of the present history they are one state, in one place.
        both = (broken.generation, live)
        known = [each for each in both if self._of_newest_line(each, broken.step)]
        generation = (
            live
            if live is not None and report.step == broken.step and len(known) == 2
            else broken.generation
        )
        return Holding(
            Source("worker", node, report.worker, broken.step, generation), broken.arrived
        )

    def _of_newest_line(self, generation: int | None, step: int) -> bool:
        newest = self.ancestry.newest
        return (
            newest is not None
            and generation is not None
            and self.ancestry.contains(newest, generation, step)
        )

    def newest_generation(self, seen: Observation) -> int:
        """Return the highest generation number that any driver has used.

        That includes a driver that could not reach the journal.
        """
        kept: list[int] = []
        for holdings in (seen.inventories or {}).values():
            kept += [holding.source.generation for holding in holdings]
        return max([self.ancestry.newest or 0, seen.checkpoint.ancestry.newest or 0, *kept])

    def needs_inventories(self, plan: Plan, seen: Observation, members: Collection[str]) -> bool:
        """Return True if live memory alone does not hold the whole of the newest state."""
        self._note_bad(seen)
        live = without(self.live_holdings(seen, members), self._bad)
        newest = max((holding.step for holding in live), default=None)
        layout = self._layout_of_plan(plan)
        return newest is None or restorable_step(layout.shards, live) != newest

    def write(
        self,
        generation: int,
        proposal: PlanProposal,
        seen: Observation,
        members: Collection[str],
        terms: OrderTerms | None = None,
    ) -> Book:
        """Write the orders of a generation.

        Every worker of the plan gets one, and each living worker outside it that holds state which
        is needed.

        Raises:
            NotRestorable: training has begun and no step has all its shards anywhere.
        """
        plan = proposal.plan
        terms = terms or OrderTerms(self.job.training.steps)
        layout = self._layout_of_plan(plan)
        self._note_bad(seen)
        self.ancestry = self.ancestry.joined(seen.checkpoint.ancestry)
        live = self.live_holdings(seen, members) if self._begun else []
        parent, holdings = self._one_history(layout, [*live, *self._kept(seen)])
        step, transfers = self._schedule(layout, holdings, seen)
        descent = Descent(
            generation=generation,
            parent=parent if transfers else None,
            first_step=step,
            driver=self.driver,
        )
        self.ancestry = self.ancestry.followed_by(descent)
        self._layouts[generation] = layout
        self._joined = {name: view.joined_at for name, view in seen.nodes.items()}
        sources = (
            set()
            if transfers is None
            else {w for w, part in transfers.parts.items() if part.messages} - set(plan.workers)
        )
        leaving = tuple(sorted(w for w in sources if w in seen.reports))
        participants = (*plan.workers, *leaving)
        writers = assign_writers(layout, {worker: seen.node_of(worker) for worker in plan.workers})
        targets = self._replication_targets(layout, seen)
        replication = self._replication(layout, targets, seen, proposal, terms.change_s)
        every = 0 if replication is None else replication.spacing.every_steps
        targets = targets if every else {}
        paces = {} if self._pace is None else self._pace(proposal)
        agents = {
            name: view.endpoint for name, view in seen.nodes.items() if view.endpoint is not None
        }
        assert terms.last_step is not None, "the rows of the data set are not counted"
        orders = {}
        for worker in participants:
            orders[worker] = GenerationOrder(
                generation=generation,
                plan=plan,
                layout=layout,
                start_step=step,
                end_step=terms.last_step,
                store_host=seen.store[0],
                store_port=seen.store[1],
                participants=participants,
                transfers=transfers,
                agents=agents,
                checkpoint_shards=frozenset(writers.get(worker, ())),
                pace=paces.get(worker),
                replication_targets=targets.get(worker, ()),
                replicates=bool(targets),
                replicate_every_steps=every,
                replicate_bytes_per_s=self._bandwidth(seen, worker),
                ancestry=self.ancestry,
                is_evaluated=step in terms.evaluated,
                step_timeout_s=terms.step_timeout_s,
                loss_scale=terms.loss_scales.before(step),
            )
        return Book(orders, step, transfers, descent, replication)

    def _one_history(
        self, layout: Layout, holdings: list[Holding]
    ) -> tuple[int | None, list[Holding]]:
        """Return the generation to continue, and the copies that belong to its history.

        It is the newest generation, if its history holds any step whole. Else it is the generation
        whose history holds the newest whole step. Copies of two histories never meet.
        """
        newest = self.ancestry.newest
        lines = {
            tip: [h for h in holdings if self._belongs(tip, h)]
            for tip in (*self.ancestry.entries, newest)
        }
        steps = {tip: restorable_step(layout.shards, mine) for tip, mine in lines.items()}
        if steps[newest] is not None:
            return newest, lines[newest]
        _, tip = max(
            ((step, tip) for tip, step in steps.items() if step is not None and tip is not None),
            default=(0, newest),
        )
        return tip, lines[tip]

    def _belongs(self, tip: int | None, holding: Holding) -> bool:
        """Return True if `holding` belongs to the history of generation `tip`.

        The journal must name what an agent or a worker holds; a checkpoint may be older than the
        journal.
        """
        source = holding.source
        if tip is not None and self.ancestry.contains(tip, source.generation, holding.step):
            return True
        unknown = source.kind == "s3" and source.generation not in self.ancestry.entries
        return unknown and (tip is None or self.ancestry.begins_after(tip, holding.step))

    def _replication_targets(
        self, layout: Layout, seen: Observation
    ) -> dict[str, tuple[ReplicationTarget, ...]]:
        """Return what each worker's agent copies to other nodes.

        That is whatever one node alone would hold. A plan that survives the loss of any node has no
        such copies.
        """
        if not self.job.checkpoint.replication_steps:
            return {}
        peers = []
        for name, view in seen.nodes.items():
            if view.endpoint is not None:
                may_leave = name in seen.notices or name in seen.risks
                peers.append(Peer(name, view.node.node_type.zone, may_leave))
        return replication_targets(
            layout,
            {worker: seen.node_of(worker) for worker in layout.workers},
            peers,
            frozenset(seen.risks),
            zones=self.job.checkpoint.replicate_zone,
            connects=self.zones.connects,
        )

    def _replication(
        self,
        layout: Layout,
        targets: Mapping[str, tuple[ReplicationTarget, ...]],
        seen: Observation,
        proposal: PlanProposal,
        change_s: float,
    ) -> Replication | None:
        """Return what these copies carry and cost, and how far apart their rounds are."""
        wishes = self.job.checkpoint
        if not wishes.replication_steps:
            return None
        node_by_worker = {worker: seen.node_of(worker) for worker in layout.workers}
        traffic = traffic_of(
            targets,
            layout,
            node_by_worker,
            {name: view.node.node_type.zone for name, view in seen.nodes.items()},
            {worker: self._bandwidth(seen, worker) for worker in targets},
        )
        lacking = self._lacking(layout, targets, node_by_worker, seen)
        if not targets:
            none = RoundSpacing(0)
            return Replication(traffic, none, self.zones, lacking) if lacking else None
        spacing = spacing_of(
            traffic,
            _training_of(proposal, seen, change_s),
            self.zones,
            least_steps=wishes.replication_steps,
            bandwidth_share=wishes.replicate_bandwidth_share,
            usd_per_hour=wishes.replicate_usd_per_hour,
        )
        return Replication(traffic, spacing, self.zones, lacking)

    def _lacking(
        self,
        layout: Layout,
        targets: Mapping[str, tuple[ReplicationTarget, ...]],
        node_by_worker: Mapping[str, str],
        seen: Observation,
    ) -> str:
        """Return a sentence if nodes alone hold uncopied shards although there are other nodes.

        The string is empty otherwise.
        """
        if sum(view.endpoint is not None for view in seen.nodes.values()) < 2:
            return ""
        copied = {shard for mine in targets.values() for each in mine for shard in each.shards}
        alone = set()
        for shard in layout.shards:
            nodes = {node_by_worker[worker] for worker in layout.holders(shard)}
            if len(nodes) == 1 and shard not in copied:
                alone |= nodes
        if not alone:
            return ""
        return (
            f"what {', '.join(sorted(alone))} alone hold has no copy: no other node is in their"
            f" zone (checkpoint.replicate_zone: {self.job.checkpoint.replicate_zone}); with `any`"
            " copies go to other zones of the region, within checkpoint.replicate_usd_per_hour"
        )

    def _bandwidth(self, seen: Observation, worker: str) -> float:
        """Return the bytes per second that copies of this worker's node may take of its network."""
        view = seen.nodes.get(seen.node_of(worker))
        network = 0.0 if view is None else view.node.node_type.inter_node_bytes_per_s
        return max(
            MIN_REPLICATION_BYTES_PER_S, self.job.checkpoint.replicate_bandwidth_share * network
        )

    def _kept(self, seen: Observation) -> Iterable[Holding]:
        """Yield the snapshots that agents hold, and the newest durable checkpoint."""
        for inventory in (seen.inventories or {}).values():
            yield from inventory
        manifest = seen.checkpoint.manifest
        if manifest is not None:
            yield Holding(
                Source("s3", "", str(seen.checkpoint.uri), manifest.step, manifest.generation),
                manifest.shards,
                manifest.checksums,
            )

    def _schedule(
        self, layout: Layout, holdings: list[Holding], seen: Observation
    ) -> tuple[int, TransferSchedule | None]:
        node_by_worker = {worker: seen.node_of(worker) for worker in layout.workers}
        if (
            not self._begun
            and seen.checkpoint.manifest is None
            and restorable_step(layout.shards, holdings) is None
        ):
            return 0, None
        if not holdings:
            raise NotRestorable(None, tuple(sorted(layout.shards))[:3])
        good = without(holdings, self._bad)
        if restorable_step(layout.shards, good) is not None:
            holdings = good  # else a source that failed may do better this time
        step = require_restorable_step(layout.shards, holdings)
        links = links_of(seen, self._slow)
        transfers = schedule(layout, node_by_worker, holdings, step, links)
        if transfers.makespan_s > URGENT * self._time_left(seen):
            spared = spare_leavers(holdings, step, seen.notices)
            transfers = schedule(layout, node_by_worker, spared, step, links)
        return step, transfers

    def _note_bad(self, seen: Observation) -> None:
        """Note the copies that failed, or were wrong, in a restore: they are not requested again.

        Those of steps behind the newest durable one are never wanted again, and forgotten. A node
        that was overtaken, or should have been, counts as slow as it was for as long as it is
        there.
        """
        told: set[tuple[Source, ShardId]] = set(self._bad)
        for report in seen.reports.values():
            for record in (report.broken, report.restore):
                if record is not None:
                    told.update(_as_held(record.bad, report.generation, seen))
                    self._slow.update(record.slow)
        same = {
            name for name, view in seen.nodes.items() if self._joined.get(name) == view.joined_at
        }
        self._slow = {name: speed for name, speed in self._slow.items() if name in same}
        oldest = seen.checkpoint.step or 0
        self._bad = frozenset(
            (s, shard) for s, shard in told if s.step >= oldest and s.kind != "s3"
        )

    def _time_left(self, seen: Observation) -> float:
        deadlines = [
            notice.deadline for notice in seen.notices.values() if notice.deadline is not None
        ]
        return max(0.0, min(deadlines, default=math.inf) - seen.now)


def _training_of(proposal: PlanProposal, seen: Observation, change_s: float) -> CopiedTraining:
    """Describe the training during which copies are made, as far as it is known."""
    usd = Fleet(0, tuple(view.node for view in seen.nodes.values())).usd_per_hour()
    prediction = proposal.prediction
    if prediction is None:
        return CopiedTraining(1.0, 0.0, usd, change_s)
    sync_s = prediction.breakdown_s.get("grad_sync", 0.0)
    return CopiedTraining(prediction.step_time_s, sync_s / prediction.step_time_s, usd, change_s)


def _as_held(
    bad: Iterable[tuple[Source, ShardId]], generation: int, seen: Observation
) -> Iterable[tuple[Source, ShardId]]:
    """Name bad copies as holdings name them.

    What a worker handed on in the restore of `generation` is held under that generation. If the
    worker had state of the same step live, it may be held under that state's generation
    (`OrderBuilder._arrived`).
    """
    for source, shard in bad:
        relay = (
            seen.reports.get(source.name)
            if source.kind == "worker" and not source.generation
            else None
        )
        if relay is None:
            yield source, shard
            continue
        live = relay.live_generation if relay.step == source.step else None
        for known in {generation, live} - {None}:
            yield replace(source, generation=known or 0), shard


def links_of(seen: Observation, slow: Mapping[str, float]) -> LinkRates:
    """Return the network speed of each living node.

    This is the speed that labels or the catalogue give its card, or at which a restore found it
    (`slow`). Unequal nodes give unequal shares; a node that is ill is asked only for what no other
    has.
    """
    labels = {name: view.node.node_type.inter_node_bytes_per_s for name, view in seen.nodes.items()}
    return LinkRates(
        network_by_node={name: min(speed, slow.get(name, speed)) for name, speed in labels.items()}
    )


def without(holdings: Iterable[Holding], bad: Collection[tuple[Source, ShardId]]) -> list[Holding]:
    """Return the holdings without the copies that proved bad."""
    shards_by_source: dict[Source, set[ShardId]] = {}
    for source, shard in bad:
        shards_by_source.setdefault(source, set()).add(shard)
    found = []
    for holding in holdings:
        if holding.source in shards_by_source:
            good = holding.shards - shards_by_source[holding.source]
            found.append(replace(holding, shards=good))
        else:
            found.append(holding)
    return found


def spare_leavers(
    holdings: Iterable[Holding], step: int, leaving: Collection[str]
) -> list[Holding]:
    """Return holdings in which workers of leaving nodes keep only their unique shards.

    These are the shards that are in no other node's memory at `step`. They then have the leaving
    nodes' network for themselves.
    """
    holdings = list(holdings)
    elsewhere: set[ShardId] = set()
    for holding in holdings:
        source = holding.source
        if (
            holding.step == step
            and source.node not in leaving
            and source.kind in ("worker", "memory")
        ):
            elsewhere |= holding.shards
    found = []
    for holding in holdings:
        if holding.source.kind == "worker" and holding.source.node in leaving:
            found.append(replace(holding, shards=holding.shards - elsewhere))
        else:
            found.append(holding)
    return found
