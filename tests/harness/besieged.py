"""The servers and files of a run under attack, with members that go on using them: the rendezvous
store, the report channel, a peer's server with its snapshot directories, and what is read of
manifests, journals and queues.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from autohet.driver.ray.reports.report_server import ReportServer
from autohet.driver.ray.store.store_server import StoreServer
from autohet.driver.sources.ec2_events import parse_events
from autohet.runtime.process.report_channel import AGE, FRAME, NONCE_BYTES, ReportSender
from autohet.runtime.process.report_channel import frame_mac as report_mac
from autohet.runtime.process.store_tunnel import (
    HELLO,
    StoreTunnel,
    generation_secret,
    handshake_mac,
)
from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    commit_checkpoint,
    write_shards,
)
from recovery.checkpoint.journal import Journal, entry_name
from recovery.checkpoint.manifest import decode_manifest
from recovery.errors import RecoveryError
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_format import FileMap
from recovery.peers import protocol
from recovery.peers.client import ShardClient
from recovery.peers.server import ShardServer
from recovery.state.ancestry import Descent
from recovery.state.layout import Layout, ShardId, TensorSpec, assign_writers
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage
from tests.harness.hostile_user import Targets, hostile_user
from tests.harness.notice_sources import ACCOUNT, ec2_event
from tests.harness.waits import HANG_S

HOST = "127.0.0.1"
SPEC = TensorSpec("w", (64,), "float32", None, (0, 1))
SHARD = ShardId("w", 0)
RIGHT = b"the right address"
WEIGHTS = bytes(range(1, 129)) * 2
TOKEN = "correct horse"


def besiege(directory: Path, num_frames: int, num_idle: int, seed: int = 0) -> dict[str, Any]:
    """Run one attack beside members at work; returns figures, among them every failure."""
    with hostile_user() as user, ExitStack() as stack:
        fort = stack.enter_context(Fort.standing(directory))
        before = _memory_kb(), _descriptors()
        user.attack(fort.targets(num_frames, num_idle, seed))
        deadline = time.monotonic() + HANG_S
        rounds = 0
        most_descriptors = 0
        slowest = 0.0
        while not user.has_ended:
            assert time.monotonic() < deadline, "the attack does not end"
            began = time.monotonic()
            fort.work()
            slowest = max(slowest, time.monotonic() - began)
            most_descriptors = max(most_descriptors, _descriptors())
            rounds += 1
        attack = user.result(5)
        fort.work()
        return {
            "attack": attack,
            "members": {
                "rounds_of_work": rounds,
                "failures": fort.failures,
                "slowest_round_s": round(slowest, 3),
            },
            "memory_grown_kb": _memory_kb() - before[0],
            "descriptors_at_most": most_descriptors - before[1],
            "documents": damage_documents(directory / "documents", num_frames // 4, seed),
        }


class Fort:
    """Owns three servers and one member of each."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.failures: list[str] = []
        self._directory = directory
        self._key = secrets.token_bytes(32)
        self._store_server = StoreServer(HOST, self._key)
        stack.callback(self._store_server.close)
        tunnel = StoreTunnel(
            HOST, self._store_server.port, 1, generation_secret(self._key, 1), 10.0
        )
        stack.callback(tunnel.close)
        limit = timedelta(seconds=HANG_S)
        self._store = TCPStore(tunnel.host, tunnel.port, is_master=False, timeout=limit)
        self._store.set("addr0", RIGHT.decode())
        self._reports = ReportServer(HOST, 0.1)
        stack.callback(self._reports.close)
        self._address = self._reports.expect("worker")
        self._value = [0]
        sender = ReportSender(self._address, lambda: self._value[0], lambda old, new: old != new)
        stack.callback(sender.close)
        self._snapshots = directory / "autohet-0" / "run" / "node"
        _write_snapshot(self._snapshots / "a.snapshot")
        agent = AgentStore(self._snapshots, directory / "autohet-0" / "disk", "n")
        stack.callback(agent.close)
        self._agent = agent
        self._peers = ShardServer(agent, TOKEN, host=HOST)
        stack.callback(self._peers.close)

    @staticmethod
    @contextmanager
    def standing(directory: Path) -> Iterator[Fort]:
        with ExitStack() as stack:
            yield Fort(directory, stack)

    def targets(self, num_frames: int, num_idle: int, seed: int) -> Targets:
        ports = {
            "store": self._store_server.port,
            "reports": self._address.port,
            "peers": self._peers.port,
        }
        captures = {
            "store": store_captures(self._key),
            "reports": self._report_captures(),
            "peers": peer_captures(TOKEN),
        }
        directories = [self._snapshots, self._snapshots.parent, self._directory / "autohet-0"]
        return Targets(
            ports=ports,
            captures=captures,
            directories=[str(path) for path in directories],
            secrets=[RIGHT.hex(), WEIGHTS[:64].hex()],
            num_frames=num_frames,
            num_idle=num_idle,
            seed=seed,
        )

    def work(self) -> None:
        """One round of what members do, each over a new connection where it makes some."""
        self._attempt("store", self._use_store)
        self._attempt("peers", self._use_peers)
        self._attempt("reports", self._use_reports)
        self._attempt("directories", self._use_directories)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001
            self.failures.append(f"{what}: {type(error).__name__}: {error}")

    def _use_store(self) -> None:
        assert self._store.get("addr0") == RIGHT
        secret = generation_secret(self._key, 1)
        tunnel = StoreTunnel(HOST, self._store_server.port, 1, secret, 10.0)
        store = TCPStore(
            tunnel.host, tunnel.port, is_master=False, timeout=timedelta(seconds=HANG_S)
        )
        assert store.get("addr0") == RIGHT
        tunnel.close()

    def _use_peers(self) -> None:
        (holding,) = self._agent.inventory()
        with ShardClient(HOST, self._peers.port, TOKEN, 20) as client:
            ((_, data),) = client.read(holding.source, [SHARD], holding.checksums or {})
            assert bytes(data) == WEIGHTS  # type: ignore[arg-type]

    def _use_reports(self) -> None:
        self._value[0] += 1
        deadline = time.monotonic() + HANG_S
        while True:
            news = self._reports.take()[1]
            assert all(each.name == self._address.name for each in news)
            if any(each.value == self._value[0] for each in news):
                return
            assert time.monotonic() < deadline, "no report"
            time.sleep(0.002)

    def _use_directories(self) -> None:
        assert len(self._agent.inventory()) == 1
        assert self._agent.problems == ()

    def _report_captures(self) -> list[str]:
        nonce = bytes(NONCE_BYTES)
        key = self._address.key
        name = self._address.name.encode()
        news = AGE.pack(0.0) + b"\x80\x04K\x07."
        frames = b""
        for place, (number, payload) in enumerate([(0, name), (99, news)]):
            mac = report_mac(key, nonce, place, number, payload)
            frames += FRAME.pack(len(payload), number, mac) + payload
        return [frames.hex(), frames[: FRAME.size + len(name)].hex()]


def store_captures(run_key: bytes) -> list[str]:
    """What a member of generation 1 sent to the store over an earlier connection."""
    old = bytes(16)
    own = bytes(range(16))
    secret = generation_secret(run_key, 1)
    hello = HELLO.pack(1, own, handshake_mac(secret, "client", old, own))
    key = b"/addr0"
    get = b"\x03" + len(key).to_bytes(8, "little") + key
    overwrite = b"\x01" + len(key).to_bytes(8, "little") + key + (5).to_bytes(8, "little")
    return [(hello + get).hex(), (hello + overwrite + b"wrong").hex(), (get * 3).hex()]


def peer_captures(token: str) -> list[str]:
    """What a peer with the token sent over an earlier connection."""
    own = bytes(protocol.NONCE_BYTES)
    old = bytes(protocol.NONCE_BYTES)
    mac = protocol.mac_of(token, "client", old, own)
    hello = protocol.HELLO.pack(protocol.VERSION, own, mac)
    request = b"\x20\x00\x00\x00" + os.urandom(32)
    return [hello.hex(), (hello + request).hex()]


def _write_snapshot(path: Path) -> None:
    writer = SnapshotFileWriter(path, FileMap.of("n/0", {"w": SPEC}, [SHARD]))
    extent = writer.map.extents[SHARD]
    writer.buffer[extent.offset : extent.offset + extent.num_bytes] = WEIGHTS
    writer.begin()
    writer.commit(4, 1)
    writer.close()


def damage_documents(directory: Path, num_cases: int, seed: int) -> dict[str, Any]:
    """Mutated manifests, journal entries, events and snapshots: each is the same as before, or
    refused by an error of its kind. Returns counts, and every other error.
    """
    draw = random.Random(seed)
    manifest, journal, entry = _checkpoint(directory / "storage")
    event = ec2_event("EC2 Spot Instance Interruption Warning", "i-1", "e").encode()
    snapshots = directory / "snapshots"
    _write_snapshot(snapshots / "a.snapshot")
    whole = (snapshots / "a.snapshot").read_bytes()

    def read_journal(data: bytes) -> None:
        entry.write_bytes(data)
        journal().read()

    def read_snapshots(data: bytes) -> None:
        (snapshots / "a.snapshot").write_bytes(data)
        store = AgentStore(snapshots, directory / "none", "n")
        store.inventory()
        store.close()

    readers: dict[str, tuple[bytes, Callable[[bytes], object], tuple[type[Exception], ...]]] = {
        "manifest": (manifest, lambda data: decode_manifest(data, "m"), (RecoveryError,)),
        "journal": (entry.read_bytes(), read_journal, (RecoveryError, StorageError)),
        "queue": (event, _read_event, (ValueError,)),
        "snapshot": (whole, read_snapshots, ()),
    }
    counts: Counter[str] = Counter()
    others: list[str] = []
    for number in range(num_cases):
        name = sorted(readers)[number % len(readers)]
        data, read, expected = readers[name]
        try:
            read(_damaged(data, draw))
            counts[f"{name} read"] += 1
        except expected:
            counts[f"{name} refused"] += 1
        except Exception as error:  # noqa: BLE001
            others.append(f"{name}: {type(error).__name__}: {error}")
    return {"counts": dict(counts), "other_errors": others}


def _read_event(data: bytes) -> None:
    parse_events(data.decode(errors="replace"), time.monotonic(), time.time(), ACCOUNT)


def _damaged(data: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(3)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        return data + draw.randbytes(draw.randrange(1, 100))
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(min(len(changed), 8192))] = draw.randrange(256)
    return bytes(changed)


def _checkpoint(directory: Path) -> tuple[bytes, Callable[[], Journal], Path]:
    """A manifest, a journal to open anew, and the path of its entry."""
    storage = open_storage(str(directory))
    spec = TensorSpec("param/w", (6, 2), "float32", 0, (0, 3, 6))
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    state = {spec.name: torch.ones(spec.shape)}
    receipt = write_shards(
        CheckpointPart(storage, 10, "a/0"), state, layout, assign_writers(layout)["a/0"]
    )
    commit_checkpoint(
        storage, 10, layout, [receipt], CheckpointFacts({}, {"model_type": "gpt2"}, job="tiny")
    )
    Journal(storage, "driver").claim(
        Descent(generation=1, parent=None, first_step=0, driver="driver")
    )
    (manifest,) = directory.rglob("manifest.json")
    return (
        manifest.read_bytes(),
        lambda: Journal(open_storage(str(directory)), "other"),
        directory / entry_name(1),
    )


def _memory_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
