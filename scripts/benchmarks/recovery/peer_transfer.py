"""How fast a restore reads another node's host memory: 1 GB over loopback, checked, beside bare
`sendfile` and `recv_into`.

    python -m scripts.benchmarks.recovery.peer_transfer --out
    scripts/benchmarks/results/peer_transfer.json

The server is a process of its own, as an agent is; its snapshot lies in /dev/shm. Bare: the same
file, four connections, no frames, no checks, in Python, in the same run, so that other load on the
machine meets both. "restore" is `recovery.transfer.restore` as a worker calls it, with the making
of its new memory; "read" is what its four streams do, into memory that is there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers.pool import ClientPool
from recovery.peers.server import ShardServer
from recovery.state.layout import Layout, ShardId, TensorSpec
from recovery.state.slices import shard_views
from recovery.transfer.restore import Access, RestoreTask, restore
from recovery.transfer.schedule import schedule
from recovery.transfer.tiers import PeerTier
from scripts.benchmarks.provenance import provenance

TOKEN, STREAMS, TENSORS = "bench", 4, 16
PIECE = 4 << 20


def layout_of(num_bytes: int) -> Layout:
    rows = num_bytes // TENSORS // 4 // 1024
    specs = [
        TensorSpec(
            f"param/t{n:02d}", (rows, 1024), "float32", 0, tuple(range(0, rows + 1, rows // 8))
        )
        for n in range(TENSORS)
    ]
    shards = frozenset(shard for spec in specs for shard in spec.shards)
    return Layout({spec.name: spec for spec in specs}, {"n0/0": shards})


def state_of(layout: Layout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(spec.shape, generator=generator) for name, spec in layout.tensors.items()
    }


def serve(directory: str, num_bytes: int, pipe: Any) -> None:
    """The agent: a shard server, and a listener that sends a quarter of the file to each bare
    connection.
    """
    torch.set_num_threads(1)
    store = AgentStore(Path(directory, "memory"), Path(directory, "disk"), "n0")
    (path,) = Path(directory, "memory").glob("*.snapshot")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=_serve_bare, args=(listener, path, num_bytes // STREAMS), daemon=True
    ).start()
    with ShardServer(store, TOKEN, host="127.0.0.1") as server:
        pipe.send((server.port, listener.getsockname()[1]))
        while pipe.recv() is not None:
            pipe.send(time.process_time())


def _serve_bare(listener: socket.socket, path: Path, length: int) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_bare, args=(connection, path, length), daemon=True).start()


def _send_bare(connection: socket.socket, path: Path, length: int) -> None:
    with connection, path.open("rb", buffering=0) as file:
        offset = int.from_bytes(connection.recv(1), "little") * length
        sent = 0
        while sent < length:
            sent += os.sendfile(
                connection.fileno(), file.fileno(), offset + sent, min(PIECE, length - sent)
            )


def bare(port: int, memory: memoryview) -> None:
    length = len(memory) // STREAMS

    def stream(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(bytes([number]))
            view, got = memory[number * length : (number + 1) * length], 0
            while got < length:
                got += connection.recv_into(view[got:], min(PIECE, length - got))

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(stream, range(STREAMS)))


def measure(name: str, action: Any, num_bytes: int, pipe: Any) -> dict[str, float]:
    def theirs() -> float:
        pipe.send("cpu")
        return float(pipe.recv())

    server, own, began = theirs(), time.process_time(), time.perf_counter()
    action()
    seconds, own, server = time.perf_counter() - began, time.process_time() - own, theirs() - server
    giga = num_bytes / 1e9
    print(
        f"{name:8} {giga / seconds:6.2f} GB/s, CPU s a GB: reader {own / giga:.2f}, server"
        f" {server / giga:.2f}"
    )
    return {
        "gb_per_s": giga / seconds,
        "reader_cpu_s_per_gb": own / giga,
        "server_cpu_s_per_gb": server / giga,
    }


class _Setting:
    def __init__(self, directory: str, num_bytes: int, port: int) -> None:
        self.layout = layout_of(num_bytes)
        store = AgentStore(Path(directory, "memory"), Path(directory, "disk"), "n0")
        (self.holding,) = store.inventory()
        self.agents = {"n0": ("127.0.0.1", port, TOKEN)}
        self.own = AgentStore(Path(directory, "m1"), Path(directory, "d1"), "n1")
        after = Layout(self.layout.tensors, {"n1/0": self.layout.shards})
        self.after, self.plan = (
            after,
            schedule(after, {"n1/0": "n1"}, [self.holding], self.holding.step),
        )
        self.memory = {name: torch.zeros(spec.shape) for name, spec in self.layout.tensors.items()}
        views = shard_views(self.layout.tensors, self.layout.shards, self.memory)
        self.into = {
            shard: view.view(-1).view(torch.uint8).numpy().data for shard, view in views.items()
        }

    def read(self) -> None:
        pool = ClientPool()
        tier = PeerTier(self.agents, pool, 30.0)
        shards = sorted(self.into)
        parts = [shards[start : start + 8] for start in range(0, len(shards), 8)]

        def stream(part: list[ShardId]) -> int:
            given = tier.read(self.holding.source, part, self.holding.checksums, self.into)
            return sum(isinstance(data, torch.Tensor) for _, data in given)

        with pool, ThreadPoolExecutor(STREAMS) as threads:
            assert sum(threads.map(stream, parts)) == len(shards)

    def restore(self) -> None:
        access = Access(self.own, self.agents, lambda *_: [], 30.0)
        done = restore(RestoreTask(self.plan, "n1/0", self.after, None), None, access)  # type: ignore[arg-type]
        assert not done.failures


def run(num_bytes: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"bare": [], "read": [], "restore": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="autohet-bench-") as directory:
        layout = layout_of(num_bytes)
        with_state = state_of(layout)
        writer = SnapshotWriter(Path(directory, "memory"), "n0/0", layout, 1)
        writer.start(1, with_state)
        writer.wait()
        writer.close()
        for spare in sorted(Path(directory, "memory").glob("*.snapshot"))[1:]:
            spare.unlink()
        near, far = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(directory, layout.num_bytes, far)
        )
        process.start()
        port, bare_port = near.recv()
        setting = _Setting(directory, num_bytes, port)
        target = torch.zeros(layout.num_bytes, dtype=torch.uint8).numpy().data
        actions = {
            "bare": lambda: bare(bare_port, target),
            "read": setting.read,
            "restore": setting.restore,
        }
        for _ in range(repeats):
            for name, action in actions.items():
                found[name].append(measure(name, action, layout.num_bytes, near))
        assert all(torch.equal(setting.memory[name], tensor) for name, tensor in with_state.items())
        near.send(None)
        process.join(10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = run(arguments.bytes, arguments.repeats)
    best = {name: max(run["gb_per_s"] for run in runs) for name, runs in found.items()}
    ratios = [
        read["gb_per_s"] / plain["gb_per_s"]
        for read, plain in zip(found["read"], found["bare"], strict=True)
    ]
    summary = {
        "best_gb_per_s": best,
        "read_over_bare_median": statistics.median(ratios),
        "runs": found,
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "runs"}))
    if arguments.out:
        arguments.out.write_text(
            json.dumps({**provenance(), "bytes": arguments.bytes, **summary}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
