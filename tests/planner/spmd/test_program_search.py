"""The search against uniform-cost search over sets of properties, HAP's own formulation, which
takes instructions in any order.
"""

import heapq
import itertools
import random
from dataclasses import replace

import pytest

from planner.spmd import search as program_search
from planner.spmd.costs import Collective, CostTable, Device, Shares, SpmdCluster, ring_collectives
from planner.spmd.graph import Graph, Signature
from planner.spmd.layouts import CONVERSIONS, FACTORED, PARTIAL
from planner.spmd.plan import synthesize
from planner.spmd.program import Instruction, Property, conversions_of
from planner.spmd.rules import leaf_layouts, rules_of
from planner.spmd.search import ProgramSearch
from tests.planner.spmd.graphs import Builder, count_states, random_graph, transformer


def every_instruction(graph: Graph) -> list[Instruction]:
    """All that may stand in a program."""
    found: list[Instruction] = []
    for node in graph.nodes:
        if node.kind != "op":
            found += [
                Instruction("load", node.name, (), layout) for layout in leaf_layouts(graph, node)
            ]
        for rule in rules_of(graph, node) if node.kind == "op" else ():
            found.append(
                Instruction(
                    "compute",
                    node.name,
                    tuple(zip(node.inputs, rule.inputs, strict=True)),
                    rule.output,
                    rule.letter,
                )
            )
        found += conversions_of(graph, node.name)
    return found


def uniform_cost(table: CostTable, shares: Shares) -> float:
    """Least seconds of any set of instructions, each after what it needs, each operator computed
    and each parameter loaded once.
    """
    graph = table.graph
    priced = [(table.seconds(table.terms(i), shares), i) for i in every_instruction(graph)]
    single = {node.name for node in graph.nodes if node.kind in ("op", "parameter")}
    goal = (graph.nodes[-1].name, PARTIAL)
    ticket = itertools.count()
    queue: list[tuple[float, int, frozenset[Property], frozenset[str]]] = [
        (0.0, next(ticket), frozenset(), frozenset())
    ]
    done: set[tuple[frozenset[Property], frozenset[str]]] = set()
    while queue:
        cost, _, have, made = heapq.heappop(queue)
        if goal in have:
            return cost
        if (have, made) in done:
            continue
        done.add((have, made))
        for seconds, i in priced:
            is_source = i.op in ("load", "compute")
            if (
                i.result in have
                or not have.issuperset(i.inputs)
                or (is_source and i.tensor in made and i.tensor in single)
            ):
                continue
            now = made | {i.tensor} if is_source else made
            heapq.heappush(queue, (cost + seconds, next(ticket), have | {i.result}, now))
    raise AssertionError("no program")


def small_graph(rng: random.Random) -> Graph:
    b = Builder()
    x = b.leaf("input", 4, 6)
    if rng.random() < 0.5:
        x = b.linear(x, rng.choice((4, 9)), False)
    else:
        x = b.add(x, b.unary(x))
    b.add_node("sum", (x,), (), Signature(("ab",), "", "ab", linear=(frozenset({0}),)))
    return b.graph()


def random_cluster(rng: random.Random, count: int) -> SpmdCluster:
    devices = tuple(Device(f"d{j}", rng.choice((1e9, 2e9, 3.7e9))) for j in range(count))
    names = ring_collectives(2, 1.0, 0.0)
    speed = 10 ** rng.uniform(6, 10)
    return SpmdCluster(
        devices,
        {
            name: Collective(speed * rng.uniform(0.5, 2), rng.choice((0.0, 1e-8, 1e-6)))
            for name in names
        },
    )


def random_ratios(rng: random.Random, count: int) -> tuple[float, ...]:
    weights = [rng.uniform(0.2, 3) for _ in range(count)]
    return tuple(w / sum(weights) for w in weights)


@pytest.mark.parametrize("seed", range(12))
def test_the_search_is_as_good_as_uniform_cost_search_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    graph = small_graph(rng)
    cluster = random_cluster(rng, rng.choice((2, 3)))
    shares = Shares(graph, (random_ratios(rng, len(cluster.devices)),))
    table = CostTable(graph, cluster)
    assert ProgramSearch(table, shares).dynamic_program()[0] == pytest.approx(
        uniform_cost(table, shares), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_program_costs_what_the_search_says(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    cluster = random_cluster(rng, 3)
    shares = Shares(graph, (random_ratios(rng, 3), random_ratios(rng, 3)))
    table = CostTable(graph, cluster)
    seconds, program = ProgramSearch(table, shares).dynamic_program()
    program.check(graph)
    assert table.program_s(program, shares) - table.seconds(
        table.final_terms(program), shares
    ) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_equal_layers_are_solved_as_if_each_were_solved_by_itself(seed: int) -> None:
    """Segments from memory, against all of them solved."""
    graph = transformer(4, 6, 4, 8, 2)
    cluster = random_cluster(random.Random(seed), 2)
    shares = Shares(graph, ((0.6, 0.4),))
    table = CostTable(graph, cluster)
    search = ProgramSearch(table, shares)
    seconds, program = search.dynamic_program()
    program.check(graph)
    assert len([i for i in program.instructions if i.op == "compute"]) == sum(
        node.kind == "op" for node in graph.nodes
    )
    assert table.program_s(program, shares) - table.seconds(
        table.final_terms(program), shares
    ) == pytest.approx(seconds, rel=1e-9)
    alike = ProgramSearch(table, shares)
    alike.segments.key = lambda first, last: first  # type: ignore[method-assign,assignment]
    assert alike.dynamic_program()[0] == pytest.approx(seconds, rel=1e-9)


def test_equal_layers_are_solved_once() -> None:
    cluster = random_cluster(random.Random(0), 2)
    seen = []
    for layers in (6, 24):
        graph = transformer(layers, 6, 4, 8, 2)
        search = ProgramSearch(CostTable(graph, cluster), Shares(graph, ((0.6, 0.4),)))
        states = count_states(search)
        search.dynamic_program()
        seen.append(sum(states))
    assert seen[1] < 2 * seen[0]


def test_a_search_that_charges_for_bytes_follows_few_states_and_a_plain_one_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = transformer(2, 6, 4, 8, 2)
    cluster, shares = random_cluster(random.Random(1), 2), Shares(graph, ((0.6, 0.4),))
    found: dict[tuple[int, bool], tuple[float, int]] = {}
    for most in (2, 10**9):
        monkeypatch.setattr(program_search, "CHARGED_STATES", most)
        for charge in ((), (1e-9, 1e-9)):
            search = ProgramSearch(CostTable(graph, cluster), shares, byte_s=charge)
            states = count_states(search)
            seconds, program = search.dynamic_program()
            program.check(graph)
            found[most, bool(charge)] = seconds, sum(states)
    assert found[2, False] == found[10**9, False]
    assert found[2, True][1] < found[10**9, True][1]
    assert found[2, True][0] >= found[10**9, True][0]


def test_a_tied_parameter_is_loaded_once_and_has_one_layout_in_memory() -> None:
    b = Builder()
    ids = b.leaf("input", 6, 4)
    x = b.embedding(ids, 12, 8)
    weight = b.nodes[1].name
    tied = b.linear(x, 12, False)
    last = b.nodes.pop()
    b.nodes.pop()
    b.nodes.append(replace(last, inputs=(x, weight)))
    b.loss(tied)
    graph = b.graph()
    for seed in range(6):
        cluster = random_cluster(random.Random(seed), 3)
        program = synthesize(CostTable(graph, cluster)).program
        program.check(graph)
        assert sum(i.op == "load" and i.tensor == weight for i in program.instructions) == 1
        assert FACTORED not in program.storage.values() or program.storage[weight] != FACTORED


def test_every_pair_of_layouts_is_joined_by_at_most_two_conversions() -> None:
    graph = transformer(1, 4, 4, 8, 2)
    name = next(node.name for node in graph.nodes if node.op == "linear")
    steps = {(i.inputs[0][1], i.output) for i in conversions_of(graph, name)}
    layouts = {layout for pair in steps for layout in pair}
    twice = steps | {(a, d) for a, b in steps for c, d in steps if b == c}
    assert all((a, b) in twice for a in layouts for b in layouts if a != b)
    assert {i.op for i in conversions_of(graph, name)} == set(CONVERSIONS)


def test_a_large_batch_is_divided_by_samples_whatever_the_number_of_devices() -> None:
    """State is cut into at most 256 units; data has none to keep, and rounding to 8 samples would
    make 64 unlike devices alike.
    """
    graph = transformer(1, 2048, 4, 8, 2)
    batch = next(axis for axis in graph.axes.values() if axis.is_batch)
    assert batch.units == 2048
    assert (
        max(
            graph.axes[node.name, 0].units
            for node in graph.parameters
            if (node.name, 0) in graph.axes
        )
        <= 256
    )
