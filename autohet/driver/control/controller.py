"""Controller of one job: wait, observe, decide, log, execute, one tick at a time.

It alone has what is decided carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autohet.driver.control.actions import (
    Action,
    AskForNodes,
    AskHoldings,
    Begin,
    ClaimGeneration,
    CommitCheckpoint,
    Dismiss,
    Drain,
    EndAgent,
    GiveBack,
    HandOver,
    Hire,
    Interrupt,
    Rehearse,
    ReleaseNode,
    RequestInventories,
    RequestStop,
    RollForward,
    StartAgents,
)
from autohet.driver.control.events import EventLog
from autohet.driver.control.observation import Failures, Observation, Prune, Workforce
from autohet.driver.control.orders import OrderBook
from autohet.driver.control.planning import Planning
from autohet.driver.control.recording import Recorder
from autohet.driver.control.state_machine import StateMachine
from autohet.driver.control.utilisation import utilisation_by_gpu_type
from autohet.runtime.job import Job


class Controller(StateMachine):
    """State machine with its workforce and its event log. Only `tick` moves it."""

    def __init__(
        self,
        job: Job,
        workforce: Workforce,
        planning: Planning,
        orders: OrderBook,
        events: EventLog,
    ) -> None:
        super().__init__(job, planning, orders)
        self.workforce = workforce
        self.events = events
        self.recorder: Recorder | None = None
        self.failures: Failures | None = None
        """Ticks that have raised so far, for the next tick to see."""

    def tick(self) -> Observation:
        """Run one round: wait, observe, decide, log, execute.

        Returns the observation, for display.
        """
        self.workforce.wait()
        seen = replace(self.workforce.observe(), failures=self.failures)
        try:
            with self._recorded(seen):
                self.decide(seen)
        finally:  # what was decided before an error came is told and done, too
            self.tell_and_execute()
        return seen

    def tell(self) -> None:
        """Log each pending decision once, in order; one that cannot be logged is dropped."""
        while self.untold:
            self.events.tell(self.untold.popleft())

    def tell_and_execute(self) -> None:
        """Log the decisions and execute the actions, in order.

        An action that raises stays first and is retried in the next tick.
        """
        try:
            self.tell()
        finally:
            while self.actions:
                execute(self.actions[0], self.workforce)
                self.actions.popleft()

    @contextmanager
    def _recorded(self, seen: Observation) -> Iterator[None]:
        """Record the decisions of the block and the error that ends it.

        No-op without a recorder.
        """
        before, error = {id(each): each for each in (*self.actions, *self.untold)}, None
        if self.recorder is not None:
            self.recorder.observed(seen)
        try:
            yield
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            if self.recorder is not None:
                decisions = [each for each in self.untold if id(each) not in before]
                actions = [each for each in self.actions if id(each) not in before]
                self.recorder.decided(decisions, actions, type(self.state).__name__, error)

    def give_up(self, reason: str) -> None:
        """End the job from outside, whatever its state."""
        self.state = self._fail(reason, may_pass=True)
        self.tell()

    def summary(self) -> dict[str, Any]:
        """Return the document that `autohet train --json` prints."""
        return self.ledger.summary(len(self.plans), self.plans, self.events.path)

    def status(self) -> dict[str, Any]:
        """Return the document that `autohet status` shows."""
        return {
            "name": self.job.name,
            "state": type(self.state).__name__.lower(),
            "reason": getattr(self.state, "reason", ""),
            "generation": self.generation,
            "workers": list(self.members),
            "plan": None if self.proposal is None else self.proposal.plan.to_document(),
            "predicted_step_s": None if self.proposal is None else self.proposal.predicted_step_s,
            "gpu_types": self._utilisation(),
            **self.ledger.status(),
        }

    def _utilisation(self) -> dict[str, Any]:
        """Return MFU and peak memory by GPU type, measured and predicted."""
        if self.proposal is None:
            return {}
        measured = self.ledger.measured_step_s(self.generation)
        return utilisation_by_gpu_type(self.proposal, measured, self.ledger.peak_bytes)


def execute(action: Action, workforce: Workforce) -> None:
    """Carry out one action. Returns at once; the effect shows in a later observation."""
    match action:
        case Hire(workers):
            workforce.hire(workers)
        case Dismiss(workers):
            workforce.dismiss(workers)
        case ClaimGeneration(entry):
            workforce.claim_generation(entry)
        case Begin(orders):
            workforce.begin(orders)
        case RequestStop(workers, checkpoint):
            workforce.request_stop(workers, checkpoint=checkpoint)
        case Interrupt(workers, generation):
            workforce.interrupt(workers, generation)
        case RollForward(workers, generation, vote):
            workforce.roll_forward(workers, generation, vote)
        case RequestInventories():
            workforce.request_inventories()
        case CommitCheckpoint(step, generation, layout, receipts):
            workforce.commit_checkpoint(step, generation, layout, receipts)
        case ReleaseNode(node):
            workforce.release_node(node)
        case EndAgent(node):
            workforce.end_agent(node)
        case StartAgents(nodes):
            workforce.start_agents(nodes)
        case Drain(node, reason, deadline):
            workforce.drain(node, reason, deadline)
        case Prune():
            workforce.prune(action)
        case AskHoldings():
            workforce.ask_holdings()
        case HandOver(parts, to):
            workforce.hand_over(parts, to)
        case AskForNodes(counts):
            workforce.ask_for_nodes(counts)
        case GiveBack(node):
            workforce.give_back(node)
        case Rehearse():
            workforce.rehearse(action)
