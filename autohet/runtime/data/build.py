"""Build token datasets in a cache directory.

Each node builds a dataset once, in bounded memory. Parts of it outlive a builder that dies.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from autohet.runtime.data.dataset import (
    MARKS_FILE,
    TOKENS_FILE,
    TokenDataset,
    write_facts,
)
from autohet.runtime.data.marks import IDS
from autohet.runtime.data.marks_file import MarksWriter
from autohet.runtime.data.parts import (
    Finished,
    Part,
    PartCorrupt,
    PartsStore,
)
from autohet.runtime.data.recipe import Recipe, example_kind, tokenizer_of
from autohet.runtime.data.row_writer import RowWriter, token_dtype
from autohet.runtime.data.selection import describe_left_out
from autohet.runtime.data.sources import select_sources
from autohet.runtime.data.tokenization import BYTES_IDENTITY
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from recovery.storage.open import open_storage

logger = logging.getLogger("autohet.data")
LOCK_POLL_S = 0.05
PROGRESS_S = 1.0
Progress = Callable[[int, int], None]
"""Callback that gets the number of source bytes tokenized so far, and the total.

The builder calls it about once a second. An exception that it raises ends the preparation.
"""


def prepare_dataset(
    data: DataSection,
    sequence_length: int,
    *,
    progress: Progress = lambda done, total: None,
    shared: str | None = None,
) -> TokenDataset:
    """Return the token dataset of `data` from the cache; build it first if it is missing or stale.

    Called by any number of processes of a node. One process builds; the others wait at most
    `data.build_timeout_s`. A builder reuses the parts that a killed builder has committed. Nodes
    that share a cache directory share the work; so do nodes with one `shared` storage (a URI), to
    which each node publishes its tokenized parts.

    Raises:
        ConfigError: sources are missing, empty, unreadable or too short for one row.
    """
    recipe = Recipe.of(data, sequence_length)
    target = _target(recipe)
    dataset = _open_complete(target) or _build_once(target, recipe, progress, shared)
    if data.held_out:
        dataset = TokenDataset(target, data.held_out, data.reads_held_out)
    dataset.summary = describe_dataset(recipe, dataset)
    _log_once(dataset.summary)
    return dataset


@lru_cache(maxsize=64)
def _log_once(summary: str) -> None:
    """Log a line once in this process: a driver prepares its data before Ray starts, and after."""
    logger.info("Data: %s", summary)


def find_dataset(data: DataSection, sequence_length: int) -> TokenDataset | None:
    """Return the token dataset of `data` if it is built and current, else None.

    Returns None also if the sources cannot be read from this machine.
    """
    try:
        recipe = Recipe.of(data, sequence_length)
        return _open_complete(_target(recipe))
    except ConfigError:
        return None


def _target(recipe: Recipe) -> Path:
    directory = recipe.data.cache_root / "datasets"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create data.cache {directory}: {error.strerror}; name a directory there"
        ) from error
    return directory / f"tokens-{recipe.fingerprint[:24]}"


def _build_once(
    target: Path, recipe: Recipe, progress: Progress, shared: str | None
) -> TokenDataset:
    """Build the dataset, unless another process of the node has just built it."""
    lock = target.with_name(f"{target.name}.{socket.gethostname()}.lock")
    with _space_errors(target.parent), _lock(lock, recipe.data.build_timeout_s):
        dataset = _open_complete(target)
        if dataset is not None:
            return dataset
        return _Build(target, recipe, progress).run(shared)


def describe_dataset(recipe: Recipe, dataset: TokenDataset) -> str:
    """Describe in one line the source files, the resulting dataset and the data left out."""
    facts, selection = dataset.facts, recipe.selection
    formats = sorted({file.format for file in selection.files})
    size_mb = sum(file.size_bytes for file in selection.files) / 1e6
    left_out = []
    if selection.left_out:
        left_out.append(describe_left_out(selection.left_out))
    if facts.num_broken:
        size = f" ({facts.num_broken_bytes} bytes)" if facts.num_broken_bytes else ""
        left_out.append(f"{facts.num_broken} broken lines{size}")
    if facts.num_untargeted:
        left_out.append(f"{facts.num_untargeted} documents without a target")
    if facts.num_dropped_rows:
        left_out.append(f"{facts.num_dropped_rows} rows without a target")
    if facts.num_cut_tokens:
        left_out.append(
            f"{facts.num_cut_tokens} tokens of {facts.num_cut} documents longer than a row"
        )
    if facts.num_left_tokens:
        left_out.append(f"{facts.num_left_tokens} tokens at the end, which fill no row")
    marked = ""
    if facts.num_targets is not None:
        num_predicted = facts.num_rows * (facts.row_tokens - 1)
        targets = 100 * facts.num_targets / max(1, num_predicted)
        marked = f" ({targets:.0f}% of them targets, {facts.num_padding_tokens} padding)"
    if dataset.held_out_share:
        part = "held out for evaluation" if dataset.reads_held_out else "without those held out"
        marked += f", {part} ({dataset.held_out_share:.1%})"
    if facts.tokenizer == BYTES_IDENTITY:
        marked += ", each a UTF-8 byte (data.tokenizer: bytes)"
    return (
        f"{len(selection.files)} files ({', '.join(formats)}; {size_mb:.1f} MB) of"
        f" {', '.join(recipe.data.sources)}: {facts.num_documents} documents,"
        f" {facts.num_rows} rows of {facts.row_tokens} tokens{marked};"
        f" left out: {'; '.join(left_out) or 'nothing'}"
    )


def survey(data: DataSection) -> int:
    """Return the size of all source files in bytes, without reading the data.

    Raises:
        ConfigError: sources are missing or empty, or the tokenizer cannot be loaded.
    """
    example_kind(data, tokenizer_of(data))
    return sum(file.size_bytes for file in select_sources(data).files)


def _open_complete(target: Path) -> TokenDataset | None:
    if not target.exists():
        return None
    with contextlib.suppress(ConfigError, pa.ArrowInvalid):
        return TokenDataset(target)
    return None


@contextlib.contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold a file lock, which the kernel releases when its process ends.

    Raises:
        ConfigError: the lock is not free within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with open(path, "w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been building the dataset {path.stem} for"
                        f" {timeout_s:.0f} s; raise data.build_timeout_s, or stop it"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


@contextlib.contextmanager
def _space_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise ConfigError(
            f"cannot build the token dataset in {directory}: {error.strerror}; point data.cache to"
            " a directory with room and permission"
        ) from error


class _Build:
    """Build of one dataset by one process, which holds its node's lock."""

    def __init__(self, target: Path, recipe: Recipe, progress: Progress) -> None:
        self._target = target
        self._recipe = recipe
        self._progress = progress
        self._tokenizer = recipe.reading.tokenizer
        self._parts_by_source = recipe.parts_by_source()
        self._parts: list[Part] = []
        for parts in self._parts_by_source:
            self._parts += parts
        self._total = sum(part.num_bytes for part in self._parts)
        self._directory = target.with_name(f"{target.name}.parts")
        self._told_at = 0.0

    def run(self, shared: str | None) -> TokenDataset:
        storage = None
        if shared is not None:
            storage = open_storage(f"{shared.rstrip('/')}/{self._target.name}")
        # Marks take the two highest bits of 32.
        dtype: np.dtype[np.uint16] | np.dtype[np.uint32] = np.dtype(np.uint32)
        if not self._recipe.reading.marked:
            dtype = token_dtype(self._tokenizer.vocab_size)
        store = PartsStore(self._directory, dtype, storage)
        try:
            store.adopt(self._parts, self._recipe.reading)
            dataset = None
            while dataset is None:
                # None: a part was corrupt or is gone, and the next attempt makes it again.
                dataset = self._attempt(store)
        except ConfigError:
            # The data is wrong: once it is fixed, it is another dataset.
            store.end(failed=True)
            raise
        finally:
            if storage is not None:
                storage.close()
        store.end(failed=False)
        return dataset

    def _attempt(self, store: PartsStore) -> TokenDataset | None:
        try:
            finished = self._tokenize(store)
            if any(part.index not in finished for part in self._parts):
                # Another node is removing them, with the dataset made, or one that was corrupt.
                return _open_complete(self._target)
            return self._assemble(store, finished)
        except PartCorrupt:
            return None
        except FileNotFoundError:
            # The parts are gone: another node has made the dataset of them.
            dataset = _open_complete(self._target)
            if dataset is None:
                raise
            return dataset

    def _tokenize(self, store: PartsStore) -> Mapping[int, Finished]:
        """Return all parts, each tokenized here or by another builder.

        Each builder walks the parts in its own order, so that two builders seldom do the same part.
        """
        me = f"{socket.gethostname()} {os.getpid()}"

        def rank(part: Part) -> int:
            return xxh3_64_intdigest(f"{me} {part.index}".encode())

        for part in sorted(self._parts, key=rank):
            store.fetch()
            if part.index not in self._told(store):
                store.write(part, self._recipe.reading, lambda: self._tell_at_times(store))
        return self._told(store)

    def _tell_at_times(self, store: PartsStore) -> None:
        if time.monotonic() - self._told_at >= PROGRESS_S:
            self._told(store)

    def _told(self, store: PartsStore) -> Mapping[int, Finished]:
        """Return the finished parts, and report the progress."""
        finished = store.finished()
        self._told_at = time.monotonic()
        done = 0
        for part in self._parts:
            if part.index in finished:
                done += part.num_bytes
        self._progress(done, self._total)
        return finished

    def _assemble(self, store: PartsStore, finished: Mapping[int, Finished]) -> TokenDataset:
        """Write the rows of all parts and commit the dataset by one rename.

        If another node was faster, returns that node's dataset.

        Raises:
            PartCorrupt: a part's file does not hold the tokens that were committed.
        """
        # This process holds its node's lock, so no other of the node is building.
        prefix = f"{self._target.name}.building-{socket.gethostname()}"
        for leftover in self._target.parent.glob(f"{prefix}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        building = self._target.with_name(f"{prefix}-{os.getpid()}")
        building.mkdir()
        try:
            row_tokens = self._recipe.sequence_length + 1
            writer = RowWriter(building / TOKENS_FILE, self._tokenizer.vocab_size, row_tokens)
            with writer:
                self._write_rows(writer, store, finished, building)
            _require_rows(writer, self._recipe.data, self._recipe.sequence_length)
            write_facts(building, writer.facts(self._recipe))
            _sync(building)
            return self._commit(building)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _write_rows(
        self,
        writer: RowWriter,
        store: PartsStore,
        finished: Mapping[int, Finished],
        building: Path,
    ) -> None:
        packer = self._recipe.packer()
        with contextlib.ExitStack() as stack:
            if self._recipe.reading.marked:
                writer.packed = packer.counts
                writer.marks = stack.enter_context(MarksWriter(building / MARKS_FILE))
            for parts in self._parts_by_source:
                tokens = self._all_tokens(parts, store, finished, writer)
                if writer.marks is None:
                    for each in tokens:
                        writer.write(each)
                else:
                    for rows in packer.pack(tokens):
                        writer.write((rows & IDS).ravel())
                        writer.marks.write(rows)
                if self._recipe.data.weights:
                    writer.end_source()

    def _all_tokens(
        self,
        parts: list[Part],
        store: PartsStore,
        finished: Mapping[int, Finished],
        writer: RowWriter,
    ) -> Iterator[NDArray[Any]]:
        """Yield the tokens of `parts` in order, and add their counts to the writer."""
        for part in parts:
            found = finished[part.index]
            yield from store.read(found)
            writer.num_documents += found.num_documents
            writer.num_broken += found.num_broken
            writer.num_broken_bytes += found.num_broken_bytes
            writer.num_untargeted += found.num_untargeted

    def _commit(self, building: Path) -> TokenDataset:
        while not _renamed(building, self._target):
            # Another node was faster, or what is there cannot be used.
            other = _open_complete(self._target)
            if other is not None:
                return other
            unusable = building.with_name(f"{building.name}.replaced")
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._target, unusable)
            # A third node may have put a good one there since we looked.
            if _open_complete(unusable) is not None:
                _renamed(unusable, self._target)
            shutil.rmtree(unusable, ignore_errors=True)
        _sync(self._target.parent)
        return TokenDataset(self._target)


def _renamed(directory: Path, target: Path) -> bool:
    """Rename `directory` to `target`; return False if `target` is a non-empty directory."""
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _require_rows(writer: RowWriter, data: DataSection, sequence_length: int) -> None:
    if writer.num_documents == 0 and writer.num_broken:
        raise ConfigError(
            f"data.source {', '.join(data.sources)}: all {writer.num_broken} lines are broken; set"
            " data.skip_broken_lines: false to see what is wrong with the first"
        )
    packed = writer.packed
    num_untargeted = writer.num_untargeted + packed.num_untargeted + packed.num_dropped_rows
    if writer.num_rows == 0 and num_untargeted:
        raise ConfigError(
            f"data.source {', '.join(data.sources)}: no document has a target of data.train_on"
            f" {data.targets} in its first {sequence_length + 1} tokens; set data.train_on, or"
            " raise training.sequence_length"
        )
    for source, rows in zip(data.sources, writer.rows_by_source):
        if rows == 0:
            raise ConfigError(
                f"data.source {source} gives no row of sequence_length + 1 = {sequence_length + 1}"
                " tokens, but has a weight; leave it out, or add data"
            )
    if writer.num_rows == 0:
        raise ConfigError(
            f"data.source {', '.join(data.sources)} gives {writer.num_tokens} tokens, fewer than"
            f" one row of sequence_length + 1 = {sequence_length + 1}; add data or lower"
            " training.sequence_length"
        )


def _sync(directory: Path) -> None:
    """Flush a directory and its files to disk, so that a later rename commits only durable data."""
    paths = [path for path in directory.iterdir() if path.is_file()]
    for path in [*paths, directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
