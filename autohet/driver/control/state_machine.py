"""State machine of one job: from an observation to the next state.

Its only output is `actions` and `untold`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autohet.driver.control import policy
from autohet.driver.control.actions import Dismiss, Hire, Interrupt, RollForward
from autohet.driver.control.change import Change
from autohet.driver.control.failures import find_causes, is_lost
from autohet.driver.control.gathering import gathers_until
from autohet.driver.control.observation import Observation
from autohet.driver.control.outlook import gather_s
from autohet.driver.control.rebuild import Rebuild
from autohet.driver.control.states import (
    Building,
    Closing,
    Considering,
    Ended,
    Quiescing,
    Saving,
    Sourcing,
    State,
    Training,
    Waiting,
    drop_search,
)
from autohet.runtime.messages import Phase
from planner.errors import ConfigError

Paces = tuple[dict[str, list[float]], dict[str, float], dict[str, str]]
"""Compute seconds of each worker's last steps, its planned seconds a step, and its GPU type.

Each is a mapping by worker.
"""
LEFT_OUT_S = 600.0
"""Seconds for which a node is left out of plans after repeated failures.

That is when failures of one cause have ended generation after generation.
"""


class StateMachine(Rebuild):
    """State machine of which `decide` is the only transition; it has no effect on anything else."""

    def decide(self, seen: Observation) -> None:
        """Compute the next state, the `actions` to execute and the events to log (`untold`).

        They depend on the observation, the present state and the planner's answers alone. There is
        no effect: no file, network or clock is read or written.
        """
        seen = self._heed_failures(self._look_at_nodes(seen))
        self.take(seen)
        if isinstance(self.state, Saving):
            self.state = self._save(self.state, seen)
            return
        self.actions.extend(policy.new_drains(self._known_notices, seen))
        self._announce(seen)
        self._direct_agents(seen)
        self.outlook.look(seen, frozenset() if self.buyer is None else self.buyer.released)
        if self.ledger.records:
            self.orders.confirm()  # also where the first generation's readiness was never seen
        hire = policy.workers_to_hire(seen)
        if hire and isinstance(self.state, (Waiting, Training)):
            self._act(Hire(hire))
        before = self.state
        self.state = self._judge_superseded(seen) or self._judge_unfit(seen) or self._step(seen)
        if self.state is not before:
            drop_search(before)
        if isinstance(self.state, (Waiting, Sourcing, Building)):
            self._tell_of_unheeded_deaths(seen)
        self._announce_departures(seen)
        self._buy(seen)
        if isinstance(self.state, Training):
            self.actions.extend(self.script.due(self.ledger.committed_steps, seen, self.members))

    def _step(self, seen: Observation) -> State:
        match self.state:
            case Waiting() as state:
                return self._wait(state, seen)
            case Quiescing() as state:
                return self._quiesce(state, seen)
            case Sourcing() as state:
                return self._source(state, seen)
            case Building() as state:
                return self._build(state, seen)
            case Training() as state:
                return self._train(state, seen)
            case Closing() as state:
                return self._close(state, seen)
            case Ended() | Saving() as state:
                return state

    # Waiting
    # ------------------------------------------------------------------------------

    def _wait(self, state: Waiting, seen: Observation) -> State:
        if seen.stop_reason:
            reason = f"stopped while waiting ({seen.stop_reason}): {state.reason}"
            return self._save_at_rest(state, seen, reason) or self._ended(reason, ok=False)
        usable = policy.usable_nodes(seen)
        num_workers = sum(len(seen.nodes[name].workers) for name in usable)
        starting, preparing = policy.workers_to_hire(seen), policy.preparing_nodes(seen)
        if state.since == 0.0 or (preparing and num_workers < self.job.elastic.min_workers):
            state.since = seen.now  # data takes what it takes: that is no fleet that does not come
        newest = max((seen.nodes[name].joined_at for name in seen.nodes), default=seen.now)
        settled = (
            seen.now - newest >= self.job.elastic.arrivals_debounce_s
            and not starting
            and not preparing
        )
        late = seen.now - state.since > self.timeouts.worker_start_s
        anew = (
            policy.fleet_of(seen, usable, 0).nodes != state.tried
        )  # other nodes, or these at another price
        if num_workers >= self.job.elastic.min_workers and (settled or late) and anew:
            return self._plan_from_rest(state, seen, usable)
        if num_workers < self.job.elastic.min_workers:
            state.reason = policy.shortage(
                num_workers, self.job.elastic.min_workers, len(starting), len(preparing)
            )
        self._announce_wait(
            state, seen, late=late, short=num_workers < self.job.elastic.min_workers
        )
        if seen.now - state.since > self.job.elastic.fleet_patience_s:
            reason = f"waited {self.job.elastic.fleet_patience_s:.0f} s: {state.reason}"
            return self._save_at_rest(state, seen, reason) or self._fail(reason)
        return state

    def _save_at_rest(self, state: Waiting, seen: Observation, reason: str) -> State | None:
        """Make the newest step durable before a job ends whose fleet is too small.

        The survivors do this. None where nothing is newer than the last checkpoint, or no plan
        exists for the survivors.
        """
        if self.ending is not None or self.ledger.committed_steps <= (
            self.ledger.checkpoint_step or 0
        ):
            return None
        self.ending = reason
        saving = Waiting(state.reason, state.since, state.change)
        found = self._plan_from_rest(saving, seen, policy.usable_nodes(seen), redundant=False)
        return None if found is saving else found

    def _plan_from_rest(
        self, state: Waiting, seen: Observation, usable: tuple[str, ...], *, redundant: bool = True
    ) -> State:
        state.tried = policy.fleet_of(seen, usable, 0).nodes
        change = state.change or Change(
            "start", (), seen.now, seen.now, self.ledger.steps_run, None
        )
        answer = self.planning.ask(self._fleet(seen, usable), None, redundant=redundant)
        if answer.proposal is None:
            state.reason, state.announced = answer.why_not, False
            return state
        change.stood_at = change.stood_at or seen.now
        change.reason = change.reason or "the fleet is ready"
        return self._adopt(change, answer.proposal, seen)

    # Training
    # ------------------------------------------------------------------------------

    def _train(self, state: Training, seen: Observation) -> State:
        trouble = policy.find_deaths(seen, self.members) or policy.find_failures(seen, self.members)
        if trouble is not None:
            return self._on_death(trouble, seen)
        if seen.stop_reason:
            return self._stop(seen, self.ending or f"stopped by {seen.stop_reason}", ok=False)
        self.ending = self.ending or self._skips_too_many()
        if self.ending is not None:
            return self._stop(seen, self.ending, ok=False)
        reports = [seen.reports.get(worker) for worker in self.members]
        if all(report is not None and report.phase is Phase.FINISHED for report in reports):
            return Closing(
                "trained to the last step",
                True,
                seen.now + self.timeouts.checkpoint_s,
                self.ledger.last_step,
            )
        self._release_idle_leavers(seen)
        leaving = policy.find_leavers(seen, self.members)
        if leaving is not None:
            return self._on_notice(state, leaving, seen)
        state.leaving = None
        state.declined &= seen.nodes.keys()  # who comes again by its old name is asked about again
        gathering_s = gather_s(self.ledger.changes, self.job.elastic.arrivals_debounce_s)
        arrived = policy.find_arrivals(
            seen, self.planned_nodes, state.declined, gathering_s, self.timeouts.worker_start_s
        )
        if arrived:
            return self._on_arrival(state, arrived, seen)
        paces = self._paces()
        if rates := self._find_rates(paces):
            return self._on_rates(state, rates, seen)
        slowed = self._find_slow(paces) or self._find_forgiven(seen)
        if slowed:
            return self._on_slow(state, slowed, seen)
        if state.considering is not None:
            return self._weigh(state, state.considering, seen)
        return self._think_again(state, seen)

    def _skips_too_many(self) -> str | None:
        """Return the reason to end the job if its newest steps changed no weights; else None.

        That holds for too many steps in a row, or for all steps of a run that is over.
        """
        skipped, limit = self.ledger.skipped, self.job.training.max_skipped_steps
        is_over = self.ledger.committed_steps == self.ledger.last_step
        none_ever = is_over and skipped.first == 0
        if not none_ever and (limit is None or skipped.in_a_row < limit):
            return None
        return (
            f"{skipped.in_a_row} steps in a row changed no weights (training.max_skipped_steps:"
            f" {limit}), the last since {skipped.cause}; the checkpoint has the weights as they"
            f" were before step {skipped.first}"
        )

    def _paces(self) -> Paces:
        """Return the compute seconds of each worker, measured and planned.

        Empty until all workers can be judged.
        """
        measured = self.ledger.compute_s(self.members) if self.job.elastic.slow_ratio else {}
        if not measured or self.proposal is None:
            return {}, {}, {}
        fleet = self.proposal.cost.fleet
        types = {worker: fleet.gpu_type(worker) for worker in self.members}
        by_node = {fleet.node_of(worker).name: types[worker] for worker in self.members}
        return measured, self.proposal.compute_s(self._node_factors(by_node)), types

    def _find_rates(self, paces: Paces) -> dict[str, float]:
        return policy.find_rates(*paces, self.rate_factors)

    def _find_slow(self, paces: Paces) -> dict[str, float]:
        measured, planned, _ = paces
        return policy.find_slow(measured, planned, self.slowdowns, self.job.elastic.slow_ratio)

    def _find_forgiven(self, seen: Observation) -> dict[str, float]:
        """Return the slow nodes that have been idle for a while: they are tried again.

        While a node is idle, it is unknown whether it still is slow.
        """
        used = {seen.node_of(worker) for worker in self.members}
        past = seen.now - self.job.elastic.slow_forgiven_s
        return {
            name: 1.0
            for name in self.slowdowns
            if name not in used and self._slow_since[name] <= past
        }

    def _on_death(self, trouble: policy.Trouble, seen: Observation) -> State:
        self._tell_of_death(trouble, seen)
        change = self._change(trouble, seen)
        survivors = self._survivors(seen)
        self._act(Interrupt(tuple(survivors), self.generation))
        return Quiescing(
            change, seen.now + self.timeouts.quiesce_s, interrupted=True, broken=self.members
        )

    def _on_notice(self, state: Training, trouble: policy.Trouble, seen: Observation) -> State:
        """Plan while training continues, wait for further notices as long as is safe, then stop.

        The stop comes after the current step.
        """
        leaving = state.leaving
        if leaving is None or leaving.change.nodes != trouble.nodes:
            return self._plan_without(state, trouble, seen)
        leaving.until = gathers_until(
            [seen.notices[name] for name in trouble.nodes], leaving.patience_s, leaving.needs_s
        )
        if seen.now < leaving.until:
            return state
        if leaving.usable != policy.usable_nodes(seen):
            return self._plan_without(state, trouble, seen)
        return self._move(leaving.change, leaving.proposal, seen)

    def _on_arrival(self, state: Training, arrived: tuple[str, ...], seen: Observation) -> State:
        state.declined = state.declined | frozenset(arrived)
        trouble = policy.Trouble("arrival", arrived, (), seen.now, f"{', '.join(arrived)} joined")
        return self._reconsider(state, trouble, seen)

    def _on_rates(self, state: Training, rates: dict[str, float], seen: Observation) -> State:
        """Plan with this run's measured rates of GPU types from now on.

        The planner decides whether that is worth a move now.
        """
        self.rate_factors.update(rates)
        self.ledger.forget_pace()
        said = [
            f"{gpu_type} computes {factor:.2f} times as long as its profile says, beside the others"
            for gpu_type, factor in sorted(rates.items())
        ]
        reason = ", ".join(said)
        self.untold.add(
            "calibration", self.generation, rate_factors=dict(self.rate_factors), reason=reason
        )
        return self._reconsider(state, policy.Trouble("search", (), (), seen.now, reason), seen)

    def _on_slow(self, state: Training, slowed: dict[str, float], seen: Observation) -> State:
        """Plan with the measured slowdowns of these nodes from now on.

        The planner decides whether that is worth a move now.
        """
        self.slowdowns = {n: f for n, f in (self.slowdowns | slowed).items() if f > 1.0}
        self._slow_since.update(dict.fromkeys(slowed, seen.now))
        self.ledger.forget_pace()
        said = [
            (
                f"{name} computes {factor:.2f} times as long as its type"
                if factor > 1.0
                else f"{name} is taken to be as fast as its type again"
            )
            for name, factor in sorted(slowed.items())
        ]
        trouble = policy.Trouble("slow", tuple(sorted(slowed)), (), seen.now, ", ".join(said))
        self.untold.add(
            "slow",
            self.generation,
            nodes=list(trouble.nodes),
            slowdowns=slowed,
            reason=trouble.reason,
        )
        return self._reconsider(state, trouble, seen)

    def _think_again(self, state: Training, seen: Observation) -> State:
        """Compare a plan that is only a repair with a whole search, once the job trains again.

        The repair was the best one while all workers stood.
        """
        if self.proposal is None or self.proposal.searched or self.ledger.open_change is not None:
            return state
        trouble = policy.Trouble("search", (), (), seen.now, "the plan so far is only a repair")
        return self._reconsider(state, trouble, seen)

    def _reconsider(self, state: Training, trouble: policy.Trouble, seen: Observation) -> State:
        """Search for a better plan while training continues; move only if that is worth it.

        Nothing is lost, so there is time for a whole search. Another event meanwhile starts a new
        search.
        """
        if state.considering is not None:
            state.considering.search.drop()
            trouble = state.considering.trouble.joined(trouble)
        usable = policy.usable_nodes(seen)
        state.declined &= {*usable}  # who cannot take part just now is asked about when it can
        if lack := self._lack(seen, usable):
            state.considering = None
            return self._stay(state, trouble, lack)
        search = self.planning.search(self._fleet(seen, usable), self.proposal)
        state.considering = Considering(trouble, search, seen.now)
        return self._weigh(state, state.considering, seen)

    def _weigh(self, state: Training, considering: Considering, seen: Observation) -> State:
        """Apply the search's answer once it is there: move to its plan, or stay."""
        trouble = considering.trouble
        try:
            proposal = considering.search.result()
        except ConfigError as error:
            state.considering = None
            return self._stay(state, trouble, str(error))
        if proposal is None:
            return state
        state.considering = None
        if proposal.stay:
            return self._stay(state, trouble, proposal.reason)
        if not {seen.node_of(worker) for worker in proposal.plan.workers} <= {
            *policy.usable_nodes(seen)
        }:
            return self._reconsider(state, trouble, seen)
        change = self._change(trouble, seen)
        change.replan_s = seen.now - considering.since
        self._say(proposal, trouble.reason)
        return self._move(change, proposal, seen)

    def _stay(self, state: Training, trouble: policy.Trouble, why: str) -> State:
        self.proposal = self.proposal and replace(self.proposal, searched=True)
        self.untold.add(
            "decision",
            self.generation,
            f"Deciding to stay as it is although {trouble.reason}, since {why}",
        )
        return state

    # Quiescing
    # ------------------------------------------------------------------------------

    def _quiesce(self, state: Quiescing, seen: Observation) -> State:
        survivors = self._survivors(seen)
        self._escalate(state, seen, survivors)
        restless = [worker for worker in survivors if not self._stands(seen.reports[worker])]
        if restless:
            state.quiet_since = None
            return self._press(state, seen, survivors, restless)
        if state.quiet_since is None:
            state.quiet_since = seen.now
        if self._roll_forward(state, seen, survivors):
            return state
        if state.change.cause == "death" and self._cause_unknown(state, seen):
            return state
        state.change.stood_at = seen.now
        return self._replan(state, seen)

    def _escalate(self, state: Quiescing, seen: Observation, survivors: Collection[str]) -> None:
        """Turn a stop under way into an interrupt after a death."""
        trouble = policy.find_deaths(
            seen, [worker for worker in self.members if worker not in self._mourned]
        )
        if trouble is None and not state.interrupted:
            trouble = policy.find_failures(seen, self.members)
        if trouble is None:
            return
        state.broken = state.broken or self.members
        if not state.interrupted:
            state.interrupted, state.proposal = True, None
            self._act(Interrupt(tuple(survivors), self.generation))
            state.deadline = seen.now + self.timeouts.quiesce_s
        self._tell_of_death(trouble, seen)
        state.change.overtaken(trouble.nodes, trouble.happened_at, seen.now, trouble.reason)

    def _press(
        self, state: Quiescing, seen: Observation, survivors: Collection[str], restless: list[str]
    ) -> State:
        """Wait for workers that still move; act at the deadline.

        First all are interrupted; at the next deadline those that do not stop are ended.
        """
        if seen.now < state.deadline:
            return state
        if not state.interrupted:
            state.interrupted = True
            self._act(Interrupt(tuple(survivors), self.generation))
        else:
            why = f"{', '.join(restless)} did not stop in time"
            self._tell_of_death(policy.Trouble("death", (), tuple(restless), seen.now, why), seen)
            self._act(Dismiss(tuple(restless)))
        state.deadline = seen.now + self.timeouts.quiesce_s
        return state

    def _roll_forward(
        self, state: Quiescing, seen: Observation, survivors: Collection[str]
    ) -> bool:
        """Return True while prepared survivors apply a step that another survivor has committed.

        A survivor that is late with it is ended: its tensors may change at any time, so no plan
        counts on them, and no later generation takes them over.
        """
        vote = self.ledger.newest_vote(
            self.generation
        )  # of the dead too: what one saw, all had contributed to
        behind = (
            [] if vote is None else policy.find_behind(seen, survivors, self.generation, vote[0])
        )
        if vote is None or not behind:
            return False
        if new := [worker for worker in behind if worker not in state.rolling]:
            state.rolling |= frozenset(new)
            state.roll_deadline = seen.now + self.timeouts.quiesce_s
            self._act(RollForward(tuple(new), self.generation, vote))
        elif state.roll_deadline is not None and seen.now > state.roll_deadline:
            why = (
                f"{', '.join(behind)} did not apply step {vote[0]} in time, which others have"
                " committed"
            )
            self._tell_of_death(policy.Trouble("death", (), tuple(behind), seen.now, why), seen)
            self._act(Dismiss(tuple(behind)))
        return True

    def _cause_unknown(self, state: Quiescing, seen: Observation) -> bool:
        """Return True while survivors stand and the dead worker is not known yet.

        The heartbeat is to tell, within bounds. Losses of earlier generations explain nothing.
        """
        if any(is_lost(seen, worker) for worker in state.broken or self.members):
            return False
        failed = any(
            seen.reports[w].phase is Phase.FAILED for w in self.members if w in seen.reports
        )
        stood_at = seen.now if state.quiet_since is None else state.quiet_since
        return not failed and seen.now - stood_at < 1.5 * self.timeouts.heartbeat_s

    def _replan(self, state: Quiescing, seen: Observation) -> State:
        change, proposal = state.change, state.proposal
        if state.broken:
            seen, ended = self._judge_failure(state.broken, seen)
            if ended is not None:
                return ended
        overtaken = proposal is not None and any(
            w not in seen.reports or w in seen.losses or seen.node_of(w) in seen.notices
            for w in proposal.plan.workers
        )
        if proposal is None or overtaken:
            proposal, why = self._try_plan(seen, policy.usable_nodes(seen), change)
            if proposal is None:
                return Waiting(why, seen.now, change)
            self._say(proposal, change.reason)
        return self._adopt(change, proposal, seen)

    # Ending
    # ------------------------------------------------------------------------------

    def _judge_failure(
        self, broken: Collection[str], seen: Observation
    ) -> tuple[Observation, Ended | None]:
        """Count one failure of the generation that `broken` took part in.

        A cause that has come too often without a step between costs its nodes their place for a
        while. If no plan exists without them, the job ends once its newest step is durable.

        Returns the observation without the nodes that are left out, and the end if there is one.
        """
        failures, limit = self.ledger.failures, self.job.elastic.max_failures_in_a_row
        failures.add(find_causes(seen, broken, self._joined))
        repeated = failures.repeated(limit)
        if repeated is None:
            return seen, None
        without = self._leave_out(repeated.nodes, repeated.reason, seen)
        if without is not None:
            failures.clear()
            return without, None
        final = failures.repeated(limit, final=True)
        return seen, None if final is None else self._give_up(final.reason)

    def _leave_out(
        self, nodes: Collection[str], reason: str, seen: Observation
    ) -> Observation | None:
        """Leave these nodes out of plans for a while; None if no plan exists without them."""
        without = replace(seen, left_out=seen.left_out | {*nodes})
        usable = policy.usable_nodes(without)
        if self._lack(without, usable):
            return None
        if self.planning.ask(self._fleet(without, usable), self.proposal).proposal is None:
            return None
        self._left_out.update(dict.fromkeys(nodes, seen.now + LEFT_OUT_S))
        names = ", ".join(sorted(nodes))
        sentence = (
            f"Deciding to leave out {names} for {LEFT_OUT_S / 60:.0f} minutes, since {reason}"
        )
        self.untold.add("decision", self.generation, sentence)
        return without

    def _give_up(self, reason: str) -> Ended | None:
        """End the job if its newest step is durable, else return None to make it so first.

        That is done in a generation of its own. If it fails, too, the job ends without it.
        """
        newest, safe = self.ledger.committed_steps, self.ledger.checkpoint_step
        if newest <= (safe or 0):
            return self._fail(self.ending or reason, may_pass=True)
        if self.ending is None:
            self.ending, self._may_pass = reason, True
            self.ledger.failures.clear()
            sentence = f"Deciding to end once step {newest} is in durable storage, since {reason}"
            self.untold.add("decision", self.generation, sentence)
            return None
        newest_safe = "there is no checkpoint" if safe is None else f"step {safe} is the newest"
        why = f"step {newest} is not in durable storage, where {newest_safe}"
        return self._fail(f"{self.ending}; {why}", may_pass=True)

    def _close(self, state: Closing, seen: Observation) -> State:
        trouble = policy.find_deaths(seen, self.members) or policy.find_failures(seen, self.members)
        if trouble is not None:
            return self._on_death(
                trouble, seen
            )  # survivors make the last step durable in a generation of their own
        standing = [
            seen.reports[w]
            for w in self.members
            if w in seen.reports and self._stands(seen.reports[w])
        ]
        if state.step is None and len(standing) == len(self.members):
            state.step = standing[0].step
        if state.step is not None and seen.checkpoint.step == state.step:
            if state.then_wait:
                return self._wait_after(state, seen)
            return self._ended(state.reason, ok=state.ok, may_pass=self._may_pass)
        error, is_retried = self._closing_error(state.step, seen)
        # A fleet that is too small waits for more nodes while the storage is tried again.
        given_up = error and (not is_retried or state.then_wait)
        if seen.now > state.deadline or given_up:
            why = (
                f"step {state.step} is not in durable storage:"
                f" {error or 'the checkpoint was not finished in time'}"
            )
            if state.then_wait:
                return self._wait_after(state, seen, why)
            asked_to_stop = seen.stop_reason is not None and self._stopping is None
            return self._ended(f"{state.reason}; {why}", ok=False, may_pass=not asked_to_stop)
        return state

    def _closing_error(self, step: int | None, seen: Observation) -> tuple[str | None, bool]:
        """Return the reason why the last step is not durable, and True if that is retried."""
        if step is None:
            return None, False
        found = seen.checkpoint
        if (found.error_generation, found.error_step) == (self.generation, step):
            return found.error, found.is_retried
        error = self.ledger.checkpoint_errors.get((self.generation, step))
        failing = self.ledger.failing
        if error is None and failing is not None and failing.age == (self.generation, step):
            return failing.reason, failing.is_retried
        return error, False

    def _wait_after(self, state: Closing, seen: Observation, trouble: str = "") -> State:
        """Wait for more nodes, since the fleet is too small.

        The nodes that are left keep the state, made durable or not.
        """
        assert state.then_wait is not None
        if trouble:
            self.untold.add(
                "decision",
                self.generation,
                f"Deciding to wait although {trouble}, since {state.then_wait}",
            )
        return Waiting(state.then_wait, seen.now, self.pending)
