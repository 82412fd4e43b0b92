"""Training of SPMD plans on gloo processes: steps under any layouts, and the same run in one plain
process.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import TCPStore
from transformers import PreTrainedConfig

from autohet.runtime.facts.layout import STATE_KINDS, state_name
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import TrainingSection
from autohet.runtime.spmd.capture import Captured, capture
from autohet.runtime.spmd.executor import ProgramExecutor
from autohet.runtime.spmd.trainer import SpmdTrainer
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from planner.plans.plan import Pipeline, Plan, Stage
from planner.spmd.costs import CostTable, Device, SpmdCluster, ring_collectives
from planner.spmd.plan import PlacedProgram, synthesize
from tests.harness.parity import ADAM_EPS
from tests.harness.spmd_models import spmd_case
from tests.harness.spmd_programs import given_plan, random_program

TRAINING = TrainingSection(
    global_batch_sequences=6,
    sequence_length=8,
    steps=100,
    precision="fp32",
    learning_rate=1e-2,
    eps=ADAM_EPS,
    min_learning_rate_ratio=1.0,
    no_decay="none",
    clip_norm=0.3,
)


def one_process(name: str, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of plain PyTorch: AdamW and clip_grad_norm_."""
    model, batch = spmd_case(name, torch.float32)
    model.reduction = "mean"  # type: ignore[assignment]
    settings = TRAINING
    optimizer = torch.optim.AdamW(
        model.parameters(),
        settings.learning_rate,
        settings.betas,
        settings.eps,
        weight_decay=settings.weight_decay,
    )
    losses = []
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        assert settings.clip_norm is not None
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def uneven_cluster(count: int, link_bytes_per_s: float = 1e9) -> SpmdCluster:
    devices = tuple(
        Device(f"n{rank}", speed * 1e9, 1e12)
        for rank, speed in zip(range(count), (4.0, 1.0, 2.0, 3.0), strict=False)
    )
    return SpmdCluster(devices, ring_collectives(count, link_bytes_per_s, 1e-6))


def some_plan(captured: Captured, size: int, seed: int | None) -> PlacedProgram:
    """The planner's, or a random program on random shares."""
    if seed is None:
        return synthesize(CostTable(captured.graph, uneven_cluster(size)))
    rng = random.Random(seed)
    weights = [rng.uniform(0.3, 3) for _ in range(size)]
    return given_plan(
        captured.graph,
        random_program(captured.graph, seed),
        (tuple(w / sum(weights) for w in weights),),
    )


def initial_state(executor: ProgramExecutor) -> dict[str, Tensor]:
    """This rank's parts of the captured model's weights, and zero moments, by state name."""
    state: dict[str, Tensor] = {}
    for name, layout in executor.plan.program.storage.items():
        if name in executor.captured.parameters:
            part = executor.local_part(
                executor.captured.parameters[name].detach().float(), name, layout
            ).clone()
            state |= {
                state_name(kind, name): part if kind == "param" else torch.zeros_like(part)
                for kind in STATE_KINDS
            }
    return state


def as_plan(size: int) -> Plan:
    """One stage of all ranks and one microbatch; which program that runs is said beside it."""
    batch = TRAINING.global_batch_sequences
    length = TRAINING.sequence_length
    stage = Stage(0, 1, tuple(f"w{rank}" for rank in range(size)))
    return Plan("m", batch, batch, length, (Pipeline((stage,), 1, batch),))


def train(
    rank: int, size: int, store: TCPStore, name: str, seeds: Sequence[int | None], steps: int
) -> list[tuple[list[float], list[float], float]]:
    """For each plan: losses, norms, and the largest difference of this rank's weights from one
    process's, over the largest weight.
    """
    expected = one_process(name, steps)[2]
    found = []
    cpu = torch.device("cpu")
    for number, seed in enumerate(seeds, 1):
        model, batch = spmd_case(name, torch.float32)
        captured = capture(model, batch)
        groups = GenerationGroups(store, number, f"w{rank}", cpu, GroupTimeouts(30.0, 30.0))
        placed = some_plan(captured, size, seed)
        setup = TrainingSetup(PreTrainedConfig(), TRAINING, cpu)
        plan = as_plan(size)
        state = initial_state(ProgramExecutor(captured, placed, groups.group(plan.workers, "spmd")))
        generation = WorkerGeneration(plan, f"w{rank}", groups, state)
        trainer = SpmdTrainer(setup, generation, program=(captured, placed))
        done = [
            trainer.train_step(lambda step, sequences, batch=batch: batch) for _ in range(steps)
        ]  # type: ignore[misc]
        worst = 0.0
        for parameter, layout in placed.program.storage.items():
            if parameter in expected:
                wanted = trainer.executor.local_part(expected[parameter], parameter, layout)
                difference = (trainer.state[state_name("param", parameter)] - wanted).abs()
                worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        found.append(([step.loss for step in done], [step.gradient_norm for step in done], worst))
    return found
