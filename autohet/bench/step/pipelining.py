"""Second baseline of `autohet bench step`: stock pipelining with DDP on an equal plan.

The stock side is `torch.distributed.pipelining` (Schedule1F1B). Four processes of this machine,
gloo or NCCL: two pipelines of two stages, of the same layers, microbatches and first weights. Each
process runs both sides in turn, so that a machine's load falls on both; a step of either lasts from
one barrier to the next. Both clip by the global norm; the stock side takes AdamW's fused update if
the device has one.
"""

import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from autohet.bench.step.sides import (
    autocast_of,
    first_parameters,
    plan_of,
    random_rows,
    state_of,
)
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.registry import family_of
from autohet.runtime.profiling.device_processes import run_in_processes
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.learning_rate import learning_rate
from autohet.runtime.step.reference import adamw, reference_model
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Pipeline, Plan, Stage

NUM_PIPELINES = 2
NUM_STAGES = 2
GROUP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Measured:
    """Measurements of each side's steps: seconds, processor seconds and losses.

    Processor seconds are of all processes together, all their threads. Warm-up is excluded from all
    but the losses. On a machine with other load, only processor seconds show what a side costs.
    """

    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    losses: dict[str, list[float]]


def measure(job: Job, steps: int, device_type: str = "cpu") -> Measured:
    """Measure both sides on this machine; block until measured."""
    measure_rank = partial(_measure_rank, job, steps)
    return run_in_processes(measure_rank, device_type, NUM_PIPELINES * NUM_STAGES)


def equal_plan(job: Job) -> Plan:
    """Return two pipelines of two stages, layers and microbatches halved.

    Worker `here/r` is stage r % 2 of pipeline r // 2.
    """
    config = load_config(job.model, job.training)
    num_layers = family_of(config).num_layers(config)
    size = job.parallelism.microbatch_sequences or 1
    cut = num_layers // NUM_STAGES
    num_microbatches = job.training.global_batch_sequences // size // NUM_PIPELINES
    pipelines = []
    for rank in range(0, NUM_PIPELINES * NUM_STAGES, NUM_STAGES):
        first = Stage(0, cut, (f"here/{rank}",))
        last = Stage(cut, num_layers - cut, (f"here/{rank + 1}",))
        pipelines.append(Pipeline((first, last), num_microbatches, size))
    return plan_of(job, size, pipelines)


def _measure_rank(job: Job, steps: int, rank: int, device: torch.device) -> Measured:
    """Run both sides in turn, in one process."""
    sides = {"autohet": _ours(rank, job, device), "pipelining": _stock(rank, job, device)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + steps):
        for name, step in sides.items():
            dist.barrier()
            began = time.perf_counter()
            used = time.process_time()
            losses[name].append(step())
            own_cpu_s = time.process_time() - used
            mine = torch.tensor(own_cpu_s, dtype=torch.float64, device=device)
            dist.all_reduce(mine)
            seconds[name].append(time.perf_counter() - began)
            cpu_s[name].append(float(mine))
    return Measured(_warm(seconds), _warm(cpu_s), losses)


def _ours(rank: int, job: Job, device: torch.device) -> Callable[[], float]:
    config = load_config(job.model, job.training)
    plan = equal_plan(job)
    server = None
    ports = [0]
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [server.port]
    dist.broadcast_object_list(ports, 0)
    store = server or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    me = f"here/{rank}"
    groups = GenerationGroups(store, 0, me, device, GroupTimeouts(GROUP_TIMEOUT_S, GROUP_TIMEOUT_S))
    groups.meet(plan.workers)
    state = state_of(job, layout_of_plan(plan, config), me, device)
    setup = TrainingSetup(config, job.training, device)
    generation = WorkerGeneration(plan, me, groups, state)
    trainer = StageTrainer(setup, generation)
    rows = random_rows(job, device)
    return lambda: trainer.train_step(rows).loss


class _Stage(nn.Module):
    """The library's own modules of one stage of a Llama."""

    def __init__(
        self,
        model: Any,
        first: bool,
        layers: Any,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(layers)
        # by their names in the model, which say what has no weight decay
        head = OrderedDict(norm=model.model.norm, lm_head=model.lm_head)
        self.head: nn.Module | None = None if first else nn.Sequential(head)
        self.rotary = model.model.rotary_emb
        self._autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with self._autocast():
            hidden = x if self.embedding is None else self.embedding(x)
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            rotary = self.rotary(hidden, positions)
            for layer in self.layers:
                hidden = layer(
                    hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
                )
            return hidden if self.head is None else self.head(hidden)


def _stock(rank: int, job: Job, device: torch.device) -> Callable[[], float]:
    """Return a step of the stock schedule; it returns its loss on last stages, 0 elsewhere."""
    training = job.training
    plan = equal_plan(job)
    pipeline, index = divmod(rank, NUM_STAGES)
    # all processes make all groups, in one order
    size = NUM_PIPELINES * NUM_STAGES
    of_pipelines = [
        dist.new_group(list(range(first, first + NUM_STAGES)))
        for first in range(0, size, NUM_STAGES)
    ]
    of_stages = [
        dist.new_group(list(range(first, size, NUM_STAGES))) for first in range(NUM_STAGES)
    ]

    config = load_config(job.model, job.training)
    names = list(family_of(config).parameter_specs(config))
    model: Any = reference_model(config, first_parameters(job, names, device))
    model.to(device)
    cut = len(model.model.layers) // NUM_STAGES
    layers = model.model.layers[:cut] if index == 0 else model.model.layers[cut:]
    module = _Stage(model, index == 0, layers, partial(autocast_of, job, device))
    replica: Any = DistributedDataParallel(
        module, process_group=of_stages[index], gradient_as_bucket_view=True
    )
    stage = PipelineStage(replica, index, NUM_STAGES, device, group=of_pipelines[pipeline])
    microbatches = plan.pipelines[0].num_microbatches

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)
    parameters = list(module.parameters())
    optimizer = adamw(model, training)
    rows = random_rows(job, device)
    share = training.global_batch_sequences // NUM_PIPELINES
    first_row = pipeline * share
    steps = itertools.count()
    num_targets = training.global_batch_sequences * training.sequence_length

    def step() -> float:
        number = next(steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, number)
        optimizer.zero_grad()
        tokens, targets = rows(number, range(first_row, first_row + share))
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        # DDP has averaged over pipelines; the sum of losses wants the sum of gradients over the
        # number of targets.
        _clip(parameters, NUM_PIPELINES / num_targets, training.clip_norm, of_pipelines[pipeline])
        optimizer.step()
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        total = total.detach().double()
        dist.all_reduce(total)
        return float(total) / num_targets

    return step


def _clip(
    parameters: list[nn.Parameter], scale: float, clip_norm: float | None, pipeline: Any
) -> None:
    """Scale the gradients, and clip them to a global norm of at most `clip_norm`.

    Squares are summed over the stages of a pipeline.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum().double() * scale**2
    dist.all_reduce(squares, group=pipeline)
    norm = float(squares) ** 0.5
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    torch._foreach_mul_(gradients, scale * factor)


def _warm(steps: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the figures without those of the first step, which warms up."""
    return {name: each[1:] for name, each in steps.items()}


def medians(steps: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in steps.items()}
