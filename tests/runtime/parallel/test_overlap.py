"""Plans whose gradient sums may overlap with the backward pass on groups in stream order."""

import graphlib
import itertools
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GlooGroup, GroupTimeouts
from autohet.runtime.parallel.gradient_sync import GradientSync
from autohet.runtime.parallel.overlap import sums_have_one_order
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Pipeline, Plan, Stage
from tests.harness.deferred_group import HOST_READS, DeferredGroup
from tests.harness.tiny_models import tiny_config
from tests.harness.training_case import BACK_ENDS, CPU, Case, local_state, rows_of

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def plan(*pipelines: list[tuple[int, int, list[str]]]) -> Plan:
    stages = [
        Pipeline(tuple(Stage(first, count, tuple(workers)) for first, count, workers in each), 1, 1)
        for each in pipelines
    ]
    return Plan("m", len(stages), 1, 8, tuple(stages))


def uneven(stages: list[list[str]]) -> Plan:
    drawn = plan(*([(0, 4, workers)] for workers in stages))
    pipelines = []
    for pipeline in drawn.pipelines:
        stage = replace(pipeline.stages[0], tp_shares=(2, 1, 1))
        pipelines.append(replace(pipeline, stages=(stage,)))
    return replace(drawn, pipelines=tuple(pipelines))


@pytest.mark.parametrize(
    ("drawn", "tied", "expected"),
    [
        (plan([(0, 4, ["a"])], [(0, 4, ["b"])]), False, True),
        (plan([(0, 4, ["a"])], [(0, 4, ["b"])]), True, True),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 1, ["c"]), (1, 3, ["d"])]), False, True),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 1, ["c"]), (1, 3, ["d"])]), True, False),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 2, ["c"]), (2, 2, ["d"])]), False, False),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 4, ["c"])]), False, False),
        (plan([(0, 4, ["a", "b"])], [(0, 4, ["c", "d"])]), False, True),
        (plan([(0, 4, ["a", "b"])], [(0, 4, ["c", "d"])]), True, True),
        (plan([(0, 4, ["a", "b"])], [(0, 4, ["c"])]), False, False),
        (plan([(0, 1, ["a", "b"]), (1, 3, ["c"])]), False, True),
        (plan([(0, 1, ["a", "b"]), (1, 3, ["c"])]), True, False),
        (uneven([["a", "b", "c"], ["d", "e", "f"]]), False, False),
    ],
)
def test_where_the_order_is_one(drawn: Plan, tied: bool, expected: bool) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied, num_hidden_layers=4)
    assert sums_have_one_order(drawn, config) is expected


def test_where_ranks_share_a_group_for_unlike_buckets_sums_wait() -> None:
    """A rank that holds nothing of a bucket would start it at once, its neighbour later."""
    drawn = plan([(0, 4, ["a", "b"])], [(0, 4, ["c", "d"])])
    config = tiny_config("llama", num_hidden_layers=4)
    assert sums_have_one_order(drawn, config, 4)
    assert not sums_have_one_order(drawn, config, 1)


@pytest.mark.parametrize(
    "drawn",
    [
        plan([(0, 2, ["a", "b"])], [(0, 2, ["c", "d"])]),
        plan([(0, 1, ["a", "b"]), (1, 1, ["c", "d"])], [(0, 1, ["e", "f"]), (1, 1, ["g", "h"])]),
    ],
    ids=["one stage", "two stages"],
)
def test_collectives_of_tensor_parallel_stages_have_one_order_on_all_workers(
    drawn: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each worker launched, one after the other, in a real step: no circle over the workers.

    A step of one order can be launched by devices that run one operation at a time.
    """
    launched: dict[str, list[tuple[object, ...]]] = {worker: [] for worker in drawn.workers}
    start = GlooGroup.start_all_reduce
    counts: Counter[tuple[str, str]] = Counter()

    def recorded(self: GlooGroup, tensor: Any, *rest: Any) -> Any:
        me = self.members[self.rank]
        counts[me, self.name] += 1
        launched[me].append((self.name, self.members, counts[me, self.name]))
        return start(self, tensor, *rest)

    monkeypatch.setattr(GlooGroup, "start_all_reduce", recorded)
    monkeypatch.setitem(GradientSync.__init__.__kwdefaults__, "bucket_bytes", 1 << 12)
    train_in_threads(drawn, "gloo", overlap=True)
    tensor_groups = {s.workers for pipeline in drawn.pipelines for s in pipeline.stages}
    after: dict[object, set[object]] = {}
    overlaps = False
    for operations in launched.values():
        for first, second in itertools.pairwise(operations):
            after.setdefault(second, set()).add(first)
            overlaps |= first[1] not in tensor_groups and second[1] in tensor_groups
    assert overlaps, "no sum of gradients was launched before one of a tensor-parallel group"
    graphlib.TopologicalSorter(after).prepare()


def test_with_cudas_semantics_overlapping_sums_give_the_losses_of_sums_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = plan([(0, 1, ["a", "b"]), (1, 1, ["c"])], [(0, 1, ["e", "f"]), (1, 1, ["g"])])
    assert sums_have_one_order(drawn, Case(MODEL, {}, {}, 1).config(), 4)
    monkeypatch.setitem(GradientSync.__init__.__kwdefaults__, "bucket_bytes", 1 << 12)
    beside, after = (
        train_in_threads(drawn, "deferred", overlap=overlap) for overlap in (None, False)
    )
    assert beside == pytest.approx(after, rel=1e-6)


class HostReads(TorchDispatchMode):
    """Record operators whose results the host would wait for on a GPU."""

    NAMES = (*HOST_READS, "nonzero", "masked_select", "_unique2")

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_of_a_step_but_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote reads its ten numbers by `tolist`, which is no operator on the CPU."""
    found: list[str] = []
    train_step = StageTrainer.train_step

    def watched(self: StageTrainer, *arguments: Any) -> Any:
        with HostReads(found):
            torch.ones(1).item()
            return train_step(self, *arguments)

    monkeypatch.setattr(StageTrainer, "train_step", watched)
    drawn = plan([(0, 1, ["a", "b"]), (1, 1, ["c"])], [(0, 1, ["e", "f"]), (1, 1, ["g"])])
    train_in_threads(drawn, "gloo", overlap=True)
    assert found == ["_local_scalar_dense"] * 2 * len(drawn.workers), "the watch's own, and more"


def train_in_threads(drawn: Plan, back_end: str, *, overlap: bool | None) -> list[float]:
    """Losses and norms of two steps of a small model, each worker a thread."""
    training = {"global_batch_sequences": 2, "sequence_length": 8, "precision": "fp32"}
    case = Case(MODEL, drawn.to_document(), training, 1)
    config, store, done = case.config(), HashStore(), dict[str, list[float]]()
    layout = layout_of_plan(drawn, config)
    states = {worker: local_state(case, layout, worker) for worker in drawn.workers}

    def work(me: str) -> None:
        groups = GenerationGroups(store, 1, me, CPU, GroupTimeouts(30.0, 30.0), BACK_ENDS[back_end])
        groups.meet(drawn.workers)
        setup = TrainingSetup(config, case.section(), CPU, overlap=overlap)
        trainer = StageTrainer(setup, WorkerGeneration(drawn, me, groups, states[me]))
        results = [trainer.train_step(rows_of(case)) for _ in range(2)]
        done[me] = [each for result in results for each in (result.loss, result.gradient_norm)]

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in drawn.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(done) == set(drawn.workers)
    return done[drawn.workers[0]]


def test_a_trainer_in_stream_order_overlaps_where_it_may() -> None:
    """A data-parallel run is else slower than DDP by its all-reduce."""
    document: dict[str, Any] = plan([(0, 2, ["w"])]).to_document()
    training = {"global_batch_sequences": 1, "sequence_length": 8, "precision": "fp32"}
    case = Case(MODEL, document, training, 1)
    config, drawn = case.config(), Plan.from_document(document)
    groups = GenerationGroups(HashStore(), 1, "w", CPU, GroupTimeouts(5.0, 5.0), DeferredGroup)
    state = local_state(case, layout_of_plan(drawn, config), "w")
    setup = TrainingSetup(config, case.section(), CPU)
    trainer = StageTrainer(setup, WorkerGeneration(drawn, "w", groups, state))
    started: list[int] = []
    start = trainer.gradient_sync.start_sum
    trainer.gradient_sync.start_sum = lambda number: (started.append(number), start(number))[1]  # type: ignore[func-returns-value, method-assign]
    finish = trainer.gradient_sync.finish

    def finished() -> Any:
        assert started, "no sum had started when the passes ended"
        return finish()

    trainer.gradient_sync.finish = finished  # type: ignore[method-assign]
    trainer.train_step(rows_of(case))
