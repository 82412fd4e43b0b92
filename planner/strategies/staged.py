"""Plans of equal depth and cut whose stages are groups of GPUs, which `metis` and `fasop` enumerate; and which of them to look at closely.

They differ in order, cut and grid, and simulating one takes a thousand times its closed form: closed forms rank them, and only those
near the best are simulated.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.cluster import Fleet, Node, node_of
from planner.plan import Pipeline, Plan
from planner.search import limits
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches, draft_fits
from planner.search.place import stages_on
from planner.search.problem import Request
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
        self._kind = {(tables.resources[k.resource].node_type, k.tp_degree): i for i, k in enumerate(tables.kinds)}
        self._row = {(row.kind, row.microbatch): i for i, row in enumerate(tables.rows)}

    def row(self, group: Group, microbatch: int) -> int | None:
        nodes = {node_of(worker) for worker in group}
        if len(nodes) != 1:
            return None
        kind = self._kind.get((self.fleet.node_of(group[0]).node_type, len(group)))
        return None if kind is None else self._row.get((kind, microbatch))

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


@dataclass(frozen=True)
class Candidate:
    """A cut of a staged plan with its rough seconds a step, gradient sync included."""

    seconds: float
    staged: Staged
    ends: tuple[int, ...]
    microbatch: int


class Shortlist:
    """The plans worth a closer look, out of all that a search adds: those whose closed form is within `slack` of the best."""

    def __init__(self, request: Request, stager: Stager, estimator: Estimator, slack: float) -> None:
        self._request, self._stager, self._estimator, self._slack = request, stager, estimator, slack
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
        return counts / rate < self._slack * self._best_s

    def add(self, staged: Staged, ends: tuple[int, ...], microbatch: int) -> None:
        """Keeps the cut unless it is far from the best. Memory is for the caller to see to."""
        shapes = [Shape(rows, ends) for rows in zip(*staged.rows, strict=True)]
        rough = rough_s(self._estimator, shapes, self._request.global_batch_sequences)
        if rough is None or rough >= self._slack * self._best_s:
            return
        seconds = rough + self._sync_s(staged, ends)
        self._best_s = min(self._best_s, seconds)
        if seconds < self._slack * self._best_s:
            self._candidates.append(Candidate(seconds, staged, ends, microbatch))

    def plans(self, most: int) -> list[Plan]:
        """The best plans by simulation, at most `most`: equal counts for every pipeline, of the first few also counts by
        speed."""
        found: dict[Plan, float] = {}
        ranked = sorted(self._candidates, key=lambda c: c.seconds)[: limits.LOOKED_AT]
        equal = [(self._equal(one), one) for one in ranked]
        timed = [
            (self._draft_s(one, draft), i, one, draft) for i, (draft, one) in enumerate(equal) if draft is not None
        ]
        for seconds, _, one, draft in timed:
            found.setdefault(self._plan(one, draft), seconds)
        order = [one for _, _, one, _ in sorted(timed, key=lambda entry: entry[:2])] or ranked
        for one in order[: limits.SHARED_BY_SPEED]:
            shared = self._stager.draft(one.staged, one.ends, self._request.global_batch_sequences, self._estimator)
            if shared is not None:
                found.setdefault(self._plan(one, shared), self._draft_s(one, shared))
        return sorted(found, key=lambda plan: found[plan])[:most]

    def _equal(self, one: Candidate) -> Draft | None:
        count, rest = divmod(self._request.global_batch_sequences, one.microbatch * one.staged.width)
        shapes = [Shape(rows, one.ends) for rows in zip(*one.staged.rows, strict=True)]
        return Draft(tuple((shape, count) for shape in shapes)) if count and not rest else None

    def _draft_s(self, one: Candidate, draft: Draft) -> float:
        slowest = max(self._estimator.pipeline_s(shape, k) for shape, k in set(draft.pipelines))
        return slowest + self._sync_s(one.staged, one.ends)

    def _plan(self, one: Candidate, draft: Draft) -> Plan:
        batch, length = self._request.global_batch_sequences, self._request.sequence_length
        return self._stager.plan(one.staged, draft, one.microbatch, self._request.spec.name, batch, length)

    def _sync_s(self, staged: Staged, ends: tuple[int, ...]) -> float:
        """Gradient sync of the slowest stage: equal cuts, so a ring over the pipelines for each stage and slice of it.

        A node's NIC is shared by the rings that cross it, as the cost model's simulation has it.
        """
        nodes = [[self._request.fleet.node_of(group[0]) for group in groups] for groups in staged.stages]
        sync = 0.0
        if staged.width > 1:
            crossing = _crossing(nodes, staged)
            for stage, rows, start, end in zip(nodes, staged.rows, (0, *ends[:-1]), ends, strict=True):
                num_bytes = self._stager.tables.stage_sync_bytes(rows[0], start, end)
                sync = max(sync, self._ring_s(stage, crossing, num_bytes))
        return sync + self._tied_s(staged, nodes)

    def _ring_s(self, stage: Sequence[Node], crossing: Counter[str], num_bytes: float) -> float:
        own = Counter(node.name for node in stage)
        members = sorted(((node.name, node.node_type) for node in stage), key=lambda member: member[0])
        flows = {name: crossing[name] / count if len(own) > 1 else 1.0 for name, count in own.items()}
        return self._request.cost.sync_s(members, num_bytes, flows=flows)

    def _tied_s(self, staged: Staged, nodes: Sequence[Sequence[Node]]) -> float:
        """The tied embedding's sum over first and last stages, as if by pairs."""
        if len(nodes) == 1 or not self._request.spec.tied_embeddings:
            return 0.0
        pairs = [(a, b, len(group)) for a, b, group in zip(nodes[0], nodes[-1], staged.stages[0], strict=True)]
        crossing = Counter[str]()
        for a, b, tp in pairs:
            for node in (a, b) if a is not b else ():
                crossing[node.name] += tp
        slowest, num_bytes = 0.0, self._request.cost.tied_sync_bytes(len(staged.stages[0][0]))
        for a, b, _ in dict.fromkeys(pairs):
            members = [(a.name, a.node_type), (b.name, b.node_type)]
            slowest = max(slowest, self._request.cost.sync_s(members, num_bytes, flows=crossing))
        return slowest


def _crossing(nodes: Sequence[Sequence[Node]], staged: Staged) -> Counter[str]:
    """Workers of each node that take part in sums over several nodes."""
    found = Counter[str]()
    for stage, groups in zip(nodes, staged.stages, strict=True):
        if any(node is not stage[0] for node in stage):
            for node, group in zip(stage, groups, strict=True):
                found[node.name] += len(group)
    return found


def rough_s(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> float | None:
    """Seconds of the pipelines if all end together, pipeline i taking fill_i + (K_i - 1) period_i; gradient sync is not
    in it. None where some pipeline would get no microbatch.
    """
    alike = [(shape, len(list(group))) for shape, group in groupby(shapes)]
    lines = [(*estimator.affine(shape), number) for shape, number in alike]
    counts = batch / estimator.microbatch(shapes[0])
    ahead = sum(number * (fill / period - 1) for fill, period, number in lines)
    seconds = (counts + ahead) / sum(number / period for _, period, number in lines)
    return None if seconds < max(fill for fill, _, _ in lines) else seconds
