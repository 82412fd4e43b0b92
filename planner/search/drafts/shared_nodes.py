"""Transfers of drafts where stages of several pipelines share a node's network card."""

from planner.search.drafts.draft import Estimator


class SharedNodes:
    """Seconds of a stage's transfers if pipelines share nodes, cached.

    parts: parts whose pipelines lie side by side, stage by stage; None if each pipeline is on nodes
    of its own as far as there are enough.
    """

    def __init__(self, estimator: Estimator, parts: int | None):
        self._estimator = estimator
        self._parts = parts
        self._sent: dict[tuple[int, tuple[int, ...]], float] = {}

    def sent_s(self, number: int, rows: tuple[int, ...]) -> float:
        """Return the most seconds that a stage of `number` pipelines sends for a microbatch.

        All pipelines on a node send at once. 0 if no node has stages of several pipelines.
        """
        key = number, rows
        if key not in self._sent:
            self._sent[key] = self._new_sent_s(number, rows)
        return self._sent[key]

    def _new_sent_s(self, number: int, rows: tuple[int, ...]) -> float:
        sharing = [self._on_one_node(number, row) for row in rows]
        if max(sharing) == 1:
            return 0.0

        on_nodes_of_many = () if self._parts is None else sharing
        alone = self._estimator.transfers(rows, on_nodes_of_many)
        most_s = 0.0
        before_s = 0.0
        for at, both_s in enumerate(alone):
            after_s = both_s * max(sharing[at], sharing[at + 1])
            most_s = max(most_s, before_s + after_s)
            before_s = after_s
        most_s = max(most_s, before_s)  # the last stage has one boundary
        # over each boundary a stage sends one way only: half of the seconds of both ways
        return most_s / 2

    def _on_one_node(self, number: int, row: int) -> int:
        """Return the pipelines whose stages of a row share a node."""
        tables = self._estimator.tables
        places = self._parts
        if places is None:
            resource = tables.resources[tables.kind(row).resource]
            places = len(resource.node_names)
        several = -(-number // places)
        return min(several, int(tables.groups_a_node[row]))
