"""Training of an asymmetric plan on four ranks of one GPU, against one plain process.

Both train the same job. Two pipelines: one of two stages of unequal depth, one of a single
tensor-parallel stage. Each rank poses as a host of its own, so NCCL carries every stage boundary,
gradient sum and vote over sockets.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from autohet.bench.step.sides import plain, random_rows, state_of
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Plan
from scripts.benchmarks.gpu.part import Failed, Machine, job_of, share_gpu

PIPELINES = [
    {
        "num_microbatches": 1,
        "stages": [
            {"first_layer": 0, "num_layers": 1, "workers": ["a/0"]},
            {"first_layer": 1, "num_layers": 2, "workers": ["b/0"]},
        ],
    },
    {
        "num_microbatches": 1,
        "stages": [{"first_layer": 0, "num_layers": 3, "workers": ["c/0", "d/0"]}],
    },
]
STEPS = 5
TOLERANCE = 2e-5
ANSWER_S = 110.0
ERROR_CHARACTERS = 1500


def run(machine: Machine) -> dict[str, Any]:
    """Compare the losses of the four ranks with those of one plain process on the CPU, in fp32."""
    job = job_of(Machine("cpu"), "fp32")  # the small one: the CPU has to train it too
    training = replace(job.training, device=machine.device_type, replica_check_steps=2)  # type: ignore[arg-type]
    job = replace(job, training=training)
    found = _train_on_ranks(job, machine)
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        raise Failed(errors[0], {})
    where = torch.device("cpu")
    side = plain(job, where, random_rows(job, where))
    expected = [side() for _ in range(STEPS)]
    differences: list[float] = []
    for each in found:
        pairs = zip(each["losses"], expected, strict=True)
        differences += [abs(loss - other) / other for loss, other in pairs]
    worst = max(differences)
    figures = {
        "worst_relative_loss_error": worst,
        "limit": TOLERANCE,
        "built_s": max(each["built_s"] for each in found),
        "five_steps_s": max(each["steps_s"] for each in found),
    }
    if worst > TOLERANCE:
        raise Failed("the ranks do not train as one plain process", figures)
    return figures


def _train_on_ranks(job: Job, machine: Machine) -> list[dict[str, Any]]:
    """Train on one process per rank; return what each rank measured, or its error."""
    plan = _plan_of(job)
    context = multiprocessing.get_context("spawn")
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    answers = context.Queue()
    processes = []
    for worker in plan.workers:
        args = (worker, machine.device_type, store.port, job, answers)
        processes.append(context.Process(target=_rank, args=args, daemon=True))
    for process in processes:
        process.start()
    try:
        return [answers.get(timeout=ANSWER_S) for _ in processes]
    except queue.Empty:
        codes = [process.exitcode for process in processes]
        raise Failed(f"a rank did not answer; exit codes {codes}", {}) from None
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _plan_of(job: Job) -> Plan:
    return Plan.from_document(
        {
            "version": 1,
            "model": job.name,
            "global_batch_sequences": job.training.global_batch_sequences,
            "microbatch_sequences": 2,
            "sequence_length": job.training.sequence_length,
            "pipelines": PIPELINES,
        }
    )


def _rank(me: str, device_type: str, port: int, job: Job, answers: Any) -> None:
    try:
        answers.put(_train(me, device_type, port, job))
    except Exception:  # noqa: BLE001
        answers.put({"error": traceback.format_exc()[-ERROR_CHARACTERS:]})


def _train(me: str, device_type: str, port: int, job: Job) -> dict[str, Any]:
    share_gpu(os.environ, me)
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    plan = _plan_of(job)
    config = load_config(job.model, job.training)
    began = time.perf_counter()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    groups = GenerationGroups(store, 0, me, device, GroupTimeouts(40.0, 60.0))
    groups.meet(plan.workers)
    state = state_of(job, layout_of_plan(plan, config), me, device)
    setup = TrainingSetup(config, job.training, device)
    trainer = StageTrainer(setup, WorkerGeneration(plan, me, groups, state))
    built_s = time.perf_counter() - began
    rows = random_rows(job, device)
    began = time.perf_counter()
    losses = [trainer.train_step(rows).loss for _ in range(STEPS)]
    return {"losses": losses, "built_s": built_s, "steps_s": time.perf_counter() - began}
