"""Reads of a committed checkpoint: parallel, coalesced ranged reads with bounded memory.

Every shard is checked.
"""

from __future__ import annotations

import io
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from recovery.checkpoint.commit import checkpoint_uri, open_checkpoint, wrong_files
from recovery.checkpoint.dcp import METADATA_NAME, dcp_metadata_problem
from recovery.checkpoint.errors import CheckpointCorrupt, ManifestInvalid
from recovery.checkpoint.item import NO_CRC32, envelope
from recovery.checkpoint.manifest import Manifest, StoredShard
from recovery.checkpoint.pieces import PIECE_BYTES, Pieces, SpanMemory
from recovery.checkpoint.retention import reading_checkpoint
from recovery.checkpoint.write import step_prefix
from recovery.state.checksum import BLOCK_BYTES, checksum
from recovery.state.layout import ShardId
from recovery.state.slices import TORCH_DTYPES
from recovery.storage.contents import get_pieces
from recovery.storage.errors import ObjectMissing, ObjectTruncated
from recovery.storage.protocol import Storage
from recovery.storage.tensor_payload import tensor_bytes

READ_MEMORY_BYTES = 512 << 20
COALESCE_GAP_BYTES = 64 << 10
"""Largest gap in bytes between neighbours that one request fetches.

An S3 request costs about 100 ms, 64 KiB a thousandth of that.
"""
_GAP = memoryview(bytearray(COALESCE_GAP_BYTES))
"""Memory for what lies between two shards, which nobody looks at."""
_LOADED_BYTES = 64 << 10
"""Largest shard that `verify` keeps, to load it by `torch.load`."""


@dataclass(frozen=True)
class FileSpan:
    """A contiguous range of one data file, and the shards that lie in it whole."""

    file: str
    start: int
    end: int
    shards: tuple[StoredShard, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def plan_reads(
    manifest: Manifest,
    ids: Iterable[ShardId],
    span_bytes: int,
    gap_bytes: int = COALESCE_GAP_BYTES,
    whole_items: bool = False,
) -> list[FileSpan]:
    """Return the fewest ranges that hold `ids`.

    Neighbours merge up to `span_bytes`; a larger shard is a span alone. Spans are in the order of
    each one's first shard, across files: the parts of several writers are next to each other in it.

    Pure. `whole_items` covers the items that stock PyTorch reads, not just their raw elements.

    Raises:
        KeyError: the manifest has no such shard.
    """
    wanted = [manifest.locations[shard] for shard in set(ids)]
    wanted.sort(key=lambda place: (place[0], place[1].offset))

    spans: list[FileSpan] = []
    for file, stored in wanted:
        if whole_items:
            start = stored.item_offset
            end = stored.item_end
        else:
            start = stored.offset
            end = stored.end

        if spans and spans[-1].file == file:
            last = spans[-1]
            is_near = 0 <= start - last.end <= gap_bytes
            if is_near and end - last.start <= span_bytes:
                spans[-1] = FileSpan(file, last.start, end, (*last.shards, stored))
                continue
        spans.append(FileSpan(file, start, end, (stored,)))
    return sorted(spans, key=lambda span: min(stored.shard for stored in span.shards))


def read_shards(
    storage: Storage,
    manifest: Manifest,
    ids: Iterable[ShardId] | None = None,
    *,
    max_memory_bytes: int = READ_MEMORY_BYTES,
    requests: Executor | None = None,
    into: Mapping[ShardId, memoryview] | None = None,
) -> Iterator[tuple[ShardId, torch.Tensor]]:
    """Yield each shard of `ids` (all when None) with its checked, contiguous CPU tensor.

    Tensors have the unit's shape and come in about the shards' order. Up to
    `storage.options.concurrency` requests are in flight while the caller works, in threads of this
    call or in `requests`, which several readers may share. At most `max_memory_bytes` (or one
    shard, if that is larger) are read ahead of the caller.

    A shard named in `into` is in that memory (of the shard's size) once it was yielded; before, the
    memory holds anything. Each other tensor owns its memory. Close the iterator to stop early.

    Raises:
        CheckpointCorrupt: a shard's bytes are wrong, also when read a second time. StorageError:
        the storage failed.
    """
    reading = _Reading(max_memory_bytes, whole_items=False, requests=requests)
    found = _read(storage, manifest, ids, into or {}, reading)
    # Closed also where this raises: whoever keeps the error keeps no threads.
    with closing(found):
        for shard, outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome is not None
            spec = manifest.specs[shard.tensor]
            tensor = _over(outcome).view(TORCH_DTYPES[spec.dtype])
            # No reference stays here while the caller works.
            del outcome
            yield shard, tensor.view(spec.unit_shape(shard.unit))


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify` for one checkpoint; `problems` is empty if all is well."""

    step: int
    uri: str
    num_shards: int
    num_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    storage: Storage, step: int | None = None, *, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Verify every shard of the checkpoint of `step` (the newest when None).

    Each shard is checked by our checksums and as stock PyTorch would read it. Damage is reported,
    not raised; `progress(done_bytes, total_bytes)` is called after each shard.

    Retention leaves the checkpoint alone meanwhile. A read-only storage has no lease: problems of a
    checkpoint that was removed meanwhile are not damage there.

    Raises:
        CheckpointMissing, ManifestInvalid: there is nothing to verify (any more). StorageError: the
        storage failed.
    """
    with reading_checkpoint(storage, step) as manifest:
        prefix = f"{storage.uri}/{step_prefix(manifest.step)}"
        wrong = wrong_files(storage, manifest)
        problems = [
            f"{prefix}{name} is missing or has not the size that was committed" for name in wrong
        ]
        problems += _metadata_problems(storage, manifest)
        present = []
        for shard, (name, stored) in manifest.locations.items():
            if stored.item_end <= wrong.get(name, stored.item_end):
                present.append(shard)
                continue
            reason = "it lies beyond the end of its file"
            problems.append(str(CheckpointCorrupt(prefix + name, shard, reason)))
        done = 0
        for shard, outcome in _read(storage, manifest, present, {}, _Reading(whole_items=True)):
            if isinstance(outcome, Exception):
                problems.append(str(outcome))
            done += manifest.locations[shard][1].num_bytes
            if progress:
                progress(done, manifest.num_bytes)
        if problems:
            # Raises where the checkpoint was removed meanwhile: that is no damage.
            open_checkpoint(storage, manifest.step)

    return VerifyReport(
        step=manifest.step,
        uri=checkpoint_uri(storage, manifest.step),
        num_shards=len(manifest.locations),
        num_bytes=manifest.num_bytes,
        problems=tuple(problems),
    )


def _metadata_problems(storage: Storage, manifest: Manifest) -> list[str]:
    name = step_prefix(manifest.step) + METADATA_NAME
    try:
        problem = dcp_metadata_problem(storage.get(name), manifest)
    except ObjectMissing:
        problem = "is missing"
    if not problem:
        return []
    return [f"{storage.uri}/{name} {problem}: stock PyTorch cannot load this checkpoint"]


@dataclass
class _Fetch:
    """Span in flight: its memory, the requests that fill it, and the results of its checks.

    `memory` is the span's from its start to its end, `shards` what of it each shard has. `items`
    has each whole item, without its elements where they are not kept, if stock PyTorch is to read
    it.
    """

    span: FileSpan
    memory: list[SpanMemory]
    shards: list[SpanMemory]
    items: list[memoryview]
    parts_left: int = 0
    parts: list[Future[None]] = field(default_factory=list)
    bad: dict[ShardId, CheckpointCorrupt] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class _Reading:
    """Way of reading shards: memory ahead of the caller, whole files or not, and the threads."""

    max_memory_bytes: int = READ_MEMORY_BYTES
    whole_items: bool = False
    requests: Executor | None = None


def _read(
    storage: Storage,
    manifest: Manifest,
    ids: Iterable[ShardId] | None,
    into: Mapping[ShardId, memoryview],
    reading: _Reading,
) -> Generator[tuple[ShardId, memoryview | CheckpointCorrupt | None]]:
    """Yield the memory of each shard, None where it was only checked."""
    wanted = manifest.locations if ids is None else ids
    part_bytes = storage.options.part_bytes
    concurrency = storage.options.concurrency
    spans = deque(plan_reads(manifest, wanted, part_bytes, whole_items=reading.whole_items))
    flying: deque[_Fetch] = deque()
    over = threading.Event()

    own: ThreadPoolExecutor | None = None
    if reading.requests is None:
        # With threads of others, whoever owns those ends what they wait for.
        storage = storage.until(over)
        own = ThreadPoolExecutor(concurrency, thread_name_prefix="shard-read")
    reader = _Reader(storage, manifest, reading.whole_items, into)

    # More would only be memory, which costs more than a read of it: all requests that there may
    # be are in flight.
    most = min(reading.max_memory_bytes, (concurrency + 1) * part_bytes)
    ahead = 0
    with own or nullcontext(reading.requests) as pool:
        assert pool is not None
        try:
            while spans or flying:
                while spans:
                    fits = ahead + spans[0].num_bytes <= most and len(flying) <= concurrency
                    # A span that is larger than the limit is read alone.
                    if flying and not fits:
                        break
                    span = spans.popleft()
                    flying.append(reader.start(pool, span))
                    ahead += span.num_bytes

                yield from reader.finish(flying[0])
                done = flying.popleft()
                ahead -= done.span.num_bytes
                # Its memory is free now, not only after the next span.
                del done
        finally:
            over.set()
            _call_off(flying)


def _call_off(fetches: Iterable[_Fetch]) -> None:
    """Cancel the requests that have not begun, and wait for the others.

    Each has the storage's own deadline.
    """
    parts = [part for fetch in fetches for part in fetch.parts]
    wait([part for part in parts if not part.cancel()])


def _over(memory: memoryview) -> torch.Tensor:
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, uri: str) -> torch.Tensor:
    """Allocate host memory for a tensor of the checkpoint at `uri`.

    Raises:
        ManifestInvalid: this machine has not enough memory.
    """
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, MemoryError, OverflowError, TypeError):
        size = math.prod(shape) * dtype.itemsize
        raise ManifestInvalid(
            uri,
            f"a tensor of shape {list(shape)} needs {size / 1e9:,.0f} GB of memory, more than this"
            " machine has; check the manifest, or use a larger machine",
        ) from None


def _give_back(reader: weakref.ref[_Reader], block: np.ndarray) -> None:
    """Give memory back to the reader that allocated it, if it still reads."""
    alive = reader()
    if alive is not None:
        alive.idle[block.nbytes].append(block)


class _Reader:
    """Fetches spans and checks what came; the last request of a span checks it, on its thread.

    Every shard is read straight into its own memory, the caller's if there is any.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        whole_items: bool,
        into: Mapping[ShardId, memoryview],
    ) -> None:
        self._into = into
        self.idle: dict[int, list[np.ndarray]] = defaultdict(list)
        """Memory that nobody uses any more, by its size."""
        self._storage = storage
        self._manifest = manifest
        self._whole_items = whole_items
        self._prefix = step_prefix(manifest.step)

    def start(self, pool: Executor, span: FileSpan) -> _Fetch:
        fetch = self._items(span) if self._whole_items else self._elements(span)
        ranges = list(pairwise(self._edges(span)))
        fetch.parts_left = len(ranges)
        for start, end in ranges:
            fetch.parts.append(pool.submit(self._part, fetch, start, end))
        return fetch

    def _edges(self, span: FileSpan) -> list[int]:
        """Return where the requests for a span begin and end: none cuts a block of a checksum.

        A span of several parts has one large shard, or ends with small ones.
        """
        stride = max(1, self._storage.options.part_bytes // BLOCK_BYTES) * BLOCK_BYTES
        first = span.shards[0]
        return [span.start, *range(first.offset + stride, first.end, stride), span.end]

    def _elements(self, span: FileSpan) -> _Fetch:
        """Allocate memory for each shard of a span, where the caller has given none."""
        fetch = _Fetch(span, [], [], [])
        position = span.start
        for stored in span.shards:
            given = self._into.get(stored.shard)
            memory = given.cast("B") if given else self._new_memory(stored.num_bytes)
            gap = SpanMemory(position, stored.offset, _GAP[: stored.offset - position])
            fetch.shards.append(SpanMemory.of_shard(stored.offset, stored.num_bytes, memory))
            fetch.memory += [gap, fetch.shards[-1]]
            position = stored.end
        return fetch

    def _items(self, span: FileSpan, all_kept: bool = False) -> _Fetch:
        """Allocate memory for each item of a span, but none for the elements of large ones."""
        fetch = _Fetch(span, [], [], [])
        position = span.start
        for stored in span.shards:
            is_kept = all_kept or stored.num_bytes <= _LOADED_BYTES
            item = memoryview(bytearray(stored.item_bytes - stored.num_bytes * (not is_kept)))
            first = stored.offset - stored.item_offset
            last = len(item) - (stored.item_end - stored.end)
            elements = item[first:last] if is_kept else None
            fetch.items.append(item)
            fetch.shards.append(SpanMemory.of_shard(stored.offset, stored.num_bytes, elements))
            fetch.memory += [
                SpanMemory(position, stored.item_offset, _GAP[: stored.item_offset - position]),
                SpanMemory(stored.item_offset, stored.offset, item[:first]),
                fetch.shards[-1],
                SpanMemory(stored.end, stored.item_end, item[last:]),
            ]
            position = stored.item_end
        return fetch

    def _new_memory(self, num_bytes: int) -> memoryview:
        """Return memory that comes back to this reader once nobody has a tensor over it."""
        size = num_bytes
        if num_bytes <= self._storage.options.part_bytes:
            # One size for many shards; pages that nobody touches are no memory.
            size = 1 << max(0, num_bytes - 1).bit_length()
        idle = self.idle[size]
        if idle:
            block = idle.pop()
        else:
            uri = f"{self._storage.uri}/{self._prefix}"
            block = empty_tensor((size,), torch.uint8, uri).numpy()
        lent = block[:num_bytes]
        weakref.finalize(lent, _give_back, weakref.ref(self), block).atexit = False
        return lent.data

    def finish(
        self, fetch: _Fetch
    ) -> Iterator[tuple[ShardId, memoryview | CheckpointCorrupt | None]]:
        """Wait for the span, at most for the storage's own deadline of each request."""
        for part in fetch.parts:
            part.result()

        for stored, raw in zip(fetch.span.shards, fetch.shards, strict=True):
            yield stored.shard, fetch.bad.get(stored.shard, raw.bytes)

    def _part(self, fetch: _Fetch, start: int, end: int) -> None:
        error = self._fetch_range(fetch, start, end)
        with fetch.lock:
            fetch.parts_left -= 1
            last = fetch.parts_left == 0
            if error:
                for stored in fetch.span.shards:
                    fetch.bad[stored.shard] = self._corrupt(fetch, stored, error)
        if last and not fetch.bad:
            self._check(fetch)

    def _fetch_range(self, fetch: _Fetch, start: int, end: int) -> str:
        """Read a part of a span into its memory; return the problem, or ""."""
        name = self._prefix + fetch.span.file
        scratch = self._new_memory(PIECE_BYTES) if self._whole_items else None
        try:
            pieces = Pieces(fetch.memory, start, end, scratch)
            get_pieces(self._storage, name, start, end - start, pieces)
        except (ObjectMissing, ObjectTruncated) as error:
            return error.reason
        return ""

    def _check(self, fetch: _Fetch) -> None:
        """Check every shard; read wrong ones once more.

        The transfer may have been at fault and not the storage.
        """
        span = fetch.span
        if not any(self._problem(fetch, index) for index in range(len(span.shards))):
            return

        again = self._items(span, all_kept=True) if self._whole_items else fetch
        errors = [self._fetch_range(again, *edges) for edges in pairwise(self._edges(span))]
        error = next(filter(None, errors), "")
        for index, stored in enumerate(span.shards):
            problem = error or self._problem(again, index)
            if problem:
                fetch.bad[stored.shard] = self._corrupt(fetch, stored, problem)

    def _problem(self, fetch: _Fetch, index: int) -> str:
        stored = fetch.span.shards[index]
        found = fetch.shards[index].checksum()
        if found != stored.checksum:
            return f"its checksum is {found:#018x}, not the recorded {stored.checksum:#018x}"
        if fetch.items:
            return self._item_problem(fetch.items[index], stored)
        return ""

    def _item_problem(self, item: memoryview, stored: StoredShard) -> str:
        """Check that stock PyTorch loads the same tensor; return the problem, or "".

        An item without its elements is right if all around them is as it was written.
        """
        spec = self._manifest.specs[stored.tensor]
        shape = spec.unit_shape(stored.unit)
        if len(item) < stored.item_bytes:
            wrap = envelope(spec.dtype, shape, stored.num_bytes, stored.crc32 or NO_CRC32)
            return "" if item == wrap.prefix + wrap.suffix else "it is wrapped otherwise"
        try:
            tensor = torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001
            return f"torch.load cannot read it ({type(error).__name__}: {str(error)[:100]})"

        if tensor.shape != shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
            return "torch.load makes another shape or dtype of it"
        if checksum(tensor_bytes(tensor)) != stored.checksum:
            return "torch.load makes other values of it"
        return ""

    def _corrupt(self, fetch: _Fetch, stored: StoredShard, reason: str) -> CheckpointCorrupt:
        uri = f"{self._storage.uri}/{self._prefix}{fetch.span.file}"
        return CheckpointCorrupt(uri, stored.shard, reason)
