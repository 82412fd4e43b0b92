"""Steps of the real executor over links of limited speed, against the cost model's simulation:
results/pipeline_transfers.json.

Each node is a network namespace (root is needed), its interface limited both ways by a token bucket
(`tc tbf`); hidden states really cross. The stages' work is EMULATED: each forward and backward
sleeps until the stated time is over. Cases are measured in turn, each by the same processes: 1F1B
against up to two and three more microbatches in flight at each stage than at the next; and, of two
stages with two tensor-parallel ranks each on two nodes, whole hidden states for each rank against
slices. Three pipelines whose first stages share a node show what its link does to theirs.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from autohet.emulate.namespaces import namespace_network, why_no_namespaces
from autohet.runtime.groups import GenerationGroups
from autohet.runtime.parallel.borders import Borders, HiddenStates
from autohet.runtime.parallel.executor import Executor
from autohet.runtime.parallel.place import place_of
from autohet.runtime.step.pacing import Pace, Pacer
from planner.cost.links.boundaries import BoundaryCosts
from planner.cost.links.traffic import Links
from planner.cost.parameters import CostParameters
from planner.cost.schedule import PipelineTimes, simulate_pipeline
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from scripts.benchmarks.provenance import provenance
from tests.harness.shaped_workers import CPU, measured_step_s

RESULTS = Path(__file__).parents[1] / "results" / "pipeline_transfers.json"
HIDDEN = (1, 64, 4096)
"""Of a microbatch, [b, S, H] fp32: 1 MiB."""
FORWARD_S, BACKWARD_S = 0.1, 0.2


@dataclass(frozen=True)
class Case:
    """What is measured: `stages` on nodes of their own, `ranks` each. sliced False: the ranks are
    named as if all were on one node, so that each takes the whole. pipelines: so many side by side,
    their first stages on one node, whose link has `first_megabits`.
    """

    what: str
    stages: int
    ranks: int
    microbatches: int
    megabits: int
    more: int = 1
    sliced: bool = True
    pipelines: int = 1
    first_megabits: int = 0

    def node(self, pipeline: int, stage: int) -> str:
        return f"node-{0 if stage == 0 else (self.stages - 1) * pipeline + stage}"

    @property
    def nodes(self) -> dict[str, str]:
        """Node of each worker."""
        real = (worker.split("/")[0] for worker in self.plan_on(self.node).workers)
        return dict(zip(self.plan.workers, real, strict=True))

    @property
    def plan(self) -> Plan:
        """As the runtime gets it."""
        return self.plan_on(self.node if self.sliced else lambda p, s: "n0")

    def plan_on(self, node: Callable[[int, int], str]) -> Plan:
        most = tuple(self.more * (self.stages - 1 - s) + 1 for s in range(self.stages))
        pipelines, taken = [], Counter[str]()
        for p in range(self.pipelines):
            stages = []
            for s in range(self.stages):
                name = node(p, s)
                stages.append(
                    Stage(s, 1, tuple(f"{name}/{taken[name] + rank}" for rank in range(self.ranks)))
                )
                taken[name] += self.ranks
            pipelines.append(Pipeline(tuple(stages), self.microbatches, 1, most))
        return Plan("m", self.pipelines * self.microbatches, 1, HIDDEN[1], tuple(pipelines))

    def speed(self, node: str) -> int:
        """Megabits a second of a node's link."""
        return self.first_megabits if self.first_megabits and node == "node-0" else self.megabits

    def predicted_s(self) -> float:
        """By the cost model's transfers and its simulation of each pipeline, where links reach all
        of their speed.
        """
        plan = self.plan_on(self.node)
        sizes = Counter(worker.split("/")[0] for worker in plan.workers)
        nodes = (
            Node(name, NodeType(name, "gpu", size, 1, 1e12, self.speed(name) * 1e6 / 8))
            for name, size in sizes.items()
        )
        links = Links(
            replace(
                CostParameters(), efficiency_inter=1.0, latency_inter_s=0.0, latency_intra_s=0.0
            )
        )
        num_bytes = 4.0 * torch.Size(HIDDEN).numel()
        costs = BoundaryCosts(
            Fleet(0, tuple(nodes)),
            links,
            lambda _: num_bytes,
            lambda _: FORWARD_S + BACKWARD_S,
            self.sliced,
        )
        work = (FORWARD_S,) * self.stages, (BACKWARD_S,) * self.stages
        seconds = []
        for pipeline in plan.pipelines:
            between = (tuple(each) for each in costs.of(plan, pipeline))
            times = PipelineTimes(*work, *between, "none", pipeline.most_in_flight)
            seconds.append(simulate_pipeline(times, self.microbatches).total_s)
        return max(seconds)


CASES = [
    *(Case(f"4 stages, 100 Mbit/s, {more} more", 4, 1, 12, 100, more) for more in (1, 2, 3)),
    *(Case(f"3 stages, 200 Mbit/s, {more} more", 3, 1, 16, 200, more) for more in (1, 2, 3)),
    Case("2 stages of 2 ranks, 200 Mbit/s, whole", 2, 2, 12, 200, 1, sliced=False),
    Case("2 stages of 2 ranks, 200 Mbit/s, slices", 2, 2, 12, 200, 1),
    Case("2 stages of 2 ranks, 200 Mbit/s, slices, 2 more", 2, 2, 12, 200, 2),
    Case(
        "3 pipelines from a node of 300 Mbit/s to three of 100",
        2,
        1,
        12,
        100,
        1,
        pipelines=3,
        first_megabits=300,
    ),
    Case(
        "3 pipelines from a node of 100 Mbit/s to three of 100",
        2,
        1,
        12,
        100,
        1,
        pipelines=3,
        first_megabits=100,
    ),
]


class _Identity(nn.Module):
    """A stage that gives on what it takes: its time is the pacer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ones(HIDDEN) if x.dtype == torch.int64 else x) * self.scale

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self(x).sum()


def step_of(case: Case, worker: str, groups: GenerationGroups) -> Callable[[], object]:
    """A step of the worker's stage."""
    plan = case.plan
    place, everyone = place_of(plan, worker), groups.group(plan.workers)
    assert place is not None
    ranks = groups.group(place.stage.workers) if case.ranks > 1 else None
    pacer = Pacer(Pace(FORWARD_S, BACKWARD_S), lambda: False)
    borders = Borders(
        place, [everyone] * 2, [everyone] * 2, ranks, HiddenStates(HIDDEN, torch.float32, CPU)
    )
    executor = Executor(borders, _Identity(), pacer)
    tokens = torch.zeros(HIDDEN[:2], dtype=torch.int64)
    return lambda: executor.run(lambda m: (tokens, tokens), lambda phase: None)


def main() -> None:
    why = why_no_namespaces()
    if why is not None:
        raise SystemExit(why)
    rows = []
    with namespace_network() as network:
        for name in sorted({name for case in CASES for name in case.nodes.values()}):
            network.add(name)
        for case in CASES:
            for name in set(case.nodes.values()):
                network.limit(name, case.speed(name))
            seconds, predicted = (
                measured_step_s(network, case.nodes, step_of, case),
                case.predicted_s(),
            )
            row = {
                "on": case.what,
                "measured_s": round(seconds, 3),
                "predicted_s": round(predicted, 3),
            }
            rows.append(row | {"predicted_over_measured": round(predicted / seconds, 4)})
            print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")
    first, second = rows[0]["measured_s"], rows[1]["measured_s"]
    print(f"working ahead over 1F1B, 4 stages: {second / first:.3f} of the time")


if __name__ == "__main__":
    main()
