"""From the token dataset to batches: which rows a step consumes is a function of (seed, step) alone."""

from __future__ import annotations

import torch

from autohet.runtime.data import TokenDataset, sample_rows
from autohet.runtime.parallel.executor import Batch


class Batches:
    """Reads any part of any step's global batch from the memory map; every worker has its own."""

    def __init__(self, dataset: TokenDataset, seed: int, global_batch_sequences: int, device: torch.device) -> None:
        self._dataset = dataset
        self._seed = seed
        self._global_batch = global_batch_sequences
        self._device = device

    def __call__(self, step: int, sequences: range) -> Batch:
        """Tokens and targets, each [len(sequences), S] int64, of these positions of the step's global batch."""
        first = step * self._global_batch + sequences.start
        indices = sample_rows(self._seed, len(self._dataset), first, len(sequences))
        rows = torch.from_numpy(self._dataset.rows(indices)).to(self._device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
