"""Random moves from one placed plan to a similar one, drawn from one stream of random numbers.

If the groups of a pipeline change, it is cut again with the least bottleneck. After each move
microbatches are shared again by the tables. Equal pipelines often move together, or plans of many
would never leave their shape.
"""

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from planner.inputs.fleet import Fleet, Node, NodeType, node_of
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.drafts.cut import Balancer
from planner.search.drafts.draft import Draft, Estimator, Shape, assign_microbatches
from planner.search.drafts.place import stages_on
from planner.search.problem.tables import Tables, tp_degrees_of
from planner.search.walk.judge import kind_of

GpuGroup = tuple[str, ...]
Pipelines = list[Pipeline]
_Move = Callable[[Pipelines, list[int]], Pipelines | None]
"""Move of a plan's pipelines that begins with the chosen ones; None if it cannot be made."""


class Moves:
    """Draws moves of plans over one set of tables."""

    def __init__(self, tables: Tables, rng: random.Random):
        self.tables = tables
        self.rng = rng
        self.estimator = Estimator(tables)
        self.balancer = Balancer(tables)
        self.degrees = tp_degrees_of(tables)
        nodes = [Node(name, node_type) for name, node_type in tables.node_types.items()]
        self._fleet = Fleet(0, tuple(nodes))
        self._uneven = any(kind.group for kind in tables.kinds)
        self._share = 0.0  # sequences of a pipeline, on average
        # of a batch and shapes, since many moves lead to the same ones
        self._shared: dict[tuple[int | Shape, ...], Draft | None] = {}
        self._ways: tuple[_Move, ...] = (
            self._move_blocks,
            self._reorder,
            self._exchange,
            self._hand_over,
            self._split_or_merge,
            self._resize,
            self._join_or_leave,
        )

    def draw(self, plan: Plan, broken: Collection[int] | None = None) -> Plan | None:
        """Return a plan one move away; None if the drawn move cannot be made.

        broken: pipelines with which a move begins (None: any).
        """
        self._share = plan.global_batch_sequences / len(plan.pipelines)
        pipelines = list(plan.pipelines)
        among = range(len(pipelines)) if broken is None else broken
        alike = self._alike(pipelines, among)
        move = self.rng.choice(self._ways)
        chosen = alike
        if self.rng.random() >= 0.5:
            chosen = [self.rng.choice(alike)]

        changed = move(pipelines, chosen)
        return self.share_batch(plan, changed) if changed else None

    def share_batch(self, plan: Plan, pipelines: Pipelines) -> Plan | None:
        """Return the plan with microbatches shared so that the slowest pipeline ends earliest.

        The tables give the times. None if sizes cannot meet the batch.
        """
        shapes = []
        for pipeline in pipelines:
            shape = self.shape(pipeline)
            if shape is None:
                return None
            shapes.append(shape)

        batch = plan.global_batch_sequences
        key: tuple[int | Shape, ...] = (batch, *shapes)
        if key not in self._shared:
            self._shared[key] = assign_microbatches(self.estimator, shapes, batch)
        draft = self._shared[key]
        if draft is None:
            return None
        counted = []
        drafted = zip(pipelines, draft.pipelines, strict=True)
        for pipeline, (_, num_microbatches) in drafted:
            whole = replace(
                pipeline, num_microbatches=num_microbatches, last_microbatch_sequences=0
            )
            counted.append(whole)
        return replace(plan, pipelines=tuple(counted))

    def shape(self, pipeline: Pipeline) -> Shape | None:
        """Return a pipeline's shape; None if the tables lack its groups or its microbatch size."""
        rows = self.rows(groups_of(pipeline), pipeline.microbatch_sequences)
        if rows is None:
            return None
        # tables count the embedding as layer 0, and the head after the blocks
        ends = [stage.end_layer + 1 for stage in pipeline.stages]
        ends[-1] += 1
        return Shape(rows, tuple(ends))

    def rows(self, groups: Sequence[GpuGroup], microbatch: int) -> tuple[int, ...] | None:
        """Return the table row of each group; None if a group has none."""
        rows = []
        for group in groups:
            row = self.tables.row_of(group, microbatch)
            if row is None:
                return None
            rows.append(row)
        return tuple(rows)

    def is_uneven(self, group: GpuGroup) -> bool:
        """Return True if the tables have the group with uneven shares."""
        if not group:
            return False
        size = self.tables.sizes[0]
        row = self.tables.row_of(group, size)
        if row is None:
            return False
        return self.tables.kind(row).group is not None

    def cut(self, groups: Sequence[GpuGroup], size: int) -> Pipeline | None:
        """Return a pipeline of these groups in this order; None if it cannot hold the model."""
        if not 0 < len(groups) <= self.tables.deepest:
            return None
        rows = self.rows(groups, size)
        if rows is None:
            return None

        # half of the cuts let early stages work ahead, the others have the least bottleneck
        microbatches = list[float]()
        if self.tables.begun_ahead > 1 and self.rng.random() < 0.5:
            count = round(self._share / size)
            microbatches.append(float(max(1, count)))
        (cut,) = self.balancer.cut_each([rows], microbatches)
        if not math.isfinite(cut.bottleneck_s):
            return None
        stages = stages_on(self.tables, cut.shape, groups)
        return Pipeline(stages, 1, size)

    def _alike(self, pipelines: Pipelines, among: Collection[int]) -> list[int]:
        """Draw one of these pipelines, and return all of them with its cut and node types."""
        kinds = {i: kind_of(self._fleet, pipelines[i]) for i in among or range(len(pipelines))}
        distinct = list(dict.fromkeys(kinds.values()))
        wanted = self.rng.choice(distinct)
        return [i for i, kind in kinds.items() if kind == wanted]

    def _type_of(self, group: GpuGroup) -> NodeType:
        return self.tables.node_types[node_of(group[0])]

    def _with_groups(self, pipeline: Pipeline, groups: list[GpuGroup]) -> Pipeline | None:
        """Return the pipeline on other groups.

        It keeps its cut if the number of stages is the same, or it is cut again.
        """
        is_as_deep = len(groups) == len(pipeline.stages)
        keeps_cut = is_as_deep and self.rng.random() >= 0.5
        # shares of one group mean nothing on another
        is_uneven = any(stage.tp_shares for stage in pipeline.stages)
        if is_uneven or not keeps_cut:
            return self.cut(groups, pipeline.microbatch_sequences)

        stages = []
        for stage, group in zip(pipeline.stages, groups, strict=True):
            stages.append(replace(stage, workers=group, compute=None))
        return replace(pipeline, stages=tuple(stages))

    def _regroup(self, pipelines: Pipelines, groups: dict[int, list[GpuGroup]]) -> Pipelines | None:
        """Return the pipelines with these groups; a pipeline without groups is removed."""
        # each pipeline draws random numbers, so none is skipped after another has failed
        changed = {i: self._with_groups(pipelines[i], mine) for i, mine in groups.items() if mine}
        if None in changed.values():
            return None

        made = []
        for i, pipeline in enumerate(pipelines):
            is_removed = i in groups and not groups[i]
            if not is_removed:
                made.append(changed.get(i) or pipeline)
        return made

    def _each(
        self,
        pipelines: Pipelines,
        chosen: Sequence[int],
        change: Callable[[list[GpuGroup]], list[GpuGroup] | None],
    ) -> Pipelines | None:
        """Make the same change to the groups of each chosen pipeline."""
        changed = {}
        for i in chosen:
            groups = change(groups_of(pipelines[i]))
            if groups is None:
                return None
            changed[i] = groups
        return self._regroup(pipelines, changed)

    # ---- moves of one pipeline, or of equal ones ----

    def _move_blocks(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Move one or two blocks from one stage to another; stages between pass as many on."""
        depth = len(pipelines[chosen[0]].stages)
        if depth < 2:
            return None
        giver, taker = self.rng.sample(range(depth), 2)
        if self.rng.random() < 0.5:
            taker = giver + 1 if giver + 1 < depth else giver - 1
        many = self.rng.choice((1, 1, 1, 2))
        for i in chosen:
            sizes = [stage.num_layers for stage in pipelines[i].stages]
            if sizes[giver] <= many:
                return None
            sizes[giver] -= many
            sizes[taker] += many

            stages = []
            start = 0
            for size, old in zip(sizes, pipelines[i].stages, strict=True):
                stage = Stage(start, size, old.workers, tp_shares=old.tp_shares)
                stages.append(stage)
                start += size
            pipelines[i] = replace(pipelines[i], stages=tuple(stages))
        return pipelines

    def _reorder(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Reorder groups: move a few neighbours, reverse all, or reorder the node types."""
        depth = len(pipelines[chosen[0]].stages)
        way = self.rng.choice(("move", "move", "move", "reverse", "sort"))
        start = self.rng.randrange(depth)
        end = start + self.rng.choice((1, 1, 2, 3, 4))
        place = self.rng.randrange(depth)
        types = [resource.node_type for resource in self.tables.resources]
        self.rng.shuffle(types)

        def change(groups: list[GpuGroup]) -> list[GpuGroup]:
            if way == "sort":
                return sorted(groups, key=lambda group: types.index(self._type_of(group)))
            if way == "reverse":
                return groups[::-1]
            moved = groups[start:end]
            rest = groups[:start] + groups[end:]
            return [*rest[:place], *moved, *rest[place:]]

        return self._each(pipelines, chosen, change)

    def _split_or_merge(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Split a group into two of half the size, or merge two neighbours on a node.

        In some moves, all groups of a node type in a pipeline do so.
        """
        groups = groups_of(pipelines[chosen[0]])
        at = self.rng.randrange(len(groups))
        split = self.rng.random() < 0.5
        whole_type = self.rng.random() < 0.3
        wanted_type = self._type_of(groups[at])
        wanted_size = len(groups[at])

        def is_chosen(i: int, group: GpuGroup) -> bool:
            if i == at:
                return True
            if not whole_type or len(group) != wanted_size:
                return False
            return self._type_of(group) == wanted_type

        def change(groups: list[GpuGroup]) -> list[GpuGroup] | None:
            changed = list[GpuGroup]()
            i = 0
            while i < len(groups):
                group = groups[i]
                if not is_chosen(i, group):
                    changed.append(group)
                elif split:
                    half = len(group) // 2
                    changed += [group[:half], group[half:]]
                else:
                    merged = _merge(groups[i : i + 2], any_sizes=self._uneven)
                    if merged is None:
                        return None
                    changed.append(merged)
                    i += 1  # the neighbour is in the merged group
                i += 1
            # half of one worker is no group
            return changed if all(changed) else None

        return self._each(pipelines, chosen, change)

    def _resize(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Change the size of microbatches, with the cut as it is or cut again."""
        size = self.rng.choice(self.tables.sizes)
        keeps_cut = self.rng.random() < 0.5
        made = list(pipelines)
        for i in chosen:
            groups = groups_of(pipelines[i])
            if keeps_cut and self.rows(groups, size) is not None:
                made[i] = replace(pipelines[i], microbatch_sequences=size)
                continue
            cut = self.cut(groups, size)
            if cut is None:
                return None
            made[i] = cut
        return made

    def _join_or_leave(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Turn a node's idle workers into a stage, or all idle workers into a pipeline.

        In other moves, a group becomes idle.
        """
        first = pipelines[chosen[0]]
        idle = _idle_workers(self._fleet, pipelines)
        place = self.rng.randrange(len(first.stages) + 1)
        way = self.rng.random()
        if not idle or way >= 0.8:
            # a place after the last stage leaves all groups as they are
            return self._each(
                pipelines, chosen, lambda groups: groups[:place] + groups[place + 1 :]
            )

        free = self.rng.choice(idle)
        possible = [degree for degree in self.degrees if degree <= len(free)]
        degree = self.rng.choice(possible or [1])
        if way >= 0.2:
            group = free[:degree]
            return self._each(
                pipelines, chosen[:1], lambda groups: [*groups[:place], group, *groups[place:]]
            )

        groups = list[GpuGroup]()
        for workers in idle:
            groups += _split(workers, degree)
        pipeline = self.cut(groups[: self.tables.deepest], first.microbatch_sequences)
        return None if pipeline is None else [*pipelines, pipeline]

    # ---- moves of two pipelines ----

    def _exchange(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Exchange the workers of two stages, in one pipeline or two."""
        p = self.rng.choice(chosen)
        q = self.rng.randrange(len(pipelines))
        groups = {p: groups_of(pipelines[p])}
        if q != p:
            groups[q] = groups_of(pipelines[q])
        one = self.rng.randrange(len(groups[p]))
        other = self.rng.randrange(len(groups[q]))
        is_same = (p, one) == (q, other)
        if is_same or len(groups[p][one]) != len(groups[q][other]):
            return None

        mine = groups[p][one]
        groups[p][one] = groups[q][other]
        groups[q][other] = mine
        return self._regroup(pipelines, groups)

    def _hand_over(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Move a few neighbouring groups to another pipeline."""
        if len(pipelines) < 2:
            return None
        giver = self.rng.choice(chosen)
        others = [i for i in range(len(pipelines)) if i != giver]
        taker = self.rng.choice(others)
        given = groups_of(pipelines[giver])
        taken = groups_of(pipelines[taker])

        start = self.rng.randrange(len(given))
        end = start + self.rng.choice((1, 1, 2, 4))
        place = self.rng.randrange(len(taken) + 1)
        left = given[:start] + given[end:]
        joined = [*taken[:place], *given[start:end], *taken[place:]]
        return self._regroup(pipelines, {giver: left, taker: joined})


def groups_of(pipeline: Pipeline) -> list[GpuGroup]:
    """Return the workers of each stage."""
    return [stage.workers for stage in pipeline.stages]


def _idle_workers(fleet: Fleet, pipelines: Pipelines) -> list[GpuGroup]:
    """Return the idle workers of each node that has some."""
    used = set[str]()
    for pipeline in pipelines:
        used.update(pipeline.workers)

    idle = []
    for node in fleet.nodes:
        free = tuple(worker for worker in node.workers if worker not in used)
        if free:
            idle.append(free)
    return idle


def _merge(neighbors: list[GpuGroup], *, any_sizes: bool) -> GpuGroup | None:
    """Return two groups as one; None if there is no second, or if it is of another size."""
    if len(neighbors) < 2:
        return None
    first, second = neighbors
    if len(first) != len(second) and not any_sizes:
        return None
    return first + second


def _split(workers: GpuGroup, degree: int) -> list[GpuGroup]:
    """Split workers into groups of `degree`, and drop the rest."""
    begins = range(0, len(workers) - degree + 1, degree)
    return [workers[begin : begin + degree] for begin in begins]
