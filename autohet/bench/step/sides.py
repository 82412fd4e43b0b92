"""Two sides of `autohet bench step`: this package's trainer and a plain loop.

Both train the same job on the same random tokens; a step of each is measured.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from autohet.runtime.facts.layout import layout_of_plan, parameter_name
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.state_source import local_slice
from autohet.runtime.step.generation import TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.reference import reference_model, train_reference
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.layout import Layout

WORKER = "here/0"
DISTINCT_BATCHES = 8
DRAWN_ON_CPU = 100_000_000
"""Parameters of the largest model whose first weights are drawn on the CPU, as in a run."""
Side = Callable[[], float]
"""Runs the next step and returns its loss; the device may still be at work."""


def random_rows(job: Job, device: torch.device) -> Callable[[int, range], tuple[Tensor, Tensor]]:
    """Return batches of random tokens, a function of the step alone.

    DISTINCT_BATCHES of them are used in turn. They are on the device ahead: a copy from pageable
    memory makes the host wait for the stream.
    """
    config = load_config(job.model, job.training)
    shape = (job.training.global_batch_sequences, job.training.sequence_length + 1)
    batches = []
    for number in range(DISTINCT_BATCHES):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randint(int(config.vocab_size), shape, generator=generator).to(device)
        batches.append((whole[:, :-1].contiguous(), whole[:, 1:].contiguous()))

    def rows(step: int, sequences: range) -> tuple[Tensor, Tensor]:
        tokens, targets = batches[step % DISTINCT_BATCHES]
        part = slice(sequences.start, sequences.stop)
        return tokens[part], targets[part]

    return rows


def state_of(job: Job, layout: Layout, worker: str, device: torch.device) -> dict[str, Tensor]:
    """A worker's first state: weights from the seed, moments of 0."""
    units = layout.units_of(worker)
    names = [parameter_name(name) for name in units if name.startswith("param/")]
    whole = dict(first_parameters(job, names, device))
    state = {}
    for name, mine in units.items():
        if name.startswith("param/"):
            # popped, so that whole tensors do not pile up beside their slices
            tensor = whole.pop(parameter_name(name))
            state[name] = local_slice(layout, name, mine, tensor).to(device)
        else:
            shape = layout.tensors[name].local_shape(mine)
            state[name] = torch.zeros(shape, device=device)
    return state


def first_parameters(
    job: Job, names: Collection[str], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The first weights of both sides: a run's own, or those of a large model, drawn on its GPU.

    Drawing three billion parameters on the CPU takes longer than measuring them.
    """
    config = load_config(job.model, job.training)
    specs = family_of(config).parameter_specs(config)
    num_elements = sum(math.prod(spec.shape) for spec in specs.values())
    if device.type == "cpu" or num_elements <= DRAWN_ON_CPU:
        yield from initial_parameters(config, names, job.training.seed)
        return
    for name in names:
        shape = specs[name].shape
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        if len(shape) == 1:
            yield name, torch.ones(shape, device=device)
        else:
            normal = torch.randn(shape, device=device, generator=generator)
            yield name, normal.mul_(0.02)


def one_worker_plan(job: Job) -> Plan:
    config = load_config(job.model, job.training)
    size = microbatch_of(job)
    stage = Stage(0, family_of(config).num_layers(config), (WORKER,))
    num_microbatches = job.training.global_batch_sequences // size
    return plan_of(job, size, [Pipeline((stage,), num_microbatches, size)])


def plan_of(job: Job, size: int, pipelines: Sequence[Pipeline]) -> Plan:
    """Return the plan of a job with these pipelines, of `size` sequences in a microbatch."""
    training = job.training
    return Plan(
        job.name or "model",
        training.global_batch_sequences,
        size,
        training.sequence_length,
        tuple(pipelines),
    )


def microbatch_of(job: Job) -> int:
    return job.parallelism.microbatch_sequences or min(8, job.training.global_batch_sequences)


def our_trainer(
    job: Job,
    device: torch.device,
    before_update: Callable[[], None] | None = None,
    plan: Plan | None = None,
    begins: Callable[[int, range], Tensor] | None = None,
) -> StageTrainer:
    """The trainer that workers run, on a plan of one worker; begins: see `TrainingSetup`."""
    config = load_config(job.model, job.training)
    plan = plan or one_worker_plan(job)
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    groups = GenerationGroups(store, 0, WORKER, device, GroupTimeouts(60.0, 60.0))
    state = state_of(job, layout_of_plan(plan, config), WORKER, device)
    setup = TrainingSetup(config, job.training, device, begins=begins)
    generation = WorkerGeneration(plan, WORKER, groups, state)
    return StageTrainer(setup, generation, TrainerHooks(before_update=before_update))


def ours(job: Job, device: torch.device, rows: Any) -> Side:
    """A step by the trainer that workers run, on a plan of one worker."""
    trainer = our_trainer(job, device)
    return lambda: trainer.train_step(rows).loss


def plain(
    job: Job, device: torch.device, rows: Any, *, compiled: Literal["no", "blocks", "model"] = "no"
) -> Side:
    """Return the side of a plain loop: transformers' whole model and torch.optim.AdamW.

    It runs in the job's precision (bf16: autocast over fp32 weights, as is usual), with the
    library's fused attention, which this package's stages use too. Compiled: each block by itself,
    or the whole model as one graph.
    """
    config = load_config(job.model, job.training)
    names = list(family_of(config).parameter_specs(config))
    with device:
        model: Any = reference_model(config, first_parameters(job, names, device))
    if compiled == "model":
        model.compile()
    if compiled == "blocks":
        for block in model.get_submodule(family_of(config).layers):
            block.compile(dynamic=False)
    steps = train_reference(model, job.training, rows, 1_000_000, microbatch_of(job))
    return lambda: _next(steps, job, device)


def _next(steps: Iterator[float], job: Job, device: torch.device) -> float:
    with autocast_of(job, device):
        return next(steps)


def autocast_of(job: Job, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which the plain side computes in the job's precision."""
    if job.training.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
