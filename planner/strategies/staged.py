"""Plans of equal depth and cut whose stages are groups of GPUs, which `metis`, `fasop`, `megatron` and `varuna` enumerate; and which of
them to look at closely.

They differ in order, cut and grid, and predicting one takes a thousand times its closed form: closed forms rank them, and only those
near the best are predicted.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.plan import Plan
from planner.search import limits
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits, fits, steady_s
from planner.search.place import plan_on
from planner.search.problem import Request
from planner.search.side_by_side import SideBySide
from planner.search.tables import Tables

Group = tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """stages[s][d]: the tensor-parallel group of stage s in pipeline d; rows[s][d]: its table row."""

    stages: tuple[tuple[Group, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Pipelines."""
        return len(self.stages[0])

    def shapes(self, ends: Sequence[int]) -> list[Shape]:
        """Of each pipeline, with that cut."""
        return [Shape(rows, tuple(ends)) for rows in zip(*self.rows, strict=True)]

    def slowest(self, tables: Tables) -> list[int]:
        """The slowest row of each stage."""
        whole = tables.time_sums[:, -1]
        return [max(rows, key=lambda row: (whole[row], row)) for rows in self.rows]


class Groups:
    """Stages along one order of the GPUs; groups and their table rows are remembered, since arrangements share them."""

    def __init__(self, tables: Tables, gpus: Sequence[str]) -> None:
        self._tables, self._gpus = tables, gpus
        self._found: dict[tuple[int, int, int], tuple[Group, int | None]] = {}

    def stages(self, sizes: Sequence[int], width: int, microbatch: int) -> Staged | None:
        """The next `size` GPUs for each stage, `width` groups each; None where a group would leave its node or was not measured."""
        stages, rows, at = [], [], 0
        for size in sizes:
            tp, groups, found = size // width, list[Group](), list[int]()
            for start in range(at, at + width * tp, tp):
                group, row = self._group(start, tp, microbatch)
                if row is None:
                    return None
                groups.append(group)
                found.append(row)
            stages.append(tuple(groups))
            rows.append(tuple(found))
            at += size
        return Staged(tuple(stages), tuple(rows))

    def _group(self, at: int, tp: int, microbatch: int) -> tuple[Group, int | None]:
        key = (at, tp, microbatch)
        if key not in self._found:
            group = tuple(self._gpus[at : at + tp])
            self._found[key] = group, self._tables.row_of(group, microbatch)
        return self._found[key]


def ends_of(split: tuple[int, ...]) -> tuple[int, ...]:
    """Layer ends of a split of the blocks: the embedding before the first, the head after the last."""
    ends = [end + 1 for end in itertools.accumulate(split)]
    return (*ends[:-1], ends[-1] + 1)


class Shortlist:
    """The plans worth a prediction, out of all that a search adds: those whose closed form is within `limits.FAR_BEHIND` of the best.
    Gradients are timed as stages lie: the groups of one follow each other on the nodes."""

    def __init__(self, request: Request, tables: Tables) -> None:
        self._tables, self._estimator, self._sync = tables, Estimator(tables), SideBySide(request, tables, 1)
        self._speed = [1.0 / float(seconds) for seconds in tables.time_sums[:, -1]]
        self._found: list[tuple[float, Staged, tuple[int, ...]]] = []  # rough seconds a step, gradient sync included
        self._best_s = float("inf")

    @property
    def is_empty(self) -> bool:
        return not self._found

    def promising(self, staged: Staged, microbatch: int) -> bool:
        """Whether layers in exact proportion to speed would come near the best so far: pipeline d then needs
        m_d = 1 / sum of its stages' speeds for each microbatch, after a first one that no stage could do faster whole."""
        counts, rate = self._tables.batch / microbatch, 0.0
        for rows in zip(*staged.rows, strict=True):
            speed = sum(self._speed[row] for row in rows)
            counts += speed / max(self._speed[row] for row in rows) - 1
            rate += speed
        return counts / rate < limits.FAR_BEHIND * self._best_s

    def add(self, staged: Staged, ends: tuple[int, ...]) -> None:
        """Keeps the cut unless it is far from the best or does not fit memory."""
        alike = Counter(staged.shapes(ends))
        batch, most_s = self._tables.batch, limits.FAR_BEHIND * self._best_s
        seconds = steady_s(self._estimator, alike.items(), batch)
        if seconds >= most_s or seconds < max(self._estimator.way(shape).fill_s for shape in alike):
            return  # in less than its first microbatch takes a pipeline gets none
        seconds += max(self._sync.after_one_s(self._estimator, staged.width, shape) for shape in alike)
        count = batch // (self._estimator.microbatch(next(iter(alike))) * staged.width)
        if seconds < most_s and all(fits(self._estimator, shape, max(1, count)) for shape in alike):
            self._best_s = min(self._best_s, seconds)
            self._found.append((seconds, staged, ends))

    def plans(self) -> list[Plan]:
        """Of the first few the plans with equal numbers of microbatches, and with numbers by speed."""
        found = dict[Plan, None]()
        for _, staged, ends in sorted(self._found, key=lambda each: each[0])[: limits.DRAFTS]:
            shapes, groups = staged.shapes(ends), list(zip(*staged.stages, strict=True))
            by_speed = assign_microbatches(self._estimator, shapes, self._tables.batch)
            fitting = [by_speed] if by_speed is not None and draft_fits(self._estimator, by_speed) else []
            drafts = dict.fromkeys([*self._equal(shapes), *fitting])
            found |= dict.fromkeys(plan_on(self._tables, draft, groups) for draft in drafts)
        return list(found)

    def _equal(self, shapes: list[Shape]) -> list[Draft]:
        count, rest = divmod(self._tables.batch, self._estimator.microbatch(shapes[0]) * len(shapes))
        return [Draft(tuple((shape, count) for shape in shapes))] if count and not rest else []
