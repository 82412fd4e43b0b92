"""SIMULATED workforce: a spot trace instead of machines, and a clock that jumps to the next event.

Controller, planner, order builder, layouts, holdings and transfer schedules are real. Time is
simulated: a step takes its predicted time and its loss to uploads and copies, a restore the time of
its schedule, and everything else the stated `Costs`. Steps between two events are made at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autohet.control.fleet import QUIET_S
from autohet.control.values.observation import CheckpointState, Observation
from autohet.simulate.costs import Costs
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.fleet.autoscaler import SimulatedAutoscaler
from autohet.simulate.fleet.clock import SimulatedClock
from autohet.simulate.fleet.copies import SimulatedCopies
from autohet.simulate.fleet.generation import SimulatedJob
from autohet.simulate.fleet.machines import SimulatedMachines
from autohet.simulate.fleet.manifest import SimulatedManifest
from autohet.simulate.fleet.no_agents import NoAgents
from autohet.simulate.fleet.workers import PaceOfPlan, SimulatedWorkers
from autohet.simulate.spot_trace import TraceEvent
from planner.inputs.fleet import NodeType
from recovery.state.ancestry import Descent

CALM_TICK_S = 60.0
NOTICES_GATHER_S = QUIET_S + 1e-3
"""Seconds just longer than the controller waits for further notices."""


class SimulatedWorkforce:
    """Implements `Workforce` for a simulation."""

    def __init__(
        self,
        kinds: Mapping[str, NodeType],
        trace: Sequence[TraceEvent],
        pace: PaceOfPlan,
        costs: Costs,
        prices: PriceHistory,
        job: SimulatedJob,
    ) -> None:
        self.clock = SimulatedClock()
        self.machines = SimulatedMachines(kinds, trace, prices, costs, self.clock)
        self.copies = SimulatedCopies()
        self.workers = SimulatedWorkers(self.machines, self.copies, pace, costs, job, self.clock)
        self.node_agents = NoAgents(self._release)
        self.autoscaler = SimulatedAutoscaler(self.machines)
        self._end_s = job.end_s
        self._last_step = job.last_step
        self._looks_s = (1e-3, NOTICES_GATHER_S, job.settle_s, job.settle_s + 2.0)
        """Seconds after a change at which the controller's own waits for more changes end."""
        self._checkpoint = CheckpointState()

    @property
    def now(self) -> float:
        return self.clock.now

    def wait(self) -> None:
        """Let time pass until something happens that the controller may have to answer."""
        now = self.now
        moments = self._due() + self.clock.pending_wakes()
        generation = self.workers.generation
        if generation is not None:
            due_in_steps = self.workers.checkpoint_pace.due_in_steps(generation.step)
            last_step = min(self._last_step, self.workers.preparation.begins_at)
            moments += generation.due(now, due_in_steps, last_step)

        moments += self.autoscaler.looks(now, self.clock.changed_at)
        for look_s in self._looks_s:
            look_at = self.clock.changed_at + look_s
            if look_at > now:
                moments.append(look_at)

        # While it trains nothing changes without an event; else the controller may wait for
        # something that has no moment of its own.
        if not self.workers.is_training or not moments:
            moments.append(now + CALM_TICK_S)

        # The clock must advance, or an event that stays due would be looked at for ever.
        self._pass_to(min(max(now + 1e-3, min(moments)), self._end_s))

    def observe(self) -> Observation:
        return Observation(
            self.now,
            dict(self.machines.nodes),
            self.machines.notices(),
            self.workers.take_reports(),
            dict(self.workers.losses),
            self.copies.inventories,
            self._checkpoint,
            store=("simulated", 1),
            launches=self.autoscaler.launches(self.now),
            prices=self.machines.prices.by_type,
            usual_prices=self.machines.prices.usual(self.now),
        )

    def wake_at(self, moment: float) -> None:
        """Make the controller look at `moment`."""
        self.clock.wake_at.append(moment)

    def busy(self, seconds: float) -> None:
        """Pass the seconds for which the driver is busy, while all else continues."""
        end = min(self.now + seconds, self._end_s)
        while self.now < end:
            moments = [moment for moment in self._due() if moment > self.now]
            self._pass_to(min([end, *moments]))

    def _due(self) -> list[float]:
        """Return the times of the events that are due without an action of the controller."""
        return self.machines.due() + self.workers.due()

    def _pass_to(self, moment: float) -> None:
        """Advance the clock to `moment`: make the steps that end until then, and the events due."""
        machines = self.machines
        workers = self.workers
        # First the time until `moment`, then what happens at it: a death must not undo the steps
        # that had ended before.
        workers.make_steps(moment)
        num_used = 0
        if workers.generation is not None:
            num_used = len(workers.generation.members)
        machines.bill.count_gpus(self.now, moment, num_used)

        self.clock.now = moment
        machines.update_prices()
        workers.finish_building()
        workers.halt_on(machines.run_trace())
        machines.join_booted()
        for name, died in machines.pop_noticed_deaths().items():
            self._forget(name, died)
        for name in machines.overdue():
            self._release(name)

    def _forget(self, node: str, died: float) -> None:
        self.machines.forget(node)
        self.workers.lose(node, died)
        self.copies.forget(node)

    def _release(self, node: str) -> None:
        if node in self.machines.nodes:
            self._forget(node, self.now)
            self.machines.end_returned(node)
            self.machines.start_wanted()

    # directions
    # ------------------------------------------------------------------------------

    def claim_generation(self, entry: Descent) -> None:
        """Claim a generation: the journal of a simulated job takes every entry at once."""
        self._checkpoint = replace(self._checkpoint, claimed=entry.generation)
        self.clock.wake_soon()

    def request_inventories(self) -> None:
        self.copies.keep_newest_round(self.workers.generation)
        machines = self.machines
        self.copies.answer_inventories(filter(machines.is_reachable, machines.nodes))
        self.clock.wake_soon()

    def commit_checkpoint(
        self, step: int, generation: int, layout: Any, receipts: Sequence[Any]
    ) -> None:
        if self.workers.generation is not None:
            self.workers.s3_requests.count_checkpoint(self.workers.generation.orders)
        self._checkpoint = self._checkpoint.followed_by(
            step, f"simulated/step-{step:08d}", SimulatedManifest(step, generation, layout.shards)
        )
        self.copies.keep_checkpoint(step, generation, layout)

    def fall_back(self, step: int, generation: int) -> None:
        raise AssertionError("no simulated step is skipped")

    def rehearse(self, what: Any) -> None:
        raise AssertionError("there is no script")

    def publish(self, status: Mapping[str, Any]) -> None:
        """Publish the status: no-op."""
