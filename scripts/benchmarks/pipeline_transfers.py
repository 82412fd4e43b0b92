#!/usr/bin/env python3
"""Steps of the real executor over links of limited speed, against the cost model's simulation: results/pipeline_transfers.json.

Each node is a network namespace (root is needed), its interface limited both ways by a token bucket (`tc tbf`); hidden states really cross.
The stages' work is EMULATED: each forward and backward sleeps until the stated time is over. Cases are measured in turn, each by the same
processes: 1F1B against up to two and three more microbatches in flight at each stage than at the next; and, of two stages with two
tensor-parallel ranks each on two nodes, whole hidden states for each rank against slices.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from provenance import provenance
from torch import Tensor, nn

from autohet.runtime.executor import Executor
from autohet.runtime.groups import GenerationGroups
from autohet.runtime.pacing import Pace, Pacer
from autohet.runtime.place import place_of
from planner.pipeline_simulation import PipelineTimes, simulate_pipeline
from planner.plan import Pipeline, Plan, Stage
from planner.transfers import transfers_between
from tests.harness.namespaces import namespace_network, why_no_namespaces
from tests.harness.shaped_workers import CPU, measured_step_s

RESULTS = Path(__file__).parent / "results" / "pipeline_transfers.json"
HIDDEN = (1, 64, 4096)
"""Of a microbatch, [b, S, H] fp32: 1 MiB."""
FORWARD_S, BACKWARD_S = 0.1, 0.2


@dataclass(frozen=True)
class Case:
    """What is measured: `stages` on nodes of their own, `ranks` each. sliced False: the ranks are named as if all were on one node, so that
    each takes the whole."""

    what: str
    stages: int
    ranks: int
    microbatches: int
    megabits: int
    more: int = 1
    sliced: bool = True

    def workers(self, stage: int) -> tuple[str, ...]:
        return tuple(f"n{stage if self.sliced else 0}/{self.ranks * stage + rank}" for rank in range(self.ranks))

    @property
    def plan(self) -> Plan:
        stages = tuple(Stage(s, 1, self.workers(s)) for s in range(self.stages))
        most = tuple(self.more * (self.stages - 1 - s) + 1 for s in range(self.stages))
        return Plan("m", self.microbatches, 1, HIDDEN[1], (Pipeline(stages, self.microbatches, 1, most),))

    def predicted_s(self) -> float:
        """By the simulation of one pipeline; what leaves a node shares its interface."""
        plan = self.plan
        pipeline = plan.pipelines[0]
        sent = sum(1 / transfer.slices for transfer in transfers_between(*pipeline.stages[:2]))
        cross = sent * 4 * torch.Size(HIDDEN).numel() * 8 / (self.megabits * 1e6)
        between = (cross,) * (self.stages - 1)
        work = (FORWARD_S,) * self.stages, (BACKWARD_S,) * self.stages
        times = PipelineTimes(*work, between, between, "none", pipeline.most_in_flight)
        return simulate_pipeline(times, self.microbatches).total_s


CASES = [
    *(Case(f"4 stages, 100 Mbit/s, {more} more", 4, 1, 12, 100, more) for more in (1, 2, 3)),
    *(Case(f"3 stages, 200 Mbit/s, {more} more", 3, 1, 16, 200, more) for more in (1, 2, 3)),
    Case("2 stages of 2 ranks, 200 Mbit/s, whole", 2, 2, 12, 200, 1, sliced=False),
    Case("2 stages of 2 ranks, 200 Mbit/s, slices", 2, 2, 12, 200, 1),
    Case("2 stages of 2 ranks, 200 Mbit/s, slices, 2 more", 2, 2, 12, 200, 2),
]


class _Identity(nn.Module):
    """A stage that gives on what it takes: its time is the pacer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ones(HIDDEN) if x.dtype == torch.int64 else x) * self.scale

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum()


def step_of(case: Case, worker: str, groups: GenerationGroups) -> Callable[[], object]:
    """A step of the worker's stage."""
    plan = case.plan
    place, everyone = place_of(plan, worker), groups.group(plan.workers)
    assert place is not None
    ranks = groups.group(place.stage.workers) if case.ranks > 1 else None
    pacer = Pacer(Pace(FORWARD_S, BACKWARD_S), lambda: False)
    executor = Executor(place, _Identity(), everyone, everyone, ranks, HIDDEN, torch.float32, CPU, pacer)
    tokens = torch.zeros(HIDDEN[:2], dtype=torch.int64)
    return lambda: executor.run(lambda m: (tokens, tokens), lambda phase: None)


def main() -> None:
    why = why_no_namespaces()
    if why is not None:
        raise SystemExit(why)
    rows = []
    with namespace_network() as network:
        for stage in range(max(case.stages for case in CASES)):
            network.add(f"node-{stage}")
        for case in CASES:
            for stage in range(case.stages):
                network.limit(f"node-{stage}", case.megabits)
            nodes = {worker: f"node-{stage}" for stage in range(case.stages) for worker in case.workers(stage)}
            seconds, predicted = measured_step_s(network, nodes, step_of, case), case.predicted_s()
            row = {"on": case.what, "measured_s": round(seconds, 3), "predicted_s": round(predicted, 3)}
            rows.append(row | {"predicted_over_measured": round(predicted / seconds, 4)})
            print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps(provenance() | {"rows": rows}, indent=1) + "\n")
    first, second = rows[0]["measured_s"], rows[1]["measured_s"]
    print(f"working ahead over 1F1B, 4 stages: {second / first:.3f} of the time")


if __name__ == "__main__":
    main()
