"""Random derivable programs, and how they are run on gloo processes beside one device."""

import random
from collections import Counter
from collections.abc import Sequence

import torch
from torch.distributed import TCPStore

from autohet.runtime.groups import GenerationGroups, Group, GroupTimeouts
from autohet.runtime.spmd.capture import Captured, capture
from autohet.runtime.spmd.executor import ProgramExecutor
from planner.spmd.costs import Shares
from planner.spmd.graph import Graph, GraphNode
from planner.spmd.layouts import CONVERSIONS, FACTORED, PARTIAL, TensorLayout, conversion_between
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Instruction, Program, layouts_of
from planner.spmd.rules import leaf_layouts, rules_of
from tests.harness.spmd_models import spmd_case
from tests.harness.waits import GROUP_TIMEOUT_S

Expected = tuple[float, dict[str, torch.Tensor]]
Found = list[tuple[str, int, float, Counter[str]]]


class _Walk:
    """Derives one program at random; each tensor may get further layouts that nobody needs."""

    def __init__(self, graph: Graph, rng: random.Random) -> None:
        self.graph = graph
        self.rng = rng
        self.instructions: list[Instruction] = []
        self.have: dict[str, list[TensorLayout]] = {}

    def program(self) -> Program:
        for node in self.graph.nodes:
            if node.kind == "op":
                self._compute(node)
        self._reach(self.graph.nodes[-1].name, PARTIAL)
        return Program(tuple(self.instructions))

    def _compute(self, node: GraphNode) -> None:
        rules = list(rules_of(self.graph, node))
        self.rng.shuffle(rules)
        rule = next(
            r
            for r in rules
            if all(self._may(n, layout) for n, layout in zip(node.inputs, r.inputs, strict=True))
        )
        for name, layout in zip(node.inputs, rule.inputs, strict=True):
            self._reach(name, layout)
        inputs = tuple(zip(node.inputs, rule.inputs, strict=True))
        self._add(Instruction("compute", node.name, inputs, rule.output, rule.letter))

    def _may(self, name: str, layout: TensorLayout) -> bool:
        """A factored weight has no other layout."""
        have = self.have.get(name, [])
        return not have or (layout in have if FACTORED in (layout, *have) else True)

    def _add(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.have.setdefault(instruction.tensor, []).append(instruction.output)

    def _reach(self, name: str, target: TensorLayout) -> None:
        node = self.graph.by_name[name]
        if node.kind != "op" and not self.have.get(name):
            free = [layout for layout in leaf_layouts(self.graph, node) if layout != FACTORED]
            self._add(
                Instruction(
                    "load", name, (), FACTORED if target == FACTORED else self.rng.choice(free)
                )
            )
        while target not in self.have[name]:
            source = self.rng.choice(self.have[name])
            direct = conversion_between(source, target)
            goal = (
                target
                if direct and self.rng.random() < 0.7
                else self.rng.choice(layouts_of(self.graph, name))
            )
            op = conversion_between(source, goal)
            if op is not None and goal not in self.have[name]:
                variant = self.rng.choice(CONVERSIONS[op])
                self._add(Instruction(op, name, ((name, source),), goal, "", variant))


def random_program(graph: Graph, seed: int) -> Program:
    return _Walk(graph, random.Random(seed)).program()


def random_plan(graph: Graph, program: Program, num_devices: int, seed: int) -> PlacedProgram:
    """The program on uneven shares, at times of two segments, at times of a device without any."""
    rng = random.Random(seed + 1)
    rows = []
    for _ in range(rng.choice((1, 2))):
        weights = [rng.choice((0.0, 0.3, 1.0, 2.0, 3.1)) for _ in range(num_devices)]
        weights[rng.randrange(num_devices)] = 1.0
        rows.append(tuple(w / sum(weights) for w in weights))
    return given_plan(graph, program, tuple(rows))


def given_plan(
    graph: Graph, program: Program, ratios: tuple[tuple[float, ...], ...]
) -> PlacedProgram:
    return PlacedProgram(graph, program, Shares(graph, ratios))


def gloo_group(store: TCPStore, rank: int, size: int, name: str = "spmd") -> Group:
    members = [f"w{number}" for number in range(size)]
    groups = GenerationGroups(
        store, 1, f"w{rank}", torch.device("cpu"), GroupTimeouts(GROUP_TIMEOUT_S, GROUP_TIMEOUT_S)
    )
    return groups.group(members, name)


def single_device(
    captured: Captured, model: torch.nn.Module, batch: Sequence[torch.Tensor]
) -> Expected:
    """Loss and gradients of the model itself."""
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return float(loss.detach()), {
        name: torch.zeros_like(captured.parameters[name]) if g is None else g
        for name, g in gradients.items()
    }


def worst_error(
    captured: Captured,
    plan: PlacedProgram,
    group: Group,
    batch: Sequence[torch.Tensor],
    expected: Expected,
) -> float:
    """Largest error of the loss and of this rank's gradients, over the largest entry of each (where
    that is not a rounding error itself, as of a key's bias, whose gradient is zero).
    """
    executor = ProgramExecutor(captured, plan, group)
    storage = {
        name: layout for name, layout in plan.program.storage.items() if name in captured.parameters
    }
    leaves = {
        name: executor.local_part(captured.parameters[name].detach(), name, layout)
        .clone()
        .requires_grad_()
        for name, layout in storage.items()
    }
    loss = executor.run(leaves, batch)
    loss.backward()
    total = loss.detach().clone()
    group.all_reduce(total)
    errors = [abs(float(total) - expected[0]) / abs(expected[0])]
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, layout in storage.items():
        gradient = leaves[name].grad
        gradient = torch.zeros_like(leaves[name]) if gradient is None else gradient.clone()
        if layout.kind == "replicated":
            group.all_reduce(gradient)
        whole = expected[1][name]
        wanted = executor.local_part(whole, name, layout)
        if gradient.numel():
            errors.append(
                float((gradient - wanted).abs().max() / whole.abs().max().clamp(min=1e-6 * largest))
            )
    return max(errors)


def run_random_programs(
    rank: int, size: int, store: TCPStore, cases: Sequence[tuple[str, range]]
) -> Found:
    """In one of `size` processes: (model, seed, worst error, instructions) of every program."""
    group = gloo_group(store, rank, size)
    found = []
    for name, seeds in cases:
        model, batch = spmd_case(name)
        captured = capture(model, batch)
        expected = single_device(captured, model, batch)
        for seed in seeds:
            program = random_program(captured.graph, seed)
            program.check(captured.graph)
            plan = random_plan(captured.graph, program, size, seed)
            kinds = Counter(f"{i.op}_{i.variant}".rstrip("_") for i in program.instructions)
            kinds.update("factored" for i in program.instructions if i.output == FACTORED)
            kinds.update(
                "vocabulary_loss"
                for i in program.instructions
                if i.letter == "Y" and "cross_entropy" in i.tensor
            )
            kinds.update(
                "empty"
                for i in program.instructions
                if i.output.kind == "sharded" and 0 in plan.lengths(i.tensor, i.output.dim)
            )
            found.append((name, seed, worst_error(captured, plan, group, batch, expected), kinds))
    return found
