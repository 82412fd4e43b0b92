"""Batches of a step, read from the token dataset.

The rows that a step consumes are a function of (seed, step) alone.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autohet.runtime.data import TokenDataset
from autohet.runtime.data.marks import IGNORED
from autohet.runtime.parallel.executor import Batch

SequencePart = tuple[int, range]
"""A step, and a range of positions of its global batch."""


class Batches:
    """Reader of any part of any step's global batch; each worker has its own, for one thread.

    prefetch: read the next part ahead in a thread, into pinned memory if the device has a bus.
    None: only on a GPU, whose host then waits neither for a disk nor for the copy. The prediction
    of the next part assumes that parts are requested in the order of the step before, as schedules
    do. A part that was not predicted is read on request. first_row: place in the sample order at
    which a step's batch begins; None: batches follow each other from 0.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seed: int,
        global_batch_sequences: int,
        device: torch.device,
        prefetch: bool | None = None,
        first_row: Callable[[int], int] | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._first_row = first_row or (lambda step: step * global_batch_sequences)
        self._device = device
        if prefetch is None:
            prefetch = device.type == "cuda"
        # One thread, since the dataset is for one.
        self._reader = ThreadPoolExecutor(1, "batches") if prefetch else None
        self._last: SequencePart | None = None
        self._after: dict[range, SequencePart] = {}
        """Steps ahead and positions of the part that was requested after these positions."""
        self._ahead: dict[SequencePart, Future[Tensor]] = {}

    def __call__(self, step: int, sequences: range) -> Batch:
        """Return tokens and targets of positions of a global batch.

        Each is [len(sequences), S] int64. A target that does not count is -100.
        """
        if self._reader is None:
            rows = self._rows(step, sequences)
        else:
            rows = self._take((step, sequences), self._reader)
        return _batch_of(rows.to(self._device, non_blocking=True))

    def begins(self, step: int, sequences: range) -> Tensor:
        """Return a mask of the starts of pieces, bool [len(sequences), S] on the host.

        The data set must be marked. Only marks are read, so that any stage may call it.
        """
        _, begins = self._dataset.marks(self._indices(step, sequences))
        return torch.from_numpy(begins[:, :-1])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _indices(self, step: int, sequences: range) -> NDArray[np.int64]:
        first = self._first_row(step) + sequences.start
        return self._dataset.sample(self._seed, first, len(sequences))

    def _rows(self, step: int, sequences: range) -> Tensor:
        """Read rows [n, S + 1]; those of a marked data set with their targets, [n, 2, S + 1]."""
        rows = _read_rows(self._dataset, self._indices(step, sequences))
        # Only from pinned memory does the copy to the device not hold up the host.
        if self._reader is not None and self._device.type == "cuda":
            return rows.pin_memory()
        return rows

    def _take(self, part: SequencePart, reader: ThreadPoolExecutor) -> Tensor:
        """Return a part's rows, read ahead or now, and start to read the one that follows."""
        rows = self._ahead.pop(part, None)
        if rows is None:
            rows = reader.submit(self._rows, *part)
        following = self._following(part)
        if following is not None and following not in self._ahead:
            self._ahead = {following: reader.submit(self._rows, *following)}
        return rows.result()

    def _following(self, part: SequencePart) -> SequencePart | None:
        """Predict the part that is requested after `part`; None: it is not known yet."""
        step, sequences = part
        if self._last is not None:
            last_step, last = self._last
            # A job that goes back, or a new plan, says nothing about the order.
            if step - last_step in (0, 1):
                self._after[last] = (step - last_step, sequences)
        self._last = part
        if sequences not in self._after:
            return None
        steps_ahead, following = self._after[sequences]
        return step + steps_ahead, following


@dataclass(frozen=True)
class EvaluationRows:
    """The first rows of an evaluation data set, in their order, as global batches.

    Positions of the last batch that have no row count nothing. max_rows: limit on the rows that are
    read; None: all.
    """

    dataset: TokenDataset
    global_batch_sequences: int
    device: torch.device
    max_rows: int | None = None

    @property
    def num_rows(self) -> int:
        return min(len(self.dataset), self.max_rows or len(self.dataset))

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.global_batch_sequences)

    def num_in_batch(self, index: int) -> int:
        """Return the number of positions of a global batch with a row; they are the first ones."""
        return min(self.global_batch_sequences, self.num_rows - index * self.global_batch_sequences)

    def batch(self, index: int, sequences: range) -> Batch:
        """Return tokens and targets of these positions, in the shapes of `Batches`."""
        rows = _read_rows(self.dataset, self._present_rows(index, sequences))
        tokens, targets = _batch_of(rows.to(self.device))
        is_missing = self._indices(index, sequences) >= self.num_rows
        missing = torch.from_numpy(is_missing).to(self.device)
        return tokens, targets.masked_fill(missing.unsqueeze(-1), IGNORED)

    @property
    def isolated(self) -> bool:
        """True if rows hold pieces that do not attend to each other."""
        return self.dataset.facts.isolated

    def begins(self, index: int, sequences: range) -> Tensor:
        """Return `Batches.begins` for evaluation rows of a data set that isolates documents."""
        _, begins = self.dataset.marks(self._present_rows(index, sequences))
        return torch.from_numpy(begins[:, :-1])

    def _present_rows(self, index: int, sequences: range) -> NDArray[np.int64]:
        """Return the row to read for each position; one without a row gets the last."""
        return np.minimum(self._indices(index, sequences), self.num_rows - 1)

    def _indices(self, index: int, sequences: range) -> NDArray[np.int64]:
        first = index * self.global_batch_sequences
        start = first + sequences.start
        stop = first + sequences.stop
        return np.arange(start, stop, dtype=np.int64)


def _read_rows(dataset: TokenDataset, indices: NDArray[np.int64]) -> Tensor:
    """Read rows [n, S + 1]; those of a marked data set with their targets, [n, 2, S + 1]."""
    rows = torch.from_numpy(dataset.rows(indices))
    if not dataset.is_marked:
        return rows
    counts, _ = dataset.marks(indices)
    targets = rows.masked_fill(~torch.from_numpy(counts), IGNORED)
    return torch.stack([rows, targets], dim=1)


def _batch_of(rows: Tensor) -> Batch:
    """Split rows of `_read_rows` into tokens and targets, each [n, S]."""
    tokens = rows
    targets = rows
    if rows.dim() == 3:
        tokens, targets = rows.unbind(1)
    # The target of a token is the next one.
    inputs = tokens[:, :-1].contiguous()
    next_tokens = targets[:, 1:].contiguous()
    return inputs, next_tokens
