"""The strategy `hap`: one sharded program on every GPU, without pipelining; the program and the ratios found in turn.

Zhang et al., "HAP: SPMD DNN training on heterogeneous GPU clusters with automated program synthesis", EuroSys'24, under
our cost model. HAP alternates until its cost stops falling: given the ratios B (the share of every device), search the
sharded program Q; given Q, solve a linear program for B. Here

* Q is a tensor-parallel degree a node type: its GPUs form groups inside nodes, every group holds all layers (a pipeline
  of one stage) and a share of the batch, and gradients are summed over the groups. The search is a dynamic program over
  the node types. Its state is what gradient sync depends on (least and largest TP degree, number of groups), its value the
  least time of the slowest group. HAP's A* has no heuristic in the released code and its costs add up in any order, so a
  dynamic program finds the same.
* B is the number of sequences of every group. The linear program, least T with x_g s_g <= T and sum n_g x_g = batch for
  groups that take s_g seconds a sequence, has all its inequalities tight: x_g is proportional to 1 / s_g.
* At the end shares become whole microbatches, of a size for every part of the program, that meet the batch exactly.

HAP gives each device a part of the batch or none, so subsets of the node types are searched as well. Memory, which HAP does
not model, is checked: a group that cannot hold the model is never formed. Not expressible in a plan, hence not searched:
unequal slices within a tensor-parallel group, sharded optimizer state (ZeRO), parts of layers that are sharded differently
from the rest, sufficient factor broadcasting, expert parallelism.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.search.cost_tables import GIB, tables_of
from planner.search.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.judge import choose, idle_workers
from planner.search.place import place
from planner.search.problem import Answer, Request, SearchReport, check_request
from planner.search.tables import Tables
from planner.strategies.sharding import Part, Program, Space, Way, degree_of, degrees_of, resource_of, spaces, sync_s

_ROUNDS = 20
_DESCENTS = 8
_MOST_SUBSETS = 4
_ROUNDED = 24
_OF_EACH = 3
_CANDIDATES = 8


def search_hap(request: Request) -> Answer:
    """HAP's search. InfeasibleError with the limit where no group of GPUs of one node holds the whole model."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    estimator = Estimator(tables)
    found: dict[Program, float] = {}
    for space in spaces(request, tables):
        for subset in _subsets(space):
            for program in alternate(space, subset):
                _descend(space, program, found)
    if not found:
        raise InfeasibleError(_why_infeasible(tables))
    drafts = (_draft(estimator, program, request.global_batch_sequences) for program in _ranked(tables, found))
    best, rejected = choose(request, _plans(request, tables, [d for d in dict.fromkeys(drafts) if d is not None]))
    if best is None:
        why = rejected[0].why if rejected else "no number of microbatches meets the batch"
        raise InfeasibleError(f"hap finds no plan without pipelining: {why}")
    report = SearchReport(request.clock() - begin, len(found), None, None)
    return Answer("hap", best.plan, best.prediction, report, tuple(rejected), idle_workers(request, tables, best.plan))


def _ranked(tables: Tables, found: dict[Program, float]) -> list[Program]:
    """The fastest programs, few of each division of the nodes into groups."""
    out: list[Program] = []
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for program in sorted(found, key=lambda p: found[p]):
        groups: dict[int, int] = {}
        for part in program:
            groups[tables.rows[part.row].kind] = groups.get(tables.rows[part.row].kind, 0) + part.groups
        division = tuple(sorted(groups.items()))
        seen[division] = seen.get(division, 0) + 1
        if np.isfinite(found[program]) and seen[division] <= _OF_EACH:
            out.append(program)
    return out[:_ROUNDED]


def _plans(request: Request, tables: Tables, drafts: Sequence[Draft]) -> Iterator[Plan]:
    for draft in drafts[:_CANDIDATES]:
        plan = place(tables, draft, request.spec.name, request.global_batch_sequences, request.sequence_length)
        if plan is not None:
            yield plan


def _subsets(space: Space) -> Iterator[tuple[int, ...]]:
    """Node types that take part: every subset of a few, of many the fastest."""
    able = [r for r, ways in enumerate(space.ways) if ways]
    fastest = sorted(able, key=lambda r: (-_speed(space, r), r))
    if len(able) <= _MOST_SUBSETS:
        for count in range(len(able), 0, -1):
            yield from itertools.combinations(able, count)
        return
    for count in range(len(able), 0, -1):
        yield tuple(sorted(fastest[:count]))


def _speed(space: Space, resource: int) -> float:
    """Sequences a second of one GPU, at best."""
    kinds = {kind for way in space.ways[resource] for kind, _ in way}
    rows = [row for kind in kinds for row in space.rows[kind]]
    return max(1.0 / space.sequence_s(row) / degree_of(space.tables, row) for row in rows)


# ---- the alternation ----


def alternate(space: Space, subset: Sequence[int]) -> Iterator[Program]:
    """Programs in the order in which they were found, from even and from compute-proportional ratios."""
    gpus = {r: float(space.tables.resources[r].num_gpus) for r in subset}
    for start in (gpus, {r: gpus[r] * _speed(space, r) for r in subset}):
        shares = {r: space.batch * part / sum(start.values()) for r, part in start.items()}
        best_s = float("inf")
        for _ in range(_ROUNDS):
            seconds, program = search_program(space, shares)
            if seconds >= best_s * (1 - 1e-9):
                break
            best_s = seconds
            yield program
            shares = _by_resource(space, program, ratios(space, program))


def ratios(space: Space, program: Program) -> list[float]:
    """Sequences of one group of each part: the linear program's optimum."""
    speeds = [1.0 / space.sequence_s(part.row) for part in program]
    whole = sum(part.groups * speed for part, speed in zip(program, speeds, strict=True))
    return [space.batch * speed / whole for speed in speeds]


def _by_resource(space: Space, program: Program, shares: Sequence[float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for part, share in zip(program, shares, strict=True):
        resource = resource_of(space, part.row)
        found[resource] = found.get(resource, 0.0) + part.groups * share
    return found


def search_program(space: Space, shares: dict[int, float]) -> tuple[float, Program]:
    """The best program for given sequences of each node type, with its seconds: the dynamic program."""
    states: dict[tuple[int, int, int], tuple[float, Program]] = {(10**6, 0, 0): (0.0, ())}
    for resource, sequences in sorted(shares.items()):
        following: dict[tuple[int, int, int], tuple[float, Program]] = {}
        for way in space.ways[resource]:
            slowest, parts = _timed(space, way, sequences)
            for seconds, program in states.values():
                grown = (*program, *parts)
                key = (*degrees_of(space, grown), sum(part.groups for part in grown))
                reached = max(seconds, slowest)
                if key not in following or reached < following[key][0]:
                    following[key] = (reached, grown)
        states = following
    best_s, best = float("inf"), next(iter(states.values()))[1]
    for seconds, program in sorted(states.values(), key=lambda state: state[0]):
        if seconds >= best_s:
            break
        ends = seconds + sync_s(space, program)
        if ends < best_s:
            best_s, best = ends, program
    return best_s, best


def _timed(space: Space, way: Way, sequences: float) -> tuple[float, Program]:
    """A way's parts, each at its best microbatch size, and the seconds of its slowest group."""
    speeds = [max(1.0 / space.sequence_s(row) for row in space.rows[kind]) for kind, _ in way]
    whole = sum(count * speed for (_, count), speed in zip(way, speeds, strict=True))
    parts, slowest = [], 0.0
    for (kind, count), speed in zip(way, speeds, strict=True):
        share = sequences * speed / whole
        seconds, row = min((_whole_microbatches_s(space, row, share), row) for row in space.rows[kind])
        parts.append(Part(row, count))
        slowest = max(slowest, seconds)
    return slowest, tuple(parts)


def _whole_microbatches_s(space: Space, row: int, sequences: float) -> float:
    return float(np.ceil(sequences / space.tables.rows[row].microbatch - 1e-9)) * space.seconds(row)


# ---- whole microbatches ----


def _descend(space: Space, program: Program, found: dict[Program, float]) -> None:
    """Changes of one part at a time, while whole microbatches end earlier; all programs seen are kept in `found`
    with their seconds."""
    ones = _merged(tuple(replace(part, row=_smallest(space, part.row)) for part in program))
    _rounded_s(space, ones, found)
    best, seconds = _merged(program), _rounded_s(space, _merged(program), found)
    for _ in range(_DESCENTS):
        options = [
            _merged((*best[:at], *parts, *best[at + 1 :]))
            for at in range(len(best))
            for parts in _changes(space, best, at)
        ]
        timed = [(_rounded_s(space, option, found), number, option) for number, option in enumerate(options)]
        now, _, option = min(timed, key=lambda entry: entry[:2])
        if now >= seconds * (1 - 1e-9):
            return
        best, seconds = option, now


def _merged(program: Program) -> Program:
    """Equal rows as one part, in the order of the rows."""
    groups: dict[int, int] = {}
    for part in program:
        groups[part.row] = groups.get(part.row, 0) + part.groups
    return tuple(Part(row, count) for row, count in sorted(groups.items()))


def _changes(space: Space, program: Program, at: int) -> Iterator[Program]:
    """A part with another microbatch size, with one group of another size, or with as many groups fewer as are not
    needed."""
    part = program[at]
    for row in space.rows[space.tables.rows[part.row].kind]:
        yield (replace(part, row=row),)
        if part.groups > 1 and row != part.row:
            yield (replace(part, groups=part.groups - 1), Part(row, 1))
    ends = _ends_s(space, program)
    if not np.isfinite(ends):
        return
    each = _count(space, part, ends) * space.tables.rows[part.row].microbatch
    surplus = _done(space, program, ends) - space.batch
    if each and 0 < surplus // each < part.groups:
        yield (replace(part, groups=part.groups - surplus // each),)


def _smallest(space: Space, row: int) -> int:
    rows = space.rows[space.tables.rows[row].kind]
    return min(rows, key=lambda r: space.tables.rows[r].microbatch)


def _rounded_s(space: Space, program: Program, found: dict[Program, float]) -> float:
    """Seconds of a step in whole microbatches, gradient sync included."""
    if program not in found:
        found[program] = _ends_s(space, program) + sync_s(space, program)
    return found[program]


def _count(space: Space, part: Part, seconds: float) -> int:
    """Microbatches that a group completes in so many seconds."""
    return int(seconds / space.seconds(part.row) + 1e-9)


def _done(space: Space, program: Program, seconds: float, below: int | None = None) -> int:
    """Sequences that the groups (those of microbatches smaller than `below`) complete in so many seconds."""
    sizes = [space.tables.rows[part.row].microbatch for part in program]
    parts = zip(program, sizes, strict=True)
    return sum(p.groups * _count(space, p, seconds) * size for p, size in parts if below is None or size < below)


def _ends_s(space: Space, program: Program) -> float:
    """The least time in which whole microbatches can meet the batch, by bisection; infinite where no number of them does.

    Each size divides the next (powers of two), so what the batch leaves over a size must come from smaller ones.
    """
    sizes = sorted({space.tables.rows[part.row].microbatch for part in program})
    if space.batch % sizes[0]:
        return float("inf")

    def meets(seconds: float) -> bool:
        if _done(space, program, seconds) < space.batch:
            return False
        return all(_done(space, program, seconds, below=size) >= space.batch % size for size in sizes[1:])

    low, high = 0.0, max(space.seconds(part.row) for part in program) * space.batch
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _draft(estimator: Estimator, program: Program, batch: int) -> Draft | None:
    """The program with its microbatches; groups beyond one microbatch each are left out, the slowest first."""
    tables, rest = estimator.tables, batch
    shapes: list[Shape] = []
    for part in sorted(program, key=lambda p: (tables.time_sums[p.row, -1] / tables.rows[p.row].microbatch, p.row)):
        count = min(part.groups, rest // tables.rows[part.row].microbatch)
        shapes += [Shape((part.row,), (tables.num_layers,))] * count
        rest -= count * tables.rows[part.row].microbatch
    return assign_microbatches(estimator, shapes, batch) if shapes else None


def _why_infeasible(tables: Tables) -> str:
    """The group that comes nearest to holding the model, and what it lacks."""
    found = []
    for index, row in enumerate(tables.rows):
        need = tables.memory_bytes(index, 0, tables.num_layers, 1)
        found.append((need - row.limit_bytes, need, row.limit_bytes, index))
    over, need, limit, index = min(found)
    node_type = tables.resources[tables.kinds[tables.rows[index].kind].resource].node_type
    return (
        f"hap holds the whole model in every group of GPUs, and none is large enough: at TP {degree_of(tables, index)} and microbatch"
        f" {tables.rows[index].microbatch} a {node_type.gpu_type} of node type '{node_type.name}' would need {need / GIB:.2f} GiB,"
        f" it has {limit / GIB:.2f} GiB: {over / GIB:.2f} GiB too little. Use a strategy with pipelines (autohet, metis, fasop),"
        f" larger nodes for a higher TP degree, or recomputation"
    )
