"""Every pipeline of a few GPUs: all groups, in every order, with every cut."""

import itertools
from collections.abc import Iterator

from planner.search.drafts.draft import Shape
from planner.search.problem.stage_sums import Ints
from planner.search.problem.tables import Tables


def arrangements(tables: Tables, rows: list[int], gpus: Ints) -> Iterator[tuple[int, ...]]:
    """All groups of all these GPUs, in every order."""
    if not gpus.any():
        yield ()
    for row in rows:
        kind = tables.kinds[tables.rows[row].kind]
        if kind.tp_degree <= gpus[kind.resource]:
            left = gpus.copy()
            left[kind.resource] -= kind.tp_degree
            yield from ((row, *rest) for rest in arrangements(tables, rows, left))


def every_shape(tables: Tables, rows: list[int], gpus: Ints) -> Iterator[Shape]:
    for arranged in arrangements(tables, rows, gpus):
        for cuts in itertools.combinations(range(2, tables.num_blocks + 1), len(arranged) - 1):
            yield Shape(arranged, (*cuts, tables.num_layers))
