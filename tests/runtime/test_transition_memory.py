"""Moves to plans that fit while they train, on devices that have room for no more than that.

The real worker on counted devices, one thread each. What is small against a device's memory on a
real one (messages under way) is made as small against these.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils._python_dispatch import _disable_current_modes

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, Phase, WorkerPlace, WorkerReport
from autohet.runtime.models.config import load_config
from autohet.runtime.state import live as live_module
from autohet.runtime.worker import Worker
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.transfer import exchange, restore
from recovery.transfer import schedule as schedule_module
from recovery.transfer.messages import make_messages
from recovery.transfer.schedule import schedule
from tests.harness.limited_memory import LimitedMemory

NUM_LAYERS, LENGTH, BATCH = 4, 4, 4
MODEL = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 480,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
IN_FLIGHT, MESSAGE, DIRECT = 16 << 10, 4 << 10, 1 << 10
DEADLINE_S = 120


class CountedWorker(Worker):
    """A worker whose generations all allocate on one counted device.

    `peak_bytes`: of a generation from its first update on.
    """

    def __init__(self, place: WorkerPlace, job: Job) -> None:
        self.memory = LimitedMemory()
        super().__init__(place, job, self._entered)

    def _entered(self, phase: str, step: int) -> None:
        if phase == "apply" and step % 2 == 0:
            self.memory.peak_bytes = self.memory.bytes

    def _run(self, order: GenerationOrder, groups: Any) -> None:
        with self.memory:
            super()._run(order, groups)


def random_plan(draw: random.Random) -> Plan:
    """One or two pipelines of one to three stages on workers n0/0 to n4/4 in any order, any TP
    degree of 1 and 2; sometimes sharded.
    """
    workers = [f"n{number}/{number}" for number in range(5)]
    draw.shuffle(workers)
    sharded, pipelines = draw.random() < 0.5, []
    for left in range(draw.choice((1, 2, 2)), 0, -1):
        cuts = sorted(draw.sample(range(1, NUM_LAYERS), draw.randint(0, 2)))
        stages = []
        for first, end in zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True):
            degree = min(draw.choice((1, 1, 2)), len(workers) - left + 1)
            if degree > 0:
                stages.append((first, end, [workers.pop() for _ in range(degree)]))
        ends = [*(first for first, _, _ in stages[1:]), NUM_LAYERS]
        pipelines.append(
            Pipeline(
                tuple(
                    Stage(first, end - first, tuple(names), shard_optimizer=sharded)
                    for (first, _, names), end in zip(stages, ends, strict=True)
                ),
                1,
                1,
            )
        )
    return Plan("m", len(pipelines), 1, LENGTH, tuple(pipelines))


class Fleet:
    """All workers of both plans, and the orders of their generations."""

    def __init__(self, job: Job, workers: Sequence[str], folder: Path) -> None:
        self.job, self.config = job, load_config(job.model, job.training)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.generation = 0
        self.workers = {
            name: CountedWorker(
                WorkerPlace(
                    name,
                    name[:2],
                    "CPU",
                    str(folder / name[:2] / "memory"),
                    str(folder / name[:2] / "disk"),
                ),
                job,
            )
            for name in workers
        }

    def train(self, plan: Plan, before: Plan | None = None) -> dict[str, WorkerReport]:
        """Two steps of the plan, from the state that a generation of `before` has left, or from the
        first; the last reports.
        """
        self.generation += 1
        layout, start = layout_of_plan(plan, self.config), 0 if before is None else 2
        participants = tuple(plan.workers if before is None else self.workers)
        for name in participants:
            self.workers[name].begin(self._order(plan, layout, name, start, before, participants))
        return {name: self._ended(self.workers[name]) for name in participants}

    def _order(
        self,
        plan: Plan,
        layout: Any,
        name: str,
        start: int,
        before: Plan | None,
        participants: tuple[str, ...],
    ) -> GenerationOrder:
        number = self.generation
        line = [Descent(generation=each, parent=None, first_step=0) for each in range(1, number)]
        line.append(
            Descent(
                generation=number, parent=None if before is None else number - 1, first_step=start
            )
        )
        transfers = None
        if before is not None:
            held = layout_of_plan(before, self.config)
            sources = [
                Holding(
                    Source("worker", each[:2], each, start, number - 1), held.shards_by_worker[each]
                )
                for each in before.workers
            ]
            transfers = schedule(layout, {each: each[:2] for each in self.workers}, sources, start)
        return GenerationOrder(
            number,
            plan,
            layout,
            start,
            start + 2,
            "127.0.0.1",
            self.store.port,
            participants,
            transfers,
            {},
            layout.shards_by_worker.get(name, frozenset()),
            ancestry=Ancestry().followed_by(*line),
        )

    def _ended(self, worker: CountedWorker) -> WorkerReport:
        until = time.monotonic() + DEADLINE_S
        while True:
            report = worker.report()
            if report.generation == self.generation and report.phase in (
                Phase.FINISHED,
                Phase.RELEASED,
                Phase.FAILED,
                Phase.HALTED,
            ):
                return report
            assert time.monotonic() < until, f"{report.phase} after {DEADLINE_S} s"
            time.sleep(0.01)


@contextmanager
def fleet_of(folder: Path, workers: Sequence[str]) -> Iterator[Fleet]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    training = {
        "global_batch_sequences": BATCH,
        "sequence_length": LENGTH,
        "steps": 10,
        "precision": "fp32",
        "device": "cpu",
    }
    job = Job.from_document(
        {
            "name": "m",
            "model": {"config": MODEL},
            "training": training,
            "data": {"source": str(folder / "text.txt"), "cache": str(folder / "cache")},
            "checkpoint": {"storage": str(folder / "checkpoints"), "every_steps": 100},
        }
    )
    with ExitStack() as stack:
        fleet = Fleet(job, workers, folder)
        for worker in fleet.workers.values():
            stack.callback(worker.close)
        yield fleet


@pytest.fixture(autouse=True)
def in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (exchange, "IN_FLIGHT_BYTES", IN_FLIGHT),
        (restore, "IN_FLIGHT_BYTES", IN_FLIGHT),
        (exchange, "DIRECT_BYTES", DIRECT),
    ):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(
        schedule_module, "make_messages", partial(make_messages, message_bytes=MESSAGE)
    )
    to_host = live_module.shard_on_host

    def on_host(view: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        with _disable_current_modes():  # the host's memory is not the device's
            return to_host(view, copy)

    monkeypatch.setattr(live_module, "shard_on_host", on_host)


def move(before: Plan, after: Plan, folder: Path) -> None:
    """Trains each plan alone, then the first and after it the second, on devices of what training
    takes and no more.
    """
    names = sorted({*before.workers, *after.workers})
    with fleet_of(folder, names) as fleet:
        limits = dict.fromkeys(names, 0)
        for plan in (after, before):
            reports = fleet.train(plan)
            assert {report.error for report in reports.values()} == {None}
            for name in plan.workers:
                limits[name] = max(limits[name], fleet.workers[name].memory.peak_bytes)
        for name, limit in limits.items():
            fleet.workers[name].memory.limit_bytes = limit
        reports = fleet.train(after, before)
        assert {name: report.error for name, report in reports.items()} == dict.fromkeys(names)


def stages(*cut: tuple[int, str]) -> Pipeline:
    """One pipeline of stages of these numbers of layers, each on one worker."""
    firsts = itertools.accumulate((layers for layers, _ in cut), initial=0)
    return Pipeline(
        tuple(
            Stage(first, layers, (name,))
            for first, (layers, name) in zip(firsts, cut, strict=False)
        ),
        1,
        1,
    )


def test_a_worker_that_keeps_all_of_its_state_fits_while_the_others_cut_theirs_anew(
    tmp_path: Path,
) -> None:
    """Its flat masters and moments are laid out anew, since its layers have other holders now."""
    whole, other = stages((4, "n0/0")), stages((4, "n1/1"))
    finer = stages((1, "n1/1"), (3, "n2/2"))
    move(Plan("m", 2, 1, LENGTH, (whole, other)), Plan("m", 2, 1, LENGTH, (whole, finer)), tmp_path)


def random_pair(seed: int) -> tuple[Plan, Plan]:
    draw = random.Random(seed)
    return random_plan(draw), random_plan(draw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(41))
def test_no_pair_of_plans_that_fit_in_training_fails_between(seed: int, tmp_path: Path) -> None:
    """Pair 0 is moved in each run, by test_host_memory_prediction.py."""
    move(*random_pair(seed), tmp_path)
