"""The controller against whatever may happen, in any order: hypothesis looks for a sequence that
breaks a promise.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autohet.control.job_state import Building, Training
from autohet.control.planning.orders import OrderBuilder
from autohet.driver.events.event_log import EventLog
from autohet.runtime.facts.layout import layout_builder, layout_of_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.inputs.fleet import Fleet, Node, NodeType
from tests.harness.fake_job import fake_job
from tests.harness.faulty_workforce import FaultyWorkforce
from tests.harness.promises import CheckedController, Promises, RememberedPlanning

SMALL = NodeType("small", "A10G", 1, 24 << 30, 32e9, 3e9)
PAIR = NodeType("pair", "A10G", 2, 24 << 30, 32e9, 3e9)
THIN = 2e5  # bytes/s: the state takes seconds, so a notice of seconds is urgent
STEPS = 120
NODE_TROUBLES = [
    ("notice", 0.3),
    ("notice", 2.0),
    ("notice", 30.0),
    ("notice", None),
    ("agent", None),
    ("replaced", None),
]
NODE_TROUBLES += [
    ("death", "quietly"),
    ("death", "openly"),
    ("pace", 1.0),
    ("pace", 2.0),
    ("pace", 4.0),
]
WORKER_TROUBLES = [
    ("death", None),
    ("frozen", 0.2),
    ("frozen", 0.8),
    ("frozen", 1.5),
    ("frozen", 100.0),
]
WORKER_TROUBLES += [("deaf", None), ("error", None), ("restore", None)]
RESUMED_AT, RESUMED_GENERATION = 20, 3
anybody = st.integers(0, 7)


@cache
def inputs_of(min_pipelines: int) -> tuple[Job, Any, Any]:
    elastic = {
        "step_timeout_s": 6,
        "debounce_s": 0.2,
        "wait_for_fleet_s": 200,
    }
    elastic |= {"worker_start_timeout_s": 3, "slow_forgiven_s": 4}
    wishes = {"min_pipelines": min_pipelines}
    job = fake_job(steps=STEPS, checkpoint={"every_steps": 10}, elastic=elastic, parallelism=wishes)
    return job, planning_inputs(job), load_config(job.model, job.training)


durations = st.fixed_dictionaries(
    {
        "builds": st.integers(1, 8),
        "speed": st.integers(1, 3),
        "prompt": st.booleans(),
        "starts_s": st.sampled_from([0.0, 0.5, 2.0]),
        "agents_start_s": st.sampled_from([0.0, 0.5]),
        "inventory_s": st.sampled_from([0.0, 0.5]),
        "upload_s": st.sampled_from([0.0, 0.3]),
        "leaves_s": st.sampled_from([0.0, 2.0]),
    }
)
"""How long everything takes, in a `FaultyWorkforce`."""


class AnyFleet(RuleBasedStateMachine):
    """A job of 120 steps on up to five nodes. Rules are what may happen between two ticks."""

    @initialize(
        takes=durations,
        min_pipelines=st.sampled_from([1, 2]),
        nodes=st.integers(2, 4),
        resumed=st.booleans(),
        thin=st.booleans(),
        hasty=st.booleans(),
        looks=st.sampled_from([0, 0, 4, 20]),
        ticks=st.integers(0, 40),
    )
    def start(
        self,
        takes: dict[str, Any],
        min_pipelines: int,
        nodes: int,
        resumed: bool,
        thin: bool,
        hasty: bool,
        looks: int,
        ticks: int,
    ) -> None:
        job, inputs, config = inputs_of(min_pipelines)
        self.workforce = workforce = FaultyWorkforce(SMALL, worker_start_s=3.0, **takes)
        planning = RememberedPlanning(inputs, clock=lambda: 0.0)
        planning.hasty, planning.looks = hasty, looks
        self.controller = CheckedController(
            job, workforce, planning, OrderBuilder(job, layout_builder(config)), EventLog(None)
        )
        self.controller.memory.prepares = True
        self.controller.memory.prepares_at_death = True
        self.controller.memory.cuts_over = True
        if resumed:
            self.resume(planning, config)
        self.promises = Promises(self.controller, workforce, RESUMED_AT if resumed else 0)
        self.names = 0
        self.network = {"inter_node_bytes_per_s": THIN} if thin else {}
        for _ in range(nodes):
            self.join(False)
        self.time_passes(ticks)

    def resume(self, planning: RememberedPlanning, config: Any) -> None:
        """As `JobRun.start` does it, where an earlier life has left a checkpoint."""
        fleet = Fleet(1, tuple(Node(f"small-{index}", SMALL) for index in range(2)))
        layout = layout_of_plan(planning.propose(fleet, None).plan, config)
        history = (RESUMED_GENERATION,) * RESUMED_AT
        self.workforce.make_durable(RESUMED_AT, RESUMED_GENERATION, layout, history)
        self.controller.memory.generation = RESUMED_GENERATION

    # what happens
    # ------------------------------------------------------------------------------

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.promises.tick()

    @rule()
    def a_state_comes_to_its_end(self) -> None:
        """Time until the controller is somewhere else, or has trained a while."""
        before, step = type(self.controller.state), self.controller.memory.ledger.committed_steps
        for _ in range(200):
            self.promises.tick()
            if (
                type(self.controller.state) is not before
                or self.controller.memory.ledger.committed_steps > step + 5
            ):
                return

    @precondition(lambda self: len(self.workforce.nodes) < 5)
    @rule(pair=st.booleans(), stillborn=st.sampled_from([False, False, True]))
    def join(self, pair: bool, stillborn: bool = False) -> None:
        kind = replace(PAIR if pair else SMALL, **self.network)
        name = f"{kind.name}-{self.names}"
        self.workforce.join(name, kind)
        self.names += 1
        if stillborn:
            self.workforce.stillborn.add(name)

    @rule(whom=anybody, what=st.sampled_from(NODE_TROUBLES))
    def node_suffers(self, whom: int, what: tuple[str, Any]) -> None:
        workforce, (kind, how) = self.workforce, what
        names = sorted(workforce.nodes)
        name = names[whom % len(names)] if names else None
        if name is None or (kind in ("notice", "agent") and name in workforce.notices):
            return
        match kind:
            case "notice":
                workforce.warn(name, how)
            case "agent":
                workforce.kill_agent(name)
            case "replaced":  # at once, by a node of the same name
                kind = workforce.nodes[name].node.node_type
                workforce.kill(name)
                workforce.join(name, kind)
            case "death":
                (workforce.cut_off if how == "quietly" else workforce.kill)(name)
            case "pace":
                workforce.slow[name] = how

    @rule(whom=anybody, what=st.sampled_from(WORKER_TROUBLES))
    def worker_suffers(self, whom: int, what: tuple[str, Any]) -> None:
        worker, (kind, how) = self.worker(whom), what
        if worker is None:
            return
        match kind:
            case "death":
                self.workforce.kill_worker(worker)
            case "frozen":
                self.workforce.freeze(worker, how)
            case "deaf":
                self.workforce.deafen(worker)
            case "error":
                self.workforce.fail(worker)
            case "restore":
                self.workforce.bad_restores |= (
                    {worker} if isinstance(self.controller.state, Building) else set()
                )

    @rule(whom=anybody, seers=st.frozensets(anybody, max_size=3), kill=st.booleans())
    def torn_moment(self, whom: int, seers: frozenset[int], kill: bool) -> None:
        """Some see a step's vote, or the end of a restore, and others do not; then one may die."""
        self.workforce.torn = frozenset(
            w for w in (self.worker(seer) for seer in seers) if w is not None
        )
        self.promises.tick()
        if kill:
            self.worker_suffers(whom, ("death", None))

    @rule(whom=anybody, times=st.integers(1, 3), steps=st.integers(0, 2))
    def it_goes_back(self, whom: int, times: int, steps: int) -> None:
        """Every process dies, and with them a node's newest snapshots; and again, a few steps
        later: the nodes then keep steps of histories that were left.
        """
        for _ in range(times):
            names = sorted(self.workforce.nodes)
            if names:
                self.workforce.copies.lose_newest(names[whom % len(names)])
            for worker in list(self.workforce.processes):
                self.workforce.kill_worker(worker)
            self.trains_again(steps)

    def trains_again(self, steps: int) -> None:
        generation = self.controller.memory.generation
        for _ in range(60):
            self.promises.tick()
            trains = (
                isinstance(self.controller.state, Training)
                and self.controller.memory.generation > generation
            )
            if (
                trains
                and len(
                    self.controller.memory.ledger.step_seconds[self.controller.memory.generation]
                )
                >= steps
            ):
                return

    @rule(whom=anybody, rest=st.booleans(), left_s=st.sampled_from([0.5, 5.0, 60.0]))
    def a_node_is_called_away_while_it_alone_keeps(
        self, whom: int, rest: bool, left_s: float
    ) -> None:
        """Its processes are dead, and with `rest` all others', too: its agent has what no one else
        has.
        """
        names = sorted(self.workforce.nodes.keys() - self.workforce.notices.keys())
        if not names:
            return
        name = names[whom % len(names)]
        for worker in list(self.workforce.processes):
            if rest or worker.startswith(f"{name}/"):
                self.workforce.kill_worker(worker)
        self.workforce.warn(name, left_s)

    @rule(what=st.sampled_from(["works", "no upload", "no manifest", "thaw", "thaw", "stop"]))
    def all_are_concerned(self, what: str) -> None:
        if what == "thaw":
            self.workforce.thaw()
        elif what != "stop":
            self.workforce.storage = what
        elif self.controller.memory.ledger.committed_steps > STEPS // 4:
            self.workforce.stop_reason = "the user"

    # what must hold
    # ------------------------------------------------------------------------------

    @invariant()
    def members_of_one_generation_agree(self) -> None:
        if hasattr(self, "controller") and isinstance(self.controller.state, Training):
            live = [self.workforce.processes.get(w) for w in self.controller.memory.members]
            histories = [
                p.history for p in live if p is not None and p.report.live_generation is not None
            ]
            shortest = min((len(h) for h in histories), default=0)
            assert len({h[:shortest] for h in histories}) <= 1
            assert max((len(h) for h in histories), default=0) <= shortest + 1

    def teardown(self) -> None:
        """When nothing happens any more and there are nodes enough, the job ends: done, stopped, or
        with its state truly lost.
        """
        if not hasattr(self, "promises"):
            return
        self.workforce.thaw()
        self.workforce.storage = "works"
        self.workforce.stillborn.clear()
        self.workforce.slow.clear()
        for _ in range(3):
            self.join(False)
        generation = self.controller.memory.generation
        for _ in range(6000):
            if self.controller.ended:
                break
            self.promises.tick()
        assert self.controller.ended, f"still {self.controller.state}"
        assert self.controller.memory.generation <= generation + 12
        if self.controller.ended.ok:
            self.check_success()

    def check_success(self) -> None:
        ledger, first = self.controller.memory.ledger, self.promises.first_step
        holding, history = self.workforce.copies.durable[str(ledger.checkpoints.uri)]
        assert holding.step == len(history) == STEPS
        ran = {step: generation for step, generation in enumerate(history) if step >= first}
        told = {step: record.generation for step, record in ledger.records.items()}
        assert told.items() <= ran.items()
        untold = {(generation, step) for step, generation in ran.items() if step not in told}
        assert not untold & self.workforce.reported

    def worker(self, whom: int) -> str | None:
        workers = sorted(self.workforce.processes)
        return workers[whom % len(workers)] if workers else None


AnyFleet.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    derandomize=True,  # what the longer run finds, it finds; this one tells of what has changed
    phases=(Phase.explicit, Phase.generate),  # to shrink an example takes minutes
)
TestWhateverHappens = pytest.mark.timeout(900)(pytest.mark.thorough(AnyFleet.TestCase))


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestWhateverHappensForLonger(AnyFleet.TestCase):
    settings = settings(
        TestWhateverHappens.settings,
        max_examples=1000,
        stateful_step_count=50,
        derandomize=False,
        phases=tuple(Phase),
    )
