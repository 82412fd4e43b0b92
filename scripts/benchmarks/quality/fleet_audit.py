"""Audits of arithmetic: faults that are found, false alarms, and cost. One JSON document.

faults: runs of a job's audits in one process. Of its workers one has a fault: 1e-4 of the results
of its matrix products have a flipped bit of the mantissa. All that a run's workers would do in an
audit is done: block, vote, exchange, judgement, and the driver's count. Exact products, which prove
a fault at once, are left out.

alarms: processes of sound workers under several instruction sets and numbers of threads compute the
same audits, of stages that are cut differently. Those of equal keys must have equal bits, the
others values that lie nearer than a ceiling.

cost: processor seconds of an audit and of a step beside it, in turns, on one thread.

python -m scripts.benchmarks.quality.fleet_audit [--parts faults alarms cost] [--runs 500]
    [--audits 100000] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from autohet.control.ledger.failures import AuditLog
from autohet.runtime.job import ModelSection
from autohet.runtime.messages import AuditRecord
from autohet.runtime.models.stages.block_audit import (
    BlockResult,
    audit_block,
    device_key,
    weights_checksum,
)
from autohet.runtime.models.stages.sketches import ceiling, distance
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.step.audit import (
    PASSED,
    AuditedDevice,
    audited_layers,
    comparable_workers,
    find_mismatches,
    vote_part,
)
from planner.plans.plan import Plan
from scripts.benchmarks.provenance import provenance
from tests.harness.faulty_arithmetic import Fault, FaultyArithmetic
from tests.harness.parity import LLAMA, pipeline, plan_document
from tests.harness.tiny_models import load_config, random_parameters, stage_chain

EVERY = 20
MOST_STEPS = 200
LENGTH = 12
PROCESSES = 6
MODEL = {**LLAMA, "num_hidden_layers": 4}
PLAN = plan_document(
    pipeline((4, 1), microbatches=3),
    pipeline((2, 1), (2, 1), microbatches=3),
    pipeline((1, 1), (3, 1), microbatches=2),
)
SETTINGS = (("default", 1), ("avx2", 1), ("avx512", 1), ("avx512", 2))
"""Instruction set of ATen and number of threads of two processes each."""


def checksum_of(stage: StageModel, layer: int, seed: int, step: int, length: int) -> int | None:
    result = audit_block(stage, layer, seed, step, length)
    return None if result is None else result.checksum


def run_with_fault(seed: int, stages: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the step at which a run's driver believes that a worker is wrong, and which."""
    wrong = random.Random(seed).choice(plan.workers)
    devices = {
        worker: AuditedDevice(device_key(stage, "fp32", LENGTH)) for worker, stage in stages.items()
    }
    log = AuditLog()
    faulty = FaultyArithmetic(Fault(rate=1e-4, seed=seed))
    for step in range(0, MOST_STEPS, EVERY):
        layers = audited_layers(plan, step // EVERY)
        groups = comparable_workers(layers, devices)
        results = {}
        for worker, stage in stages.items():
            call = (stage, layers[worker], seed, step, LENGTH)
            if worker != wrong:
                results[worker] = checksum_of(*call)
                continue
            with faulty:
                results[worker] = checksum_of(*call)
        found: Any = ()
        if sum(vote_part(groups, worker, results[worker]) for worker in stages):
            answers = {}
            for worker, stage in stages.items():
                weights = weights_checksum(stage, layers[worker])
                answers[worker] = [results[worker], weights, PASSED]
            found = find_mismatches(step, layers, groups, answers)
        compared = tuple(worker for group in groups for worker in group)
        list(log.log_audit(AuditRecord(compared, found), step, 1))
        if log.wrong:
            return {"step": step, "right": set(log.wrong) == {wrong}, "flips": faulty.flips}
    return {"step": None, "right": False, "flips": faulty.flips}


def run_all(seeds: range) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    plan = Plan.from_document(PLAN)
    config = load_config(ModelSection(config=MODEL))
    parameters = random_parameters(config)
    stages = {}
    for each in plan.pipelines:
        chain = stage_chain(config, parameters, [stage.num_layers for stage in each.stages])
        for stage, built in zip(each.stages, chain, strict=True):
            stages[stage.workers[0]] = built
    return [run_with_fault(seed, stages, plan) for seed in seeds]


def measure_faults(runs: int) -> dict[str, Any]:
    parts = [range(first, runs, PROCESSES) for first in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        found = [each for part in pool.map(run_all, parts) for each in part]
    steps = sorted(each["step"] for each in found if each["step"] is not None)
    return {
        "runs": runs,
        "found_within_200_steps": len(steps),
        "right_worker": sum(each["right"] for each in found),
        "step_when_believed": {"median": statistics.median(steps), "most": steps[-1]},
        "flips_until_then_median": statistics.median(each["flips"] for each in found),
    }


def audit_alone(setting: tuple[str, int, int, int]) -> tuple[int, str, list[BlockResult | None]]:
    """Return the key of a process, its instruction set, and the results of its audits."""
    _, threads, number, audits = setting
    torch.set_num_threads(threads)
    wide = {"hidden_size": 128, "intermediate_size": 320} if threads > 1 else {}
    length = 256 if threads > 1 else LENGTH
    config = load_config(ModelSection(config={**MODEL, **wide}))
    stage = stage_chain(config, random_parameters(config), [[4], [1, 3]][number])[-1]
    found = []
    for index in range(audits):
        layer = 1 + index % 3
        found.append(audit_block(stage, layer, 7, index, length, sketched=True))
    return device_key(stage, "fp32", length), torch.backends.cpu.get_cpu_capability(), found


def measure_alarms(audits: int) -> dict[str, Any]:
    one_thread = [each for each in SETTINGS if each[1] == 1]
    share = -(-audits // (2 * len(one_thread)))
    results: dict[int, list[list[BlockResult]]] = {}
    rows = []
    pools = []
    for capability, threads in SETTINGS:
        # A process reads it as it starts.
        os.environ["ATEN_CPU_CAPABILITY"] = capability
        number = share if threads == 1 else share // 50
        settings = [(capability, threads, which, number) for which in (0, 1)]
        pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
        pools.append((threads, pool, pool.map(audit_alone, settings)))
    for threads, pool, answers in pools:
        for key, name, found in answers:
            results.setdefault(key, []).append([each for each in found if each is not None])
            rows.append({"instruction_set": name, "threads": threads, "audits": len(found)})
        pool.shutdown()
    alarms = 0
    for one, two in results.values():
        pairs = zip(one, two, strict=True)
        alarms += sum(mine.checksum != its.checksum for mine, its in pairs)
    unlike = [found[0] for found in results.values() if len(found[0]) == share]
    firsts = {found[0].checksum for found in unlike}
    distances = []
    for one, two in itertools.combinations(unlike, 2):
        for mine, its in zip(one, two, strict=True):
            assert mine.sketch is not None
            assert its.sketch is not None
            distances.append(distance(mine.sketch, its.sketch))
    return {
        "audits": sum(row["audits"] for row in rows),
        "false_alarms": alarms,
        "keys": len(results),
        "instruction_sets_with_bits_of_their_own": len(firsts),
        "unlike": {
            "pairs": len(distances),
            "false_alarms": sum(each > ceiling("fp32") for each in distances),
            "largest_distance": max(distances),
        },
        "workers": rows,
    }


def measure_cost(pairs: int) -> list[dict[str, Any]]:
    """Ratios of an audit to the 20 steps that it is for, of 6 layers and 5 microbatches."""
    torch.set_num_threads(1)
    rows = []
    for hidden, length in ((64, 64), (128, 128), (256, 256)):
        model = {**MODEL, "hidden_size": hidden, "intermediate_size": 3 * hidden}
        config = load_config(ModelSection(config={**model, "num_hidden_layers": 6}))
        (stage,) = stage_chain(config, random_parameters(config), [6])
        tokens = torch.randint(0, 60, (1, length))
        ratios = []
        audit_s = 0.0
        for index in range(pairs):
            begin = time.process_time()
            for _ in range(5):
                stage.loss(tokens, tokens).backward()
            between = time.process_time()
            audit_block(stage, index % 6, 7, index, length, sketched=True)
            audit_s = time.process_time() - between
            ratios.append(audit_s / (EVERY * (between - begin)))
        rows.append(
            {
                "hidden_size": hidden,
                "tokens": length,
                "layers_times_microbatches": 30,
                "audit_ms": round(1e3 * audit_s, 2),
                "share_of_a_step": {
                    "median": round(statistics.median(ratios), 5),
                    "quartiles": [round(each, 5) for each in statistics.quantiles(ratios)],
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["faults", "alarms", "cost"])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--audits", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out")
    args = parser.parse_args()
    document: dict[str, Any] = provenance()
    if "cost" in args.parts:
        document["cost"] = measure_cost(args.pairs)
    if "faults" in args.parts:
        document["faults"] = measure_faults(args.runs)
    if "alarms" in args.parts:
        document["alarms"] = measure_alarms(args.audits)
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
