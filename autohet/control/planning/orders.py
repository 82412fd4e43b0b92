"""Builds each worker's order: layout, restore step, transfer schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autohet.control.planning.outlook import MOST_S, URGENT
from autohet.control.planning.replication import Replication, ReplicationPlanner, Targets
from autohet.control.planning.restore_sources import (
    BadCopy,
    links_of,
    name_as_held,
    spare_leavers,
    without,
)
from autohet.runtime.messages import (
    NOT_EVALUATED,
    EvaluationProgress,
    GenerationOrder,
    WorkerReport,
)
from autohet.runtime.step.loss_scale import LossScales
from planner.inputs.zones import EC2_ZONES, ZoneTable
from recovery.errors import NotRestorable
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source, require_restorable_step, restorable_step
from recovery.state.layout import assign_writers
from recovery.transfer.schedule import TransferSchedule, schedule

if TYPE_CHECKING:
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.evaluation_log import EvaluationLog
    from autohet.control.values.observation import Observation
    from autohet.runtime.job import Job
    from planner.plans.plan import Plan
    from recovery.state.layout import Layout


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
class OrderTerms:
    """Terms of a generation's orders that the state does not decide.

    last_step: steps of the whole run; None while the rows of the data set are not counted. Early
    stopping may end it before. step_timeout_s: deadline of a step. change_s: expected time until a
    node leaves. evaluations: losses so far; None where nothing is evaluated. loss_scales: those of
    the run so far. from_scratch: begin at step 0, although training has begun. before_step: restore
    a checkpoint before this step, whatever else is there. gated, follows: as in `GenerationOrder`.
    kept_plan: plan of the generation before, whose passes its workers may keep. least_steps: the
    generation runs as many, if need be beyond `last_step`. is_prepared: as in `GenerationOrder`.
    """

    last_step: int | None
    step_timeout_s: float | None = None
    change_s: float = MOST_S
    evaluations: EvaluationLog | None = None
    loss_scales: LossScales = field(default_factory=LossScales)
    from_scratch: bool = False
    before_step: int | None = None
    gated: bool = False
    kept_plan: Plan | None = None
    follows: int | None = None
    least_steps: int = 0
    is_prepared: bool = False

    def end_step(self, step: int) -> int | None:
        """Return the step at which a generation that starts at `step` ends; None: not known yet."""
        if self.evaluations is not None and self.evaluations.ends_run(step):
            return step
        return None if self.last_step is None else max(self.last_step, step + self.least_steps)

    def is_evaluated(self, step: int) -> bool:
        """Return True if the loss after `step` updates is known."""
        return self.evaluations is not None and step in self.evaluations.losses

    def progress(self, step: int) -> EvaluationProgress:
        """Return the progress of the evaluations until `step`."""
        return NOT_EVALUATED if self.evaluations is None else self.evaluations.progress(step)


class OrderBuilder:
    """Builder of orders that knows every generation's layout, first step and parent.

    Pure but for that memory.
    """

    def __init__(
        self,
        job: Job,
        layouts: Callable[[Plan], Layout],
        pace: Callable[[PlanProposal], Mapping[str, Any]] | None = None,
        driver: str = "",
        zones: ZoneTable | None = None,
    ) -> None:
        self.job = job
        self.zones = zones or EC2_ZONES
        self._pace = pace
        self.driver = driver
        self._layout = layouts
        self._planned: tuple[Plan, Layout] | None = None
        self._layouts: dict[int, Layout] = {}
        self._replication = ReplicationPlanner(job.checkpoint, self.zones)
        self.ancestry = Ancestry()
        self._bad: frozenset[BadCopy] = frozenset()
        self.slow: dict[str, float] = {}
        self._joined: dict[str, float] = {}
        """Join time of each node that the last orders knew.

        A node that comes later may have the name of one that is gone.
        """
        self._begun = False

    def inherit(self, orders: Iterable[GenerationOrder]) -> None:
        """Take over generations of an earlier driver, whose state living workers hold."""
        for order in orders:
            self._layouts[order.generation] = order.layout
        self._begun = True

    def confirm(self) -> None:
        """Note that a generation has its state, or has run a step.

        From now on the state must be found, never drawn anew.
        """
        self._begun = True

    @property
    def begun(self) -> bool:
        """True once a generation has its state."""
        return self._begun

    def _layout_of_plan(self, plan: Plan) -> Layout:
        """Return a plan's layout, which is cached for the plan that was asked about last.

        A plan that is checked for inventories is the one that orders are written for next.
        """
        if self._planned is not None:
            known, layout = self._planned
            if known == plan:
                return layout
        layout = self._layout(plan)
        self._planned = (plan, layout)
        return layout

    # Copies of the training state that exist
    # ----------------------------------------------------------------------------------

    def live_holdings(self, seen: Observation, workers: Collection[str]) -> list[Holding]:
        """Return what living processes hold whole.

        Each holding is at its step and in its generation's layout.
        """
        found = []
        for worker in workers:
            report = seen.reports.get(worker)
            if report is None or worker in seen.losses:
                continue
            # There is no state, or only the driver before this one knew its layout.
            if report.live_generation not in self._layouts:
                continue
            if not report.whole:
                continue
            found.append(self._live(report, seen.node_of(worker)))

        for worker, report in seen.reports.items():
            if worker in seen.losses:
                continue
            if report.broken and report.broken.arrived:
                node = seen.node_of(report.worker)
                found.append(self._arrived(report, node))
        return found

    def _live(self, report: WorkerReport, node: str) -> Holding:
        generation = report.live_generation
        assert generation is not None
        source = Source(
            kind="worker", node=node, name=report.worker, step=report.step, generation=generation
        )
        shards = self._layouts[generation].shards_by_worker[report.worker]
        return Holding(source, shards)

    def _arrived(self, report: WorkerReport, node: str) -> Holding:
        """Return what an interrupted restore had brought to a worker.

        It is as good as live state, and often comes from a node that is gone now.
        """
        broken = report.broken
        assert broken is not None
        generation = broken.generation

        live = report.live_generation
        if live is not None and report.step == broken.step:
            arrived_is_known = self._is_of_newest_line(broken.generation, broken.step)
            live_is_known = self._is_of_newest_line(live, broken.step)
            # Where both are of the present history they are one state, in one place.
            if arrived_is_known and live_is_known:
                generation = live

        source = Source(
            kind="worker", node=node, name=report.worker, step=broken.step, generation=generation
        )
        return Holding(source, broken.arrived)

    def _is_of_newest_line(self, generation: int, step: int) -> bool:
        newest = self.ancestry.newest
        return newest is not None and self.ancestry.contains(newest, generation, step)

    def _kept(self, seen: Observation) -> Iterable[Holding]:
        """Yield the snapshots that agents hold, and the newest durable checkpoint."""
        for inventory in (seen.inventories or {}).values():
            yield from inventory
        manifest = seen.checkpoint.manifest
        if manifest is not None:
            uri = str(seen.checkpoint.uri)
            source = Source(
                kind="s3", node="", name=uri, step=manifest.step, generation=manifest.generation
            )
            yield Holding(source, manifest.shards, manifest.checksums)

    def newest_generation(self, seen: Observation) -> int:
        """Return the highest generation number that any driver has used.

        That includes a driver that could not reach the journal.
        """
        own = self.ancestry.newest or 0
        in_journal = seen.checkpoint.ancestry.newest or 0
        newest = max(own, in_journal)
        for inventory in (seen.inventories or {}).values():
            for holding in inventory:
                newest = max(newest, holding.source.generation)
        return newest

    def needs_inventories(self, plan: Plan, seen: Observation, members: Collection[str]) -> bool:
        """Return True if live memory alone does not hold the whole of the newest state."""
        self._note_bad(seen)
        live = self.live_holdings(seen, members)
        live = without(live, self._bad)
        # Also where nothing is live: this caches the layout for the orders.
        layout = self._layout_of_plan(plan)
        if not live:
            return True
        newest = max(holding.step for holding in live)
        return restorable_step(layout.shards, live) != newest

    # Orders of a generation
    # ----------------------------------------------------------------------------------

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
        terms = terms or OrderTerms(self.job.training.steps)
        plan = proposal.plan
        layout = self._layout_of_plan(plan)
        self._note_bad(seen)
        self.ancestry = self.ancestry.joined(seen.checkpoint.ancestry)

        parent, step, transfers = self._find_state(layout, seen, members, terms)
        descent = Descent(
            generation=generation,
            parent=parent if transfers else None,
            first_step=step,
            driver=self.driver,
            ahead=terms.follows is not None,
        )
        self.ancestry = self.ancestry.followed_by(descent)
        self._layouts[generation] = layout
        self._joined = {name: view.joined_at for name, view in seen.nodes.items()}

        targets, replication = _plan_copies(
            self._replication, layout, seen, proposal, terms.change_s
        )
        others = _pure_sources(plan, transfers, seen)
        if terms.follows is not None:
            others = without_place(plan, members)
        participants = (*plan.workers, *others)
        end_step = terms.end_step(step)
        assert end_step is not None, "the rows of the data set are not counted"
        common = GenerationOrder(
            generation=generation,
            plan=plan,
            layout=layout,
            start_step=step,
            end_step=end_step,
            store_host=seen.store[0],
            store_port=seen.store[1],
            participants=participants,
            transfers=transfers,
            agents=seen.agents(),
            checkpoint_shards=frozenset(),
            replicates=bool(targets),
            replicate_every_steps=0 if replication is None else replication.spacing.every_steps,
            ancestry=self.ancestry,
            is_evaluated=terms.is_evaluated(step),
            evaluation_progress=terms.progress(step),
            step_timeout_s=terms.step_timeout_s,
            loss_scale=terms.loss_scales.before(step),
            gated=terms.gated,
            kept_plan=_kept_plan(plan, step, terms.kept_plan, seen),
            follows=terms.follows,
            is_prepared=terms.is_prepared,
        )
        orders = self._address(common, proposal, seen, targets)
        return Book(
            orders=orders,
            start_step=step,
            schedule=transfers,
            descent=descent,
            replication=replication,
        )

    def _find_state(
        self, layout: Layout, seen: Observation, members: Collection[str], terms: OrderTerms
    ) -> tuple[int | None, int, TransferSchedule | None]:
        """Return the generation and step to continue, and the transfers; None for a new state."""
        if terms.from_scratch:
            return None, 0, None
        # Before training has begun, what is live was drawn from the seed, and can be drawn again.
        live = self.live_holdings(seen, members) if self._begun else []
        found = [*live, *self._kept(seen)]
        if terms.before_step is not None:
            found = [
                each for each in found if each.source.kind == "s3" and each.step < terms.before_step
            ]
        parent, holdings = self._one_history(layout, found)
        step, transfers = self._schedule(layout, holdings, seen)
        return parent, step, transfers

    def withdraw(self, generation: int) -> None:
        """Forget a generation whose orders were written and are not sent."""
        entries = dict(self.ancestry.entries)
        del entries[generation]
        self.ancestry = Ancestry(entries, self.ancestry.unknown)
        del self._layouts[generation]

    def _address(
        self,
        common: GenerationOrder,
        proposal: PlanProposal,
        seen: Observation,
        targets: Targets,
    ) -> dict[str, GenerationOrder]:
        """Return the order of each participant: the common one, with the worker's own part."""
        node_by_worker = seen.nodes_of(common.plan.workers)
        writers = assign_writers(common.layout, node_by_worker)
        paces: Mapping[str, Any] = {}
        if self._pace is not None:
            paces = self._pace(proposal)

        orders = {}
        for worker in common.participants:
            orders[worker] = replace(
                common,
                checkpoint_shards=frozenset(writers.get(worker, ())),
                pace=paces.get(worker),
                replication_targets=targets.get(worker, ()),
                replicate_bytes_per_s=self._replication.bandwidth(seen, worker),
            )
        return orders

    def _one_history(
        self, layout: Layout, holdings: list[Holding]
    ) -> tuple[int | None, list[Holding]]:
        """Return the generation to continue, and the copies that belong to its history.

        It is the newest generation, if its history holds any step whole. Else it is the generation
        whose history holds the newest whole step. Copies of two histories never meet.
        """
        newest = self.ancestry.newest
        lines: dict[int | None, list[Holding]] = {}
        for tip in (*self.ancestry.entries, newest):
            lines[tip] = [holding for holding in holdings if self._belongs(tip, holding)]
        steps = {tip: restorable_step(layout.shards, line) for tip, line in lines.items()}
        if steps[newest] is not None:
            return newest, lines[newest]

        candidates = [
            (step, tip) for tip, step in steps.items() if step is not None and tip is not None
        ]
        if not candidates:
            return newest, lines[newest]
        _, tip = max(candidates)
        return tip, lines[tip]

    def _belongs(self, tip: int | None, holding: Holding) -> bool:
        """Return True if `holding` belongs to the history of generation `tip`.

        The journal must name what an agent or a worker holds; a checkpoint may be older than the
        journal.
        """
        source = holding.source
        if tip is not None and self.ancestry.contains(tip, source.generation, holding.step):
            return True
        is_unknown = source.generation not in self.ancestry.entries
        if source.kind != "s3" or not is_unknown:
            return False
        return tip is None or self.ancestry.begins_after(tip, holding.step)

    def _schedule(
        self, layout: Layout, holdings: list[Holding], seen: Observation
    ) -> tuple[int, TransferSchedule | None]:
        """Return the step to restore and the transfers that bring it; (0, None) for a new state."""
        is_first_start = not self._begun and seen.checkpoint.manifest is None
        if is_first_start and restorable_step(layout.shards, holdings) is None:
            return 0, None
        if not holdings:
            first_shards = sorted(layout.shards)[:3]
            raise NotRestorable(None, tuple(first_shards))

        good = without(holdings, self._bad)
        if restorable_step(layout.shards, good) is not None:
            holdings = good  # else a source that failed may do better this time
        step = require_restorable_step(layout.shards, holdings)

        node_by_worker = seen.nodes_of(layout.workers)
        links = links_of(seen, self.slow)
        transfers = schedule(layout, node_by_worker, holdings, step, links)
        # A leaver's network is for what no other node has, if the time may not suffice for all.
        if transfers.makespan_s > URGENT * _time_left(seen):
            spared = spare_leavers(holdings, step, seen.notices)
            transfers = schedule(layout, node_by_worker, spared, step, links)
        return step, transfers

    def _note_bad(self, seen: Observation) -> None:
        """Note the copies that failed, or were wrong, in a restore: they are not requested again.

        Those of steps behind the newest durable one are never wanted again, and forgotten. A node
        that was overtaken, or should have been, counts as slow as it was for as long as it is
        there.
        """
        bad = set(self._bad)
        for report in seen.reports.values():
            for record in (report.broken, report.restore):
                if record is not None:
                    bad.update(name_as_held(record.bad, report.generation, seen))
                    self.slow.update(record.slow)

        same = {
            name for name, view in seen.nodes.items() if self._joined.get(name) == view.joined_at
        }
        for name in self.slow.keys() - same:
            del self.slow[name]

        kept = set()
        oldest = seen.checkpoint.step or 0
        for source, shard in bad:
            # Durable storage is the last resort: a copy there is asked for again.
            if source.kind != "s3" and source.step >= oldest:
                kept.add((source, shard))
        self._bad = frozenset(kept)


def _kept_plan(plan: Plan, step: int, before: Plan | None, seen: Observation) -> Plan | None:
    """Return the plan before if all workers of this one keep their passes of `step` under it."""
    if before is None:
        return None
    stages = {pipeline.stages for pipeline in before.pipelines}
    if not all(pipeline.stages in stages for pipeline in plan.pipelines):
        return None
    kept = {seen.reports[worker].kept_step for worker in plan.workers}
    return before if kept == {step} else None


def without_place(plan: Plan, members: Iterable[str]) -> tuple[str, ...]:
    """Return the members that are not in the plan, in their order."""
    workers = frozenset(plan.workers)
    return tuple(worker for worker in members if worker not in workers)


def _pure_sources(
    plan: Plan, transfers: TransferSchedule | None, seen: Observation
) -> tuple[str, ...]:
    """Return the living workers that send state of theirs and are not in the plan, sorted."""
    if transfers is None:
        return ()
    senders = [worker for worker, part in transfers.parts.items() if part.messages]
    outside = set(senders) - set(plan.workers)
    alive = [worker for worker in outside if worker in seen.reports]
    return tuple(sorted(alive))


def _time_left(seen: Observation) -> float:
    """Return the seconds until the first deadline of a notice; infinite without any."""
    first = math.inf
    for notice in seen.notices.values():
        if notice.deadline is not None:
            first = min(first, notice.deadline)
    return max(0.0, first - seen.now)


def _plan_copies(
    planner: ReplicationPlanner,
    layout: Layout,
    seen: Observation,
    proposal: PlanProposal,
    change_s: float,
) -> tuple[Targets, Replication | None]:
    """Return the nodes that copies go to, and the rounds of copying; no nodes without rounds."""
    targets = planner.find_targets(layout, seen)
    replication = planner.plan_rounds(layout, targets, seen, proposal, change_s)
    if replication is None or replication.spacing.every_steps == 0:
        # No worker then waits for copies before its snapshot counts.
        return {}, replication
    return targets, replication
