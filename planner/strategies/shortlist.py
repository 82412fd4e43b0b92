"""Which of many staged plans to look at closely: ranked by a closed form, simulated only if they are among the best.

What `metis` and `fasop` enumerate differs in cut and grid; sharing microbatches under the simulation costs a thousand
times the closed form.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Node
from planner.plan import Plan
from planner.strategies.drafts import Draft, Estimator, Shape
from planner.strategies.request import Request
from planner.strategies.staged import Staged, Stager
from planner.strategies.tables import Tables

SYNCED = 256
LOOKED_AT = 24


@dataclass(frozen=True)
class Candidate:
    """A cut of a staged plan with its rough seconds a step; `number` breaks equal times."""

    seconds: float
    number: int
    staged: Staged
    ends: tuple[int, ...]
    microbatch: int


def rough_s(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> float | None:
    """Seconds of the pipelines if all end together, pipeline i taking fill_i + (K_i - 1) period_i; gradient sync is not
    in it. None where some pipeline would get no microbatch.
    """
    number_by_line = Counter(estimator.affine(shape) for shape in shapes)
    counts = batch / estimator.microbatch(shapes[0])
    lines = [(fill, period, number) for (fill, period), number in number_by_line.items()]
    ahead = sum(number * (fill / period - 1) for fill, period, number in lines)
    seconds = (counts + ahead) / sum(number / period for _, period, number in lines)
    return None if seconds < max(fill for fill, _, _ in lines) else seconds


def candidate(
    estimator: Estimator, staged: Staged, ends: tuple[int, ...], microbatch: int, batch: int, number: int
) -> Candidate | None:
    """None where there are more pipelines than the batch can keep busy. Memory is for the caller to see to."""
    shapes = [Shape(tuple(rows[d] for rows in staged.rows), ends) for d in range(staged.width)]
    rough = rough_s(estimator, shapes, batch)
    return None if rough is None else Candidate(rough, number, staged, ends, microbatch)


def sync_s(request: Request, tables: Tables, one: Candidate) -> float:
    """Gradient sync of the slowest stage: equal cuts, so a ring over the pipelines for each stage and slice of it.

    A node's NIC is shared by the rings that cross it, as the cost model's simulation has it.
    """
    staged, starts, slowest = one.staged, (0, *one.ends[:-1]), 0.0
    nodes = [[request.fleet.node_of(group[0]) for group in groups] for groups in staged.stages]
    crossing = Counter[str]()
    for stage, groups in zip(nodes, staged.stages, strict=True):
        if len({node.name for node in stage}) > 1:
            for node, group in zip(stage, groups, strict=True):
                crossing[node.name] += len(group)
    for stage, rows, start, end in zip(nodes, staged.rows, starts, one.ends, strict=True):
        members = sorted(((node.name, node.node_type) for node in stage), key=lambda member: member[0])
        own = Counter(name for name, _ in members)
        flows = max(crossing[name] / count for name, count in own.items()) if len(own) > 1 else 1.0
        num_bytes = float(tables.sync_sums[rows[0], end] - tables.sync_sums[rows[0], start])
        slowest = max(slowest, request.cost.sync_s(members, num_bytes, flows=flows))
    return slowest + _tied_s(request, one, nodes)


def _tied_s(request: Request, one: Candidate, nodes: Sequence[Sequence[Node]]) -> float:
    """The tied embedding's sum over first and last stages, as if by pairs."""
    if len(nodes) == 1 or not request.spec.tied_embeddings:
        return 0.0
    pairs = [(a, b, len(group)) for a, b, group in zip(nodes[0], nodes[-1], one.staged.stages[0], strict=True)]
    leaving = Counter[str]()
    for a, b, flows in pairs:
        leaving[a.name] += flows if a is not b else 0
    width = request.cost.parameters.sync_bytes_per_parameter
    return max(
        request.cost.sync_s(
            [(a.name, a.node_type), (b.name, b.node_type)],
            request.spec.tied_parameters / tp * width,
            flows=max(1.0, leaving[a.name]),
        )
        for a, b, tp in pairs
    )


def plans_of(
    request: Request, stager: Stager, estimator: Estimator, candidates: Sequence[Candidate], most: int
) -> list[Plan]:
    """The plans of the roughly fastest, best first by the simulation, at most `most`."""
    found: dict[Plan, float] = {}
    ranked = sorted(candidates, key=lambda c: (c.seconds, c.number))[:SYNCED]
    timed = [(c.seconds + sync_s(request, stager.tables, c), c.number, c) for c in ranked]
    for _, _, one in sorted(timed, key=lambda entry: entry[:2])[:LOOKED_AT]:
        draft = stager.draft(one.staged, one.ends, request.global_batch_sequences, estimator)
        if draft is not None:
            slowest = max(estimator.pipeline_s(shape, k) for shape, k in set(draft.pipelines))
            plan = _plan(request, stager, one, draft)
            found.setdefault(plan, slowest + sync_s(request, stager.tables, one))
    return sorted(found, key=lambda plan: found[plan])[:most]


def _plan(request: Request, stager: Stager, one: Candidate, draft: Draft) -> Plan:
    batch, length = request.global_batch_sequences, request.sequence_length
    return stager.plan(one.staged, draft, one.microbatch, request.spec.name, batch, length)
