"""Plans of equal depth and cut whose stages are groups of GPUs, which `metis`, `fasop`, `megatron` and `varuna` enumerate; and which of
them to look at closely.

They differ in order, cut and grid, and predicting one takes a thousand times its closed form: closed forms rank them, and only those
near the best are predicted.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster import Fleet, node_of
from planner.plan import Pipeline, Plan
from planner.search import limits
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits, fits, steady_s
from planner.search.place import stages_on
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


class Stager:
    """Turns GPUs in an order into stages over one set of tables."""

    def __init__(self, tables: Tables, fleet: Fleet):
        self.tables = tables
        self.fleet = fleet

    def row(self, group: Group, microbatch: int) -> int | None:
        """Its table row; None where it would leave its node or is not in the tables."""
        if len({node_of(worker) for worker in group}) != 1:
            return None
        return self.tables.row_of.get((self.fleet.node_of(group[0]).node_type, len(group), microbatch))

    def slowest(self, staged: Staged) -> list[int]:
        """The slowest row of each stage."""
        whole = self.tables.time_sums[:, -1]
        return [max(rows, key=lambda row: (whole[row], row)) for rows in staged.rows]

    def draft(self, staged: Staged, ends: Sequence[int], batch: int, estimator: Estimator) -> Draft | None:
        """The draft with microbatches shared by speed; None where memory or the batch forbids it."""
        shapes = [Shape(tuple(rows[d] for rows in staged.rows), tuple(ends)) for d in range(staged.width)]
        draft = assign_microbatches(estimator, shapes, batch)
        return draft if draft is not None and draft_fits(estimator, draft) else None

    def plan(self, staged: Staged, draft: Draft, microbatch: int, model: str, batch: int, length: int) -> Plan:
        """The plan of a draft of `staged`, pipeline d on its own groups."""
        pipelines = tuple(
            Pipeline(stages_on(self.tables, shape, [stage[d] for stage in staged.stages]), k, microbatch)
            for d, (shape, k) in enumerate(draft.pipelines)
        )
        return Plan(model, batch, microbatch, length, pipelines)


class Groups:
    """Stages along one order of the GPUs; groups and their table rows are remembered, since arrangements share them."""

    def __init__(self, stager: Stager, gpus: Sequence[str]) -> None:
        self._stager, self._gpus = stager, gpus
        self._found: dict[tuple[int, int, int], tuple[tuple[str, ...], int | None]] = {}

    def stages(self, sizes: Sequence[int], width: int, microbatch: int) -> Staged | None:
        """The next `size` GPUs for each stage, `width` groups each; None where a group would leave its node or was not measured."""
        stages, rows, at = [], [], 0
        for size in sizes:
            tp = size // width
            groups, found = [], []
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

    def _group(self, at: int, tp: int, microbatch: int) -> tuple[tuple[str, ...], int | None]:
        key = (at, tp, microbatch)
        if key not in self._found:
            group = tuple(self._gpus[at : at + tp])
            self._found[key] = (group, self._stager.row(group, microbatch))
        return self._found[key]


def ends_of(split: tuple[int, ...]) -> tuple[int, ...]:
    """Layer ends of a split of the blocks: the embedding before the first, the head after the last."""
    ends = [end + 1 for end in itertools.accumulate(split)]
    return (*ends[:-1], ends[-1] + 1)


@dataclass(frozen=True)
class Candidate:
    """A cut of a staged plan with its rough seconds a step, gradient sync included."""

    seconds: float
    staged: Staged
    ends: tuple[int, ...]
    microbatch: int

    def shapes(self) -> list[Shape]:
        """Of each pipeline."""
        return [Shape(rows, self.ends) for rows in zip(*self.staged.rows, strict=True)]


class Shortlist:
    """The plans worth a prediction, out of all that a search adds: those whose closed form is within `limits.FAR_BEHIND` of the best.
    Gradients are timed as stages lie: the groups of one follow each other on the nodes."""

    def __init__(self, request: Request, stager: Stager, estimator: Estimator) -> None:
        self._request, self._stager, self._estimator = request, stager, estimator
        self._sync = SideBySide(request, stager.tables, 1)
        self._speed = [1.0 / float(seconds) for seconds in stager.tables.time_sums[:, -1]]
        self._candidates: list[Candidate] = []
        self._best_s = float("inf")

    @property
    def is_empty(self) -> bool:
        return not self._candidates

    def promising(self, staged: Staged, microbatch: int) -> bool:
        """Whether layers in exact proportion to speed would come near the best so far: pipeline d then needs
        m_d = 1 / sum of its stages' speeds for each microbatch, after a first one that no stage could do faster whole."""
        counts, rate = self._request.global_batch_sequences / microbatch, 0.0
        for rows in zip(*staged.rows, strict=True):
            speed = sum(self._speed[row] for row in rows)
            counts += speed / max(self._speed[row] for row in rows) - 1
            rate += speed
        return counts / rate < limits.FAR_BEHIND * self._best_s

    def add(self, staged: Staged, ends: tuple[int, ...], microbatch: int) -> None:
        """Keeps the cut unless it is far from the best or does not fit memory."""
        one = Candidate(0.0, staged, ends, microbatch)
        alike = Counter(one.shapes())
        batch, most_s = self._request.global_batch_sequences, limits.FAR_BEHIND * self._best_s
        seconds = steady_s(self._estimator, alike.items(), batch)
        if seconds >= most_s or seconds < max(self._estimator.affine(shape)[0] for shape in alike):
            return  # in less than its first microbatch takes a pipeline gets none
        seconds += max(self._sync.after_one_s(self._estimator, staged.width, shape) for shape in alike)
        count = batch // (microbatch * staged.width)
        if seconds < most_s and all(fits(self._estimator, shape, max(1, count)) for shape in alike):
            self._best_s = min(self._best_s, seconds)
            self._candidates.append(replace(one, seconds=seconds))

    def plans(self) -> list[Plan]:
        """Of the first few the plans with equal numbers of microbatches, and with numbers by speed."""
        ranked = sorted(self._candidates, key=lambda c: c.seconds)[: limits.DRAFTS]
        batch, length = self._request.global_batch_sequences, self._request.sequence_length
        found = dict[Plan, None]()
        for one in ranked:
            by_speed = self._stager.draft(one.staged, one.ends, batch, self._estimator)
            for draft in dict.fromkeys((self._equal(one), by_speed)):
                if draft is not None:
                    model = self._request.spec.name
                    found[self._stager.plan(one.staged, draft, one.microbatch, model, batch, length)] = None
        return list(found)

    def _equal(self, one: Candidate) -> Draft | None:
        count, rest = divmod(self._request.global_batch_sequences, one.microbatch * one.staged.width)
        return Draft(tuple((shape, count) for shape in one.shapes())) if count and not rest else None
