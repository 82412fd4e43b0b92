"""Data that all states of the controller share: generation, plan, members, pending events."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from autohet.driver.control import policy
from autohet.driver.control.actions import (
    Action,
    CommitCheckpoint,
    Dismiss,
    RequestStop,
    StartAgents,
)
from autohet.driver.control.buyer import Buyer
from autohet.driver.control.change import Change
from autohet.driver.control.decisions import Untold
from autohet.driver.control.ledger import Ledger
from autohet.driver.control.observation import Notice, Observation
from autohet.driver.control.orders import OrderBook
from autohet.driver.control.outlook import Outlook, move_s
from autohet.driver.control.planning import Planning, Proposal
from autohet.driver.control.script import Script
from autohet.driver.control.states import (
    Building,
    Closing,
    Ended,
    Saving,
    State,
    Training,
    Waiting,
    drop_search,
)
from autohet.driver.control.upkeep import Upkeep
from autohet.runtime.job import Job
from autohet.runtime.messages import QUIET, WorkerReport
from planner.cluster import Fleet, NodeType
from planner.plan import Plan

AGENT_START_S = 10.0
"""Seconds after which a node is announced even if its agent has not reported its type."""


class Desk:
    """Memory of one job from one observation to the next.

    The states of `StateMachine` read and change it.
    """

    def __init__(self, job: Job, planning: Planning, orders: OrderBook) -> None:
        self.job = job
        self.planning = planning
        self.orders = orders
        self.untold = Untold()
        """Events decided but not yet logged."""
        self.timeouts = job.elastic.timeouts()
        self.ledger = Ledger(job, self.untold)
        self.outlook = Outlook()
        self.upkeep = Upkeep()
        self.script = Script(job)
        self.buyer: Buyer | None = None
        """Adapts the request for nodes; None where the autoscaler cannot be asked for others."""
        self.actions: deque[Action] = deque()
        """Actions decided but not yet executed."""
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.planned_nodes: frozenset[str] = frozenset()
        self.proposal: Proposal | None = None
        self.pending: Change | None = None
        self.plans: list[tuple[int, Plan, float]] = []
        self.lacks_host_memory: list[str] = []
        """Sentences on host memory that nodes of the present plan lack."""
        self.said_of_copies: list[str] = []
        """Sentences on the present generation's copies to other nodes."""
        self.slowdowns: dict[str, float] = {}
        self._slow_since: dict[str, float] = {}
        self.rate_factors: dict[str, float] = {}
        """Measured compute time of each GPU type in this run, as a multiple of its profile's."""
        self.ending: str | None = None
        self._may_pass = False
        """True if a restarted driver may do better, since the cause of the end may be over by then.
        """
        self._stopping: str | None = None
        """Cause of the repeated failures for which the job is to stop; None without any."""
        self.state: State = Waiting("the job has just started", since=0.0)
        self._known_notices: dict[str, Notice] = {}
        self._known_nodes: dict[str, NodeType] = {}
        """Nodes that an event has announced, with the type as announced last."""
        self._known_risks: set[str] = set()
        self._released: set[str] = set()
        self._joined: dict[str, float] = {}
        """Time at which the last node of each name joined."""
        self._last_nodes: frozenset[str] = frozenset()
        """Names of the nodes in the observation before."""
        self._left_out: dict[str, float] = {}
        """Time until which each node is left out of plans."""
        self._mourned: set[str] = set()
        self._unfit: set[str] = set()

    @property
    def left_out(self) -> frozenset[str]:
        """Nodes that are left out of plans for a while, after failures of one cause."""
        return frozenset(self._left_out)

    @property
    def ended(self) -> Ended | None:
        return self.state if isinstance(self.state, Ended) else None

    def _act(self, action: Action) -> None:
        self.actions.append(action)

    def take(self, seen: Observation) -> None:
        """Record an observation in the ledger, and queue commits of complete checkpoints."""
        self.actions.extend(self.ledger.take(seen, self.generation))

    def _look_at_nodes(self, seen: Observation) -> Observation:
        """Hide, for one observation, each node that has taken over the name of another.

        What is remembered by name ends with the node that it was about. Nodes that are left out
        stay so for their time.
        """
        replaced = {
            name
            for name in self._last_nodes & seen.nodes.keys()
            if self._joined[name] != seen.nodes[name].joined_at
        }
        if replaced:
            seen = seen.without_nodes(replaced)
        self._joined.update({name: view.joined_at for name, view in seen.nodes.items()})
        self._last_nodes = frozenset(seen.nodes)
        self._left_out = {
            name: until
            for name, until in self._left_out.items()
            if name in seen.nodes and until > seen.now
        }
        return replace(seen, left_out=self.left_out)

    def _announce(self, seen: Observation) -> None:
        """Log each notice and each new node once; forget what is gone."""
        gone = (
            self._known_nodes.keys() | self._known_notices.keys() | self.slowdowns.keys()
        ) - seen.nodes.keys()
        self._tell_of_idle_deaths(self._known_nodes.keys() - seen.nodes.keys(), seen)
        self._released -= gone
        self._known_notices = {
            name: n for name, n in self._known_notices.items() if name not in gone
        }
        self.slowdowns = {
            name: factor for name, factor in self.slowdowns.items() if name not in gone
        }
        self.planned_nodes -= gone
        self._mourned = {
            w for w in self._mourned if w in seen.losses or seen.node_of(w) not in seen.nodes
        }
        for name, notice in seen.notices.items():
            known = self._known_notices.get(name)
            if known is None or notice.deadline != known.deadline:
                deadline_s = (
                    None if notice.deadline is None else round(notice.deadline - seen.now, 3)
                )
                updated: dict[str, Any] = {} if known is None else {"updated": True}
                self.untold.add(
                    "notice",
                    self.generation,
                    node=name,
                    source=notice.source,
                    deadline_s=deadline_s,
                    **updated,
                )
            self._known_notices[name] = notice
        self._announce_risks(seen)
        for name, view in seen.nodes.items():
            introduced = view.endpoint is not None or seen.now - view.joined_at > AGENT_START_S
            if name not in self._known_nodes and introduced:
                self._announce_arrival(name, view.node.node_type)
        self._announce_prices(seen)

    def _announce_prices(self, seen: Observation) -> None:
        """Log changed spot prices, which are known later than the node and move.

        A node that was announced before its agent had reported is announced again if the agent
        reports another type.
        """
        for name, view in seen.nodes.items():
            known, kind = self._known_nodes.get(name), view.node.node_type
            if known is None or known == kind:
                continue
            if replace(known, usd_per_hour=kind.usd_per_hour) != kind:
                self._announce_arrival(name, kind, updated=True)
            elif known.usd_per_hour != kind.usd_per_hour:
                self._known_nodes[name] = kind
                price = kind.usd_per_hour
                self.untold.add("price", self.generation, node=name, usd_per_hour=price)

    def _announce_departures(self, seen: Observation) -> None:
        """Log the departure of each announced node that is gone without a death event."""
        for name in sorted(self._known_nodes.keys() - seen.nodes.keys()):
            del self._known_nodes[name]
            self.untold.add("departure", self.generation, node=name, reason=f"{name} is gone")

    def _gone(self, nodes: Collection[str], seen: Observation) -> list[str]:
        """Return the announced nodes among `nodes` that are gone, for a death event to name.

        They are forgotten here, so that no departure event names them again.
        """
        gone = sorted(self._known_nodes.keys() & {*nodes} - seen.nodes.keys())
        for name in gone:
            del self._known_nodes[name]
        return gone

    def _announce_arrival(self, name: str, kind: NodeType, *, updated: bool = False) -> None:
        self._known_nodes[name] = kind
        again: dict[str, Any] = {"updated": True} if updated else {}
        self.untold.add(
            "arrival",
            self.generation,
            node=name,
            node_type=kind.name,
            gpu_type=kind.gpu_type,
            num_gpus=kind.num_gpus,
            usd_per_hour=kind.usd_per_hour,
            zone=kind.zone,
            spot=kind.spot,
            **again,
        )

    def _announce_risks(self, seen: Observation) -> None:
        """Log each new risk.

        A node at risk goes on training. Its shards are copied to nodes that are not at risk, from
        the next generation on.
        """
        self._known_risks &= seen.risks.keys()
        for name in sorted(seen.risks.keys() - self._known_risks):
            self._known_risks.add(name)
            source = seen.risks[name].source
            sentence = (
                f"Deciding to go on with {name} and to copy what it holds elsewhere, since it is at"
                f" risk ({source})"
            )
            self.untold.add("risk", self.generation, sentence, node=name, source=source)

    def _announce_wait(self, state: Waiting, seen: Observation, *, late: bool, short: bool) -> None:
        """Log that the job waits, and why.

        After a change this is logged at once. At the start it is logged when workers take longer
        than arrivals do to settle (`elastic.arrivals_debounce_s`). It is logged again when the
        awaited fleet has grown or shrunk.
        """
        settle_s = self.job.elastic.arrivals_debounce_s
        news = not state.announced or (
            short and state.reason != state.said and seen.now - state.said_at >= settle_s
        )
        if news and (
            late or state.change is not None or (short and seen.now - state.since >= settle_s)
        ):
            state.announced, state.said, state.said_at = True, state.reason, seen.now
            self.untold.add("decision", self.generation, f"Deciding to wait, since {state.reason}")

    def _buy(self, seen: Observation) -> None:
        if self.buyer is not None:
            actions, said = self.buyer.decide(
                seen, self.members, training=isinstance(self.state, Training)
            )
            self.actions.extend(actions)
            for sentence in said:
                self.untold.add("decision", self.generation, sentence)

    def _try_plan(
        self, seen: Observation, usable: Collection[str], change: Change
    ) -> tuple[Proposal | None, str]:
        """Return the plan for these nodes, or the reason why there is none."""
        if lack := self._lack(seen, usable):
            return None, lack
        answer = self.planning.ask(
            self._fleet(seen, usable), self.proposal, redundant=self.ending is None
        )
        change.replan_s += answer.seconds
        return answer.proposal, answer.why_not

    def _lack(self, seen: Observation, usable: Collection[str]) -> str:
        """Return a sentence if these nodes are too few for the job, else an empty string."""
        num_workers, least = (
            sum(len(seen.nodes[name].workers) for name in usable),
            self.job.elastic.min_workers,
        )
        return (
            f"only {num_workers} workers are left; the job needs {least}"
            if num_workers < least
            else ""
        )

    def _fleet(self, seen: Observation, usable: Collection[str]) -> Fleet:
        """Build the fleet that the planner is asked about.

        Also sets what the planner is to expect of these nodes: horizon and cost of a move.
        """
        self.planning.expect(self._horizon_s(seen, usable), move_s(self.ledger.changes))
        slowdowns = self._node_factors(
            {name: seen.nodes[name].node.node_type.gpu_type for name in usable}
        )
        return policy.fleet_of(seen, usable, self.generation + 1, slowdowns)

    def _node_factors(self, gpu_types: Mapping[str, str]) -> dict[str, float]:
        """Return each node's compute time as a multiple of its profile's.

        The factors of its GPU type and of the node itself are multiplied.

        gpu_types: GPU type by node name. Nodes that take as long as the profile says are left out.
        """
        factors = {
            name: self.rate_factors.get(gpu_type, 1.0) * self.slowdowns.get(name, 1.0)
            for name, gpu_type in gpu_types.items()
        }
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def _horizon_s(self, seen: Observation, usable: Collection[str]) -> float:
        """Return the seconds until the fleet changes again, or the job is done.

        This is an estimate, unless the job sets `parallelism.horizon_s`.
        """
        if self.job.parallelism.horizon_s is not None:
            return self.job.parallelism.horizon_s
        horizon_s = self.outlook.horizon_s(seen, usable)
        last = self.ledger.last_step
        if last is None or self.proposal is None:
            return horizon_s
        left_s = (last - self.ledger.committed_steps) * self.proposal.predicted_step_s
        return max(1.0, min(horizon_s, left_s))

    def _say(self, proposal: Proposal, reason: str) -> None:
        self.untold.add(
            "decision",
            self.generation,
            f"Deciding to {proposal.headline}, since {reason}",
            cause=reason,
        )

    def _tell_of_death(self, trouble: policy.Trouble, seen: Observation) -> None:
        """Log the death of these workers, once for each.

        What may be left of their processes is ended.
        """
        self.untold.add(
            "death",
            self.generation,
            nodes=list(trouble.nodes),
            workers=list(trouble.workers),
            reason=trouble.reason,
            gone=self._gone(trouble.nodes, seen),
        )
        self._act(Dismiss(tuple(worker for worker in trouble.workers if worker in seen.losses)))
        self._mourned |= {
            w for w in trouble.workers if w in seen.losses or seen.node_of(w) not in seen.nodes
        }

    def _tell_of_idle_deaths(self, gone: Collection[str], seen: Observation) -> None:
        """Log deaths of nodes that were not trained on and went without a notice.

        Other events name all other nodes.
        """
        busy = {
            *self.members,
            *(self.state.participants if isinstance(self.state, Building) else ()),
        }
        for name in sorted(
            set(gone)
            - {seen.node_of(worker) for worker in busy}
            - self._known_notices.keys()
            - self._released
        ):
            reasons = sorted(
                {
                    loss.reason
                    for worker, loss in seen.losses.items()
                    if seen.node_of(worker) == name
                }
            )
            reason = f"{name}, which was idle, is gone{': ' if reasons else ''}{'; '.join(reasons)}"
            gone = self._gone([name], seen)
            self.untold.add(
                "death", self.generation, nodes=[name], workers=[], reason=reason, gone=gone
            )

    def _tell_of_unheeded_deaths(self, seen: Observation) -> None:
        """Log deaths of members that change nothing just now.

        That is so while all wait, or while a generation without them is being built.
        """
        trouble = policy.find_deaths(
            seen, [worker for worker in self.members if worker not in self._mourned]
        )
        if trouble is not None:
            self._tell_of_death(trouble, seen)

    def _judge_unfit(self, seen: Observation) -> State | None:
        """Fail the job, or leave nodes out, where workers can never take part.

        A job that has not trained yet fails at once: no retry helps, and the user is there to fix
        the cause. Once the job trains, the worker's node is left out, unless there is no other
        node.
        """
        unfit = {} if self.ended else policy.find_unfit(seen)
        new, self._unfit = unfit.keys() - self._unfit, set(unfit)
        told = {worker: why for worker, why in unfit.items() if worker not in seen.losses}
        nodes = {seen.node_of(worker) for worker in unfit}
        fatal = (
            told
            if told and not self.plans
            else unfit
            if nodes and nodes >= seen.nodes.keys()
            else {}
        )
        if fatal:
            worker, why = min(fatal.items())
            others = f" (and {len(fatal) - 1} more workers)" if len(fatal) > 1 else ""
            who = f"worker {worker} on node {seen.node_of(worker)}{others}"
            return self._fail(f"{who} cannot take part: {why}", may_pass=bool(self.plans))
        for worker in sorted(new):
            left_out = (
                f"Deciding to leave out node {seen.node_of(worker)}, since its worker {worker}"
                " cannot take part"
            )
            self.untold.add("decision", self.generation, f"{left_out}: {unfit[worker]}")
        return None

    def _judge_superseded(self, seen: Observation) -> State | None:
        """Fail the job if another driver has taken it over.

        Nothing that this driver does counts any more.
        """
        why = seen.checkpoint.superseded
        return None if why is None or self.ended else self._fail(why)

    def _heed_failures(self, seen: Observation) -> Observation:
        """Apply the failure policy to ticks that failed.

        Returns the observation with the stop that was decided on because of them.
        """
        if seen.failures is not None and not self.ended:
            cause, times = seen.failures.cause, seen.failures.in_a_row
            saving = isinstance(self.state, Saving)
            answer = policy.answer_failures(
                times, stopping=self._stopping is not None, saving=saving
            )
            often = f", {times} times in a row" if times > 1 else ""
            self.untold.add(
                "decision", self.generation, f"Deciding to {answer}, since there was {cause}{often}"
            )
            if answer is policy.FailureAnswer.STOP:
                self._stopping, self._may_pass = cause, True
            elif answer is policy.FailureAnswer.SAVE:
                drop_search(self.state)
                self.state = Saving(
                    cause, seen.now + self.timeouts.step_s + self.timeouts.checkpoint_s
                )
                commits = [
                    action for action in self.actions if isinstance(action, CommitCheckpoint)
                ]
                self.actions.clear()  # the first of them may be what fails
                self.actions.extend([RequestStop(self.members, checkpoint=True), *commits])
            elif answer is policy.FailureAnswer.GIVE_UP:
                self.state = self._unsaved(cause, "ticks go on failing")
        return (
            seen
            if self._stopping is None
            else replace(seen, stop_reason=seen.stop_reason or self._stopping)
        )

    def _save(self, state: Saving, seen: Observation) -> State:
        """End the job once all members stand after the same step and that step is committed."""
        reports = [seen.reports.get(worker) for worker in self.members]
        if not reports or any(report is None for report in reports):
            return self._unsaved(state.reason, "not all workers are there")
        steps = {
            report.step if self._stands(report) else None
            for report in reports
            if report is not None
        }
        step = min(steps, key=lambda step: step or -1)
        if len(steps) == 1 and step is not None:
            if seen.checkpoint.step == step:
                return self._fail(state.reason, may_pass=True)
            found = seen.checkpoint
            if found.error and found.error_step == step and not found.is_retried:
                return self._unsaved(state.reason, found.error)
        return (
            self._unsaved(state.reason, "it was not finished in time")
            if seen.now > state.deadline
            else state
        )

    def _unsaved(self, reason: str, why: str) -> Ended:
        return self._fail(
            f"{reason}; its newest step is not in durable storage: {why}", may_pass=True
        )

    def _change(self, trouble: policy.Trouble, seen: Observation) -> Change:
        plan = self.proposal.plan if self.proposal else None
        return Change(
            trouble.cause,
            trouble.nodes,
            trouble.happened_at,
            seen.now,
            self.ledger.committed_steps,
            plan,
            trouble.reason,
        )

    def _survivors(self, seen: Observation) -> tuple[str, ...]:
        """Return the members whose process answers, on whatever node.

        Members with a notice count as long as they live.
        """
        return tuple(
            w
            for w in self.members
            if w in seen.reports and w not in seen.losses and seen.node_of(w) in seen.nodes
        )

    def _release_idle_leavers(self, seen: Observation) -> None:
        used = {seen.node_of(worker) for worker in self.members}
        for name in seen.notices:
            if name in seen.nodes and name not in used and name not in self._released:
                self._act(Dismiss(tuple(w for w in seen.nodes[name].workers if w in seen.reports)))
                self._release(name, seen)

    def _release(self, name: str, seen: Observation) -> None:
        self._released.add(name)
        self._act(self.upkeep.release(name, seen, self.timeouts.checkpoint_s))

    def _direct_agents(self, seen: Observation) -> None:
        """Start agents on new nodes, and send all agents what to remove and what to hand over."""
        if new := tuple(name for name, view in seen.nodes.items() if not view.agent_started):
            self._act(StartAgents(new))
        self.actions.extend(self.upkeep.decide(seen))

    def _stands(self, report: WorkerReport) -> bool:
        return report.phase in QUIET

    def _stop(
        self, seen: Observation, reason: str, *, ok: bool, then_wait: str | None = None
    ) -> State:
        self._act(RequestStop(self._survivors(seen), checkpoint=True))
        return Closing(
            reason,
            ok,
            seen.now + self.timeouts.step_s + self.timeouts.checkpoint_s,
            then_wait=then_wait,
        )

    def _ended(self, reason: str, *, ok: bool, may_pass: bool = False) -> Ended:
        self.ledger.skipped.finish(self.generation)
        self.ledger.tell_of_transfers(self.generation)
        self.untold.add(
            "finished", self.generation, reason=reason, ok=ok, step=self.ledger.committed_steps
        )
        return Ended(ok, reason, may_pass and not ok)

    def _fail(self, reason: str, *, may_pass: bool = False) -> Ended:
        """Fail the job. may_pass: True if a restarted driver may do better."""
        self.ledger.skipped.finish(self.generation)
        self.ledger.tell_of_transfers(self.generation)
        self.untold.add("failed", self.generation, f"The job failed: {reason}", reason=reason)
        return Ended(False, reason, may_pass)
