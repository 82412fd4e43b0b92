"""Bare copies: what this machine can move between the same places at the same time.

They move the same bytes without any of the product. Every flow of a schedule (bytes from a node,
from storage, or from a disk to a worker) is sent by `sendfile` from a file of host memory and
received into new memory. What stays with a worker in another tensor is copied there; nothing is
framed, checked or ordered. The time is that of the links or of the processor's copies, whichever is
longer, so it bounds what a restore could reach on this machine.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from recovery.state.layout import Layout
from recovery.transfer.schedule import TransferSchedule

FILE_BYTES = 128 << 20
PIECE_BYTES = 4 << 20
STREAMS = 4
S3 = "s3"


@dataclass(frozen=True)
class Flow:
    """Bytes that one worker gets from one place.

    `source` is a node, or S3. `kind` is "network", the worker's own node's "disk" or "memory", or
    "kept": its own, in another tensor.
    """

    kind: str
    source: str
    num_bytes: int


def flows_of(
    worker: str, transfers: TransferSchedule, before: Layout, layout: Layout
) -> list[Flow]:
    """Sum the bytes that the schedule moves to `worker`, or copies in it, by their source."""
    part = transfers.parts.get(worker)
    if part is None:
        return []
    found: dict[tuple[str, str], int] = {}
    for fetch in (*part.fetches, *part.message_fallbacks):
        source = fetch.sources[0]
        size = sum(layout.shard_bytes(shard) for shard in fetch.shards)
        node = S3 if source.kind == "s3" else source.node
        if node != part.node:
            kind = "network"
        else:
            kind = "disk" if source.kind == "disk" else "memory"
        found[kind, node] = found.get((kind, node), 0) + size
    if part.keep:
        then = before.units_of(worker)
        now = layout.units_of(worker)
        copied = 0
        for shard in part.keep:
            # a tensor with the same units stays in place
            if then[shard.tensor] != now[shard.tensor]:
                copied += layout.shard_bytes(shard)
        found["kept", part.node] = copied
    return [Flow(kind, source, size) for (kind, source), size in found.items() if size]


class BareSender:
    """Server of bytes of a file in host memory, as many as a client asks for.

    It owns its listener and threads, one per connection.
    """

    def __init__(self, directory: Path | str, host: str) -> None:
        self._file = open(Path(directory, f"bare.{os.getpid()}"), "w+b", buffering=0)  # noqa: SIM115
        os.unlink(self._file.name)
        block = os.urandom(1 << 20)
        for _ in range(FILE_BYTES >> 20):
            self._file.write(block)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="bare sender", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._send, args=(connection,), name="bare stream", daemon=True
            ).start()

    def _send(self, connection: socket.socket) -> None:
        with connection:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            at = 0
            while left:
                piece = min(PIECE_BYTES, left, FILE_BYTES - at)
                sent = os.sendfile(connection.fileno(), self._file.fileno(), at, piece)
                left -= sent
                at = (at + sent) % FILE_BYTES

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._file.close()


def receive_flows(
    flows: list[Flow], senders: Mapping[str, tuple[str, int]], scratch: Path | None
) -> float:
    """Return the seconds that all of a worker's flows take together.

    `scratch` is a file on its disk, of any content, read in place of its copies there.
    """
    keeps_some = any(flow.kind == "kept" for flow in flows)
    own = torch.ones(FILE_BYTES if keeps_some else 0, dtype=torch.uint8)
    parts = []
    for flow in flows:
        streams = max(1, STREAMS // len(flows))
        for size in _split(flow.num_bytes, streams):
            parts.append((flow, size))

    began = time.monotonic()
    with ThreadPoolExecutor(max(1, len(parts))) as pool:
        jobs = [pool.submit(_receive, flow, size, senders, scratch, own) for flow, size in parts]
        kept = [job.result() for job in jobs]
    seconds = time.monotonic() - began
    del kept
    return seconds


def _split(num_bytes: int, count: int) -> list[int]:
    """Return the bytes of each stream; the last one has the rest, and none is empty."""
    each = num_bytes // count
    sizes = [each] * (count - 1)
    sizes.append(num_bytes - sum(sizes))
    return [size for size in sizes if size]


def _receive(
    flow: Flow,
    size: int,
    senders: Mapping[str, tuple[str, int]],
    scratch: Path | None,
    own: torch.Tensor,
) -> torch.Tensor:
    target = torch.empty(size, dtype=torch.uint8)
    if flow.kind == "kept":
        for piece in target.split(FILE_BYTES):
            piece.copy_(own[: piece.numel()])
        return target
    memory = target.numpy().data
    if flow.kind == "disk" and scratch is not None:
        with scratch.open("rb", buffering=0) as file:
            got = 0
            while got < len(memory):
                count = file.readinto(memory[got : got + PIECE_BYTES])
                got += count or 0
                # the file may be shorter than the flow: read it again
                if not count:
                    file.seek(0)
        return target
    with socket.create_connection(senders[flow.source], 60.0) as connection:
        connection.sendall(size.to_bytes(8, "little"))
        got = 0
        while got < size:
            count = connection.recv_into(memory[got:], min(PIECE_BYTES, size - got))
            if count == 0:
                break
            got += count
    if got < size:
        raise ConnectionError(f"{flow.source} gave {got} of {size} bare bytes")
    return target
