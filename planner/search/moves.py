"""Random moves from one placed plan to a similar one, drawn from one stream of random numbers.

If the groups of a pipeline change, it is cut again with the least bottleneck. After each move
microbatches are shared again by the tables. Equal pipelines often move together, or plans of many
would never leave their shape.
"""

import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from planner.cluster import Fleet, Node, NodeType, node_of
from planner.plan import Pipeline, Plan, Stage
from planner.search.cut import Balancer
from planner.search.draft import Estimator, Shape, assign_microbatches
from planner.search.judge import kind_of
from planner.search.place import stages_on
from planner.search.tables import Tables

GpuGroup = tuple[str, ...]
Pipelines = list[Pipeline]


class Moves:
    """Draws moves of plans over one set of tables.

    mixed_sizes: pipelines may differ in the size of their microbatches.
    """

    def __init__(self, tables: Tables, rng: random.Random, mixed_sizes: bool = True):
        self.tables = tables
        self.rng = rng
        self.mixed_sizes = mixed_sizes
        self.estimator, self.balancer = Estimator(tables), Balancer(tables)
        self.degrees = sorted({kind.tp_degree for kind in tables.kinds})
        self._fleet = Fleet(
            0, tuple(Node(name, node_type) for name, node_type in tables.node_types.items())
        )
        self._uneven = any(kind.group for kind in tables.kinds)
        self._share = 0.0  # sequences of a pipeline, on average
        self._ways: tuple[Callable[[Pipelines, list[int]], Pipelines | None], ...] = (
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
        made = list(plan.pipelines)
        alike = self._alike(made, range(len(made)) if broken is None else broken)
        changed = self.rng.choice(self._ways)(
            made, alike if self.rng.random() < 0.5 else [self.rng.choice(alike)]
        )
        return self.shared(plan, changed) if changed else None

    def shared(self, plan: Plan, pipelines: Pipelines) -> Plan | None:
        """Return the plan with microbatches shared so that the slowest pipeline ends earliest.

        The tables give the times. None if sizes cannot meet the batch.
        """
        shapes = [self.shape(pipeline) for pipeline in pipelines]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes):
            return None
        if (
            draft := assign_microbatches(self.estimator, known, plan.global_batch_sequences)
        ) is None:
            return None
        counted = [
            replace(p, num_microbatches=k)
            for p, (_, k) in zip(pipelines, draft.pipelines, strict=True)
        ]
        return replace(plan, pipelines=tuple(counted))

    def shape(self, pipeline: Pipeline) -> Shape | None:
        """Return a pipeline's shape; None if the tables lack its groups or its microbatch size."""
        rows = self.rows(groups_of(pipeline), pipeline.microbatch_sequences)
        ends = [stage.end_layer + 1 for stage in pipeline.stages]
        return None if rows is None else Shape(rows, (*ends[:-1], ends[-1] + 1))

    def rows(self, groups: Sequence[GpuGroup], microbatch: int) -> tuple[int, ...] | None:
        """Return the table row of each group; None if a group has none."""
        rows = [self.tables.row_of(group, microbatch) for group in groups]
        found = tuple(row for row in rows if row is not None)
        return found if len(found) == len(rows) else None

    def is_uneven(self, group: GpuGroup) -> bool:
        """Return True if the tables have the group with uneven shares."""
        row = self.tables.row_of(group, self.tables.sizes[0]) if group else None
        return row is not None and self.tables.kind(row).group is not None

    def cut(self, groups: Sequence[GpuGroup], size: int) -> Pipeline | None:
        """Return a pipeline of these groups in this order; None if it cannot hold the model."""
        rows = self.rows(groups, size) if 0 < len(groups) <= self.tables.deepest else None
        if rows is None:
            return None
        sloped = self.tables.begun_ahead > 1 and self.rng.random() < 0.5
        (cut,) = self.balancer.cut_each(
            [rows], [float(max(1, round(self._share / size)))] if sloped else ()
        )
        return (
            Pipeline(stages_on(self.tables, cut.shape, groups), 1, size)
            if math.isfinite(cut.bottleneck_s)
            else None
        )

    def _alike(self, pipelines: Pipelines, among: Collection[int]) -> list[int]:
        """Draw one of these pipelines, and return all of them with its cut and node types."""
        looks = {i: kind_of(self._fleet, pipelines[i]) for i in among or range(len(pipelines))}
        wanted = self.rng.choice(list(dict.fromkeys(looks.values())))
        return [i for i, look in looks.items() if look == wanted]

    def _type_of(self, group: GpuGroup) -> NodeType:
        return self.tables.node_types[node_of(group[0])]

    def _with_groups(self, pipeline: Pipeline, groups: list[GpuGroup]) -> Pipeline | None:
        """Return the pipeline on other groups.

        It keeps its cut if the number of stages is the same, or it is cut again.
        """
        uneven = any(stage.tp_shares for stage in pipeline.stages)
        if len(groups) != len(pipeline.stages) or self.rng.random() < 0.5 or uneven:
            return self.cut(groups, pipeline.microbatch_sequences)
        stages = [
            replace(stage, workers=group, compute=None)
            for stage, group in zip(pipeline.stages, groups, strict=True)
        ]
        return replace(pipeline, stages=tuple(stages))

    def _regrouped(
        self, pipelines: Pipelines, groups: dict[int, list[GpuGroup]]
    ) -> Pipelines | None:
        """Return the pipelines with these groups; a pipeline without groups is removed."""
        made = {
            i: self._with_groups(pipelines[i], mine) if mine else None for i, mine in groups.items()
        }
        if any(made[i] is None for i, mine in groups.items() if mine):
            return None
        changed = (made.get(i, pipeline) for i, pipeline in enumerate(pipelines))
        return [pipeline for pipeline in changed if pipeline is not None]

    def _each(
        self,
        pipelines: Pipelines,
        chosen: Sequence[int],
        change: Callable[[list[GpuGroup]], list[GpuGroup] | None],
    ) -> Pipelines | None:
        """Make the same change to the groups of each chosen pipeline."""
        changed = {i: change(groups_of(pipelines[i])) for i in chosen}
        found = {i: groups for i, groups in changed.items() if groups is not None}
        return self._regrouped(pipelines, found) if len(found) == len(chosen) else None

    # -- one pipeline or equal ones
    # ------------------------------------------------------------------------------

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
            cut = zip(itertools.accumulate(sizes, initial=0), sizes, pipelines[i].stages)
            stages = (
                Stage(start, size, stage.workers, tp_shares=stage.tp_shares)
                for start, size, stage in cut
            )
            pipelines[i] = replace(pipelines[i], stages=tuple(stages))
        return pipelines

    def _reorder(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Reorder groups: move a few neighbours, reverse all, or reorder the node types."""
        depth = len(pipelines[chosen[0]].stages)
        way = self.rng.choice("mmmrs")
        start, many, place = (
            self.rng.randrange(depth),
            self.rng.choice((1, 1, 2, 3, 4)),
            self.rng.randrange(depth),
        )
        types = [resource.node_type for resource in self.tables.resources]
        self.rng.shuffle(types)

        def change(groups: list[GpuGroup]) -> list[GpuGroup]:
            if way == "s":
                return sorted(groups, key=lambda group: types.index(self._type_of(group)))
            if way == "r":
                return groups[::-1]
            moved = groups[start : start + many]
            rest = groups[:start] + groups[start + many :]
            return [*rest[:place], *moved, *rest[place:]]

        return self._each(pipelines, chosen, change)

    def _split_or_merge(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Split a group into two of half the size, or merge two neighbours on a node.

        In some moves, all groups of a node type in a pipeline do so.
        """
        groups = groups_of(pipelines[chosen[0]])
        at, split, whole = (
            self.rng.randrange(len(groups)),
            self.rng.random() < 0.5,
            self.rng.random() < 0.3,
        )
        kind = (self._type_of(groups[at]), len(groups[at]))

        def change(groups: list[GpuGroup]) -> list[GpuGroup] | None:
            out = list[GpuGroup]()
            i = 0
            while i < len(groups):
                mine = groups[i]
                two = groups[i : i + 2]
                if i == at or (whole and (self._type_of(mine), len(mine)) == kind):
                    if split:
                        out += [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
                    elif len(two) == 2 and (len(two[0]) == len(two[1]) or self._uneven):
                        out.append(two[0] + two[1])
                        i += 1
                    else:
                        return None
                else:
                    out.append(mine)
                i += 1
            return out if all(out) else None

        return self._each(pipelines, chosen, change)

    def _resize(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Change the size of microbatches, with the cut as it is or cut again."""
        size = self.rng.choice(self.tables.sizes)
        keep = self.rng.random() < 0.5
        made = list(pipelines)
        for i in chosen if self.mixed_sizes else range(len(pipelines)):
            groups = groups_of(pipelines[i])
            known = self.rows(groups, size) is not None
            new = (
                replace(pipelines[i], microbatch_sequences=size)
                if keep and known
                else self.cut(groups, size)
            )
            if new is None:
                return None
            made[i] = new
        return made

    def _join_or_leave(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Turn a node's idle workers into a stage, or all idle workers into a pipeline.

        In other moves, a group becomes idle.
        """
        used = {worker for pipeline in pipelines for worker in pipeline.workers}
        idle = []
        for node in self._fleet.nodes:
            free = tuple(worker for worker in node.workers if worker not in used)
            if free:
                idle.append(free)
        depth = len(pipelines[chosen[0]].stages)
        place, way = self.rng.randrange(depth + 1), self.rng.random()
        if not idle or way >= 0.8:
            return self._each(
                pipelines, chosen, lambda groups: groups[:place] + groups[place + 1 :]
            )
        free = self.rng.choice(idle)
        degree = self.rng.choice([d for d in self.degrees if d <= len(free)] or [1])
        if way < 0.2:
            several = list(itertools.chain.from_iterable(_split(of, degree) for of in idle))
            new = self.cut(
                several[: self.tables.deepest], pipelines[chosen[0]].microbatch_sequences
            )
            return None if new is None else [*pipelines, new]
        return self._each(
            pipelines, chosen[:1], lambda groups: [*groups[:place], free[:degree], *groups[place:]]
        )

    # -- two pipelines
    # ------------------------------------------------------------------------------

    def _exchange(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Exchange the workers of two stages, in one pipeline or two."""
        p = self.rng.choice(chosen)
        q = self.rng.randrange(len(pipelines))
        groups = {i: groups_of(pipelines[i]) for i in (p, q)}
        one = self.rng.randrange(len(groups[p]))
        other = self.rng.randrange(len(groups[q]))
        if len(groups[p][one]) != len(groups[q][other]) or (p, one) == (q, other):
            return None
        groups[p][one], groups[q][other] = groups[q][other], groups[p][one]
        return self._regrouped(pipelines, groups)

    def _hand_over(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Move a few neighbouring groups to another pipeline."""
        if len(pipelines) < 2:
            return None
        giver = self.rng.choice(chosen)
        taker = self.rng.choice([i for i in range(len(pipelines)) if i != giver])
        left = groups_of(pipelines[giver])
        taken = groups_of(pipelines[taker])
        start, many, place = (
            self.rng.randrange(len(left)),
            self.rng.choice((1, 1, 2, 4)),
            self.rng.randrange(len(taken) + 1),
        )
        moved = left[start : start + many]
        left = left[:start] + left[start + many :]
        return self._regrouped(
            pipelines, {giver: left, taker: [*taken[:place], *moved, *taken[place:]]}
        )


def groups_of(pipeline: Pipeline) -> list[GpuGroup]:
    """Return the workers of each stage."""
    return [stage.workers for stage in pipeline.stages]


def _split(workers: GpuGroup, degree: int) -> list[GpuGroup]:
    """Split workers into groups of `degree`, and drop the rest."""
    return [workers[i : i + degree] for i in range(0, len(workers) - degree + 1, degree)]
