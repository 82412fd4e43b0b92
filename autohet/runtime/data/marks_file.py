"""Writer of a dataset's file of marks, with its digest and statistics."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np

from autohet.runtime.data.marks import BEGINS, COUNTS, Marked, pack_marks


class MarksWriter:
    """Appends the bitmaps of marked rows; use it as a context."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.digest = hashlib.sha256()
        self._squares = 0
        self._num_rows = 0
        self.num_bytes = 0
        self.num_targets = 0

    def __enter__(self) -> MarksWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, rows: Marked) -> None:
        """Append the marks of rows [n, row_tokens]."""
        packed = np.ascontiguousarray(pack_marks(rows))
        self._file.write(packed.data)
        self.digest.update(packed.data)
        self.num_bytes += packed.nbytes
        is_target = (rows & COUNTS) != 0
        self.num_targets += int(is_target.sum())
        self._num_rows += len(rows)
        # Without the last token, which is a target alone.
        begins = (rows[:, :-1] & BEGINS) != 0
        begins[:, 0] = True
        starts = np.flatnonzero(begins.ravel())
        borders = np.append(starts, begins.size)
        # Of all pieces of all rows.
        lengths = np.diff(borders).astype(np.int64)
        self._squares += int((lengths**2).sum())

    @property
    def mean_squared_length(self) -> float:
        """Mean over rows of the sum of their pieces' squared lengths, counted in inputs."""
        return self._squares / max(1, self._num_rows)
