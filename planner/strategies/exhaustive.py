"""The strategy `exhaustive`: every plan of a small case, costed in full; an independent judge of the other
strategies.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from planner.cluster import Node
from planner.errors import ConfigError, InfeasibleError
from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.search.cost_tables import check_request, microbatch_sizes, tables_of
from planner.search.problem import Answer, Request, SearchReport
from planner.strategies.autohet import unacceptable

MAX_GPUS = 5
MAX_BLOCKS = 6
MAX_BATCH = 16
_Type = tuple[str, float]  # a node type's name and slowdown


@dataclass(frozen=True, slots=True)
class _Form:
    """A pipeline without workers: node type and TP degree of each stage, blocks of each stage."""

    kinds: tuple[tuple[_Type, int], ...]
    blocks: tuple[int, ...]


def search_exhaustive(request: Request) -> Answer:
    """The best of all plans. ConfigError where the case is not small."""
    check_request(request)
    begin = request.clock()
    _check_small(request)
    best: tuple[float, Plan] | None = None
    count = 0
    for forms in _packings(request):
        for plan in (way for each in _with_batches(request, forms) for way in request.cost.ways_ahead(each)):
            count += 1
            check_plan(plan, request.spec.num_layers)
            prediction = request.cost.predict(plan)
            if unacceptable(request, plan, prediction) is None and (
                best is None or prediction.step_time_s < best[0] * (1 - 1e-12)
            ):
                best = (prediction.step_time_s, plan)
    if best is None:
        tables_of(request)
        raise InfeasibleError(
            f"none of {count} plans fits memory; add GPUs, or use recomputation or a shorter sequence"
        )
    report = SearchReport(request.clock() - begin, count, best[0], 0.0)
    return Answer("exhaustive", best[1], request.cost.predict(best[1]), report)


def _check_small(request: Request) -> None:
    limits = (
        ("GPUs", len(request.fleet.workers), MAX_GPUS),
        ("layers", request.spec.num_layers, MAX_BLOCKS),
        ("sequences in the global batch", request.global_batch_sequences, MAX_BATCH),
    )
    for what, have, limit in limits:
        if have > limit:
            raise ConfigError(f"strategy exhaustive takes at most {limit} {what}, not {have}; use autohet")


def _packings(request: Request) -> Iterator[tuple[_Form, ...]]:
    """Multisets of forms that the nodes can hold."""
    forms = sorted(_forms(request), key=repr)
    free = {node.name: node.node_type.num_gpus for node in request.fleet.nodes}
    yield from _extend((), forms, 0, free, request)


def _extend(
    chosen: tuple[_Form, ...], forms: list[_Form], first: int, free: dict[str, int], request: Request
) -> Iterator[tuple[_Form, ...]]:
    if chosen:
        yield chosen
    for index in range(first, len(forms)):
        if _workers_of((*chosen, forms[index]), request) is not None:
            yield from _extend((*chosen, forms[index]), forms, index, free, request)


def _forms(request: Request) -> Iterator[_Form]:
    """Every sequence of stages with every cut of the blocks."""
    top = min(request.spec.max_tp_degree, request.max_tp_degree or request.spec.max_tp_degree)
    types = {_type_of(node): node.node_type for node in request.fleet.nodes}
    kinds = [
        (name, tp)
        for name, node_type in sorted(types.items())
        for tp in (1, 2, 4)
        if request.min_tp_degree <= tp <= min(top, node_type.num_gpus)
    ]
    blocks = request.spec.num_layers
    for depth in range(1, min(blocks, len(request.fleet.workers)) + 1):
        for sequence in itertools.product(kinds, repeat=depth):
            if _workers_of((_Form(sequence, ()),), request) is None:
                continue
            for cuts in itertools.combinations(range(1, blocks), depth - 1):
                bounds = (0, *cuts, blocks)
                yield _Form(sequence, tuple(b - a for a, b in itertools.pairwise(bounds)))


def _type_of(node: Node) -> _Type:
    return node.node_type.name, node.node_type.slowdown


def _workers_of(forms: tuple[_Form, ...], request: Request) -> list[list[tuple[str, ...]]] | None:
    """First-fit workers, largest groups first; None where they do not fit."""
    free = {node.name: list(node.workers) for node in request.fleet.nodes}
    wanted = [(-tp, p, s, name) for p, form in enumerate(forms) for s, (name, tp) in enumerate(form.kinds)]
    out: list[list[tuple[str, ...]]] = [[()] * len(form.kinds) for form in forms]
    for size, p, s, name in sorted(wanted):
        node = next((n for n in request.fleet.nodes if _type_of(n) == name and len(free[n.name]) >= -size), None)
        if node is None:
            return None
        out[p][s], free[node.name] = tuple(free[node.name][:-size]), free[node.name][-size:]
    return out


def _with_batches(request: Request, forms: tuple[_Form, ...]) -> Iterator[Plan]:
    """Every microbatch size and count of each pipeline that meets the batch; pipelines of equal form in falling
    order.
    """
    batch = request.global_batch_sequences
    workers = _workers_of(forms, request)
    assert workers is not None
    sizes = microbatch_sizes(request)
    options = [(size, k) for size in sizes for k in range(1, batch // size + 1)]
    for loads in itertools.product(options, repeat=len(forms)):
        if sum(size * k for size, k in loads) != batch:
            continue
        same = [(forms[i] == forms[i + 1], loads[i], loads[i + 1]) for i in range(len(forms) - 1)]
        if any(equal and a < b for equal, a, b in same):
            continue
        pipelines = tuple(
            Pipeline(_stages(form, groups), k, size)
            for form, groups, (size, k) in zip(forms, workers, loads, strict=True)
        )
        yield Plan(request.spec.name, batch, loads[0][0], request.sequence_length, pipelines)


def _stages(form: _Form, groups: list[tuple[str, ...]]) -> tuple[Stage, ...]:
    firsts = itertools.accumulate((0, *form.blocks[:-1]))
    return tuple(Stage(a, n, group) for a, n, group in zip(firsts, form.blocks, groups, strict=True))
