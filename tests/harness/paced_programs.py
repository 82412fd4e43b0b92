"""Plans of one job run on gloo processes that are paced as their emulated GPU types: what is
predicted of a step, and what it takes.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore

from autohet.bench.step.sides import random_rows, state_of
from autohet.control.planning.proposals import PlanProposal
from autohet.driver.loop.emulated_paces import paces_of
from autohet.driver.loop.planning import Planning
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.groups import GenerationGroups, Group, GroupTimeouts
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.spmd.trainer import SpmdTrainer
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.pacing import Pace
from autohet.runtime.step.step_commit import Trainer
from autohet.runtime.step.trainer import StageTrainer
from planner.cost.model import CostModel
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan, Stage
from planner.spmd.costs import Shares, round_to_units
from planner.spmd.document import StageProgram
from planner.spmd.graph import WHOLE
from planner.spmd.plan import PlacedProgram
from planner.spmd.search import ProgramSearch
from planner.strategies import Request, plan_with
from tests.harness.local_fleet import node_type
from tests.harness.processes import run_distributed

LENGTH = 16
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
}


@dataclass(frozen=True)
class PacedFleet:
    """nodes: (GPU type, GPUs of a node, nodes). speeds: by GPU type. block_s: a block's forward of
    one sequence at speed 1.
    """

    nodes: tuple[tuple[str, int, int], ...]
    speeds: Mapping[str, float]
    batch: int
    block_s: float

    def job(self) -> Job:
        return Job.from_document(
            {
                "name": "paced",
                "model": {"config": LLAMA},
                "training": {
                    "global_batch_sequences": self.batch,
                    "sequence_length": LENGTH,
                    "steps": 100,
                    "precision": "fp32",
                    "device": "cpu",
                },
                "parallelism": {"memory_reserve_bytes": 0},
                "emulation": {
                    "relative_speed_by_gpu_type": dict(self.speeds),
                    "block_forward_s": self.block_s,
                },
            }
        )

    def fleet(self) -> Fleet:
        types = {
            gpu: node_type(gpu, count) | {"max_workers": nodes} for gpu, count, nodes in self.nodes
        }
        return cluster_from_document(
            {"cluster_name": "paced", "available_node_types": types}
        ).fleet()

    def cost(self) -> CostModel:
        return Planning(planning_inputs(self.job())).make_cost(self.fleet())


def chosen_plan(of: PacedFleet, strategy: str) -> Plan:
    """What a strategy answers."""
    cost = of.cost()
    request = Request(
        cost.fleet, cost.spec, cost, of.batch, LENGTH, time_limit_s=60.0, clock=time.monotonic
    )
    return plan_with(strategy, request).plan


def data_parallel_plan(of: PacedFleet, weights: Sequence[float]) -> Plan:
    """Data parallelism as a program: state whole on all GPUs, whole samples in proportion to these
    weights. Were weights cut, the slowest GPU would have all of them, so the search cuts none; were
    sequences cut, they would be so in the same parts, so it cuts samples.
    """
    cost = of.cost()
    workers = cost.fleet.workers
    decoder = cost.programs.decoder(of.batch)
    speeds = speeds_of(of)
    table = cost.programs.table(decoder.graph, workers, of.batch, 1)
    row = tuple(samples / of.batch for samples in round_to_units(weights, of.batch))
    slowest = speeds.index(min(speeds))
    given = (row, tuple(float(rank == slowest) for rank in range(len(row))))
    pinned = dict.fromkeys(decoder.split_dims, WHOLE)
    search = ProgramSearch(table, Shares(decoder.graph, given), pinned)
    _, program = search.dynamic_program()
    placed = PlacedProgram(decoder.graph, program, Shares(decoder.graph, (row,)))
    assert [axis.units for axis in placed.units] == [of.batch]
    return _as_plan(of, cost, placed)


def _as_plan(of: PacedFleet, cost: CostModel, placed: PlacedProgram) -> Plan:
    stage = Stage(0, cost.spec.num_layers, tuple(cost.fleet.workers), spmd=StageProgram.of(placed))
    return Plan("paced", of.batch, of.batch, LENGTH, (Pipeline((stage,), 1, of.batch),))


def speeds_of(of: PacedFleet) -> list[float]:
    """Of each worker, in the fleet's order."""
    fleet = of.fleet()
    return [of.speeds[fleet.gpu_type(worker)] for worker in fleet.workers]


def predicted_and_measured(of: PacedFleet, plan: Plan, steps: int) -> tuple[float, float]:
    """Seconds of a step: the cost model's, and the median of real ones. Blocks."""
    cost = of.cost()
    prediction = cost.predict(plan)
    paces = paces_of(PlanProposal(plan, prediction, cost))
    by_rank = run_distributed(
        _train, len(plan.workers), of.job(), plan.to_json(), dict(paces), steps
    )
    return prediction.step_time_s, statistics.median(by_rank[0])


def _train(
    rank: int,
    size: int,
    store: TCPStore,
    job: Job,
    text: str,
    paces: Mapping[str, Pace],
    steps: int,
) -> list[float]:
    """Seconds of each step after the first, from all ranks' begin to all ranks' end."""
    plan = Plan.from_json(text)
    cpu = torch.device("cpu")
    config = load_config(job.model, job.training)
    me = plan.workers[rank]
    groups = GenerationGroups(store, 1, me, cpu, GroupTimeouts(60.0, 60.0))
    groups.meet(plan.workers)
    everyone = groups.group(plan.workers, "measured")
    state = state_of(job, layout_of_plan(plan, config), me, cpu)
    kind = StageTrainer if plan.spmd is None else SpmdTrainer
    generation = WorkerGeneration(plan, me, groups, state, pace=paces[me])
    trainer = kind(TrainingSetup(config, job.training, cpu), generation)
    return seconds_together(trainer, everyone, job, steps)


def seconds_together(trainer: Trainer, everyone: Group, job: Job, steps: int) -> list[float]:
    """Train; seconds of each step after the first, from all ranks' begin to all ranks' end."""
    rows = random_rows(job, torch.device("cpu"))
    seconds = []
    for _ in range(1 + steps):
        everyone.all_reduce(torch.zeros(1))
        begin = time.perf_counter()
        trainer.train_step(rows)
        everyone.all_reduce(torch.zeros(1))
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]
