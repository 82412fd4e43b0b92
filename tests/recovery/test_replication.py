"""An agent's copies to other nodes: what a round asks for, and what is there when a peer is gone,
full or slow.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch

from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers import replication
from recovery.peers.replication import (
    Endpoint,
    Pushed,
    PushRequest,
    ReplicationTargets,
    Replicator,
    hand_over,
    read_pushed,
    withdraw,
    write_round,
    write_targets,
)
from recovery.peers.replication_targets import ReplicationTarget
from recovery.peers.server import ShardServer
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from tests.harness.state_cases import placed, state_of, tensors_of, unit

WORKER, TOKEN = "n0/0", "token"
CASE = placed(tensors_of(2), 2, [[(2, [WORKER])]])
SHARDS = tuple(sorted(CASE.layout.shards_by_worker[WORKER]))


class Node:
    """A node's store, and its server."""

    def __init__(self, stack: ExitStack, directory: Path, name: str) -> None:
        self.name, self.memory = name, directory / name / "memory"
        self.store = AgentStore(self.memory, directory / name / "disk", name)
        stack.callback(self.store.close)
        self.server = ShardServer(self.store, TOKEN, host="127.0.0.1")
        stack.callback(self.server.close)
        self.endpoint = Endpoint(name, "127.0.0.1", self.server.port)

    def has(self, step: int, generation: int = 1) -> frozenset[ShardId]:
        source = Source("memory", self.name, WORKER, step, generation)
        return frozenset().union(*(h.shards for h in self.store.inventory() if h.source == source))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        found = [Node(stack, tmp_path, f"n{number}") for number in range(3)]
        stack.callback(Replicator(found[0].store, found[0].memory, TOKEN).close)
        yield found


@pytest.fixture
def writer(nodes: list[Node]) -> Iterator[SnapshotWriter]:
    writer = SnapshotWriter(nodes[0].memory, WORKER, CASE.layout, 1)
    yield writer
    writer.close(20)


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(
    nodes: list[Node],
    *targets: ReplicationTarget,
    max_bytes_per_s: float | None = None,
    timeout_s: float = 10,
) -> None:
    endpoints = tuple(node.endpoint for node in nodes)
    write_targets(
        nodes[0].memory,
        ReplicationTargets(WORKER, 1, targets, endpoints, max_bytes_per_s, timeout_s),
    )


def replicate(
    nodes: list[Node],
    writer: SnapshotWriter,
    step: int,
    complete: tuple[int, int] | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> Pushed:
    """One round: opened before its snapshot is there, as training does it."""
    write_round(nodes[0].memory, PushRequest(WORKER, 1, step, complete))
    writer.start(step, state_of(CASE.layout, WORKER, step) if state is None else state)
    until(lambda: (done := read_pushed(nodes[0].memory, WORKER)) is not None and done.step == step)
    done = read_pushed(nodes[0].memory, WORKER)
    assert done is not None
    return done


def test_targets_go_where_they_say_and_read_back_right(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    half = len(SHARDS) // 2
    ask(
        nodes,
        ReplicationTarget(WORKER, SHARDS[:half], ("n1", "n2")),
        ReplicationTarget(WORKER, SHARDS[half:], ("n2", "n1")),
    )
    began = time.monotonic()
    done = replicate(nodes, writer, 4)
    assert (done.generation, done.step, done.error) == (1, 4, None)
    assert done.num_bytes == CASE.layout.bytes_of(WORKER)
    assert 0 < done.seconds <= time.monotonic() - began
    assert began <= done.ended_at - done.seconds
    assert (nodes[1].has(4), nodes[2].has(4)) == (
        frozenset(SHARDS[:half]),
        frozenset(SHARDS[half:]),
    )
    for shard in SHARDS[:half]:
        expected = unit(CASE.layout.tensors[shard.tensor], shard, 4).contiguous().numpy().tobytes()
        assert bytes(nodes[1].store.read(Source("memory", "n1", WORKER, 4, 1), shard)) == expected


def test_a_peer_keeps_the_complete_round_and_the_open_one(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    for step in range(1, 6):
        complete = (1, step - 1) if step > 1 else None
        assert replicate(nodes, writer, step, complete).error is None
        assert {s for s in range(7) if nodes[1].has(s)} == {step, step - 1} - {0}


def bytes_of_tensors(names: Iterable[str]) -> int:
    layout = CASE.layout
    mine = [shard for shard in SHARDS if shard.tensor in names]
    return sum(layout.shard_bytes(shard) for shard in mine)


def test_shards_that_did_not_change_are_not_sent_again(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    """Weights that a step does not touch (frozen, or experts that no token chose) travel once.

    Wrong: a shard that changed is taken from the earlier copy; one is sent whose bytes are there.
    """
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    first, later = (state_of(CASE.layout, WORKER, step) for step in (1, 2))
    names = sorted(first)
    frozen, trained = set(names[::2]), set(names[1::2])
    sent = [replicate(nodes, writer, 1, state=first).num_bytes]
    for step in (2, 3):
        state = {name: first[name] if name in frozen else later[name] for name in names}
        sent.append(replicate(nodes, writer, step, (1, step - 1), state).num_bytes)
    assert sent == [CASE.layout.bytes_of(WORKER), bytes_of_tensors(trained), 0]
    for step in (2, 3):
        assert nodes[1].has(step) == frozenset(SHARDS), "a copy is whole, whatever was sent"
        source = Source("memory", "n1", WORKER, step, 1)
        for shard in SHARDS:
            origin = 1 if shard.tensor in frozen else 2
            expected = unit(CASE.layout.tensors[shard.tensor], shard, origin)
            held = bytes(nodes[1].store.read(source, shard))
            assert held == expected.contiguous().numpy().tobytes()


def test_a_shard_whose_earlier_copy_is_damaged_is_sent_again(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    state = state_of(CASE.layout, WORKER, 1)
    replicate(nodes, writer, 1, state=state)
    (path,) = nodes[1].memory.glob("*.pushed*.snapshot")
    file = nodes[1].store.file_of(Source("memory", "n1", WORKER, 1, 1), SHARDS[0])
    with path.open("r+b") as damaged:
        damaged.seek(file.extent(SHARDS[0]).offset)
        damaged.write(bytes(8))
    sent = replicate(nodes, writer, 2, (1, 1), state).num_bytes
    assert sent == CASE.layout.shard_bytes(SHARDS[0])
    held = nodes[1].store.read(Source("memory", "n1", WORKER, 2, 1), SHARDS[0])
    expected = unit(CASE.layout.tensors[SHARDS[0].tensor], SHARDS[0], 1)
    assert bytes(held) == expected.contiguous().numpy().tobytes()


def test_rounds_share_a_connection_that_the_replicator_closes(
    tmp_path: Path, greetings: list[str]
) -> None:
    with ExitStack() as stack:
        nodes = [Node(stack, tmp_path, name) for name in ("n0", "n1")]
        ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
        replicator = Replicator(nodes[0].store, nodes[0].memory, TOKEN)
        writer = SnapshotWriter(nodes[0].memory, WORKER, CASE.layout, 1)
        for step in range(1, 4):
            assert replicate(nodes, writer, step).error is None
        writer.close(20)
        replicator.close()
        until(lambda: not nodes[1].server.listener.open)
    assert len(greetings) == 1


def test_the_next_peer_takes_it_where_the_first_is_gone(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    nodes[1].server.close()
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1", "n2")))
    assert replicate(nodes, writer, 4).error is None
    assert nodes[2].has(4) == frozenset(SHARDS)


def test_copies_do_not_come_home_where_their_address_has_become_ones_own(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    """The connection to the peer is kept; then it is gone, and this node listens where it did."""
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1", "n2")))
    assert replicate(nodes, writer, 4).error is None
    nodes[1].server.close()
    with ShardServer(nodes[0].store, TOKEN, host="127.0.0.1", port=nodes[1].endpoint.port):
        assert replicate(nodes, writer, 5).error is None
        parts = [(Source("memory", "n0", WORKER, 5, 1), SHARDS)]
        assert hand_over(nodes[0].store, parts, [nodes[1].endpoint], TOKEN, 10) == 0
    assert (nodes[1].has(4), nodes[2].has(5)) == (frozenset(SHARDS), frozenset(SHARDS))
    assert not list(nodes[0].memory.glob("*pushed*.snapshot"))


def test_a_round_that_nobody_takes_has_failed_and_the_next_may_work(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    (nodes[1].memory.parent).mkdir(parents=True)
    for directory in (nodes[1].memory, nodes[1].memory.parent / "disk"):
        directory.write_text("no directory: nothing fits in it")
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    failed = replicate(nodes, writer, 4)
    assert "no room" in (failed.error or "")
    nodes[1].memory.unlink()
    assert replicate(nodes, writer, 5).error is None
    assert nodes[1].has(5) == frozenset(SHARDS)


def test_a_round_whose_snapshot_never_comes_ends(nodes: list[Node]) -> None:
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)), timeout_s=0.2)
    write_round(nodes[0].memory, PushRequest(WORKER, 1, 9))
    until(lambda: read_pushed(nodes[0].memory, WORKER) is not None)
    done = read_pushed(nodes[0].memory, WORKER)
    assert done is not None
    assert "no such snapshot" in (done.error or "")


def test_bandwidth_is_bounded(nodes: list[Node], writer: SnapshotWriter) -> None:
    num_bytes = CASE.layout.bytes_of(WORKER)
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)), max_bytes_per_s=num_bytes / 0.5)
    began = time.monotonic()
    replicate(nodes, writer, 1)
    replicate(nodes, writer, 2)
    assert time.monotonic() - began > 0.5, "a second round's worth cannot pass sooner"


def test_what_is_withdrawn_is_not_pushed(nodes: list[Node], writer: SnapshotWriter) -> None:
    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    assert replicate(nodes, writer, 1).error is None
    withdraw(nodes[0].memory, WORKER)
    assert {path.suffix for path in nodes[0].memory.iterdir()} == {".snapshot"}


def test_handing_over_spreads_parts_and_passes_over_peers_that_are_gone(
    nodes: list[Node], writer: SnapshotWriter
) -> None:
    writer.start(4, state_of(CASE.layout, WORKER, 4))
    writer.wait(20)
    half, source = len(SHARDS) // 2, Source("memory", "n0", WORKER, 4, 1)
    parts = [(source, SHARDS[:half]), (source, SHARDS[half:])]
    endpoints = [nodes[1].endpoint, nodes[2].endpoint]
    assert hand_over(nodes[0].store, parts, endpoints, TOKEN, 10) == CASE.layout.bytes_of(WORKER)
    assert (nodes[1].has(4), nodes[2].has(4)) == (
        frozenset(SHARDS[:half]),
        frozenset(SHARDS[half:]),
    )
    nodes[1].server.close()
    hand_over(nodes[0].store, parts, endpoints, TOKEN, 10)
    assert nodes[2].has(4) == frozenset(SHARDS)
    gone = Source("memory", "n0", WORKER, 3, 1)
    assert hand_over(nodes[0].store, [(gone, SHARDS)], endpoints, TOKEN, 10) == 0
    assert hand_over(nodes[0].store, parts, [], TOKEN, 10) == 0


def test_a_push_under_way_ends_with_its_replicator(tmp_path: Path) -> None:
    """An agent that is told to end is waited for a few seconds, and has snapshots to remove."""
    with ExitStack() as stack:
        nodes = [Node(stack, tmp_path, name) for name in ("n0", "n1")]
        ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)), max_bytes_per_s=1e-3)
        replicator = Replicator(nodes[0].store, nodes[0].memory, TOKEN)
        writer = SnapshotWriter(nodes[0].memory, WORKER, CASE.layout, 1)
        write_round(nodes[0].memory, PushRequest(WORKER, 1, 1, None))
        writer.start(1, state_of(CASE.layout, WORKER, 1))
        until(lambda: nodes[1].memory.is_dir() and any(nodes[1].memory.iterdir()))
        replicator.close(20)
        assert not replicator.thread.is_alive()
        assert read_pushed(nodes[0].memory, WORKER) is None
        writer.close(20)


def test_an_answer_that_cannot_be_written_is_written_later(
    nodes: list[Node], writer: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is full for a moment: nobody asks for a step twice."""
    write, failed = replication.write_document, list[str]()

    def full(directory: Path, worker: str, kind: str, document: msgspec.Struct) -> None:
        if kind == "pushed" and len(failed) < 3:
            failed.append(kind)
            raise OSError(errno.ENOSPC, "no space left")
        write(directory, worker, kind, document)

    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    monkeypatch.setattr(replication, "write_document", full)
    assert replicate(nodes, writer, 1).error is None
    assert len(failed) == 3


def test_rounds_are_looked_for_again_after_an_error(
    nodes: list[Node], writer: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    glob, failed = Path.glob, threading.Event()

    def too_many(path: Path, pattern: str) -> Iterator[Path]:
        if pattern == "*.round" and not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return glob(path, pattern)

    ask(nodes, ReplicationTarget(WORKER, SHARDS, ("n1",)))
    monkeypatch.setattr(Path, "glob", too_many)
    assert failed.wait(20)
    assert replicate(nodes, writer, 1).error is None
