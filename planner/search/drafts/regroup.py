"""Variants of pipelines that have some groups of another size."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.search.drafts.orders import StageRows
from planner.search.drafts.uncut import UncutPipelines
from planner.search.problem.tables import Tables

_Place = Literal["first", "inside", "last"]


@dataclass(frozen=True)
class _Change:
    """Change of groups: about `many` groups of `row` become groups of `other`.

    The new groups are fewer and larger, or more and smaller. place: "first" before the remaining
    groups of `row`, "last" after them, or "inside", with half of them before.
    """

    row: int
    other: int
    many: int
    place: _Place


def regroup(tables: Tables, uncut: UncutPipelines) -> Iterator[list[UncutPipelines]]:
    """Yield variants with some groups of one row replaced by groups of one other size.

    There is one list for each row and each other size. The replaced groups are at either end of
    their run, or inside it. Variants help if one degree leaves blocks that do not divide well, or
    more memory than early stages need, and if an end has much more to do than a block: a head,
    whose gradient a large group also sums sooner, or which lies beside the tied embedding.
    """
    rows, _ = uncut.pipelines[0]
    for row in dict.fromkeys(rows):
        for other in _other_degrees(tables, row):
            yield _variants(tables, uncut, row, other)


def _other_degrees(tables: Tables, row: int) -> list[int]:
    """Return the rows of the same node type and microbatch size at other TP degrees."""
    resource = tables.resources[tables.kind(row).resource]
    node_type = resource.node_type
    size = tables.rows[row].microbatch

    degrees = set()
    for kind in tables.kinds:
        if kind.group is None:
            degrees.add(kind.tp_degree)

    found = []
    for degree in sorted(degrees):
        other = tables.row_by_use.get((node_type, degree, size))
        if other is not None and other != row:
            found.append(other)
    return found


def _variants(tables: Tables, uncut: UncutPipelines, row: int, other: int) -> list[UncutPipelines]:
    """Return the variants with groups of `row` replaced by groups of `other`."""
    places: tuple[_Place, ...] = ("first", "inside", "last")
    variants = []
    for many in _steps(uncut.depth):
        for place in places:
            change = _Change(row, other, many, place)
            variant = _with_change(tables, uncut, change)
            if variant is not None:
                variants.append(variant)
    return variants


def _with_change(tables: Tables, uncut: UncutPipelines, change: _Change) -> UncutPipelines | None:
    """Return the pipelines after the change; None if one of them cannot be changed."""
    pipelines = []
    for rows, number in uncut.pipelines:
        changed = _with_groups(tables, rows, change)
        if changed is None or len(changed) > tables.deepest:
            return None
        pipelines.append((changed, number))
    return replace(uncut, pipelines=tuple(pipelines))


def _with_groups(tables: Tables, rows: StageRows, change: _Change) -> StageRows | None:
    """Return the rows with `change.many` groups of another size, on as many GPUs.

    None if there are too few groups.
    """
    old_degree = tables.kind(change.row).tp_degree
    new_degree = tables.kind(change.other).tp_degree
    if new_degree > old_degree:
        num_new = change.many
        num_old = num_new * new_degree // old_degree
    else:
        num_old = -(-change.many * new_degree // old_degree)
        num_new = num_old * old_degree // new_degree

    num_left = rows.count(change.row) - num_old
    if num_left < 0:
        return None

    num_before = 0
    if change.place == "last":
        num_before = num_left
    if change.place == "inside":
        num_before = num_left // 2
        if num_before == 0:
            return None  # it would be at an end

    first = rows.index(change.row)
    run = [change.row] * num_left
    run[num_before:num_before] = [change.other] * num_new
    rest = (row for row in rows[first:] if row != change.row)
    return (*rows[:first], *run, *rest)


def _steps(most: int) -> list[int]:
    """Return 1, 2, and on in steps of about a half, up to the first number of at least `most`."""
    steps = [1]
    while steps[-1] < most:
        half = steps[-1] // 2
        steps.append(steps[-1] + max(1, half))
    return steps
