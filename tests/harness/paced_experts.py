"""Stages of uneven experts on gloo processes that take time by the tokens that they compute.

Unlike `paced_programs`, whose workers take the seconds that the cost model says, each rank here
sleeps for its own part: attention by its share of the heads, experts by the tokens that the real
router sends to its own experts. Ranks wait for each other in the real sums of each block.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from autohet.bench.step.sides import random_rows, state_of
from autohet.driver.loop.planning import Planning
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import Job
from autohet.runtime.job.emulated_profile import (
    BACKWARD_PER_FORWARD,
    SHARE_BY_LAYER,
    TP_OVERHEAD,
)
from autohet.runtime.models.config import load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.reference import reference_model
from autohet.runtime.step.trainer import StageTrainer
from planner.cost.layers.experts import load_spread
from planner.cost.model import CostModel
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import Fleet
from planner.inputs.profile import ProfileTable
from planner.plans.plan import Pipeline, Plan, Stage
from tests.harness.local_fleet import node_type
from tests.harness.paced_programs import seconds_together
from tests.harness.processes import run_distributed

LENGTH = 128
BATCH = 2
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
}
SPEEDS = {"A100-40": 2.0, "A10G": 1.0}
"""Speeds of the types that workers pose as; the first node has the fast one."""


@dataclass(frozen=True)
class Work:
    """Seconds at speed 1 of one sequence in a block, and the experts' share of them."""

    block_s: float
    experts_share: float

    @property
    def pair_s(self) -> float:
        """Seconds of one token on one expert."""
        return self.block_s * self.experts_share / LENGTH / MIXTRAL["num_experts_per_tok"]  # type: ignore[operator]


def job_of(block_s: float) -> Job:
    return Job.from_document(
        {
            "name": "paced",
            "model": {"config": MIXTRAL},
            "training": {
                "global_batch_sequences": BATCH,
                "sequence_length": LENGTH,
                "steps": 100,
                "precision": "fp32",
                "device": "cpu",
                "learning_rate": 1e-5,
            },
            "parallelism": {"memory_reserve_bytes": 0},
            "emulation": {"relative_speed_by_gpu_type": SPEEDS, "block_forward_s": block_s},
        }
    )


def fleet() -> Fleet:
    """One fast node and two slow ones, of a GPU each."""
    types = {
        "fast": node_type("A100-40") | {"max_workers": 1},
        "slow": node_type("A10G") | {"max_workers": 2},
    }
    return cluster_from_document({"cluster_name": "c", "available_node_types": types}).fleet()


def plan_of(shares: Sequence[int]) -> Plan:
    """One stage of the three GPUs with these parts, a sequence at a time."""
    workers = ("fast-0/0", "slow-0/0", "slow-1/0")
    layers = int(MIXTRAL["num_hidden_layers"])  # type: ignore[call-overload]
    stage = Stage(0, layers, workers, tp_shares=tuple(shares))
    return Plan("paced", BATCH, 1, LENGTH, (Pipeline((stage,), BATCH, 1),))


def cost_of(job: Job) -> CostModel:
    """The cost model, with the spread of loads that `measured_spread` finds."""
    inputs = planning_inputs(job)
    assert inputs.profile is not None
    spread = measured_spread(job)
    rows = [
        replace(row, expert_load_spread=spread) if row.layer == "block" else row
        for row in inputs.profile.measurements
    ]
    return Planning(replace(inputs, profile=ProfileTable(rows))).make_cost(fleet())


def measured_spread(job: Job) -> float:
    """The mean spread of the experts' loads over blocks and microbatches, by the library."""
    config = load_config(job.model, job.training)
    names = list(family_of(config).parameter_specs(config))
    model = reference_model(config, initial_parameters(config, names, job.training.seed))
    spreads: list[float] = []

    def record(_: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        counts = torch.bincount(out[2].flatten(), minlength=8)
        spreads.append(load_spread(counts.tolist()))

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(record)
    tokens, _ = random_rows(job, torch.device("cpu"))(0, range(BATCH))
    with torch.no_grad():
        for row in tokens:
            model(row[None])
    return statistics.fmean(spreads)


def work_of(cost: CostModel, block_s: float) -> Work:
    """The work of a block, with the experts' share by FLOPs."""
    block = cost.spec.blocks[0]
    experts = block.experts
    assert experts is not None
    routed = 2.0 * experts.parameters * experts.per_token / experts.number * LENGTH
    return Work(block_s, routed / block.forward_flops(LENGTH))


def measured_step_s(job: Job, plan: Plan, work: Work, steps: int) -> float:
    """The median seconds of real steps. Blocks."""
    by_rank = run_distributed(_train, len(plan.workers), job, plan.to_json(), work, steps)
    return statistics.median(by_rank[0])


class _SleepBackward(torch.autograd.Function):
    """Identity whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def _sleep(out: Any, seconds: float) -> Any:
    """Sleep for a forward pass, and let the backward pass of `out` sleep as well."""
    time.sleep(seconds)
    backward_s = BACKWARD_PER_FORWARD * seconds
    if isinstance(out, tuple):
        return _SleepBackward.apply(out[0], backward_s), *out[1:]  # type: ignore[no-untyped-call]
    return _SleepBackward.apply(out, backward_s)  # type: ignore[no-untyped-call]


def pace(trainer: StageTrainer, plan: Plan, rank: int, work: Work) -> None:
    """Let a rank take the time of its heads and of the tokens of its own experts."""
    share = plan.pipelines[0].stages[0].share(rank)
    speed = SPEEDS[fleet().gpu_type(plan.workers[rank])] / TP_OVERHEAD
    ends_s = (SHARE_BY_LAYER["embedding"] + SHARE_BY_LAYER["head"]) * work.block_s

    def of_attention(index: int) -> Any:
        one_s = (1.0 - work.experts_share) * work.block_s + (ends_s if index == 0 else 0.0)
        return lambda _, args, out: _sleep(out, one_s * share.fraction / speed)

    def of_experts(module: Any, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Any:
        pairs = int((args[1] < module.num_experts).sum())
        return _sleep(out, pairs * work.pair_s / speed)

    for index, block in enumerate(trainer.stage.blocks):
        block.get_submodule("self_attn").register_forward_hook(of_attention(index))
        block.get_submodule("mlp.experts").register_forward_hook(of_experts)


def _train(
    rank: int, size: int, store: TCPStore, job: Job, text: str, work: Work, steps: int
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
    generation = WorkerGeneration(plan, me, groups, state)
    trainer = StageTrainer(TrainingSetup(config, job.training, cpu), generation)
    pace(trainer, plan, rank, work)
    return seconds_together(trainer, everyone, job, steps)
