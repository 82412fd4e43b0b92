"""One conformance suite for every tier that a worker reads by itself: host memory, disk, a peer's
agent, durable storage.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    open_checkpoint,
)
from recovery.checkpoint.read import read_shards
from recovery.checkpoint.write import write_shards
from recovery.errors import RecoveryError
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers.pool import ClientPool
from recovery.peers.server import ShardServer
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.storage.open import open_storage
from recovery.storage.tensor_payload import tensor_bytes
from recovery.transfer.tiers import DurableTier, NodeTier, PeerTier, ShardAnswer, Tier
from tests.harness.faulty_tier import FAULTS, FaultyTier
from tests.harness.state_cases import placed, state_of, tensors_of, unit

CASE = placed(tensors_of(2), 2, [[(2, ["n0/0"])]])
SHARDS = sorted(CASE.layout.shards_by_worker["n0/0"])
STEP = 5
TOKEN = "token"


SUMS = {
    shard: checksum(tensor_bytes(unit(CASE.layout.tensors[shard.tensor], shard, STEP)))
    for shard in SHARDS
}


@dataclass
class Held:
    """A tier, a source in it that holds SHARDS of STEP, and how to break one of them where it
    lies.
    """

    tier: Tier
    source: Source
    flip: Callable[[ShardId], None]


@pytest.fixture(params=["memory", "disk", "peer memory", "peer disk", "directory"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Held]:
    if request.param == "directory":
        yield durable(str(tmp_path / "durable"), tmp_path / "durable")
        return
    kind = request.param.split()[-1]
    store = AgentStore(tmp_path / "memory", tmp_path / "disk", "n0")
    writer = SnapshotWriter(tmp_path / kind, "n0/0", CASE.layout, 1)
    writer.start(STEP, state_of(CASE.layout, "n0/0", STEP))
    writer.wait(20)
    writer.close(20)
    source = Source(kind, "n0", "n0/0", STEP, 1)

    def flip(shard: ShardId) -> None:
        file = store.file_of(source, shard)
        break_bytes(file.path, file.map.extents[shard].offset)

    if request.param == kind:
        yield Held(NodeTier(store), source, flip)
    else:
        with ShardServer(store, TOKEN, host="127.0.0.1") as server, ClientPool() as pool:
            yield Held(PeerTier({"n0": ("127.0.0.1", server.port, TOKEN)}, pool, 20), source, flip)
    store.close()


def durable(uri: str, directory: Path) -> Held:
    storage = open_storage(uri)
    receipt = write_shards(
        CheckpointPart(storage, STEP, "n0/0"),
        state_of(CASE.layout, "n0/0", STEP),
        CASE.layout,
        frozenset(SHARDS),
    )
    manifest = commit_checkpoint(
        storage, STEP, CASE.layout, [receipt], CheckpointFacts({"step": STEP}, {})
    )

    def flip(shard: ShardId) -> None:
        for file in manifest.files:
            for stored in file.shards:
                if stored.shard == shard:
                    (path,) = directory.rglob(Path(file.name).name)
                    break_bytes(path, stored.offset)

    tier = DurableTier(
        lambda _, step, shards, into: read_shards(
            storage, open_checkpoint(storage, step), shards, into=into
        )
    )
    return Held(tier, Source("s3", "", uri, STEP), flip)


def break_bytes(path: Path, offset: int) -> None:
    with open(path, "r+b") as raw:
        raw.seek(offset)
        old = raw.read(2)
        raw.seek(offset)
        raw.write(bytes([old[0] ^ 0x40, old[1]]))


def is_whole(shard: ShardId, piece: ShardAnswer) -> bool:
    assert isinstance(piece, torch.Tensor)
    expected = unit(CASE.layout.tensors[shard.tensor], shard, STEP).contiguous()
    return piece.contiguous().view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8))


def test_gives_each_shard_once_and_whole(held: Held) -> None:
    for asked in (SHARDS, SHARDS[2:4], SHARDS[-1:]):
        got = []
        for shard, piece in held.tier.read(held.source, asked, SUMS, {}):
            assert is_whole(shard, piece), "valid when it is given"
            got.append(shard)
        assert sorted(got) == asked


def test_never_gives_a_flipped_shard(held: Held) -> None:
    """Either that shard is an error among the others, or the source breaks off: never the wrong
    bytes.
    """
    held.flip(SHARDS[3])
    given, refused = collect(held.tier, held.source)
    assert SHARDS[3] not in given
    assert refused, "and it says so"


def test_what_counts_is_the_schedules_checksum_and_not_the_holders(held: Held) -> None:
    """Bytes that agree with what their own holder recorded, but not with what the reader was
    told.
    """
    other = {**SUMS, SHARDS[2]: SUMS[SHARDS[3]]}
    given = {
        shard
        for shard, piece in held.tier.read(held.source, SHARDS, other, {})
        if isinstance(piece, torch.Tensor)
    }
    assert given == set(SHARDS) - {SHARDS[2]}


def test_an_absent_step_gives_nothing(held: Held) -> None:
    source = held.source
    gone = Source(source.kind, source.node, source.name, STEP + 1, source.generation)
    given, refused = collect(held.tier, gone)
    assert not given
    assert refused


def test_an_absent_shard_does_not_become_another(held: Held) -> None:
    absent = ShardId("param/none", 0)
    given, refused = collect(held.tier, held.source, [absent, *SHARDS[:2]])
    assert given <= set(SHARDS[:2])
    assert refused


def test_reading_may_be_stopped_early_and_begun_again(held: Held) -> None:
    reading = held.tier.read(held.source, SHARDS, SUMS, {})
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    given, refused = collect(held.tier, held.source)
    assert given == set(SHARDS)
    assert not refused


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tier_is_faulty_at_its_call_only(held: Held, fault: str) -> None:
    """The harness itself: what the restore's tests rely on."""
    tier = FaultyTier(held.tier, fault, at=3)
    given, refused = collect(tier, held.source)
    assert refused or fault == "truncate"
    assert len(given) == (2 if fault in ("fail", "stall") else len(SHARDS) - 1)
    assert collect(tier, held.source)[0] == set(SHARDS)


def collect(
    tier: Tier, source: Source, asked: list[ShardId] | None = None
) -> tuple[set[ShardId], list[Exception]]:
    given, refused = set(), []
    try:
        for shard, piece in tier.read(source, asked or SHARDS, SUMS, {}):
            if isinstance(piece, RecoveryError):
                refused.append(piece)
            elif piece.nbytes == CASE.layout.shard_bytes(shard):
                assert is_whole(shard, piece)
                given.add(shard)
    except (RecoveryError, OSError) as error:
        refused.append(error)
    return given, refused
