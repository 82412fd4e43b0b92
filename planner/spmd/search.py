"""Search of the cheapest program for given shares: a dynamic program over the frontier, and A*.

Both have the same states. Costs add up and do not depend on the order, so operators are taken in
topological order without loss. A state is the set of layouts of each live tensor. A tensor gets a
further layout when a rule first asks for it, by at most two conversions (more never help: every
pair of layouts is joined by two). A state is dropped if a cheaper one can be converted into it for
the difference. Inputs, constants, and parameters with one reader never live; they add to a rule the
cheapest way to load them as the rule wants.

Segments lie between positions with few live tensors. Equal segments (a model's layers) that begin
at states with equal differences of cost have equal solutions. So a deep model takes little longer
than its first few layers.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planner.spmd.costs import CostTable, Shares
from planner.spmd.graph import GraphNode
from planner.spmd.layouts import FACTORED, TensorLayout
from planner.spmd.program import Instruction, Program, conversions_of, layouts_of
from planner.spmd.rules import leaf_layouts, rules_of
from planner.spmd.segments import SearchStep, Segments

# cheaper states of the frontier, from which another may follow: the cheapest tell nearly all
COMPARED = 12
# followed at once where bytes are charged: of the time without a limit 0.4 to 0.9, the same plans
CHARGED_STATES = 32
SearchState = tuple[int, ...]
"""Layouts of each live tensor, in the order of positions: one bit for each layout it has."""


@dataclass(frozen=True, slots=True)
class _Option:
    """Rule at one node.

    wants: for each live input, its place in the frontier and the bit of the layout. loads:
    instructions for leaves with one reader.
    """

    seconds: float
    wants: tuple[tuple[int, int], ...]
    bit: int
    instruction: Instruction
    loads: tuple[Instruction, ...]


@dataclass(slots=True)
class _Tensor:
    """Layouts and conversions of a tensor.

    paths[have, want]: the cheapest conversions, and the layouts that the tensor has then.
    """

    layouts: tuple[TensorLayout, ...]
    edges: dict[tuple[int, int], tuple[float, Instruction]]
    paths: dict[tuple[int, int], tuple[float, int, tuple[Instruction, ...]]] = field(
        default_factory=dict
    )

    def path(self, have: int, want: int) -> tuple[float, int, tuple[Instruction, ...]]:
        """Seconds, layouts afterwards, instructions."""
        found = self.paths.get((have, want))
        if found is None:
            found = self.paths[have, want] = min(
                self._ways(have, want), key=lambda way: (way[0], len(way[2]))
            )
        return found

    def _ways(self, have: int, want: int) -> Iterator[tuple[float, int, tuple[Instruction, ...]]]:
        if have >> want & 1:
            yield 0.0, have, ()
            return
        for source in range(len(self.layouts)):
            if not have >> source & 1:
                continue
            if edge := self.edges.get((source, want)):
                yield edge[0], have | 1 << want, (edge[1],)
            for middle in range(len(self.layouts)):
                first = self.edges.get((source, middle))
                second = self.edges.get((middle, want))
                if first and second:
                    yield (
                        first[0] + second[0],
                        have | 1 << want | 1 << middle,
                        (first[1], second[1]),
                    )


@dataclass(frozen=True, slots=True)
class _Solved:
    """Solution of a segment.

    first: its first step. back: for each step, state -> (state before, option). costs: at its end,
    less the least cost at its beginning.
    """

    first: int
    back: list[dict[SearchState, tuple[SearchState, _Option]]]
    costs: dict[SearchState, float]


class ProgramSearch:
    """Search for the cheapest program on a cost table.

    pinned: for some parameters, the only dimension along which their state may be cut.
    byte_s: by device, seconds charged for each byte that the device must hold. The charge makes a
    search respect memory. The search then follows only the cheapest states, which proves nothing.
    """

    def __init__(
        self,
        table: CostTable,
        shares: Shares,
        pinned: dict[str, int] | None = None,
        byte_s: tuple[float, ...] = (),
    ) -> None:
        self.table = table
        self.shares = shares
        self.graph = table.graph
        self._pinned = pinned or {}
        self._byte_s = byte_s
        self._tensors: dict[str, _Tensor] = {}
        self.states_seen = 0
        self._places = self._live_places()
        self._segments = Segments(self.graph, shares, self._places, self._pinned)
        self._choices: dict[int, tuple[_Option, ...]] = {}

    def price(self, instruction: Instruction) -> float:
        """Seconds of an instruction and its dual, and the charge for its bytes."""
        seconds = self.table.times(instruction) * self.table.seconds(
            self.table.terms(instruction), self.shares
        )
        if self._byte_s:
            axis, size = self.table.bytes_of(instruction)
            share = self.shares.of(axis).tolist() if axis is not None else [1.0] * len(self._byte_s)
            seconds += size * sum(
                charge * part for charge, part in zip(self._byte_s, share, strict=True)
            )
        return seconds

    def _live_places(self) -> list[SearchStep]:
        live: tuple[str, ...] = ()
        places: list[SearchStep] = []
        last_read = {
            name: max(readers, default=len(self.graph.nodes))
            for name, readers in self.graph.consumers.items()
        }
        for position, node in enumerate(self.graph.nodes):
            if self._is_fused(node):
                continue
            kept = tuple(at for at, name in enumerate(live) if last_read[name] > position)
            places.append(SearchStep(position, live, kept))
            live = (*(live[at] for at in kept), node.name)
        return places

    def _options_at(self, step: int) -> tuple[_Option, ...]:
        if step not in self._choices:
            place = self._places[step]
            self._choices[step] = tuple(self._options(self.graph.nodes[place.position], place.live))
        return self._choices[step]

    def _live(self, step: int) -> tuple[str, ...]:
        """Tensors alive before a step; after the last one the loss."""
        return self._places[step].live if step < len(self._places) else (self.graph.nodes[-1].name,)

    def _is_fused(self, node: GraphNode) -> bool:
        """Inputs and constants are free in any layout, so each reader loads its own."""
        if node.kind != "parameter":
            return node.kind != "op"
        readers = self.graph.consumers[node.name]
        return len(readers) == 1 and self.graph.nodes[readers[0]].inputs.count(node.name) == 1

    def _options(self, node: GraphNode, live: tuple[str, ...]) -> Iterator[_Option]:
        if node.kind != "op":
            for load in self._leaf_loads(node):
                if load.output != FACTORED:
                    yield _Option(self.price(load), (), self._bit(node.name, load.output), load, ())
            return
        for rule in rules_of(self.graph, node):
            inputs = tuple(zip(node.inputs, rule.inputs, strict=True))
            instruction = Instruction("compute", node.name, inputs, rule.output, rule.letter)
            loads: list[tuple[float, tuple[Instruction, ...]]] = []
            wants: set[tuple[int, int]] = set()
            for name, layout in inputs:
                if self._is_fused(self.graph.by_name[name]):
                    loads.append(self._fused_load(name, layout))
                if name in live:
                    wants.add((live.index(name), self._bit(name, layout)))
            seconds = self.price(instruction) + sum(load[0] for load in loads)
            yield _Option(
                seconds,
                tuple(sorted(wants)),
                self._bit(node.name, rule.output),
                instruction,
                tuple(i for load in loads for i in load[1]),
            )

    def _leaf_loads(self, node: GraphNode) -> Iterator[Instruction]:
        pin = self._pinned.get(node.name)
        for layout in leaf_layouts(self.graph, node):
            if pin is None or layout.kind != "sharded" or layout.dim == pin:
                yield Instruction("load", node.name, (), layout)

    def _fused_load(self, name: str, want: TensorLayout) -> tuple[float, tuple[Instruction, ...]]:
        """The cheapest way to have a leaf in a layout, and its seconds."""
        ways: list[tuple[float, tuple[Instruction, ...]]] = []
        for load in self._leaf_loads(self.graph.by_name[name]):
            if load.output == want:
                ways.append((self.price(load), (load,)))
            elif FACTORED not in (load.output, want):
                seconds, _, path = self._tensor(name).path(
                    1 << self._bit(name, load.output), self._bit(name, want)
                )
                ways.append((self.price(load) + seconds, (load, *path)))
        return min(ways, key=lambda way: way[0])

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            layouts = layouts_of(self.graph, name)
            edges: dict[tuple[int, int], tuple[float, Instruction]] = {}
            for conversion in conversions_of(self.graph, name):
                ends = layouts.index(conversion.inputs[0][1]), layouts.index(conversion.output)
                seconds = self.price(conversion)
                if ends not in edges or seconds < edges[ends][0]:
                    edges[ends] = seconds, conversion
            self._tensors[name] = _Tensor(layouts, edges)
        return self._tensors[name]

    def _bit(self, name: str, layout: TensorLayout) -> int:
        return -1 if layout == FACTORED else self._tensor(name).layouts.index(layout)

    def _follow(
        self, step: int, state: SearchState
    ) -> Iterator[tuple[float, SearchState, _Option]]:
        """Every way on from a state: seconds, the next state, by which option."""
        here = self._places[step]
        live = here.live
        for option in self._options_at(step):
            seconds = option.seconds
            masks = list(state)
            for place, bit in option.wants:
                added, masks[place], _ = self._tensor(live[place]).path(masks[place], bit)
                seconds += added
            yield seconds, (*(masks[at] for at in here.kept), 1 << option.bit), option

    def _undominated(self, step: int, costs: dict[SearchState, float]) -> list[SearchState]:
        """States that no cheaper one can be turned into for the difference."""
        tensors = [self._tensor(name) for name in self._live(step)]
        kept: list[SearchState] = []
        for state in sorted(costs, key=lambda s: (costs[s], s)):
            if self._byte_s and len(kept) == CHARGED_STATES:
                break
            for other in kept[:COMPARED]:
                left = costs[state] - costs[other]
                for tensor, have, wanted in zip(tensors, other, state, strict=True):
                    missing = wanted & ~have
                    while missing and left >= 0:
                        bit = missing & -missing
                        seconds, have, _ = tensor.path(have, bit.bit_length() - 1)
                        left -= seconds
                        missing = wanted & ~have
                    if left < 0:
                        break
                if left >= 0:
                    break
            else:
                kept.append(state)
        return kept

    def dynamic_program(self) -> tuple[float, Program]:
        """Least seconds and a program that takes them."""
        known: dict[object, _Solved] = {}
        chain: list[tuple[int, _Solved]] = []
        costs: dict[SearchState, float] = {(): 0.0}
        base = 0.0
        for first, last in itertools.pairwise(self._segments.starts()):
            least = min(costs.values())
            costs = {state: cost - least for state, cost in costs.items()}
            base += least
            key = (
                self._segments.key(first, last),
                tuple(sorted((state, f"{cost:.9e}") for state, cost in costs.items())),
            )
            if key not in known:
                known[key] = self._solve(first, last, costs)
            chain.append((first, known[key]))
            costs = known[key].costs
        ends, state = min(
            (cost + self._loss_path(state)[0], state) for state, cost in costs.items()
        )
        instructions = [*self._assembled(chain, state), *self._loss_path(state)[2]]
        return base + ends, Program(tuple(dict.fromkeys(instructions)))

    def _loss_path(self, state: SearchState) -> tuple[float, int, tuple[Instruction, ...]]:
        """Return the cheapest conversions from the last state to a partial loss."""
        return self._tensor(self.graph.nodes[-1].name).path(state[0], 1)

    def _solve(self, first: int, last: int, costs: dict[SearchState, float]) -> _Solved:
        back: list[dict[SearchState, tuple[SearchState, _Option]]] = []
        for step in range(first, last):
            following: dict[SearchState, float] = {}
            origins: dict[SearchState, tuple[SearchState, _Option]] = {}
            for state in self._undominated(step, costs):
                base = costs[state]
                for seconds, reached, option in self._follow(step, state):
                    if base + seconds < following.get(reached, float("inf")):
                        following[reached], origins[reached] = base + seconds, (state, option)
            self.states_seen += len(following)
            back.append(origins)
            costs = following
        return _Solved(
            first, back, {state: costs[state] for state in self._undominated(last, costs)}
        )

    def _assembled(self, chain: list[tuple[int, _Solved]], state: SearchState) -> list[Instruction]:
        """The chosen instructions in order; a solution that another segment shares is read with
        that segment's names.
        """
        blocks: list[list[Instruction]] = []
        for first, solved in reversed(chain):
            chosen: list[tuple[int, SearchState, _Option]] = []
            for offset in range(len(solved.back) - 1, -1, -1):
                state, option = solved.back[offset][state]
                chosen.append((solved.first + offset, state, option))
            known, actual = (
                self._segments.names(begin, begin + len(solved.back))
                for begin in (solved.first, first)
            )
            names = dict(zip(known, actual, strict=True))
            block: list[Instruction] = []
            for step, before, option in reversed(chosen):
                block += [_renamed(each, names) for each in self._spelt(step, before, option)]
            blocks.append(block)
        return [instruction for block in reversed(blocks) for instruction in block]

    def _spelt(self, step: int, before: SearchState, option: _Option) -> Iterator[Instruction]:
        masks = list(before)
        for place, bit in option.wants:
            _, masks[place], path = self._tensor(self._places[step].live[place]).path(
                masks[place], bit
            )
            yield from path
        yield from (*option.loads, option.instruction)

    def a_star(self) -> float:
        """Least seconds, by A*: the rest costs at least every node's cheapest option."""
        steps = len(self._places)
        rest = [0.0, 0.0]
        for step in reversed(range(steps)):
            rest.append(rest[-1] + min(option.seconds for option in self._options_at(step)))
        rest.reverse()
        queue: list[tuple[float, int, SearchState]] = [(rest[0], 0, ())]
        done: set[tuple[int, SearchState]] = set()
        while True:
            bound, step, state = heapq.heappop(queue)
            if step > steps:
                return bound
            if (step, state) not in done:
                done.add((step, state))
                ways = (
                    self._follow(step, state) if step < steps else [(self._loss_path(state)[0], ())]
                )
                for seconds, reached, *_ in ways:
                    heapq.heappush(
                        queue, (bound - rest[step] + seconds + rest[step + 1], step + 1, reached)
                    )


def _renamed(instruction: Instruction, names: dict[str, str]) -> Instruction:
    inputs = tuple((names.get(name, name), layout) for name, layout in instruction.inputs)
    return replace(
        instruction, tensor=names.get(instruction.tensor, instruction.tensor), inputs=inputs
    )
