"""State that is half updated is never planned on, and an update that comes late never changes what
a later generation holds.

The product's worker, snapshots and orders with the exact model, one worker in this process.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from autohet.control.planning.orders import OrderBuilder
from autohet.control.planning.proposals import PlanProposal
from autohet.control.values.observation import NodeView, Observation
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.groups import Interrupted
from autohet.runtime.messages import AgentEndpoint, Phase, WorkerPlace, WorkerReport
from autohet.runtime.models.config import load_config
from autohet.runtime.parallel.buckets import ALIGNMENT
from autohet.runtime.state import flat_optimizer
from autohet.runtime.state.optimizer import UpdateRule
from autohet.runtime.step import votes as votes_module
from autohet.runtime.step.votes import Vote
from autohet.runtime.worker import Worker
from planner.inputs.fleet import Node
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.local.agent_store import AgentStore
from tests.harness.exact_job import BATCH, LAYERS, LENGTH, exact_job, node_type, train_alone

ME, NODE, STEPS, STRUCK = "one/0", "one", 10, 5
DEADLINE_S = 20.0
PLAN = Plan("exact", BATCH, 1, LENGTH, (Pipeline((Stage(0, LAYERS, (ME,)),), BATCH, 1),))


class Scene:
    """One worker, the order book that directs it, and the agent's store beside it."""

    def __init__(self, tmp_path: Path, hook: Callable[[str, int], None]) -> None:
        (tmp_path / "alone").mkdir()
        self.job = exact_job(tmp_path, tmp_path, tmp_path / "memory", training={"steps": STEPS})
        self.votes: dict[int, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                votes_module, "Vote", lambda **v: self.votes.setdefault(len(self.votes), Vote(**v))
            )
            self.wanted = train_alone(tmp_path / "alone", tmp_path, training={"steps": STEPS}).state
        place = WorkerPlace(ME, NODE, "A10G", str(tmp_path / "memory"), str(tmp_path / "ssd"))
        self.worker = Worker(place, self.job, phase_hook=hook)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.kept = AgentStore(tmp_path / "memory", tmp_path / "ssd", NODE)
        self.book = OrderBuilder(
            self.job, layout_builder(load_config(self.job.model, self.job.training))
        )

    def order(self, generation: int, report: WorkerReport | None = None) -> Any:
        """What the product orders for a generation, given the worker's report and what the node's
        agent keeps.
        """
        view = NodeView(Node(NODE, node_type(1)), 0.0, AgentEndpoint(NODE, "127.0.0.1", 1, "token"))
        reports = {} if report is None else {ME: report}
        seen = Observation(
            1.0,
            {NODE: view},
            reports=reports,
            inventories={NODE: self.kept.inventory()},
            store=("127.0.0.1", self.store.port),
        )
        members = () if report is None else (ME,)
        proposal = PlanProposal(PLAN, None, None)  # type: ignore[arg-type]
        book = self.book.write(generation, proposal, seen, members)
        self.book.confirm()
        return book.orders[ME]

    def until(self, *phases: Phase) -> WorkerReport:
        deadline = time.monotonic() + DEADLINE_S
        while (report := self.worker.report()).phase not in phases:
            assert time.monotonic() < deadline, report
            time.sleep(0.01)
        return report

    @property
    def state(self) -> Mapping[str, Tensor]:
        assert self.worker.live is not None
        return self.worker.live.state

    def differing(self) -> list[str]:
        return [
            name
            for name, tensor in self.state.items()
            if not torch.equal(tensor, self.wanted[name])
        ]

    def close(self) -> None:
        self.worker.close()
        self.kept.close()


@pytest.fixture
def hooks() -> dict[tuple[str, int], Callable[[], None]]:
    """What happens, once, when the trainer enters a phase of a step."""
    return {}


@pytest.fixture
def scene(tmp_path: Path, hooks: dict[tuple[str, int], Callable[[], None]]) -> Iterator[Scene]:
    made = Scene(tmp_path, lambda phase, step: hooks.pop((phase, step), lambda: None)())
    yield made
    made.close()


def interrupted() -> None:
    raise Interrupted("a peer was lost before the vote's result came")


def halted_in_the_vote(
    scene: Scene, hooks: dict[tuple[str, int], Callable[[], None]]
) -> tuple[WorkerReport, Any]:
    """The worker is prepared and has not seen the vote's result; and that result, which somebody
    else saw.
    """
    hooks["vote", STRUCK] = interrupted
    scene.worker.begin(scene.order(1))
    report = scene.until(Phase.HALTED)
    assert (report.step, report.prepared_step) == (STRUCK, STRUCK)
    return report, (STRUCK, scene.votes[STRUCK])


def test_a_roll_forward_that_is_late_never_changes_what_the_next_generation_holds(
    scene: Scene, hooks: dict[tuple[str, int], Callable[[], None]]
) -> None:
    """Its copy takes long; meanwhile the driver has planned anew, and the next generation takes the
    tensors over in place.
    """
    report, vote = halted_in_the_vote(scene, hooks)
    copied, waiting = threading.Event(), threading.Event()
    live = scene.worker.live
    assert live is not None
    assert live.trainer is not None
    # The next generation waits for the copy, so this is what the test takes.
    wait = lambda: waiting.set() or copied.wait(4.0)  # type: ignore[func-returns-value]  # noqa: E731
    live.trainer.hooks = replace(live.trainer.hooks, before_update=wait)  # type: ignore[arg-type]
    late = threading.Thread(target=scene.worker.roll_forward, args=(1, vote))
    late.start()
    assert waiting.wait(DEADLINE_S)

    def let_it_go() -> None:
        copied.set()
        late.join(DEADLINE_S)

    hooks["forward", STRUCK + 2] = let_it_go
    scene.worker.begin(scene.order(2, report))
    report = scene.until(Phase.FINISHED, Phase.FAILED, Phase.HALTED)
    let_it_go()
    assert report.phase is not Phase.FINISHED or scene.differing() == []


def broken_in_the_update(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> WorkerReport:
    """Some tensors are of step 6 and some of step 5."""
    real, struck = flat_optimizer.fused_update, itertools.count()

    def breaking(tensors: Any, gradients: Any, rule: UpdateRule) -> None:
        if rule.step == STRUCK and next(struck) == 0:
            half = gradients[0].numel() // 2 // ALIGNMENT * ALIGNMENT
            real([tuple(tensor[:half] for tensor in tensors[0])], [gradients[0][:half]], rule)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        real(tensors, gradients, rule)

    monkeypatch.setattr(flat_optimizer, "fused_update", breaking)
    scene.worker.begin(scene.order(1))
    return scene.until(Phase.FAILED)


@pytest.mark.parametrize("told", ["as it is", "as whole"])
def test_an_update_that_broke_off_in_the_middle_is_not_planned_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """The clean snapshot is, and the run goes on from that.

    A driver that has an older report orders the live state: that is refused.
    """
    report = broken_in_the_update(scene, monkeypatch)
    assert not report.whole
    if told == "as whole":
        scene.worker.begin(scene.order(2, replace(report, whole=True)))
        report = scene.until(Phase.FAILED)
        assert "does not hold it at step 5" in str(report.error)
    scene.worker.begin(scene.order(3, report))
    scene.until(Phase.FINISHED)
    assert scene.differing() == []


def test_an_update_that_broke_off_is_not_applied_once_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver took the worker for prepared, and asks it to roll forward: it refuses, since its
    tensors are of no step.
    """
    broken_in_the_update(scene, monkeypatch)
    torn = {name: tensor.clone() for name, tensor in scene.state.items()}
    outcome = scene.worker.roll_forward(1, (STRUCK, scene.votes[STRUCK]))
    assert outcome.error is not None
    assert outcome.error.startswith("HalfUpdated")
    assert all(torch.equal(tensor, torn[name]) for name, tensor in scene.state.items())
    assert not scene.worker.report().whole


def test_a_roll_forward_of_an_older_generation_is_refused(
    scene: Scene, hooks: dict[tuple[str, int], Callable[[], None]]
) -> None:
    """The next generation has come to the same step's vote, which nobody has seen the result of."""
    report, vote = halted_in_the_vote(scene, hooks)
    hooks["vote", STRUCK] = interrupted
    scene.worker.begin(scene.order(2, report))
    scene.until(Phase.HALTED)
    assert "not of generation 1" in str(scene.worker.roll_forward(1, vote).error)
    assert scene.worker.report().step == STRUCK
    assert scene.worker.roll_forward(2, vote).error is None
    assert scene.worker.report().step == STRUCK + 1


def test_a_vote_that_not_all_members_cast_does_not_commit(
    scene: Scene, hooks: dict[tuple[str, int], Callable[[], None]]
) -> None:
    """A generation that ends before its vote has left still sends it: with a zero where it says
    that it lives.
    """

    def ended_before_its_vote() -> None:
        scene.worker.groups.alive.zero_()  # type: ignore[union-attr]

    hooks["gradient_sync", STRUCK] = ended_before_its_vote
    scene.worker.begin(scene.order(1))
    report = scene.until(Phase.HALTED, Phase.FINISHED)
    assert (report.phase, report.step, report.prepared_step) == (Phase.HALTED, STRUCK, STRUCK)
