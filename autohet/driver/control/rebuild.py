"""Rebuilds after a plan: find the state, write the orders, build groups, restore the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autohet.driver.control import policy
from autohet.driver.control.actions import (
    Begin,
    ClaimGeneration,
    Dismiss,
    Interrupt,
    RequestInventories,
    RequestStop,
)
from autohet.driver.control.change import Change
from autohet.driver.control.desk import Desk
from autohet.driver.control.gathering import gathers_until, needed_s, slowest_move_s
from autohet.driver.control.observation import Observation
from autohet.driver.control.orders import Book
from autohet.driver.control.outlook import patience_s
from autohet.driver.control.planning import Proposal
from autohet.driver.control.states import (
    Building,
    Leaving,
    Quiescing,
    Sourcing,
    State,
    Training,
    drop_search,
)
from autohet.runtime.messages import QUIET, Phase, WorkerReport
from planner.cost.host_memory import sentences
from planner.errors import ConfigError
from planner.zones import known_zones
from recovery.errors import NotRestorable

# a conditional put takes a storage tens of milliseconds; no recovery waits longer for one that is
# out of order
CLAIM_S = 2.0


class Rebuild(Desk):
    """States Sourcing and Building of a job's controller, and the way to them from Training."""

    def _plan_without(self, state: Training, trouble: policy.Trouble, seen: Observation) -> State:
        """Plan for the nodes that stay, at once.

        All workers move to that plan when no further notices are waited for. If no plan exists,
        they stop with a checkpoint.
        """
        drop_search(state)
        state.considering, change, usable = (
            None,
            self._change(trouble, seen),
            policy.usable_nodes(seen),
        )
        proposal, why = self._try_plan(seen, usable, change)
        if proposal is None:
            why_stop = f"Deciding to stop and wait, since {trouble.reason} and {why}"
            self.untold.add("decision", self.generation, why_stop)
            self.pending = change
            return self._stop(seen, f"{trouble.reason} and {why}", ok=False, then_wait=why)
        self._say(proposal, trouble.reason)
        waits_s, needs_s = patience_s(self.ledger.changes), self._needed_s(seen)
        until = gathers_until([seen.notices[name] for name in trouble.nodes], waits_s, needs_s)
        if seen.now >= until:
            return self._move(change, proposal, seen)
        state.leaving = Leaving(change, proposal, usable, waits_s, needs_s, until)
        go_on = (
            f"Deciding to go on for {until - seen.now:.1f} s before that, since one change answers"
            " all notices that come until then"
        )
        self.untold.add("decision", self.generation, go_on)
        return state

    def _needed_s(self, seen: Observation) -> float:
        """Return the seconds before the first deadline at which a change must begin to be in time.

        This is as far as this run can know: see `gathering.needed_s`.
        """
        assert self.proposal is not None
        layouts = [order.layout for order in self.ledger.orders.values()]
        return needed_s(
            self.ledger.changes,
            self.timeouts,
            search_s=self.job.parallelism.search_time_limit_s,
            step_s=self.proposal.predicted_step_s,
            state_s=slowest_move_s(layouts[0], seen) if layouts else 0.0,
            upload_s=self.ledger.upload_s,
        )

    def _move(self, change: Change, proposal: Proposal, seen: Observation) -> State:
        """Stop all survivors after the current step, to continue under this plan."""
        self._act(RequestStop(self._survivors(seen), checkpoint=False))
        return Quiescing(
            change, seen.now + self.timeouts.step_s, interrupted=False, proposal=proposal
        )

    def _adopt(self, change: Change, proposal: Proposal, seen: Observation) -> State:
        change.plan_after, change.predicted_step_s = proposal.plan, proposal.predicted_step_s
        limits = self.job.elastic.timeouts(proposal.predicted_step_s)
        if not self.plans or limits != self.timeouts:
            self.untold.remark(
                f"Time limits under a predicted step of {proposal.predicted_step_s:.2f} s: {limits}"
            )
        self.timeouts = limits
        return self._source(Sourcing(change, proposal, seen.now + self.timeouts.quiesce_s), seen)

    def _source(self, state: Sourcing, seen: Observation) -> State:
        needs_more = self.orders.needs_inventories(state.proposal.plan, seen, self.members)
        if needs_more and not state.asked:
            state.asked = True
            self._act(RequestInventories())
            return state
        if needs_more and seen.inventories is None and seen.now < state.deadline:
            return state
        taking_part = state.proposal.plan.workers if state.book is None else state.book.orders
        if any(w not in seen.reports or w in seen.losses for w in taking_part):
            return Quiescing(
                state.change, seen.now + self.timeouts.quiesce_s, interrupted=True
            )  # it died meanwhile
        if state.book is None:
            return self._claim(state, seen)
        return self._begin(state, state.book, seen)

    def _claim(self, state: Sourcing, seen: Observation) -> State:
        """Write the orders for the next generation, and claim its number in the journal.

        Both are this driver's once the journal says so.
        """
        generation = max(self.generation, self.orders.newest_generation(seen)) + 1
        self.orders.evaluated = self.ledger.evaluations.keys()
        self.orders.last_step = self.ledger.last_step
        try:
            book = self.orders.write(
                generation,
                state.proposal,
                seen,
                self.members,
                seen.store,
                self.timeouts.step_s,
                self.planning.horizon_s,
            )
        except NotRestorable as error:
            return self._fail(f"the training state is lost: {error}")
        except ConfigError as error:
            return self._fail(str(error))
        state.book, state.claimed_by = book, seen.now + min(CLAIM_S, self.timeouts.quiesce_s)
        self.generation = generation
        self._act(ClaimGeneration(book.descent))
        return state

    def _begin(self, state: Sourcing, book: Book, seen: Observation) -> State:
        """Send the orders once the journal names the generation.

        If the storage does not answer in time, they are sent without that.
        """
        generation, checkpoint = self.generation, seen.checkpoint
        if checkpoint.claimed < generation and seen.now < state.claimed_by:
            return state
        is_claimed = checkpoint.claimed >= generation and checkpoint.unclaimed != generation
        if not is_claimed:
            what = (
                f"Deciding to begin generation {generation} without its entry in the journal, since"
                " the storage does not take it"
            )
            self.untold.add(
                "decision",
                generation,
                f"{what}: a restarted driver cannot go on from what it keeps in memory",
            )
        state.change.step_before = max(
            state.change.step_before, self.ledger.committed_steps
        )  # all stand now
        state.change.restore_step, state.change.begun_at = book.start_step, seen.now
        self._emit_plan(state, book)
        orders = {
            worker: replace(order, is_claimed=is_claimed) for worker, order in book.orders.items()
        }
        self._act(Begin(orders))
        self.ledger.orders = orders
        self.upkeep.begin(orders)
        participants = tuple(orders)
        deadline = seen.now + self.timeouts.rendezvous_s + self.timeouts.transfer_s
        return Building(state.change, state.proposal, generation, participants, deadline)

    def _emit_plan(self, state: Sourcing, book: Book) -> None:
        """Log the plan.

        Warnings come first: host memory that its nodes lack, and copies that are spaced or missing.
        """
        proposal = state.proposal
        lacks = sentences(
            proposal.cost.memory_of.host_memory(proposal.plan, self.planning.inputs.kept)
        )
        for sentence in lacks if lacks != self.lacks_host_memory else ():
            self.untold.remark(sentence, warning=True)
        self.lacks_host_memory = lacks
        said = [] if book.replication is None else book.replication.sentences()
        for sentence in said if said != self.said_of_copies else ():
            self.untold.remark(sentence, warning=True)
        self.said_of_copies = said
        self.untold.add(
            "plan",
            self.generation,
            plan=proposal.plan.to_document(),
            predicted_step_s=proposal.predicted_step_s,
            cause=state.change.cause,
            reason=state.change.reason,
            step=book.start_step,
            idle=list(proposal.idle),
            step_timeout_s=self.timeouts.step_s,
            usd_per_hour=proposal.cost.fleet.usd_per_hour(),
            horizon_s=round(self.planning.horizon_s, 1),
            move_s=round(self.planning.move_s, 2),
            zones=list(known_zones([node.node_type.zone for node in proposal.cost.fleet.nodes])),
            lacks_host_memory=lacks,
            transfers=[
                each.to_document(proposal.predicted_step_s)
                for each in proposal.prediction.transfers
            ],
            replication=None if book.replication is None else book.replication.to_document(),
        )

    def _build(self, state: Building, seen: Observation) -> State:
        mine = [
            seen.reports[w]
            for w in state.proposal.plan.workers
            if w in seen.reports and w not in seen.losses
        ]
        there = [
            r
            for r in mine
            if r.generation == state.generation and r.live_generation == state.generation
        ]
        if len(there) == len(state.proposal.plan.workers) and all(
            r.phase not in (Phase.BUILDING, Phase.RESTORING) for r in there
        ):
            return self._ready(state, seen, there)
        trouble = policy.find_deaths(seen, state.participants)
        fresh = {w for w, r in seen.reports.items() if r.generation == state.generation}
        trouble = trouble or policy.find_failures(
            seen, [w for w in state.participants if w in fresh]
        )
        if trouble is None and seen.now > state.deadline:
            late = tuple(
                w
                for w in state.participants
                if w not in fresh or seen.reports[w].phase not in QUIET
            )
            trouble = policy.Trouble(
                "death", (), late, seen.now, f"{', '.join(late)} did not get ready in time"
            )
        return self._build_failed(state, trouble, seen) if trouble else state

    def _build_failed(self, state: Building, trouble: policy.Trouble, seen: Observation) -> State:
        self._tell_of_death(trouble, seen)
        change = state.change
        change.attempts += 1
        change.overtaken(trouble.nodes, trouble.happened_at, seen.now, trouble.reason)
        self.members = tuple(dict.fromkeys((*self.members, *state.participants)))
        self._act(Interrupt(self._survivors(seen), self.generation))
        return Quiescing(
            change, seen.now + self.timeouts.quiesce_s, interrupted=True, broken=state.participants
        )

    def _missing_losses(self, change: Change) -> dict[str, Any]:
        """Return the steps that were run and that no event names, and warn about them once.

        A driver that is killed leaves such steps.
        """
        missing = self.ledger.told.missing(change.restore_step or 0)
        if len(self.plans) > 1 or not missing:
            return {}
        steps = ", ".join(map(str, missing))
        self.untold.remark(
            f"Steps without a loss in the events: {steps}. The driver was killed before it told of"
            " them.",
            warning=True,
        )
        return {"steps_without_loss": missing}

    def _ready(self, state: Building, seen: Observation, reports: list[WorkerReport]) -> State:
        change = state.change
        change.ready_at = seen.now
        change.restores = {r.worker: r.restore for r in reports if r.restore is not None}
        leaving = [w for w in state.participants if w not in state.proposal.plan.workers]
        self._act(
            Dismiss(
                tuple(
                    w for w in leaving if w not in seen.losses and seen.node_of(w) in seen.notices
                )
            )
        )
        for name in sorted({seen.node_of(w) for w in leaving} & set(seen.notices)):
            self._release(name, seen)
        self.members, self.proposal = state.proposal.plan.workers, state.proposal
        self._mourned.clear()
        self.planned_nodes = (
            frozenset(node.name for node in state.proposal.cost.fleet.nodes) & seen.nodes.keys()
        )
        self.plans.append((state.generation, state.proposal.plan, state.proposal.predicted_step_s))
        self.orders.confirm()
        self.ledger.begin_generation(state.generation, change)
        self.untold.add(
            "restore",
            self.generation,
            step=change.restore_step,
            bytes_by_tier=change.bytes_by_tier(),
            steps_lost=change.steps_lost,
            **self._missing_losses(change),
            workers_restored={
                worker: {
                    "seconds": round(record.restore_s, 4),
                    "bytes_by_tier": dict(record.bytes_by_tier),
                }
                for worker, record in change.restores.items()
            },
            cause=change.cause,
        )
        return Training(state.generation, seen.now)
