"""The controller: observe, decide, act, one tick at a time. It never sleeps, never calls Ray and never reads a clock."""

from __future__ import annotations

from collections.abc import Collection

from autohet.driver import policy
from autohet.driver.change import Change
from autohet.driver.desk import Desk
from autohet.driver.observation import Observation
from autohet.driver.planning import Proposal
from autohet.driver.states import Building, Closing, Ended, Quiescing, Sourcing, State, Training, Waiting
from autohet.runtime.messages import QUIET, Phase, WorkerReport
from planner.errors import ConfigError
from recovery.errors import NotRestorable


class Controller(Desk):
    """The state machine of one job. `tick` is the only thing that moves it."""

    def tick(self) -> Observation:
        """One round: look, decide, act. Returns what was seen, for whoever shows it."""
        seen = self.workforce.observe()
        self._announce(seen)
        self.ledger.take(seen, self)
        hire = policy.workers_to_hire(seen)
        if hire and isinstance(self.state, (Waiting, Training)):
            self.workforce.hire(hire)
        self.state = self._step(seen)
        return seen

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
            case Ended() as state:
                return state

    # Waiting ---------------------------------------------------------------------------------------------------------

    def _wait(self, state: Waiting, seen: Observation) -> State:
        if seen.stop_reason:
            reason = f"stopped while waiting ({seen.stop_reason}): {state.reason}"
            self.events.emit("finished", self.generation, reason=reason, ok=False, step=self.ledger.committed_steps)
            return Ended(False, reason)
        if state.since == 0.0:
            state.since = seen.now
        usable = policy.usable_nodes(seen)
        num_workers = sum(len(seen.nodes[name].workers) for name in usable)
        starting = policy.workers_to_hire(seen)
        newest = max((seen.nodes[name].joined_at for name in seen.nodes), default=seen.now)
        settled = seen.now - newest >= self.job.elastic.arrivals_debounce_s and not starting
        late = seen.now - state.since > self.timeouts.worker_start_s
        if num_workers >= self.job.elastic.min_workers and (settled or late) and frozenset(usable) != state.tried:
            return self._plan_from_rest(state, seen, usable)
        if num_workers < self.job.elastic.min_workers:
            state.reason = f"{num_workers} workers are ready; the job needs {self.job.elastic.min_workers}"
        if not state.announced and (late or state.change is not None):
            state.announced = True
            self.events.emit("decision", self.generation, f"Deciding to wait, since {state.reason}")
        if seen.now - state.since > self.job.elastic.wait_for_fleet_s:
            return self._fail(f"waited {self.job.elastic.wait_for_fleet_s:.0f} s: {state.reason}")
        return state

    def _plan_from_rest(self, state: Waiting, seen: Observation, usable: tuple[str, ...]) -> State:
        state.tried = frozenset(usable)
        change = state.change or Change("start", (), seen.now, seen.now, self.ledger.committed_steps, None)
        try:
            proposal = self.planning.propose(policy.fleet_of(seen, usable, self.generation + 1), None)
        except ConfigError as error:
            state.reason, state.announced = str(error), False
            return state
        change.stood_at = change.stood_at or seen.now
        change.reason = change.reason or "the fleet is ready"
        return self._adopt(change, proposal, seen)

    # Training --------------------------------------------------------------------------------------------------------

    def _train(self, state: Training, seen: Observation) -> State:
        trouble = policy.find_deaths(seen, self.members) or policy.find_failures(seen, self.members)
        if trouble is not None:
            return self._on_death(trouble, seen)
        if seen.stop_reason:
            return self._stop(seen, f"stopped by {seen.stop_reason}", ok=False)
        reports = [seen.reports.get(worker) for worker in self.members]
        if all(report is not None and report.phase is Phase.FINISHED for report in reports):
            return Closing(
                "trained to the last step", True, seen.now + self.timeouts.checkpoint_s, self.job.training.steps
            )
        leaving = policy.find_leavers(seen, self.members, 0.2)
        if leaving is not None:
            return self._on_notice(leaving, seen)
        self._release_idle_leavers(seen)
        arrived = policy.find_arrivals(seen, self.planned_nodes, state.declined, self.job.elastic.arrivals_debounce_s)
        return self._on_arrival(state, arrived, seen) if arrived else state

    def _on_death(self, trouble: policy.Trouble, seen: Observation) -> State:
        self.events.emit(
            "death", self.generation, nodes=list(trouble.nodes), workers=list(trouble.workers), reason=trouble.reason
        )
        self.failures_in_a_row += 1
        change = self._change(trouble, seen)
        survivors = self._survivors(seen)
        self.workforce.interrupt(tuple(survivors))
        self.workforce.dismiss([worker for worker in trouble.workers if worker in seen.losses])
        return Quiescing(change, seen.now + self.timeouts.quiesce_s, interrupted=True)

    def _on_notice(self, trouble: policy.Trouble, seen: Observation) -> State:
        """Plan first, while training goes on; then stop after the current step."""
        change = self._change(trouble, seen)
        usable = [name for name in policy.usable_nodes(seen) if name not in trouble.nodes]
        proposal, why = self._try_plan(seen, usable, change)
        if proposal is None:
            self.events.emit(
                "decision", self.generation, f"Deciding to stop and wait, since {trouble.reason} and {why}"
            )
            self.pending = change
            return self._stop(seen, f"{trouble.reason} and {why}", ok=False, then_wait=why)
        self._say(proposal, trouble.reason)
        self.workforce.request_stop(self._survivors(seen), checkpoint=False)
        return Quiescing(change, seen.now + self.timeouts.step_s, interrupted=False, proposal=proposal)

    def _on_arrival(self, state: Training, arrived: tuple[str, ...], seen: Observation) -> State:
        trouble = policy.Trouble("arrival", arrived, (), seen.now, f"{', '.join(arrived)} joined")
        change = self._change(trouble, seen)
        proposal, why = self._try_plan(seen, policy.usable_nodes(seen), change)
        if proposal is None or proposal.stay:
            reason = why if proposal is None else proposal.reason
            self.events.emit(
                "decision", self.generation, f"Deciding to stay as it is although {trouble.reason}, since {reason}"
            )
            state.declined = state.declined | frozenset(arrived)
            return state
        self._say(proposal, trouble.reason)
        self.workforce.request_stop(self._survivors(seen), checkpoint=False)
        return Quiescing(change, seen.now + self.timeouts.step_s, interrupted=False, proposal=proposal)

    # Quiescing -------------------------------------------------------------------------------------------------------

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
        self.ledger.take(seen, self)
        return self._replan(state, seen)

    def _escalate(self, state: Quiescing, seen: Observation, survivors: Collection[str]) -> None:
        """A death while a stop was under way turns the stop into an interrupt."""
        trouble = policy.find_deaths(seen, self.members) or policy.find_failures(seen, self.members)
        if trouble is None:
            return
        lost = [worker for worker in trouble.workers if worker in seen.losses]
        if lost:
            self.workforce.dismiss(lost)
        new_nodes = set(trouble.nodes) - set(state.change.nodes)
        if state.interrupted and not new_nodes:
            return
        if not state.interrupted:
            state.interrupted, state.proposal = True, None
            self.workforce.interrupt(tuple(survivors))
            state.deadline = seen.now + self.timeouts.quiesce_s
        if new_nodes or state.change.cause != "death":
            self.events.emit(
                "death",
                self.generation,
                nodes=list(trouble.nodes),
                workers=list(trouble.workers),
                reason=trouble.reason,
            )
            known = state.change.nodes if state.change.cause == "death" else ()
            state.change.happened_at = (
                min(state.change.happened_at, trouble.happened_at) if known else trouble.happened_at
            )
            state.change.cause, state.change.reason = "death", trouble.reason
            state.change.nodes = tuple(sorted({*known, *trouble.nodes}))

    def _press(self, state: Quiescing, seen: Observation, survivors: Collection[str], restless: list[str]) -> State:
        """Some still move. At the deadline first an interrupt for all, then the end of those that do not answer it."""
        if seen.now < state.deadline:
            return state
        if not state.interrupted:
            state.interrupted = True
            self.workforce.interrupt(tuple(survivors))
        else:
            self.events.emit(
                "death",
                self.generation,
                workers=restless,
                nodes=[],
                reason=f"{', '.join(restless)} did not stop in time",
            )
            self.workforce.dismiss(restless)
        state.deadline = seen.now + self.timeouts.quiesce_s
        return state

    def _roll_forward(self, state: Quiescing, seen: Observation, survivors: Collection[str]) -> bool:
        """True while survivors that were prepared apply a step that another survivor has committed."""
        current = [seen.reports[w] for w in survivors if seen.reports[w].live_generation == self.generation]
        newest = max((report.step for report in current), default=0)
        votes = [report.vote for report in current if report.vote is not None and report.vote[0] == newest - 1]
        behind = [r.worker for r in current if r.step == newest - 1 and r.prepared_step == newest - 1]
        if not behind or not votes or seen.now > state.deadline:
            return False
        if not state.rolling:
            state.rolling = True
            self.workforce.roll_forward(behind, votes[0])
        return True

    def _cause_unknown(self, state: Quiescing, seen: Observation) -> bool:
        """Survivors stand, but who died is not known yet: wait for the heartbeat to tell, within bounds."""
        if any(worker in seen.losses or seen.node_of(worker) not in seen.nodes for worker in self.members):
            return False
        failed = any(seen.reports[w].phase is Phase.FAILED for w in self.members if w in seen.reports)
        return not failed and seen.now - state.change.detected_at < 1.5 * self.timeouts.heartbeat_s

    def _replan(self, state: Quiescing, seen: Observation) -> State:
        change, proposal = state.change, state.proposal
        if self.failures_in_a_row > self.job.elastic.max_failures_in_a_row:
            return self._fail(
                f"{self.failures_in_a_row} failures in a row and no step between; the last: {change.reason}"
            )
        gone = (
            set()
            if proposal is None
            else {w for w in proposal.plan.workers if w not in seen.reports or w in seen.losses}
        )
        if proposal is None or gone:
            proposal, why = self._try_plan(seen, policy.usable_nodes(seen), change)
            if proposal is None:
                return Waiting(why, seen.now, change)
            self._say(proposal, change.reason)
        return self._adopt(change, proposal, seen)

    # Sourcing and building -------------------------------------------------------------------------------------------

    def _adopt(self, change: Change, proposal: Proposal, seen: Observation) -> State:
        change.plan_after, change.predicted_step_s = proposal.plan, proposal.predicted_step_s
        return self._source(Sourcing(change, proposal, seen.now + self.timeouts.quiesce_s), seen)

    def _source(self, state: Sourcing, seen: Observation) -> State:
        needs_more = self.orders.needs_inventories(state.proposal.plan, seen, self.members)
        if needs_more and not state.asked:
            state.asked = True
            self.workforce.request_inventories()
            return state
        if needs_more and seen.inventories is None and seen.now < state.deadline:
            return state
        generation = self.generation + 1
        try:
            book = self.orders.write(
                generation, state.proposal, seen, self.members, self.workforce.next_generation_store(generation)
            )
        except NotRestorable as error:
            return self._fail(f"the training state is lost: {error}")
        except ConfigError as error:
            return self._fail(str(error))
        state.change.restore_step, state.change.begun_at = book.start_step, seen.now
        self.generation = generation
        self._emit_plan(state, book.start_step)
        self.workforce.begin(book.orders)
        participants = tuple(book.orders)
        deadline = seen.now + self.timeouts.rendezvous_s + self.timeouts.transfer_s
        return Building(state.change, state.proposal, generation, participants, deadline)

    def _emit_plan(self, state: Sourcing, start_step: int) -> None:
        proposal = state.proposal
        self.events.emit(
            "plan", self.generation, plan=proposal.plan.to_document(), predicted_step_s=proposal.predicted_step_s, cause=state.change.cause,
            reason=state.change.reason, step=start_step, idle=list(proposal.idle),
        )  # fmt: skip

    def _build(self, state: Building, seen: Observation) -> State:
        mine = [seen.reports[w] for w in state.proposal.plan.workers if w in seen.reports and w not in seen.losses]
        there = [r for r in mine if r.generation == state.generation and r.live_generation == state.generation]
        if len(there) == len(state.proposal.plan.workers) and all(
            r.phase not in (Phase.BUILDING, Phase.RESTORING) for r in there
        ):
            return self._ready(state, seen, there)
        trouble = policy.find_deaths(seen, state.participants)
        fresh = {w for w, r in seen.reports.items() if r.generation == state.generation}
        trouble = trouble or policy.find_failures(seen, [w for w in state.participants if w in fresh])
        if trouble is None and seen.now > state.deadline:
            late = tuple(w for w in state.participants if w not in fresh or seen.reports[w].phase not in QUIET)
            trouble = policy.Trouble("death", (), late, seen.now, f"{', '.join(late)} did not get ready in time")
        return self._build_failed(state, trouble, seen) if trouble else state

    def _build_failed(self, state: Building, trouble: policy.Trouble, seen: Observation) -> State:
        self.events.emit(
            "death", self.generation, nodes=list(trouble.nodes), workers=list(trouble.workers), reason=trouble.reason
        )
        change = state.change
        change.attempts += 1
        change.cause, change.reason = "death", trouble.reason
        change.nodes = tuple(sorted({*change.nodes, *trouble.nodes}))
        self.failures_in_a_row += 1
        if self.failures_in_a_row > self.job.elastic.max_failures_in_a_row:
            return self._fail(f"{self.failures_in_a_row} reconfigurations failed in a row; the last: {trouble.reason}")
        self.members = tuple(dict.fromkeys((*self.members, *state.participants)))
        self.workforce.interrupt(self._survivors(seen))
        self.workforce.dismiss([w for w in trouble.workers if w in seen.losses])
        return Quiescing(change, seen.now + self.timeouts.quiesce_s, interrupted=True)

    def _ready(self, state: Building, seen: Observation, reports: list[WorkerReport]) -> State:
        change = state.change
        change.ready_at = seen.now
        change.restores = {r.worker: r.restore for r in reports if r.restore is not None}
        leaving = [w for w in state.participants if w not in state.proposal.plan.workers]
        self.workforce.dismiss([w for w in leaving if w not in seen.losses and seen.node_of(w) in seen.notices])
        for name in {seen.node_of(w) for w in leaving} & set(seen.notices):
            self._released.add(name)
            self.workforce.release_node(name)
        self.members, self.proposal = state.proposal.plan.workers, state.proposal
        self.planned_nodes = frozenset(
            name
            for name in seen.nodes
            if name in policy.usable_nodes(seen) or name in {seen.node_of(w) for w in self.members}
        )
        self.plans.append((state.generation, state.proposal.plan, state.proposal.predicted_step_s))
        self.orders.confirm()
        self.ledger.begin_generation(state.generation, change)
        self.events.emit(
            "restore",
            self.generation,
            step=change.restore_step,
            bytes_by_tier=change.bytes_by_tier(),
            steps_lost=change.steps_lost,
            cause=change.cause,
        )
        return Training(state.generation, seen.now)

    # Ending ----------------------------------------------------------------------------------------------------------

    def _close(self, state: Closing, seen: Observation) -> State:
        trouble = policy.find_deaths(seen, self.members) or policy.find_failures(seen, self.members)
        if trouble is not None:
            return self._on_death(
                trouble, seen
            )  # the survivors make the last step durable in a generation of their own
        standing = [seen.reports[w] for w in self.members if w in seen.reports and self._stands(seen.reports[w])]
        if state.step is None and len(standing) == len(self.members):
            state.step = standing[0].step
        if state.step is not None and seen.checkpoint.step == state.step:
            return (
                Waiting(state.then_wait, seen.now, self.pending)
                if state.then_wait
                else self._ended(state, state.reason)
            )
        error = self.ledger.checkpoint_errors.get(state.step or -1)
        if seen.checkpoint.error is not None and seen.checkpoint.error_step == state.step:
            error = seen.checkpoint.error
        if seen.now > state.deadline or (error and state.step is not None):
            why = error or "the checkpoint was not finished in time"
            return self._ended(state, f"{state.reason}; step {state.step} is not in durable storage: {why}", ok=False)
        return state
