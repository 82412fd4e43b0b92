"""A generation that is built ahead: used by the order of its number alone, dropped by any other."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GroupTimeouts, Interrupted
from autohet.runtime.groups.generation import BACK_ENDS
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.job import ModelSection, TrainingSection
from autohet.runtime.messages import (
    WITHDRAWN,
    GenerationOrder,
    Phase,
    PreparationOrder,
    Prepared,
    WorkerPlace,
)
from autohet.runtime.models.config import load_config
from autohet.runtime.step.generation import TrainingSetup
from autohet.runtime.step.next_generation import NextGeneration
from autohet.runtime.step.stage_parts import StageParts
from autohet.runtime.step.trainer import StageTrainer
from autohet.runtime.step.votes import PLACES, Voter
from autohet.runtime.worker import Worker
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.layout import Layout
from tests.harness.deferred_group import DeferredGroup
from tests.harness.exact_job import BATCH, LAYERS, LENGTH, exact_job
from tests.harness.tiny_models import TINY
from tests.harness.waits import HANG_S

PLAN = Plan("exact", BATCH, 1, LENGTH, (Pipeline((Stage(0, LAYERS, ("one/0",)),), BATCH, 1),))
STEPS = 3


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    torch.set_num_threads(1)
    (tmp_path / "shared").mkdir()
    job = exact_job(tmp_path, tmp_path / "shared", tmp_path / "memory", training={"steps": STEPS})
    place = WorkerPlace("one/0", "one", "CPU", str(tmp_path / "memory"), str(tmp_path / "ssd"))
    found = Worker(place, job)
    yield found
    found.close()


def preparation_order(generation: int, store: TCPStore, plan: Plan = PLAN) -> PreparationOrder:
    return PreparationOrder(generation, plan, "127.0.0.1", store.port)


def order_of(worker: Worker, generation: int, store: TCPStore) -> GenerationOrder:
    layout = layout_of_plan(PLAN, load_config(worker.job.model))
    everybody = ("one/0",)
    return GenerationOrder(
        generation,
        PLAN,
        layout,
        0,
        STEPS,
        "127.0.0.1",
        store.port,
        everybody,
        None,
        {},
        frozenset(),
    )


def trained(worker: Worker) -> list[float]:
    """Losses of a generation, once it has ended."""
    losses: list[float] = []

    def has_ended() -> bool:
        report = worker.report()
        assert report.phase is not Phase.FAILED, report.error
        losses.extend(record.loss for record in report.steps)
        return report.phase is Phase.FINISHED and len(losses) == STEPS

    wait_until(has_ended)
    return losses


@pytest.mark.parametrize("prepared", [None, 1, 2])
def test_the_order_of_a_prepared_generation_uses_what_was_built(
    worker: Worker, store: TCPStore, prepared: int | None
) -> None:
    built = None
    if prepared is not None:
        worker.prepare(preparation_order(prepared, store))
        wait_until(lambda: worker.report().prepared == Prepared(prepared))
        newest = worker._next._newest
        assert newest is not None
        built = newest.groups
        assert built is not None
    worker.begin(order_of(worker, 1, store))
    assert (worker.groups is built) == (prepared == 1)
    losses = trained(worker)
    assert all(0 < loss < 20 for loss in losses)
    if prepared == 2:
        assert built is not None
        assert built.interrupted, "another generation begins"
    assert worker.report().prepared is None, "it is used, or dropped"


def test_an_order_to_begin_may_arrive_before_that_to_prepare(
    worker: Worker, store: TCPStore
) -> None:
    """Threads of one actor take them in any order. Wrong: this worker builds groups of its own, in
    which nobody meets it, and then those that the others have.
    """
    order = replace(order_of(worker, 1, store), is_prepared=True)
    begins = threading.Thread(target=worker.begin, args=(order,))
    begins.start()
    begins.join(0.2)
    assert worker.groups is None
    worker.prepare(preparation_order(1, store))
    newest = worker._next._newest
    assert newest is not None
    begins.join(HANG_S)
    assert worker.groups is newest.groups is not None
    assert len(trained(worker)) == STEPS


def test_with_cudas_semantics_modules_alone_are_built_ahead(
    worker: Worker, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACK_ENDS, "cpu", DeferredGroup)
    worker.prepare(preparation_order(1, store))
    wait_until(lambda: worker.report().prepared == Prepared(1))
    newest = worker._next._newest
    assert newest is not None
    assert newest.groups is not None
    assert newest.groups.built == {}
    assert newest.parts is not None
    stage = newest.parts.stage
    worker.begin(order_of(worker, 1, store))
    assert len(trained(worker)) == STEPS
    assert worker.live is not None
    assert isinstance(worker.live.trainer, StageTrainer)
    assert worker.live.trainer.stage is stage


def test_a_training_generation_goes_on_while_the_next_is_prepared_and_dropped(
    worker: Worker, store: TCPStore
) -> None:
    """With a member that never comes: neither its absence nor the drop is felt."""
    worker.begin(order_of(worker, 1, store))
    stages = (Stage(0, 1, ("one/0",)), Stage(1, 1, ("nobody/0",)))
    plan = replace(PLAN, pipelines=(Pipeline(stages, BATCH, 1),))
    worker.prepare(preparation_order(2, store, plan))
    worker.prepare(preparation_order(3, store, plan))
    assert len(trained(worker)) == STEPS
    assert worker.report().prepared is None


def test_an_older_preparation_is_ignored_and_one_that_cannot_be_says_why(
    worker: Worker, store: TCPStore
) -> None:
    limits = GroupTimeouts(0.3, 0.3)
    found = NextGeneration("one/0", worker._setup, limits)
    stages = (Stage(0, 1, ("one/0",)), Stage(1, 1, ("nobody/0",)))
    plan = replace(PLAN, pipelines=(Pipeline(stages, BATCH, 1),))
    found.begin(preparation_order(3, store, plan))
    found.begin(preparation_order(2, store))
    wait_until(lambda: found.outcome is not None)
    outcome = found.outcome
    assert outcome is not None
    assert outcome.generation == 3
    assert "PeerLost" in str(outcome.error)
    with pytest.raises(RuntimeError, match=r"not prepared: .*PeerLost"):
        found.take(3)


def test_what_is_dropped_wakes_its_waits(worker: Worker, store: TCPStore) -> None:
    found = NextGeneration("one/0", worker._setup, GroupTimeouts(60.0, 60.0))
    stages = (Stage(0, 1, ("one/0",)), Stage(1, 1, ("nobody/0",)))
    plan = replace(PLAN, pipelines=(Pipeline(stages, BATCH, 1),))
    found.begin(preparation_order(2, store, plan))
    wait_until(lambda: found._newest is not None and found._newest.groups is not None)
    newest = found._newest
    found.drop()
    assert newest is not None
    wait_until(lambda: newest.outcome is not None)
    assert newest.outcome is not None
    assert Interrupted.__name__ in str(newest.outcome.error)


@pytest.mark.parametrize("withdrawn_at", [6, 7, 8])
def test_a_worker_withdraws_until_it_has_voted(
    worker: Worker, store: TCPStore, withdrawn_at: int
) -> None:
    """6: while it meets the others; 7, 8: before its vote on this step, of which that on 7 decides.

    What it has voted for begins if the others have, too: it is not said to be withdrawn.
    """
    following = worker._next
    worker.prepare(preparation_order(1, store))
    wait_until(lambda: following.outcome == Prepared(1))
    if withdrawn_at == 6:
        assert following._newest is not None
        following._newest.groups.meet = lambda *_: following.withdraw(1)  # type: ignore
    groups: Any = SimpleNamespace(alive=torch.ones(1))
    voter = Voter(groups, groups, torch.device("cpu"), counts_loss=False)
    order: Any = SimpleNamespace(
        generation=1, participants=("one/0",), start_step=8, layout=Layout({}, {})
    )
    following.follow(order, voter)
    wait_until(lambda: not any(thread.name == "cut-over" for thread in threading.enumerate()))
    votes = []
    for step in (6, 7):
        if step == withdrawn_at:
            following.withdraw(1)
        nothing = torch.zeros(())
        mine = voter.contribution(step, nothing, nothing, nothing, {})
        votes.append(int(mine[PLACES["ready"]]))
    following.withdraw(1)
    assert votes == [0, withdrawn_at == 8]
    assert following.outcome == Prepared(1, None if withdrawn_at == 8 else WITHDRAWN)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("stage_index", [0, 1, 2])
def test_a_stage_that_was_warmed_up_computes_the_same_and_holds_nothing(
    stage_index: int, dropout: float
) -> None:
    """Wrong: zeros stay loaded, or their gradients, or the process's generator moves."""
    config = load_config(ModelSection(config={**TINY["gpt2"], "resid_pdrop": dropout}))
    stages = tuple(Stage(index, 1, (f"n{index}/0",)) for index in range(3))
    plan = Plan("gpt2", 2, 2, 8, (Pipeline(stages, 1, 2),))
    section = TrainingSection(global_batch_sequences=2, sequence_length=8)
    setup = TrainingSetup(config, section, torch.device("cpu"))
    groups: Any = SimpleNamespace(me=f"n{stage_index}/0", back_end=GlooGroup)
    found = []
    for warms_up in (False, True):
        parts = StageParts.build(setup, plan, groups, with_groups=False)
        if warms_up:
            before = torch.get_rng_state()
            parts.warm_up(setup)
            assert torch.equal(torch.get_rng_state(), before)
            assert all(each.is_meta for each in parts.stage.parameters())
        draw = torch.Generator().manual_seed(1)
        shapes = parts.stage.weights.local_shapes()
        parts.stage.weights.load({n: torch.randn(s, generator=draw) for n, s in shapes.items()})
        if parts.stage.dropout.drops:
            parts.stage.dropout.draw(1, [4, 5])
        tokens = torch.arange(16).view(2, 8)
        states = torch.randn(2, 8, config.hidden_size, generator=draw)
        x = states.to(parts.dtypes.compute) if stage_index else tokens
        result = parts.stage.loss(x, tokens) if stage_index == 2 else parts.stage(x).sum()
        result.backward()
        gradients = [each.grad for each in parts.stage.weights.local_parameters().values()]
        found.append([result.detach(), *gradients])
    for plain, warmed in zip(*found, strict=True):
        assert torch.equal(plain, warmed)


@pytest.mark.parametrize(
    ("model", "change", "is_taken_over"),
    [
        ("gpt2", {"workers": ("n9/0",)}, True),
        ("gpt2", {"num_layers": 2}, False),
        ("gpt2", {"recompute": "full"}, False),
        ("gpt2", {"compute": "bf16"}, False),
        ("mixtral", {"workers": ("n9/0",)}, False),
    ],
)
def test_modules_are_taken_over_where_they_would_be_built_equal(
    model: str, change: dict[str, Any], is_taken_over: bool
) -> None:
    """Experts count tokens, also of a step that a death interrupted."""
    config = load_config(ModelSection(config=TINY[model]))
    section = TrainingSection(global_batch_sequences=2, sequence_length=8)
    setup = TrainingSetup(config, section, torch.device("cpu"))
    found: list[StageParts] = []
    for first in (Stage(0, 1, ("n0/0",)), replace(Stage(0, 1, ("n0/0",)), **change)):
        last = Stage(first.num_layers, 3 - first.num_layers, ("n1/0",))
        plan = Plan(model, 2, 2, 8, (Pipeline((first, last), 1, 2),))
        groups: Any = SimpleNamespace(me=first.workers[0], back_end=GlooGroup)
        present = found[0] if found else None
        found.append(StageParts.build(setup, plan, groups, with_groups=False, present=present))
    assert (found[1].stage is found[0].stage) == is_taken_over
