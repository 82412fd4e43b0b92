"""One worker's process logic, in this process: orders in, reports out."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from autohet.emulate.demo import reference_losses
from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import EvaluationSection, Job
from autohet.runtime.messages import (
    EvaluationProgress,
    GenerationOrder,
    Phase,
    PreparationOrder,
    Prepared,
    StateTransfer,
    StepRecord,
    WorkerPlace,
)
from autohet.runtime.models.config import load_config
from autohet.runtime.process import store_connector
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.loss_scale import LossScale
from autohet.runtime.worker import Worker
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.checkpoint.commit import CheckpointFacts, CheckpointPart, commit_checkpoint
from recovery.checkpoint.write import write_shards
from recovery.local import snapshot_file
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.local.snapshot_file import SnapshotFile
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.storage import s3_client
from recovery.storage.open import open_storage
from recovery.transfer.schedule import schedule
from tests.harness.s3_server import s3_server

ME = "node/0"
DEADLINE_S = 60


@pytest.fixture
def job(tmp_path):
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 256,
    }
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return Job.from_document(
        {
            "name": "one",
            "model": {"config": model},
            "training": {
                "global_batch_sequences": 4,
                "sequence_length": 16,
                "steps": 3,
                "precision": "fp32",
                "device": "cpu",
            },
            "data": {"source": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache")},
            "checkpoint": {"storage": str(tmp_path / "checkpoints"), "every_steps": 100},
        }
    )


@pytest.fixture
def worker(job, tmp_path):
    found = Worker(
        WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk")), job
    )
    yield found
    found.close()


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def order(job, store, generation, start_step, transfers=None):
    plan = Plan("one", 4, 2, 16, (Pipeline((Stage(0, 2, (ME,)),), 2, 2),))
    layout = layout_of_plan(plan, load_config(job.model, job.training))
    return GenerationOrder(
        generation,
        plan,
        layout,
        start_step,
        job.training.steps,
        "127.0.0.1",
        store.port,
        (ME,),
        transfers,
        {},
        layout.shards_by_worker[ME],
        ancestry=Ancestry().followed_by(
            *(
                Descent(generation=g, parent=g - 1 or None, first_step=start_step)
                for g in range(1, generation + 1)
            )
        ),
    )


def follow(worker, phase):
    """Reports until `phase` is reached and an upload's receipt is there:

    (last report, all steps, all receipts).
    """
    steps, receipts, until = [], [], time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        report = worker.report()
        steps += report.steps
        receipts += report.receipts
        assert report.phase is not Phase.FAILED, report.error
        if report.phase is phase and receipts:
            return report, steps, receipts
        time.sleep(0.02)
    raise AssertionError(f"{worker.report().phase} after {DEADLINE_S} s, {len(receipts)} receipts")


def test_a_generation_in_fp16_goes_on_with_the_scale_of_its_order(job, store, tmp_path):
    job = replace(job, training=replace(job.training, precision="fp16"))
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, job)
    try:
        worker.begin(replace(order(job, store, 1, 0), loss_scale=LossScale(0, 3)))
        _, steps, _ = follow(worker, Phase.FINISHED)
    finally:
        worker.close()
    assert {record.loss_scale for record in steps} == {LossScale(0, 3)}


def test_a_generation_trains_to_its_end_and_leaves_a_durable_step(worker, job, store):
    worker.begin(order(job, store, 1, 0))
    report, steps, receipts = follow(worker, Phase.FINISHED)
    assert report.step == 3
    assert report.live_generation == 1
    assert [record.step for record in steps] == [0, 1, 2]
    assert [record.loss for record in steps] == pytest.approx(reference_losses(job, 3), rel=1e-5)
    assert [(generation, step) for generation, step, _ in receipts] == [(1, 3)]
    assert receipts[0][2].shards == order(job, store, 1, 0).checkpoint_shards


@pytest.mark.parametrize(
    ("known", "steps", "split"),
    [(False, [0, 2, 3], None), (True, [2, 3], None), (True, [2, 3], 0.3)],
)
def test_a_worker_evaluates_when_it_is_due(job, store, tmp_path, known, steps, split):
    """Before the first step, unless the driver knows its loss, every second step and at the end."""
    source = job.data.source if split is None else None
    section = EvaluationSection(
        source=source, split=split, every_steps=2, at_start=True, max_sequences=6
    )
    job = replace(job, evaluation=section)
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker, found = Worker(place, job), []
    try:
        worker.begin(replace(order(job, store, 1, 0), is_evaluated=known))
        until, phase = time.monotonic() + DEADLINE_S, None
        while phase is not Phase.FINISHED and time.monotonic() < until:
            report = worker.report()
            assert report.phase is not Phase.FAILED, report.error
            phase = report.phase
            found += report.evaluations
            time.sleep(0.02)
    finally:
        worker.close()
    assert [(each.step, each.sequences, each.generation) for each in found] == [
        (step, 6, 1) for step in steps
    ]
    assert len({each.loss for each in found}) == len(steps)


def evaluating(job, **keys):
    """The job with an evaluation after every second step."""
    section = EvaluationSection(source=job.data.source, every_steps=2, max_sequences=6, **keys)
    return replace(job, evaluation=section)


def test_a_stop_in_an_evaluation_makes_that_step_durable(job, store, tmp_path, monkeypatch):
    """The run that goes on evaluates it: one more step would have left its loss out for good."""
    job = evaluating(job)
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, job)
    read = EvaluationRows.batch

    def stop_and_read(rows, index, sequences):
        worker.request_stop(checkpoint=True)
        return read(rows, index, sequences)

    monkeypatch.setattr(EvaluationRows, "batch", stop_and_read)
    try:
        worker.begin(order(job, store, 1, 0))
        report, steps, receipts = follow(worker, Phase.STOPPED)
    finally:
        worker.close()
    assert (report.step, [record.step for record in steps]) == (2, [0, 1])
    assert [(generation, step) for generation, step, _ in receipts] == [(1, 2)]


@pytest.mark.parametrize("known", [0, 1])
def test_early_stopping_ends_a_run_with_a_durable_step(job, store, tmp_path, known):
    """known: evaluations without improvement of the generations before."""
    job = evaluating(job, early_stopping_patience=known + 1, early_stopping_threshold=99.0)
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, job)
    progress = EvaluationProgress(1.0, known)
    try:
        worker.begin(replace(order(job, store, 1, 0), evaluation_progress=progress))
        report, steps, receipts = follow(worker, Phase.FINISHED)
    finally:
        worker.close()
    assert (report.step, [record.step for record in steps]) == (2, [0, 1])
    assert [(generation, step) for generation, step, _ in receipts] == [(1, 2)]


def test_what_was_copied_is_told_along_with_what_is_told_anyway(worker, job, store):
    """The driver is woken by each report: an upload or a spill that ends between two steps is no
    reason for one of its own.
    """
    worker._report = replace(worker._report, phase=Phase.TRAINING)
    worker.preservation.transfers.add(StateTransfer("s3", "a/0", 1, 5, 700, 2.0))
    assert worker.report().transfers == ()
    worker.records.add_step(StepRecord(6, 1.0, 1.0, 64, 1.0, 1, 10.0))
    assert [transfer.num_bytes for transfer in worker.report().transfers] == [700]
    assert worker.report().transfers == ()
    layout = order(job, store, 1, 0).layout
    worker.begin(order(job, store, 1, 0))
    told, until = [], time.monotonic() + DEADLINE_S
    while len(told) < 2 and time.monotonic() < until:
        report = worker.report()
        told += report.transfers
        assert (
            not report.transfers
            or report.steps
            or report.receipts
            or report.phase is Phase.FINISHED
        )
        time.sleep(0.02)
    by_tier = {
        transfer.tier: (transfer.source, transfer.step, transfer.num_bytes) for transfer in told
    }
    assert by_tier.keys() == {"s3", "disk"}
    assert by_tier["disk"] == (ME, 3, layout.bytes_of(ME))
    stored = sum(
        path.stat().st_size for path in Path(job.checkpoint_storage).rglob("step-00000003/*.distcp")
    )
    assert by_tier["s3"] == (ME, 3, stored)


def test_a_fleet_that_changes_on_the_last_step_still_makes_it_durable(worker, job, store):
    worker.begin(order(job, store, 1, 0))
    follow(worker, Phase.FINISHED)
    layout = order(job, store, 2, 3).layout
    live = [Holding(Source("worker", "node", ME, 3, 1), layout.shards_by_worker[ME])]
    worker.begin(order(job, store, 2, 3, schedule(layout, {ME: "node"}, live, 3)))
    report, steps, receipts = follow(worker, Phase.FINISHED)
    assert (report.live_generation, report.step, steps) == (2, 3, [])
    assert [(generation, step) for generation, step, _ in receipts] == [(2, 3)]
    assert report.restore is not None
    assert sum(report.restore.bytes_by_tier.values()) == 0


@pytest.mark.parametrize("recompute", [None, "full"])
def test_an_equal_stage_is_taken_over_and_trains_on(job, store, tmp_path, recompute):
    """Wrong: it computes on the memory of the state before, or keeps it; or any stage is equal."""
    job = replace(job, training=replace(job.training, steps=6))
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, job)
    try:
        worker.begin(replace(order(job, store, 1, 0), end_step=3))
        _, first, _ = follow(worker, Phase.FINISHED)
        before = worker.live.trainer
        following = order(job, store, 2, 3)
        stage = replace(following.plan.pipelines[0].stages[0], recompute=recompute)
        plan = replace(following.plan, pipelines=(Pipeline((stage,), 2, 2),))
        worker.prepare(PreparationOrder(2, plan, "127.0.0.1", store.port))
        until = time.monotonic() + DEADLINE_S
        while worker.report().prepared != Prepared(2):
            assert time.monotonic() < until
            time.sleep(0.02)
        live = [Holding(Source("worker", "node", ME, 3, 1), following.layout.shards_by_worker[ME])]
        transfers = schedule(following.layout, {ME: "node"}, live, 3)
        held = {each.data_ptr() for each in before.stage.parameters()}
        worker.begin(replace(following, plan=plan, transfers=transfers))
        _, second, _ = follow(worker, Phase.FINISHED)
        after = worker.live.trainer
        assert (after.stage is before.stage) == (recompute is None)
        assert held.isdisjoint(each.data_ptr() for each in after.stage.parameters())
    finally:
        worker.close()
    losses = [record.loss for record in (*first, *second)]
    assert losses == pytest.approx(reference_losses(job, 6), rel=1e-6)


def test_a_generation_that_cannot_be_joined_is_refused_with_the_reason(
    worker, job, store, monkeypatch
):
    """The store is out of reach from this node alone, say: the driver would wait for the deadline
    of the whole restore.
    """

    def unreachable(*_, **__):
        raise ConnectionError("no route to the store")

    with monkeypatch.context() as patch:
        patch.setattr(store_connector, "TCPStore", unreachable)
        worker.begin(order(job, store, 1, 0))
    report = worker.report()
    assert (report.generation, report.phase, report.error) == (
        1,
        Phase.FAILED,
        "ConnectionError: no route to the store",
    )
    worker.begin(order(job, store, 2, 0))
    assert follow(worker, Phase.FINISHED)[0].live_generation == 2


def test_an_interrupt_while_a_generation_begins_ends_that_one(worker, job, store, monkeypatch):
    """Calls come in threads of their own, and a connection takes a moment: without this the worker
    would wait for the dead.
    """
    connecting, connected = threading.Event(), threading.Event()
    connect = store_connector.TCPStore
    monkeypatch.setattr(
        store_connector,
        "TCPStore",
        lambda *a, **n: connecting.set() or (connected.wait(20) and connect(*a, **n)),
    )
    what = replace(order(job, store, 1, 0), participants=(ME, "other/0"))
    calls = [
        threading.Thread(target=worker.begin, args=(what,)),
        threading.Thread(target=worker.interrupt),
    ]
    calls[0].start()
    assert connecting.wait(20)
    calls[1].start()
    time.sleep(0.1)
    connected.set()
    for call in calls:
        call.join(20)
    until = time.monotonic() + 5
    while (report := worker.report()).phase is not Phase.HALTED:
        assert time.monotonic() < until, report.phase
        time.sleep(0.02)


def test_a_restore_that_fails_tells_which_copies_were_bad_and_the_next_goes_on_from_it(
    worker, job, store, tmp_path
):
    layout = order(job, store, 1, 0).layout
    state = {name: torch.ones(layout.tensors[name].shape) for name in layout.units_of(ME)}
    writer = SnapshotWriter(tmp_path / "memory", ME, layout, 1)
    writer.start(2, state)
    writer.close()
    (kept,) = AgentStore(tmp_path / "memory", tmp_path / "disk", "node").inventory()
    shard = min(layout.shards_by_worker[ME])
    (path,) = [p for p in (tmp_path / "memory").glob("*.snapshot") if p.name.endswith("0.snapshot")]
    with SnapshotFile(path) as file, open(path, "r+b") as raw:
        raw.seek(file.map.extents[shard].offset)
        raw.write(b"\xff\xfe\xfd\xfc")
    worker.begin(order(job, store, 2, 2, schedule(layout, {ME: "node"}, [kept], 2)))
    until = time.monotonic() + DEADLINE_S
    while (report := worker.report()).phase is not Phase.FAILED:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert report.broken.step == 2
    assert report.broken.bad == ((kept.source, shard),)
    assert report.broken.arrived == layout.shards_by_worker[ME] - {shard}
    assert "cannot restore its state" in report.error
    raw_bytes = layout.shard_bytes(shard)
    writer = SnapshotWriter(tmp_path / "memory", ME, layout, 1)  # a good copy turns up
    writer.start(2, state)
    writer.close()
    (good,) = AgentStore(tmp_path / "memory", tmp_path / "disk", "node").inventory()
    here = Holding(Source("worker", "node", ME, 2, 2), report.broken.arrived)
    worker.begin(order(job, store, 3, 2, schedule(layout, {ME: "node"}, [here, good], 2)))
    report, steps, _ = follow(worker, Phase.FINISHED)
    assert report.restore.bytes_by_tier == {"memory": raw_bytes, "disk": 0, "peer": 0, "s3": 0}
    assert [record.step for record in steps] == [2]
    assert report.broken is None


def test_one_storage_client_serves_a_workers_checkpoints_and_restores(
    job, store, tmp_path, monkeypatch
):
    """Its state was to come from an agent that is gone: all of it falls back to S3, and the last
    step goes there.
    """
    with s3_server() as server:
        uri = server.create_bucket("runs")
        job = replace(job, checkpoint=replace(job.checkpoint, storage=uri))
        layout = order(job, store, 1, 0).layout
        state = {name: torch.ones(layout.tensors[name].shape) for name in layout.units_of(ME)}
        storage = open_storage(uri)
        receipt = write_shards(
            CheckpointPart(storage, 2, ME), state, layout, layout.shards_by_worker[ME]
        )
        commit_checkpoint(storage, 2, layout, [receipt], CheckpointFacts({}, {}))
        storage.close()
        clients = counted(monkeypatch, s3_client, "make_client")
        sources = [Source("memory", "gone", "gone/0", 2, 1), Source("s3", "", uri, 2)]
        holdings = [Holding(source, layout.shards_by_worker[ME]) for source in sources]
        worker = Worker(
            WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk")), job
        )
        try:
            worker.begin(order(job, store, 2, 2, schedule(layout, {ME: "node"}, holdings, 2)))
            report, _, _ = follow(worker, Phase.FINISHED)
        finally:
            worker.close()
    assert report.restore.bytes_by_tier["s3"] == layout.num_bytes
    assert len(clients) == 1


def counted(monkeypatch, module, name):
    """The calls of a module's function from now on, as a list that grows."""
    calls, real = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: calls.append(given) or real(*given))
    return calls


def test_an_order_that_was_overtaken_by_a_later_one_is_dropped(worker, job, store):
    """Calls come in threads of their own: the later one may be first."""
    worker.begin(order(job, store, 2, 0))
    worker.begin(order(job, store, 1, 0))
    assert worker.report().generation == 2
    assert follow(worker, Phase.FINISHED)[0].live_generation == 2


def test_an_interrupt_ends_its_generation_and_those_before_and_no_later_one(worker, job, store):
    worker.interrupt(1)
    worker.begin(order(job, store, 1, 0))
    assert worker.report().generation == 0, "it was over before it came"
    worker.begin(replace(order(job, store, 2, 0), participants=(ME, "other/0")))
    worker.interrupt(1)
    assert not worker.groups.interrupted
    worker.interrupt(2)
    assert worker.groups.interrupted


def test_what_an_older_generation_kept_is_not_told_as_the_new_ones(worker, job, store, monkeypatch):
    """Agents would remove what is older than the new generation, of which nothing is kept yet."""
    worker.begin(order(job, store, 1, 0))
    follow(worker, Phase.FINISHED)
    until = time.monotonic() + DEADLINE_S
    while worker.report().snapshot_step != 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    begins, go_on, begin = threading.Event(), threading.Event(), Preservation.begin

    def slow(*arguments):
        begins.set()
        assert go_on.wait(20)
        begin(*arguments)

    monkeypatch.setattr(Preservation, "begin", slow)
    worker.begin(order(job, store, 2, 0))
    assert begins.wait(20)
    report = worker.report()
    assert report.live_generation == 2
    assert (report.snapshot_step, report.replicated_step) == (None, None)
    go_on.set()
    follow(worker, Phase.FINISHED)


def test_a_disk_that_hangs_holds_up_no_generation(worker, job, store, monkeypatch):
    """Neither the files that are to be made there, nor a spill that is under way."""
    create, hangs, hung = snapshot_file.create_file, threading.Event(), list[Path]()

    def slow(path, *arguments):
        if "disk" in path.parts:
            hung.append(path)
            assert hangs.wait(60)
        return create(path, *arguments)

    monkeypatch.setattr(snapshot_file, "create_file", slow)
    try:
        for generation in (1, 2):
            worker.begin(order(job, store, generation, 0))
            assert follow(worker, Phase.FINISHED)[0].live_generation == generation
        assert hung
        assert not hangs.is_set()
    finally:
        hangs.set()


def test_a_requested_checkpoint_is_made_once_and_training_goes_on(job, store, tmp_path):
    """The next step is durable; no later one is but the last."""
    section = replace(job.checkpoint, every_steps=None)
    training = replace(job.training, steps=12)
    place = WorkerPlace(ME, "node", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    worker = Worker(place, replace(job, checkpoint=section, training=training))
    asked = []
    kept = worker.preservation.keep

    def keep(step, state, *, durable):
        kept(step, state, durable=durable)
        asked.extend([step] if durable else [])
        if step == 4:
            worker.request_checkpoint()

    worker.preservation.keep = keep
    try:
        worker.begin(replace(order(job, store, 1, 0), end_step=12))
        follow(worker, Phase.FINISHED)
    finally:
        worker.close()
    assert asked == [5, 12]
