"""Drafts in which the only node of a type holds other layers in every second pipeline.

Near-equal pipelines have the same layers on that node, which then is their one holder. If the
node's stages come elsewhere in every second pipeline, nodes of other types hold these layers, too.
"""

from collections.abc import Collection, Iterator

from planner.search.drafts.cut import Balancer
from planner.search.drafts.draft import Draft, Shape
from planner.search.problem.tables import Tables


def stagger(tables: Tables, balancer: Balancer, draft: Draft) -> Iterator[list[Shape]]:
    """Yield shapes like those of a draft of near-equal pipelines, with several holders of layers.

    There is one list for each place of the only nodes' stages that overlaps with none of the first.
    """
    alone = {row for row in range(len(tables.rows)) if _is_alone(tables, row)}
    first, *_ = draft.shapes
    taken = _layers_on(first, alone)
    mine = [row for row in first.rows if row in alone]
    rest = [row for row in first.rows if row not in alone]
    orders = []
    for at in range(len(rest) + 1):
        order = (*rest[:at], *mine, *rest[at:])
        if order != first.rows:
            orders.append(order)
    for cut in balancer.cut_each(orders):
        # a pipeline that cannot hold the model ends nowhere
        if cut.shape.ends[-1] < 0 or taken & _layers_on(cut.shape, alone):
            continue
        shapes = draft.shapes
        shapes[1::2] = [cut.shape] * len(shapes[1::2])
        yield shapes


def _is_alone(tables: Tables, row: int) -> bool:
    return tables.resources[tables.kind(row).resource].num_nodes == 1


def _layers_on(shape: Shape, rows: Collection[int]) -> set[int]:
    layers = set[int]()
    for row, start, end in shape.stages:
        if row in rows:
            layers.update(range(start, end))
    return layers
