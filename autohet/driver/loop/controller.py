"""Controller of one job: wait, observe, decide, log, execute, one tick at a time.

It alone has what is decided carried out.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from autohet.control.decide import MOST_FAILURES, RETRIES, decide, fail_at_once
from autohet.control.job_memory import JobMemory
from autohet.control.job_state import Ended, State
from autohet.control.ledger.run_summary import (
    ledger_status,
    ledger_summary,
    utilisation_by_gpu_type,
)
from autohet.control.planning.orders import OrderBuilder
from autohet.control.values.actions import (
    Action,
    AskForNodes,
    AskHoldings,
    Begin,
    ClaimGeneration,
    CommitCheckpoint,
    Dismiss,
    Drain,
    EndAgent,
    FallBack,
    GiveBack,
    HandOver,
    Hire,
    Interrupt,
    Prepare,
    Rehearse,
    ReleaseNode,
    RequestCheckpoint,
    RequestInventories,
    RequestStop,
    RollForward,
    StartAgents,
    Withdraw,
)
from autohet.control.values.effects import Decision, Remark, Round, Supersede
from autohet.control.values.observation import Failures, Observation, Prune, Workforce
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.planning import Planning
from autohet.driver.loop.recorder import Recorder
from autohet.runtime.job import Job
from planner.inputs.documents import Document

logger = logging.getLogger("autohet")
PAUSE_S = 0.5
"""Seconds of the pause after a failed tick; longer after more of them."""


class Controller:
    """Job's memory, its workforce and its event log. Only `tick` and `give_up` move it."""

    def __init__(
        self,
        job: Job,
        workforce: Workforce,
        planning: Planning,
        orders: OrderBuilder,
        events: EventLog,
    ) -> None:
        self.memory = JobMemory(job, planning, orders)
        self.workforce = workforce
        self.events = events
        self.recorder: Recorder | None = None
        self.failures: Failures | None = None
        """Ticks that have raised so far, for the next tick to see."""
        self.pending_events: deque[Decision | Remark] = deque()
        """Events and remarks decided but not yet logged."""
        self.pending_actions: deque[Action] = deque()
        """Actions decided but not yet executed."""

    @property
    def state(self) -> State:
        return self.memory.state

    @property
    def ended(self) -> Ended | None:
        return self.state if isinstance(self.state, Ended) else None

    def tick(self) -> Observation:
        """Run one round: wait, observe, decide, log, execute.

        Returns the observation, for display.
        """
        self.workforce.wait()
        seen = replace(self.workforce.observe(), failures=self.failures)
        decided = Round()
        try:
            decided.collect(decide(self.memory, seen))
        finally:  # what was decided before an error came is logged and executed, too
            self._enqueue(decided)
            try:
                if self.recorder is not None:
                    self.recorder.write_tick(seen, decided, self.state)
            finally:
                try:
                    self._log()
                finally:
                    while self.pending_actions:
                        # Removed only once executed: one that raises is retried in the next tick.
                        execute(self.pending_actions[0], self.workforce)
                        self.pending_actions.popleft()
        return seen

    def _enqueue(self, decided: Round) -> None:
        for effect in decided.effects:
            match effect:
                case Decision() | Remark():
                    self.pending_events.append(effect)
                case Supersede(action):
                    remaining: deque[Action] = deque([action])
                    for pending in self.pending_actions:
                        if isinstance(pending, CommitCheckpoint):
                            remaining.append(pending)
                    self.pending_actions = remaining
                case _:
                    self.pending_actions.append(effect)

    def _log(self) -> None:
        """Log each pending event once, in order; one that cannot be logged is dropped."""
        while self.pending_events:
            self.events.tell(self.pending_events.popleft())

    def give_up(self, reason: str) -> None:
        """End the job from outside, whatever its state."""
        decided = Round()
        decided.collect(fail_at_once(self.memory, reason))
        self._enqueue(decided)
        self._log()

    def summary(self) -> Document:
        """Return the document that `autohet train --json` prints."""
        summary = ledger_summary(self.memory.ledger, self.memory.plans, self.events.path)
        return summary | self._goal()

    def _goal(self) -> Document:
        """Return the entry of a job's deadline and budget; empty where it has neither."""
        goal = self.memory.goal
        return {} if goal is None else {"goal": goal.document()}

    def status(self) -> Document:
        """Return the document that `autohet status` shows."""
        memory = self.memory
        plan = None
        predicted_step_s = None
        if memory.proposal is not None:
            plan = memory.proposal.plan.to_document()
            predicted_step_s = memory.proposal.predicted_step_s
        return {
            "name": memory.job.name,
            "state": type(memory.state).__name__.lower(),
            "reason": getattr(memory.state, "reason", ""),
            "generation": memory.generation,
            "workers": list(memory.members),
            "plan": plan,
            "predicted_step_s": predicted_step_s,
            "gpu_types": self._utilisation(),
            **ledger_status(memory.ledger),
            **self._goal(),
        }

    def _utilisation(self) -> Document:
        """Return MFU and peak memory by GPU type, measured and predicted."""
        memory = self.memory
        if memory.proposal is None:
            return {}
        measured = memory.ledger.measured_step_s(memory.generation)
        return utilisation_by_gpu_type(memory.proposal, measured, memory.ledger.peak_bytes)


def execute(action: Action, workforce: Workforce) -> None:
    """Carry out one action. Returns at once; the effect shows in a later observation."""
    match action:
        case Hire(workers):
            workforce.workers.hire(workers)
        case Dismiss(workers):
            workforce.workers.dismiss(workers)
        case ClaimGeneration(entry):
            workforce.claim_generation(entry)
        case Prepare(orders):
            workforce.workers.prepare(orders)
        case Withdraw(workers, generation):
            workforce.workers.withdraw(workers, generation)
        case Begin(orders):
            workforce.workers.begin(orders)
        case RequestStop(workers, checkpoint):
            workforce.workers.request_stop(workers, checkpoint=checkpoint)
        case RequestCheckpoint(worker):
            workforce.workers.request_checkpoint(worker)
        case Interrupt(workers, generation, keep):
            workforce.workers.interrupt(workers, generation, keep=keep)
        case RollForward(workers, generation, vote):
            workforce.workers.roll_forward(workers, generation, vote)
        case RequestInventories():
            workforce.request_inventories()
        case CommitCheckpoint(step, generation, layout, receipts):
            workforce.commit_checkpoint(step, generation, layout, receipts)
        case FallBack(step, generation):
            workforce.fall_back(step, generation)
        case ReleaseNode(node):
            workforce.node_agents.release_node(node)
        case EndAgent(node):
            workforce.node_agents.end_agent(node)
        case StartAgents(nodes):
            workforce.node_agents.start_agents(nodes)
        case Drain(node, reason, deadline):
            workforce.autoscaler.drain(node, reason, deadline)
        case Prune():
            workforce.node_agents.prune(action)
        case AskHoldings():
            workforce.node_agents.ask_holdings()
        case HandOver(parts, to):
            workforce.node_agents.hand_over(parts, to)
        case AskForNodes(counts):
            workforce.autoscaler.ask_for_nodes(counts)
        case GiveBack(node):
            workforce.autoscaler.give_back(node)
        case Rehearse():
            workforce.rehearse(action)


class Guard:
    """Wrapper of the run's own tick, which keeps the driver alive when a tick raises.

    The next tick sees the failure and decides what to do about it (`failures.answer_failures`). The
    guard decides one thing alone: the end of a job whose ticks do not even come to a decision.
    """

    def __init__(
        self,
        controller: Controller,
        tick: Callable[[], Observation],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._controller = controller
        self._tick = tick
        self._pause = pause

    def tick(self) -> Observation | None:
        """Run one tick. Returns its observation, or None if the tick failed."""
        try:
            seen = self._tick()
        except Exception as error:  # noqa: BLE001
            self._count(error)
            return None
        self._controller.failures = None
        return seen

    def _count(self, error: Exception) -> None:
        logger.warning("A tick of the driver failed", exc_info=error)
        cause = f"an error in the driver: {type(error).__name__}: {str(error).strip()[:500]}"
        in_a_row = 1
        if self._controller.failures is not None:
            in_a_row += self._controller.failures.in_a_row
        self._controller.failures = Failures(in_a_row, cause)

        # A tick that comes to a decision gives up after MOST_FAILURES: so none does.
        is_stuck = in_a_row > MOST_FAILURES + 1
        if is_stuck and not self._controller.ended:
            self._controller.give_up(
                f"{cause}; its newest step is not in durable storage: no decision is possible"
            )
        else:
            # What has failed, a storage say, gets time to come back.
            self._pause(PAUSE_S * min(in_a_row, RETRIES))
