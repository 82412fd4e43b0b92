"""Gradient sync of differently cut pipelines over links of limited speed, against the cost model:
results/gradient_sync.json.

Each node is a network namespace (root is needed), its interface limited both ways by a token bucket
(`tc tbf`); the runtime's own `GradientSync` sums real gradients. No stage does any work: all begin
at once, or some later. The first case, two equal workers, tells what share of the nominal bandwidth
an all-reduce reaches; the others are predicted with it.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autohet.emulate.namespaces import namespace_network, why_no_namespaces
from autohet.runtime.facts.layout import held_units, layout_of_plan
from autohet.runtime.groups import GenerationGroups
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from autohet.runtime.parallel.buckets import LocalBuffers
from autohet.runtime.parallel.gradient_sync import GradientSync
from planner.cost.links.sync import StepTimeline, simulate_sync, sync_jobs
from planner.cost.links.traffic import Links
from planner.cost.parameters import CostParameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from scripts.benchmarks.provenance import provenance
from tests.harness.shaped_workers import measured_step_s
from tests.harness.tiny_models import TINY, tiny_config

RESULTS = Path(__file__).parents[1] / "results" / "gradient_sync.json"
CHANGES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""A layer of 3.2 million parameters: 12.1 MiB of gradients."""

CONFIG = tiny_config("llama", **CHANGES)
SPEC = model_spec_from_config("m", {**TINY["llama"], **CHANGES}, precision="fp32")


@dataclass(frozen=True)
class Case:
    """`cuts`: the layers of each pipeline's stages; `megabits`: the speed of each stage's link;
    together: numbers of the pipelines whose stages are all on one node; late_s: how long each stage
    of any pipeline waits first, where not all begin at once.
    """

    what: str
    cuts: tuple[tuple[int, ...], ...]
    megabits: tuple[tuple[int, ...], ...]
    together: tuple[int, ...] = ()
    late_s: tuple[float, ...] = ()

    @property
    def plan(self) -> Plan:
        pipelines = []
        for p, cut in enumerate(self.cuts):
            starts = [sum(cut[:s]) for s in range(len(cut))]
            stages = (
                Stage(start, size, (f"p{p}/{s}" if p in self.together else f"p{p}s{s}/0",))
                for s, (start, size) in enumerate(zip(starts, cut, strict=True))
            )
            pipelines.append(Pipeline(tuple(stages), 1, 1))
        return Plan("m", len(pipelines), 1, 4, tuple(pipelines))

    @property
    def speeds(self) -> dict[str, int]:
        """Megabits a second of each node's link."""
        nodes = (worker.split("/")[0] for worker in self.plan.workers)
        return dict(zip(nodes, (speed for each in self.megabits for speed in each), strict=True))

    def predicted(self, efficiency: float) -> StepTimeline:
        """By the cost model, where links reach that share of their speed."""
        parameters = replace(
            CostParameters(), efficiency_inter=efficiency, all_reduce_efficiency=1.0
        )
        sizes = Counter(worker.split("/")[0] for worker in self.plan.workers)
        kinds = {
            (speed, size): NodeType(
                f"{speed}-{size}", "gpu", size, 1, 1.0, speed * 1e6 / 8, max_nodes=9
            )
            for speed, size in ((self.speeds[node], size) for node, size in sizes.items())
        }
        fleet = Fleet(
            0, tuple(Node(node, kinds[speed, sizes[node]]) for node, speed in self.speeds.items())
        )
        begin, nothing = self.begin_s, dict.fromkeys(self.plan.workers, 0.0)
        return simulate_sync(
            sync_jobs(self.plan, SPEC, parameters), begin, nothing, fleet, Links(parameters)
        )

    @property
    def begin_s(self) -> dict[str, float]:
        """When each worker does."""
        stages = (
            (s, stage)
            for pipeline in self.plan.pipelines
            for s, stage in enumerate(pipeline.stages)
        )
        return {stage.workers[0]: self.late_s[s] if self.late_s else 0.0 for s, stage in stages}


CASES = [
    Case("two equal workers", ((8,), (8,)), ((200,), (200,))),
    Case("three equal workers", ((8,), (8,), (8,)), ((200,), (200,), (200,))),
    Case("one fast link, four slow ones", ((8,), (2, 2, 2, 2)), ((400,), (100, 100, 100, 100))),
    Case(
        "one link twice as fast as four others",
        ((8,), (2, 2, 2, 2)),
        ((200,), (100, 100, 100, 100)),
    ),
    Case("two fast links, unlike cuts", ((4, 4), (2, 3, 3)), ((400, 400), (100, 100, 100))),
    Case("one slow link among fast ones", ((4, 4), (1, 5, 2)), ((400, 400), (400, 400, 100))),
    Case("equal links, two cuts", ((4, 4), (3, 5)), ((200, 200), (200, 200))),
    Case("a node of four, four nodes of one", ((2,) * 4,) * 2, ((400,) * 4, (100,) * 4), (0,)),
    Case("a slow node of four, four nodes of one", ((2,) * 4,) * 2, ((100,) * 4, (100,) * 4), (0,)),
    Case("a node of two, one a second later", ((4, 4),) * 2, ((200,) * 2,) * 2, (0,), (1.0, 0.0)),
    Case(
        "a node of two, one when the other is done",
        ((4, 4),) * 2,
        ((200,) * 2,) * 2,
        (0,),
        (2.5, 0.0),
    ),
    Case(
        "two nodes of four, each two late",
        ((2,) * 4,) * 2,
        ((400,) * 4,) * 2,
        (0, 1),
        (2.5, 2.0, 0.5, 0.0),
    ),
    Case("equal links, three cuts", ((4, 4), (3, 5), (6, 2)), ((200, 200), (200, 200), (200, 200))),
]


def step_of(case: Case, worker: str, groups: GenerationGroups) -> Callable[[], object]:
    """Sums the gradients of the worker's stage, all at once, when they are ready."""
    plan = case.plan
    specs, held = (
        layout_of_plan(plan, CONFIG).tensors,
        [held for held in held_units(plan, CONFIG) if held[0] == worker],
    )
    shapes = {name: specs[f"param/{name}"].local_shape(units) for _, name, _, units in held}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    local = LocalBuffers(plan, CONFIG, worker, groups.back_end.max_sync_groups(plan))
    sync = GradientSync(local, groups, parameters, overlap=False)

    begin_s = case.begin_s[worker]

    def step() -> None:
        time.sleep(begin_s)
        sync.begin()
        sync.finish()

    return step


def main() -> None:
    why = why_no_namespaces()
    if why is not None:
        raise SystemExit(why)
    rows, efficiency = list[dict[str, Any]](), 1.0
    with namespace_network() as network:
        for case in CASES:
            numbers = {name: i for i, name in enumerate(case.speeds)}
            for name, i in numbers.items():
                network.add(f"node-{i}")
                network.limit(f"node-{i}", case.speeds[name])
            nodes = {
                worker: f"node-{numbers[worker.split('/')[0]]}" for worker in case.plan.workers
            }
            seconds = measured_step_s(network, nodes, step_of, case)
            if not rows:
                efficiency = case.predicted(1.0).gradients_end_s / seconds
            predicted = case.predicted(efficiency).gradients_end_s
            row = {
                "on": case.what,
                "measured_s": round(seconds, 3),
                "predicted_s": round(predicted, 3),
            }
            rows.append(row | {"predicted_over_measured": round(predicted / seconds, 4)})
            print(rows[-1], flush=True)
    document = provenance() | {"efficiency_fitted_on_first": round(efficiency, 4), "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
