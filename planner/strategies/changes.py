"""Random changes to placed plans, of what searches by tables decide once: order, groups, who works for whom, cuts."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.cluster import NodeType
from planner.plan import Pipeline, Plan, Stage
from planner.search.cut import Balancer
from planner.search.draft import Estimator, Shape, assign_microbatches
from planner.search.place import stages_on
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.staged import Group, Stager

_AT_ONCE = (1, 1, 2, 4)
_FAR = 4
_SORTED = 0.25
_REVERSED = 0.15
_SLOPED = 0.5
_BOLD_GPUS = 3
_MORE = 0.4
_TWO_BLOCKS = 0.25
_EASED = 0.2
_SHARES = (0.5, 0.2, 0.05)
_PASSED = 0.2
Pipelines = list[Pipeline]


class Changes:
    """Changes of plans of one request, drawn from one stream of random numbers.

    Where the groups of a pipeline change it is cut anew with the least bottleneck; microbatches are shared anew by the tables.
    Equal pipelines often change together, or plans of many would never leave their shape.
    """

    def __init__(self, request: Request, tables: Tables, rng: random.Random):
        self.request, self.tables, self.rng = request, tables, rng
        self.deepest = request.deepest(tables.num_blocks)
        self.estimator, self.balancer = Estimator(tables), Balancer(tables, self.deepest)
        self.stager = Stager(tables, request.fleet)
        self.sizes = sorted({row.microbatch for row in tables.rows})
        self.degrees = sorted({kind.tp_degree for kind in tables.kinds})
        self._cuts: dict[tuple[tuple[int, ...], int | None, tuple[float, ...]], Shape | None] = {}
        self._share = 0.0  # sequences of a pipeline, on average
        self._ways: list[tuple[float, Callable[[Pipelines, list[int]], Pipelines | None]]] = [
            (0.35, self._move_block),
            (0.12, self._reorder),
            (0.15, self._exchange),
            (0.12, self._hand_over),
            (0.16, self._split_or_merge),
            (0.1, self._resize),
            (0.16, self._join_or_leave),
        ]

    def draw(self, plan: Plan) -> Plan | None:
        """A plan one change away, or now and then a few; None where one that was drawn cannot be made."""
        passes = self._boldly(_PASSED)
        drawn = plan if passes and self.rng.random() < 0.5 else self._changed(plan)
        return self._passed_on(drawn) if passes and drawn is not None else drawn

    def _changed(self, plan: Plan) -> Plan | None:
        weights, ways = zip(*self._ways, strict=True)
        self._share = plan.global_batch_sequences / len(plan.pipelines)
        made: Pipelines | None = list(plan.pipelines)
        many = 1 + self._boldly(_MORE) * (1 + self._boldly(_MORE))
        for way in self.rng.choices(ways, weights, k=many):
            if not made:
                return None
            alike = self._alike(made)
            chosen = alike if self.rng.random() < 0.5 else [self.rng.choice(alike)]
            made = way(made, chosen)
        return None if not made else self._shared(plan, made)

    def _boldly(self, chance: float) -> bool:
        """A change that seldom pays goes with this chance on a tiny fleet, whose plans are few, and less often on a larger one."""
        return self.rng.random() < chance * min(1.0, _BOLD_GPUS / len(self.request.fleet.workers))

    def _alike(self, pipelines: Pipelines) -> list[int]:
        """All pipelines with the cut and the node types of one drawn at random."""
        looks = [self._look(pipeline) for pipeline in pipelines]
        wanted = self.rng.choice(list(dict.fromkeys(looks)))
        return [i for i, look in enumerate(looks) if look == wanted]

    def _look(self, pipeline: Pipeline) -> tuple[int, tuple[tuple[int, int, NodeType], ...]]:
        stages = [(s.num_layers, s.tp_degree, self._node_type(s.workers)) for s in pipeline.stages]
        return pipeline.microbatch_sequences, tuple(stages)

    def _node_type(self, group: Group) -> NodeType:
        return self.request.fleet.node_of(group[0]).node_type

    def _shared(self, plan: Plan, pipelines: Pipelines) -> Plan | None:
        shapes = [shape for pipeline in pipelines if (shape := self.stager.shape(pipeline)) is not None]
        known = len(shapes) == len(pipelines)
        draft = assign_microbatches(self.estimator, shapes, plan.global_batch_sequences) if known else None
        if draft is None:
            return None
        counted = [replace(p, num_microbatches=k) for p, (_, k) in zip(pipelines, draft.pipelines, strict=True)]
        return replace(plan, pipelines=tuple(counted))

    def _passed_on(self, plan: Plan) -> Plan | None:
        """A microbatch goes to another pipeline of its size: what ends sooner is summed sooner, which tables do not know."""
        pipelines = list(plan.pipelines)
        if len(pipelines) == 1:
            return None
        giver, taker = self.rng.sample(range(len(pipelines)), 2)
        one, other = pipelines[giver], pipelines[taker]
        if one.num_microbatches == 1 or one.microbatch_sequences != other.microbatch_sequences:
            return None
        pipelines[giver] = replace(one, num_microbatches=one.num_microbatches - 1)
        pipelines[taker] = replace(other, num_microbatches=other.num_microbatches + 1)
        return replace(plan, pipelines=tuple(pipelines))

    def _cut(self, groups: Sequence[Group], size: int) -> Pipeline | None:
        """A pipeline of these groups in this order; None where it cannot hold the model."""
        rows = self.stager.rows(groups, size) if 0 < len(groups) <= self.deepest else None
        if rows is None:
            return None
        key = (rows, max(1, round(self._share / size)) if self._may_slope() else None, self._eased(rows))
        if key not in self._cuts:
            number = None if key[1] is None else np.array([float(key[1])])
            cuts = self.balancer.cut(np.array([rows]), np.array([len(rows)]), np.array([key[2]]), number)
            held = bool(np.isfinite(cuts.bottleneck_s[0]))
            self._cuts[key] = Shape(rows, tuple(cuts.ends[0, : len(rows)].tolist())) if held else None
        shape = self._cuts[key]
        return None if shape is None else Pipeline(stages_on(self.tables, shape, groups), 1, size)

    def _may_slope(self) -> bool:
        """Whether early stages are to be cut for working ahead: now and then, where they can."""
        return self.tables.begun_ahead > 1 and self.rng.random() < _SLOPED

    def _eased(self, rows: tuple[int, ...]) -> tuple[float, ...]:
        """What of the bottleneck each stage may take: now and then a node type, its link too slow for more, does less than it could."""
        resources = [self.tables.kinds[self.tables.rows[row].kind].resource for row in rows]
        if len(set(resources)) == 1 or not self._boldly(_EASED):
            return (1.0,) * len(rows)
        spared, share = self.rng.choice(resources), self.rng.choice(_SHARES)
        return tuple(share if resource == spared else 1.0 for resource in resources)

    def _regrouped(
        self, pipelines: Pipelines, chosen: Sequence[int], change: Callable[[list[Group]], list[Group] | None]
    ) -> Pipelines | None:
        """The same change to the groups of each of the chosen."""
        for i in chosen:
            groups = change(_groups(pipelines[i]))
            made = None if groups is None else self._with_groups(pipelines[i], groups)
            if made is None:
                return None
            pipelines[i] = made
        return pipelines

    def _with_groups(self, pipeline: Pipeline, groups: list[Group]) -> Pipeline | None:
        """With the cut as it is, where the stages are as many, or anew."""
        if len(groups) != len(pipeline.stages) or self.rng.random() < 0.5:
            return self._cut(groups, pipeline.microbatch_sequences)
        stages = [replace(stage, workers=group) for stage, group in zip(pipeline.stages, groups, strict=True)]
        return replace(pipeline, stages=tuple(stages))

    # -- one pipeline or equal ones ------------------------------------------------------------------------------------

    def _move_block(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """One or a few from one stage to another near it; those between pass as many on."""
        depth = len(pipelines[chosen[0]].stages)
        giver = self.rng.randrange(depth)
        near = [s for s in range(max(0, giver - _FAR), min(depth, giver + _FAR + 1)) if s != giver]
        if not near:
            return None
        taker, many = self.rng.choice(near), 1 + self._boldly(_TWO_BLOCKS)
        for i in chosen:
            sizes = [stage.num_layers for stage in pipelines[i].stages]
            if sizes[giver] <= many:
                return None
            sizes[giver] -= many
            sizes[taker] += many
            starts = itertools.accumulate(sizes, initial=0)
            pipelines[i] = replace(pipelines[i], stages=tuple(map(Stage, starts, sizes, _groups(pipelines[i]))))
        return pipelines

    def _reorder(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """A few neighbouring groups go to another place, or all are reversed, or node types follow each other in another order."""
        depth, way = len(pipelines[chosen[0]].stages), self.rng.random()
        start, many, place = self.rng.randrange(depth), self.rng.choice((1, 1, 2, 3, 4)), self.rng.randrange(depth)
        types = list(self.request.cost.node_types)
        self.rng.shuffle(types)

        def change(groups: list[Group]) -> list[Group]:
            if way < _SORTED:
                return sorted(groups, key=lambda group: types.index(self._node_type(group)))
            moved, rest = groups[start : start + many], groups[:start] + groups[start + many :]
            groups = [*rest[:place], *moved, *rest[place:]]
            return groups[::-1] if way < _SORTED + _REVERSED else groups

        return self._regrouped(pipelines, chosen, change)

    def _split_or_merge(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """A group becomes two of half the size, or two neighbours on a node one."""
        at, split = self.rng.randrange(len(pipelines[chosen[0]].stages)), self.rng.random() < 0.5

        def change(groups: list[Group]) -> list[Group] | None:
            if split:
                half = len(groups[at]) // 2
                return [*groups[:at], groups[at][:half], groups[at][half:], *groups[at + 1 :]] if half else None
            if at + 1 == len(groups):
                return None
            return [*groups[:at], groups[at] + groups[at + 1], *groups[at + 2 :]]

        return self._regrouped(pipelines, chosen, change)

    def _resize(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Microbatches of another size; or pipelines of one size take another's, and that one theirs."""
        size, keep = self.rng.choice(self.sizes), self.rng.random() < 0.5
        sizes = dict.fromkeys(chosen if self.request.mixed_microbatch else range(len(pipelines)), size)
        other = self.rng.randrange(len(pipelines))
        if self.request.mixed_microbatch and other not in chosen and self.rng.random() < 0.3:
            sizes = dict.fromkeys(chosen, pipelines[other].microbatch_sequences)
            sizes[other] = pipelines[chosen[0]].microbatch_sequences
        for i, size in sizes.items():
            made = self._sized(pipelines[i], size) if keep else self._cut(_groups(pipelines[i]), size)
            if made is None:
                return None
            pipelines[i] = made
        return pipelines

    def _sized(self, pipeline: Pipeline, size: int) -> Pipeline | None:
        known = self.stager.rows(_groups(pipeline), size) is not None
        return replace(pipeline, microbatch_sequences=size) if known else None

    def _join_or_leave(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Idle workers of a node become a stage or double a group there, or a group becomes idle."""
        used = {worker for pipeline in pipelines for worker in pipeline.workers}
        idle = [tuple(w for w in node.workers if w not in used) for node in self.request.fleet.nodes]
        idle = [workers for workers in idle if workers]
        depth = len(pipelines[chosen[0]].stages)
        place, way = self.rng.randrange(depth + 1), self.rng.random()
        if not idle or way >= 0.8:
            return self._regrouped(pipelines, chosen, lambda groups: groups[:place] + groups[place + 1 :])
        workers = self.rng.choice(idle)
        if way < 0.3:
            return self._regrouped(pipelines, chosen[:1], lambda groups: self._doubled(groups, workers))
        group = workers[: self.rng.choice([d for d in self.degrees if d <= len(workers)] or [1])]
        return self._regrouped(pipelines, chosen[:1], lambda groups: [*groups[:place], group, *groups[place:]])

    def _doubled(self, groups: list[Group], idle: Group) -> list[Group] | None:
        """A group on these workers' node with as many of them as it has."""
        node = self.request.fleet.node_of(idle[0])
        there = [i for i, g in enumerate(groups) if len(g) <= len(idle) and self.request.fleet.node_of(g[0]) is node]
        if not there:
            return None
        at = self.rng.choice(there)
        return [*groups[:at], groups[at] + idle[: len(groups[at])], *groups[at + 1 :]]

    # -- two pipelines -------------------------------------------------------------------------------------------------

    def _exchange(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """Two stages exchange their workers, in one pipeline or two."""
        p, q = self.rng.choice(chosen), self.rng.randrange(len(pipelines))
        groups = {i: _groups(pipelines[i]) for i in (p, q)}
        one, other = self.rng.randrange(len(groups[p])), self.rng.randrange(len(groups[q]))
        if len(groups[p][one]) != len(groups[q][other]) or (p, one) == (q, other):
            return None
        groups[p][one], groups[q][other] = groups[q][other], groups[p][one]
        for i, mine in groups.items():
            made = self._with_groups(pipelines[i], mine)
            if made is None:
                return None
            pipelines[i] = made
        return pipelines

    def _hand_over(self, pipelines: Pipelines, chosen: list[int]) -> Pipelines | None:
        """A few neighbouring groups go to another pipeline; one that has none left is no more."""
        if len(pipelines) < 2:
            return None
        giver = self.rng.choice(chosen)
        taker = self.rng.choice([i for i in range(len(pipelines)) if i != giver])
        left = _groups(pipelines[giver])
        start, many = self.rng.randrange(len(left)), self.rng.choice(_AT_ONCE)
        moved, left = left[start : start + many], left[:start] + left[start + many :]
        place = self.rng.randrange(len(pipelines[taker].stages) + 1)
        made = self._regrouped(pipelines, [taker], lambda groups: [*groups[:place], *moved, *groups[place:]])
        if made is not None and not left:
            return [pipeline for i, pipeline in enumerate(made) if i != giver]
        return made and self._regrouped(made, [giver], lambda _: left)


def _groups(pipeline: Pipeline) -> list[Group]:
    return [stage.workers for stage in pipeline.stages]
