"""Linear programs of a few rows and many columns, solved again and again with other values.

The revised simplex method (Dantzig 1953): with m rows a solution has m columns, its basis, and their inverse prices all others in one
product. The last basis still fits when only values change, and is where the next program begins.
"""

import numpy as np

from planner.search.tables import Floats, Ints

_TOLERANCE = 1e-9
_EXCHANGES = 200  # of which the second half by index: no cycles among equal solutions (Bland 1977)


class Simplex:
    """max value . x with usage^T x <= limits, x >= 0, which bounds each x. usage: (n, rows). Beyond the n columns each row has its
    slack."""

    def __init__(self, usage: Floats):
        self._count, rows = usage.shape
        self._columns = np.concatenate([usage, np.eye(rows)])
        self._value = np.zeros(len(self._columns))
        self._slacks = np.arange(self._count, len(self._columns))
        self._basis, self._inverse = self._slacks, np.eye(rows)

    def restart(self, value: Floats, limits: Floats) -> None:
        """Other values, (n,), and limits, (rows,) and not negative: from the last basis where it may be kept."""
        self._value[: self._count], self._limits = value, limits
        self._inverse = np.linalg.inv(self._columns[self._basis].T)
        worthless = (self._value[self._basis] <= 0) & (self._basis < self._count)
        if worthless.any() or (self._inverse @ limits < -_TOLERANCE).any():
            self._basis, self._inverse = self._slacks, np.eye(len(limits))
        self.exchange(self._slacks)

    @property
    def prices(self) -> Floats:
        """(rows,) what one more of each limit is worth."""
        return np.asarray(self._value[self._basis] @ self._inverse)

    @property
    def found(self) -> float:
        """What the present solution is worth."""
        return float(self._value[self._basis] @ self._amounts)

    @property
    def amounts(self) -> dict[int, float]:
        """The columns of the present solution, x > 0."""
        pairs = zip(self._basis.tolist(), self._amounts.tolist(), strict=True)
        return {column: amount for column, amount in sorted(pairs) if column < self._count and amount > _TOLERANCE}

    def exchange(self, columns: Ints) -> None:
        """The best solution of these columns and those that it has, from the present one."""
        pool = np.concatenate([columns, self._basis, self._slacks])
        usage, value = self._columns[pool], self._value[pool]
        least = _TOLERANCE * max(1.0, float(value.max()))
        for number in range(_EXCHANGES):
            gain = value - usage @ self.prices
            enters = int((gain if number < _EXCHANGES / 2 else gain > least).argmax())
            if gain[enters] <= least:
                return
            self._enter(int(pool[enters]), usage[enters])

    @property
    def _amounts(self) -> Floats:
        return np.asarray(np.maximum(self._inverse @ self._limits, 0.0))

    def _enter(self, column: int, usage: Floats) -> None:
        """Instead of the column that is the first to be none."""
        along, amounts = self._inverse @ usage, self._amounts
        steps = [
            (amount / each, number, at)
            for at, (amount, each, number) in enumerate(
                zip(amounts.tolist(), along.tolist(), self._basis.tolist(), strict=True)
            )
            if each > _TOLERANCE
        ]
        leaves = min(steps)[2]
        row = self._inverse[leaves] / along[leaves]
        self._inverse = self._inverse - np.outer(along, row)
        self._inverse[leaves] = row
        self._basis = np.where(np.arange(len(self._basis)) == leaves, column, self._basis)
