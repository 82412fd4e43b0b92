"""Search of the cheapest program for given shares: a dynamic program over the frontier.

Costs add up and do not depend on the order, so operators are taken in
topological order without loss. A state is the set of layouts of each live tensor. A tensor gets a
further layout when a rule first asks for it, by at most two conversions (more never help: every
pair of layouts is joined by two). A state is dropped if a cheaper one can be converted into it for
the difference. Inputs, constants, and parameters with one reader never live; they add to a rule the
cheapest way to load them as the rule wants.

Segments lie between positions with few live tensors. Equal segments (a model's layers) that begin
at states with equal differences of cost have equal solutions. So a deep model takes little longer
than its first few layers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.spmd.costs import CostTable, Shares
from planner.spmd.graph import GraphNode
from planner.spmd.layouts import FACTORED, PARTIAL, TensorLayout
from planner.spmd.program import Instruction, Program, conversions_of, layouts_of
from planner.spmd.rules import leaf_layouts, rules_of
from planner.spmd.segments import SearchStep, Segments

# Cheaper states with which each state of the frontier is compared: nearly all states that can be
# dropped are dominated by one of the cheapest.
COMPARED = 12
# States that are followed if bytes are charged. Measured: 0.4 to 0.9 of the time without a limit,
# with the same plans.
CHARGED_STATES = 32
SearchState = tuple[int, ...]
"""Layouts of each live tensor, in the order of positions: one bit for each layout it has."""
_Way = tuple[float, int, tuple[Instruction, ...]]
"""Conversions of a tensor: their seconds, its layouts (bits) afterwards, the instructions."""
_Edges = dict[tuple[int, int], tuple[float, Instruction]]
"""Seconds and instruction of the conversion from one layout (index) to another."""


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

    paths[have, want]: the cheapest way from layouts (bits) to one more (index).
    """

    layouts: tuple[TensorLayout, ...]
    edges: _Edges
    paths: dict[tuple[int, int], _Way] = field(default_factory=dict)

    def path(self, have: int, want: int) -> _Way:
        """Return the cheapest way to have the layout `want`."""
        found = self.paths.get((have, want))
        if found is None:
            # of ways that take as long, the one with fewer instructions
            ways = self._ways(have, want)
            found = min(ways, key=lambda way: (way[0], len(way[2])))
            self.paths[have, want] = found
        return found

    def _ways(self, have: int, want: int) -> Iterator[_Way]:
        if have >> want & 1:
            yield 0.0, have, ()
            return

        have_wanted = have | 1 << want
        for source in range(len(self.layouts)):
            is_held = have >> source & 1
            if not is_held:
                continue

            edge = self.edges.get((source, want))
            if edge:
                seconds, instruction = edge
                yield seconds, have_wanted, (instruction,)

            for middle in range(len(self.layouts)):
                first = self.edges.get((source, middle))
                second = self.edges.get((middle, want))
                if first and second:
                    first_s, to_middle = first
                    second_s, to_wanted = second
                    # the layout in the middle is kept, for free
                    have_both = have_wanted | 1 << middle
                    yield first_s + second_s, have_both, (to_middle, to_wanted)


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
        self._places = self._live_places()
        self.segments = Segments(self.graph, shares, self._places, self._pinned)
        self._choices: dict[int, tuple[_Option, ...]] = {}

    def price(self, instruction: Instruction) -> float:
        """Seconds of an instruction and its dual, and the charge for its bytes."""
        once_s = self.table.seconds(self.table.terms(instruction), self.shares)
        seconds = self.table.times(instruction) * once_s
        if not self._byte_s:
            return seconds
        axis, size = self.table.bytes_of(instruction)
        shares = [1.0] * len(self._byte_s)
        if axis is not None:
            shares = self.shares.of(axis).tolist()
        charges = [charge * part for charge, part in zip(self._byte_s, shares, strict=True)]
        return seconds + size * sum(charges)

    def _live_places(self) -> list[SearchStep]:
        last_read = {}
        for name, readers in self.graph.consumers.items():
            # the loss, which no node reads, lives on
            last_read[name] = max(readers, default=len(self.graph.nodes))

        live: tuple[str, ...] = ()
        places: list[SearchStep] = []
        for position, node in enumerate(self.graph.nodes):
            if self._is_fused(node):
                continue
            kept = []
            still_live = []
            for place, name in enumerate(live):
                if last_read[name] > position:
                    kept.append(place)
                    still_live.append(name)
            places.append(SearchStep(position, live, tuple(kept)))
            live = (*still_live, node.name)
        return places

    def _options_at(self, step: int) -> tuple[_Option, ...]:
        if step not in self._choices:
            place = self._places[step]
            node = self.graph.nodes[place.position]
            self._choices[step] = tuple(self._options(node, place.live))
        return self._choices[step]

    def _live(self, step: int) -> tuple[str, ...]:
        """Tensors alive before a step; after the last one the loss."""
        if step < len(self._places):
            return self._places[step].live
        loss = self.graph.nodes[-1]
        return (loss.name,)

    def _is_fused(self, node: GraphNode) -> bool:
        """Return True for a leaf that its readers load for themselves.

        Inputs and constants are free in any layout, so each reader loads its own. A parameter that
        is read once needs no layout but its reader's.
        """
        if node.kind != "parameter":
            return node.kind != "op"
        readers = self.graph.consumers[node.name]
        if len(readers) != 1:
            return False
        reader = self.graph.nodes[readers[0]]
        return reader.inputs.count(node.name) == 1

    def _options(self, node: GraphNode, live: tuple[str, ...]) -> Iterator[_Option]:
        if node.kind != "op":
            for load in self._leaf_loads(node):
                if load.output != FACTORED:
                    bit = self._bit(node.name, load.output)
                    yield _Option(self.price(load), (), bit, load, ())
            return
        for rule in rules_of(self.graph, node):
            inputs = tuple(zip(node.inputs, rule.inputs, strict=True))
            instruction = Instruction("compute", node.name, inputs, rule.output, rule.letter)
            loads_s: list[float] = []
            loads: list[Instruction] = []
            # a set, since a node may read one tensor twice
            wants: set[tuple[int, int]] = set()
            for name, layout in inputs:
                if self._is_fused(self.graph.by_name[name]):
                    load_s, path = self._fused_load(name, layout)
                    loads_s.append(load_s)
                    loads += path
                if name in live:
                    place = live.index(name)
                    wants.add((place, self._bit(name, layout)))

            seconds = self.price(instruction) + sum(loads_s)
            bit = self._bit(node.name, rule.output)
            in_order = tuple(sorted(wants))
            yield _Option(seconds, in_order, bit, instruction, tuple(loads))

    def _leaf_loads(self, node: GraphNode) -> Iterator[Instruction]:
        pin = self._pinned.get(node.name)
        for layout in leaf_layouts(self.graph, node):
            is_allowed = pin is None or layout.kind != "sharded" or layout.dim == pin
            if is_allowed:
                yield Instruction("load", node.name, (), layout)

    def _fused_load(self, name: str, want: TensorLayout) -> tuple[float, tuple[Instruction, ...]]:
        """Return the seconds and the instructions of the cheapest way to a leaf in a layout."""
        ways: list[tuple[float, tuple[Instruction, ...]]] = []
        for load in self._leaf_loads(self.graph.by_name[name]):
            if load.output == want:
                ways.append((self.price(load), (load,)))
            elif FACTORED not in (load.output, want):
                have = 1 << self._bit(name, load.output)
                wanted = self._bit(name, want)
                seconds, _, path = self._tensor(name).path(have, wanted)
                ways.append((self.price(load) + seconds, (load, *path)))
        return min(ways, key=lambda way: way[0])

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            layouts = layouts_of(self.graph, name)
            edges: _Edges = {}
            for conversion in conversions_of(self.graph, name):
                ((_, source),) = conversion.inputs
                ends = (layouts.index(source), layouts.index(conversion.output))
                seconds = self.price(conversion)
                if ends not in edges or seconds < edges[ends][0]:
                    edges[ends] = (seconds, conversion)
            self._tensors[name] = _Tensor(layouts, edges)
        return self._tensors[name]

    def _bit(self, name: str, layout: TensorLayout) -> int:
        """Return the index of a layout in a tensor's; -1 for one that no conversion yields."""
        if layout == FACTORED:
            return -1
        return self._tensor(name).layouts.index(layout)

    def _follow(
        self, step: int, state: SearchState
    ) -> Iterator[tuple[float, SearchState, _Option]]:
        """Yield every way on from a state: seconds, the next state, and the option taken."""
        here = self._places[step]
        live = here.live
        for option in self._options_at(step):
            seconds = option.seconds
            masks = list(state)
            for place, bit in option.wants:
                tensor = self._tensor(live[place])
                added, masks[place], _ = tensor.path(masks[place], bit)
                seconds += added
            # the innermost loop of the search: a comprehension, as it is the fastest
            following = [masks[at] for at in here.kept]
            following.append(1 << option.bit)
            yield seconds, tuple(following), option

    def _drop_dominated(self, step: int, costs: dict[SearchState, float]) -> list[SearchState]:
        """Return the states that no cheaper one can be turned into for the difference."""
        tensors = [self._tensor(name) for name in self._live(step)]
        kept: list[SearchState] = []
        for state in sorted(costs, key=lambda s: (costs[s], s)):
            if self._byte_s and len(kept) == CHARGED_STATES:
                break
            for other in kept[:COMPARED]:
                difference = costs[state] - costs[other]
                if _becomes(tensors, other, state, difference):
                    break
            else:
                kept.append(state)
        return kept

    def dynamic_program(self) -> tuple[float, Program]:
        """Return the least seconds, and a program that takes them."""
        known: dict[object, _Solved] = {}
        chain: list[tuple[int, _Solved]] = []
        costs: dict[SearchState, float] = {(): 0.0}
        base = 0.0
        for first, last in itertools.pairwise(self.segments.starts()):
            least = min(costs.values())
            base += least
            differences: dict[SearchState, float] = {}
            begin: list[tuple[SearchState, str]] = []
            for state, cost in costs.items():
                difference = cost - least
                differences[state] = difference
                # differences that are equal but for rounding are one beginning
                begin.append((state, f"{difference:.9e}"))
            begin.sort()

            key = (self.segments.key(first, last), tuple(begin))
            if key not in known:
                known[key] = self._solve(first, last, differences)
            solved = known[key]
            chain.append((first, solved))
            costs = solved.costs

        ends: list[tuple[float, SearchState]] = []
        for state, cost in costs.items():
            loss_s, _, _ = self._loss_path(state)
            ends.append((cost + loss_s, state))
        end_s, state = min(ends)
        _, _, loss_path = self._loss_path(state)
        instructions = [*self._assemble(chain, state), *loss_path]
        # a leaf that several readers load alike is loaded once
        distinct = dict.fromkeys(instructions)
        return base + end_s, Program(tuple(distinct))

    def _loss_path(self, state: SearchState) -> _Way:
        """Return the cheapest conversions from the last state to a partial loss."""
        loss = self._tensor(self.graph.nodes[-1].name)
        return loss.path(state[0], loss.layouts.index(PARTIAL))

    def _solve(self, first: int, last: int, costs: dict[SearchState, float]) -> _Solved:
        back: list[dict[SearchState, tuple[SearchState, _Option]]] = []
        for step in range(first, last):
            following: dict[SearchState, float] = {}
            origins: dict[SearchState, tuple[SearchState, _Option]] = {}
            for state in self._drop_dominated(step, costs):
                base = costs[state]
                for seconds, reached, option in self._follow(step, state):
                    reached_s = base + seconds
                    if reached_s < following.get(reached, float("inf")):
                        following[reached] = reached_s
                        origins[reached] = (state, option)
            back.append(origins)
            costs = following
        ends = {state: costs[state] for state in self._drop_dominated(last, costs)}
        return _Solved(first, back, ends)

    def _assemble(self, chain: list[tuple[int, _Solved]], state: SearchState) -> list[Instruction]:
        """Return the chosen instructions in order.

        A solution that was found for an equal segment is read with this segment's names.
        """
        # from the last state back to the first, so segments and steps come in reverse
        blocks: list[list[Instruction]] = []
        for first, solved in reversed(chain):
            num_steps = len(solved.back)
            chosen: list[tuple[int, SearchState, _Option]] = []
            for offset in range(num_steps - 1, -1, -1):
                state, option = solved.back[offset][state]
                chosen.append((solved.first + offset, state, option))

            solved_names = self.segments.names(solved.first, solved.first + num_steps)
            own_names = self.segments.names(first, first + num_steps)
            names = dict(zip(solved_names, own_names, strict=True))
            block: list[Instruction] = []
            for step, before, option in reversed(chosen):
                for instruction in self._spell_out(step, before, option):
                    tensor = names.get(instruction.tensor, instruction.tensor)
                    inputs = [
                        (names.get(name, name), layout) for name, layout in instruction.inputs
                    ]
                    block.append(replace(instruction, tensor=tensor, inputs=tuple(inputs)))
            blocks.append(block)

        instructions = []
        for block in reversed(blocks):
            instructions += block
        return instructions

    def _spell_out(self, step: int, before: SearchState, option: _Option) -> Iterator[Instruction]:
        """Yield the instructions of an option, conversions of its inputs first."""
        live = self._places[step].live
        masks = list(before)
        for place, bit in option.wants:
            tensor = self._tensor(live[place])
            _, masks[place], path = tensor.path(masks[place], bit)
            yield from path
        yield from option.loads
        yield option.instruction


def _becomes(
    tensors: Sequence[_Tensor], other: SearchState, state: SearchState, left: float
) -> bool:
    """Return True if `left` seconds suffice to convert the tensors of one state to another's."""
    for tensor, have, wanted in zip(tensors, other, state, strict=True):
        missing = wanted & ~have
        while missing and left >= 0:
            lowest = missing & -missing
            seconds, have, _ = tensor.path(have, lowest.bit_length() - 1)
            left -= seconds
            missing = wanted & ~have
        if left < 0:
            return False
    return left >= 0
