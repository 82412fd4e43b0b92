"""What a worker keeps of its state beyond its own memory: snapshots, rounds with its agent, and
what stays of older generations.
"""

import threading
import time
from dataclasses import replace

import pytest
import torch

from autohet.runtime.copies.preservation import Preservation
from autohet.runtime.job import Job
from autohet.runtime.messages import AgentEndpoint, GenerationOrder, WorkerPlace
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.checkpoint import upload as checkpoint_upload
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_buffer import SnapshotBuffer
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.peers.replication import Replicator
from recovery.peers.replication_rounds import PreservationStatus
from recovery.peers.replication_targets import ReplicationTarget
from recovery.peers.server import ShardServer
from recovery.state.borrowed import BorrowedState
from recovery.state.checksum import checksum
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.open import open_storage
from recovery.storage.tensor_payload import tensor_bytes

ME, SPEC = "a/0", TensorSpec("param/w", (64,), "float32")
LAYOUT = Layout({SPEC.name: SPEC}, {ME: frozenset(SPEC.shards)})
PLAN = Plan("one", 4, 2, 16, (Pipeline((Stage(0, 1, (ME,)),), 2, 2),))


@pytest.fixture
def peer(tmp_path):
    store = AgentStore(tmp_path / "b" / "memory", tmp_path / "b" / "disk", "b")
    with ShardServer(store, "token", host="127.0.0.1") as server:
        yield AgentEndpoint("b", "127.0.0.1", server.port, "token"), store
    store.close()


@pytest.fixture
def agent(tmp_path):
    """This node's agent, as far as it copies."""
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "a")
    replicator = Replicator(store, tmp_path / "memory", "token")
    yield store
    replicator.close()
    store.close()


@pytest.fixture
def preservation(tmp_path):
    job = Job.from_document(
        {
            "name": "one",
            "model": {"config": {"model_type": "llama"}},
            "training": {"global_batch_sequences": 4, "sequence_length": 16, "steps": 3},
            "data": {"source": "unused"},
            "checkpoint": {"storage": str(tmp_path / "checkpoints"), "every_steps": 100},
        }
    )
    place = WorkerPlace(ME, "a", "CPU", str(tmp_path / "memory"), str(tmp_path / "disk"))
    found = Preservation(place, job, open_storage(job.checkpoint_storage))
    yield found
    found.close()


def order(peer, generation=1, start_step=0):
    target = ReplicationTarget(ME, SPEC.shards, ("b",))
    return GenerationOrder(
        generation,
        PLAN,
        LAYOUT,
        start_step,
        100,
        "here",
        1,
        PLAN.workers,
        None,
        {"b": peer},
        frozenset(),
        replication_targets=(target,),
        replicates=True,
    )


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def keep(preservation, step):
    """One step's snapshot, waited for."""
    preservation.keep(step, {SPEC.name: torch.full((64,), float(step))}, durable=False)
    until(lambda: preservation.snapshots.newest(preservation.order.generation) == step)


def round_of(preservation, step):
    """A round that this worker and its agent end."""
    keep(preservation, step)
    until(lambda: preservation.status() == PreservationStatus())
    preservation.record_vote(pending=False, failed=False)
    assert preservation.replication.complete_step(1) == step


def steps(store):
    return {(holding.source.generation, holding.step) for holding in store.inventory()}


def test_a_round_ends_when_the_agent_has_copied_and_nobody_waits(preservation, agent, peer):
    endpoint, there = peer
    preservation.begin(order(endpoint))
    assert preservation.status() == PreservationStatus(), "no round is open"
    round_of(preservation, 1)
    assert steps(there) == {(1, 1)}
    keep(preservation, 2)
    preservation.record_vote(pending=True, failed=False)  # somebody else is not done
    for step in (3, 4, 5, 6):
        keep(preservation, step)
    assert {step for _, step in steps(agent)} == {1, 2, 5, 6}, (
        "the complete one, the open one, the two newest"
    )
    assert preservation.replication.complete_step(1) == 1


def test_the_update_waits_until_what_is_to_be_durable_is_copied(preservation, peer, monkeypatch):
    """The copy is not the training thread's work, nor is the upload waited for."""
    copying, copied, stored = threading.Event(), threading.Event(), threading.Event()
    copy, write = SnapshotBuffer.copy_from, checkpoint_upload.write_views
    monkeypatch.setattr(
        SnapshotBuffer,
        "copy_from",
        lambda *given: copying.set() or (copied.wait(20) and copy(*given)),
    )
    monkeypatch.setattr(
        checkpoint_upload, "write_views", lambda *given: stored.wait(20) and write(*given)
    )
    preservation.begin(replace(order(peer[0]), checkpoint_shards=frozenset(SPEC.shards)))
    preservation.keep(1, {SPEC.name: torch.ones(64)}, durable=True)
    assert copying.wait(20)
    updating = threading.Thread(target=preservation.before_update)
    updating.start()
    updating.join(0.2)
    assert updating.is_alive()
    copied.set()
    updating.join(20)
    assert not updating.is_alive()
    assert preservation.uploads.take_receipts() == []
    stored.set()
    until(lambda: not preservation.uploads.busy)
    ((_, step, receipt),) = preservation.uploads.take_receipts()
    assert (step, receipt.shards) == (1, frozenset(SPEC.shards))


def test_what_was_copied_elsewhere_is_told_once(preservation, agent, peer):
    """An upload, a spill and a round of copies, each in one summary with its bytes, seconds and
    end.
    """
    began = time.monotonic()
    preservation.begin(replace(order(peer[0]), checkpoint_shards=frozenset(SPEC.shards)))
    preservation.keep(1, {SPEC.name: torch.ones(64)}, durable=True)
    until(lambda: preservation.snapshots.newest(1) == 1)
    until(lambda: preservation.status() == PreservationStatus())
    assert preservation.status() == PreservationStatus()
    ((_, _, receipt),) = preservation.uploads.take_receipts()
    transfers = preservation.transfers.take()
    told = {transfer.tier: transfer for transfer in transfers}
    since = time.monotonic() - began
    assert len(transfers) == 3, "each once, however often it votes"
    assert {tier: (t.source, t.generation, t.step) for tier, t in told.items()} == dict.fromkeys(
        ("disk", "peer", "s3"), (ME, 1, 1)
    )
    assert told["s3"].num_bytes == sum(file.num_bytes for file in receipt.files)
    assert told["disk"].num_bytes == told["peer"].num_bytes == LAYOUT.bytes_of(ME)
    assert all(0 < t.seconds <= t.seconds + t.ended_ago_s <= since for t in told.values())
    assert preservation.transfers.take() == ()


def test_a_worker_votes_once_its_snapshot_of_the_step_before_is_committed(
    preservation, peer, monkeypatch
):
    """Who passes the vote overwrites the snapshot before that one: were all to end then, no step
    would be kept by all.
    """
    copied, commit = threading.Event(), SnapshotFileWriter.commit
    monkeypatch.setattr(
        SnapshotFileWriter, "commit", lambda *given: copied.wait(20) and commit(*given)
    )
    preservation.begin(order(peer[0]))
    preservation.keep(1, {SPEC.name: torch.ones(64)}, durable=False)
    seen = []
    voting = threading.Thread(
        target=lambda: (preservation.status(), seen.append(preservation.snapshots.newest(1)))
    )
    voting.start()
    voting.join(0.2)
    assert seen == []
    copied.set()
    voting.join(20)
    assert seen == [1]


def test_one_snapshot_that_fails_costs_no_other(preservation, peer, monkeypatch):
    """Ten more were left out: with a sole holder a death then lost them all."""
    copy, fails = SnapshotBuffer.copy_from, [True]

    def once(*given):
        if fails:
            raise ValueError(fails.pop())
        copy(*given)

    monkeypatch.setattr(SnapshotBuffer, "copy_from", once)
    preservation.begin(order(peer[0]))
    state = {SPEC.name: torch.ones(64)}
    preservation.keep(1, state, durable=False)
    assert preservation.status() == PreservationStatus(failed=True)
    preservation.record_vote(pending=False, failed=True)
    keep(preservation, 2)
    assert preservation.snapshots.newest(1) == 2


def test_without_its_agent_the_round_stays_open_and_training_goes_on(preservation, peer):
    preservation.begin(order(peer[0]))
    for step in (1, 2, 3):
        keep(preservation, step)
        assert preservation.status() == PreservationStatus(pending=True)
        preservation.record_vote(pending=True, failed=False)
    assert preservation.replication.complete_step(1) is None


def test_a_peer_that_takes_nothing_fails_the_round_and_the_next_one_is_opened(
    preservation, agent, peer
):
    preservation.begin(order(replace(peer[0], port=1)))
    keep(preservation, 1)
    until(lambda: preservation.status() == PreservationStatus(failed=True))
    preservation.record_vote(pending=False, failed=True)
    keep(preservation, 2)
    assert preservation.replication.rounds.open == 2


def test_the_complete_round_of_an_older_generation_stays_until_the_new_one_has_its_own(
    preservation, agent, peer
):
    preservation.begin(order(peer[0]))
    round_of(preservation, 1)
    for step in range(2, 8):
        keep(preservation, step)
        preservation.record_vote(pending=True, failed=False)
    preservation.begin(order(peer[0], 2, start_step=7))
    assert steps(agent) == {(1, 1), (1, 2), (1, 6), (1, 7)}, "2 is the open round's"
    keep(preservation, 8)
    keep(preservation, 9)
    assert {(1, 1), (2, 8), (2, 9)} <= steps(agent)
    until(lambda: preservation.status() == PreservationStatus())
    preservation.record_vote(pending=False, failed=False)
    keep(preservation, 10)
    until(lambda: all(generation == 2 for generation, _ in steps(agent)))
    assert (2, 8) in steps(peer[1])


def test_a_run_that_goes_back_forgets_the_rounds_it_has_left(preservation, agent, peer):
    preservation.begin(order(peer[0]))
    for step in (1, 2, 3, 4):
        round_of(preservation, step)
    preservation.begin(order(peer[0], 2, start_step=2))
    assert preservation.replication.complete is None
    assert {step for generation, step in steps(agent) if generation == 1} <= {1, 2}


def stalled(call):
    """Whether the training thread would stand still in this call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(1.0)
    return thread.is_alive()


@pytest.fixture
def stored(monkeypatch):
    """Every upload waits for this, and is noted."""
    may, write, steps = threading.Event(), checkpoint_upload.write_views, []

    def late(part, *given):
        steps.append(part.step)
        assert may.wait(20)
        return write(part, *given)

    monkeypatch.setattr(checkpoint_upload, "write_views", late)
    yield may, steps
    may.set()


def test_a_slow_storage_holds_up_no_step_and_the_newest_state_takes_the_next_turn(
    preservation, peer, stored
):
    may, uploads = stored
    preservation.begin(replace(order(peer[0]), checkpoint_shards=frozenset(SPEC.shards)))
    turns = []

    def step(number):
        writing = preservation.status().writing
        due = preservation.turns.take(number, writing=writing)
        turns.extend([number] if due else [])
        preservation.keep(number, {SPEC.name: torch.full((64,), float(number))}, durable=due)
        preservation.before_update()

    for number in (100, 101, 200, 300, 301):
        assert not stalled(lambda number=number: step(number))
    assert turns == uploads == [100], "one under way, and none beside it"
    may.set()
    until(lambda: not preservation.status().writing)
    step(302)
    until(lambda: not preservation.status().writing)
    step(303)
    assert turns == uploads == [100, 302], (
        "200 and 300 are one owed checkpoint, of the newest state"
    )
    assert [(generation, step) for generation, step, _ in preservation.uploads.take_receipts()] == [
        (1, 100),
        (1, 302),
    ]


def test_the_last_step_is_stored_although_the_one_before_failed(preservation, peer, monkeypatch):
    """Its failure is that step's alone, and is told."""
    write = checkpoint_upload.write_views
    failing, may = iter((True, False)), threading.Event()

    def flaky(*given):
        assert may.wait(20)
        if next(failing):
            raise OSError("the storage is away")
        return write(*given)

    monkeypatch.setattr(checkpoint_upload, "write_views", flaky)
    preservation.begin(replace(order(peer[0]), checkpoint_shards=frozenset(SPEC.shards)))
    preservation.keep(1, {SPEC.name: torch.ones(64)}, durable=True)
    preservation.before_update()
    threading.Timer(0.2, may.set).start()
    preservation.keep(2, {SPEC.name: torch.ones(64)}, durable=True)
    until(lambda: not preservation.status().writing)
    (_, first, why), (_, second, receipt) = preservation.uploads.take_receipts()
    assert (first, second) == (1, 2)
    assert "the storage is away" in why
    assert receipt.shards == frozenset(SPEC.shards)


def test_a_durable_step_reads_the_state_once(preservation, peer, monkeypatch):
    """Host memory is filled from the state; the disk and durable storage from host memory, with the
    checksums of that moment. On a GPU each reading is a copy over its bus.
    """
    readings = []
    reading = BorrowedState.reading
    monkeypatch.setattr(
        BorrowedState, "reading", lambda state: readings.append(1) or reading(state)
    )
    preservation.begin(replace(order(peer[0]), checkpoint_shards=frozenset(SPEC.shards)))
    for step in (1, 2):
        keep(preservation, step)
    state = {SPEC.name: torch.full((64,), 3.0)}
    preservation.keep(3, state, durable=True)
    preservation.before_update()
    state[SPEC.name].fill_(4.0)  # the next update: whoever still read the state now would store it
    until(lambda: not preservation.status().writing)
    assert len(readings) == 3, "one a step"
    ((_, _, receipt),) = preservation.uploads.take_receipts()
    (stored,) = {shard.checksum for file in receipt.files for shard in file.shards}
    assert stored == checksum(tensor_bytes(torch.full((64,), 3.0)))
    disk = [
        holding for holding in stores(preservation).inventory() if holding.source.kind == "disk"
    ]
    assert [holding.checksums for holding in disk if holding.step == 3] == [
        {SPEC.shards[0]: stored}
    ]


def stores(preservation):
    place = preservation.place
    return AgentStore(place.memory_directory, place.disk_directory, place.node)
