"""Records spot jobs that lose all their state at once, simulated: results/simulate_restarts.json.

    python -m scripts.benchmarks.planner.simulate_restarts [NAME ...]       default: all

Each job is compared with one that restarts from storage at Young and Daly's interval, for which it
knows the mean time between departures in hindsight. Nothing gives notice. A fleet that has died is
there again some minutes later; lives are exponential, drawn from a stated seed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohet.runtime.job import Job
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent
from planner.inputs.cluster import cluster_from_document
from scripts.benchmarks.planner.simulate_traces import brief
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "simulate_restarts.json"
JOB = Path(__file__).parents[3] / "cluster_configs" / "jobs" / "llama-1b-bf16.yaml"
HOURS = 24.0
AWAY_S = 300.0
"""Seconds from the death of a fleet to the next one."""
STAGGER_S = 20.0
"""Seconds between the deaths of the first and the last node of a fleet."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """A fleet of L40S nodes that dies as a whole every `life_s` seconds in the mean."""

    what: str
    nodes: int
    life_s: float
    global_batch_sequences: int
    parallelism: tuple[tuple[str, Any], ...] = ()


CASES = {
    "one-node": Case("one L40S, a death each two hours, steps of two minutes", 1, 7200.0, 944),
    "one-node-29s": Case("one L40S, a death each two hours, steps of 29 s", 1, 7200.0, 232),
    "one-node-1s": Case("one L40S, a death each two hours, steps of a second", 1, 7200.0, 8),
    "one-node-hasty": Case("one L40S, a death each half hour, steps of 118 s", 1, 1800.0, 944),
    "fleet": Case("six L40S that die together each two hours", 6, 7200.0, 1392),
    "fleet-copies": Case(
        "the same, in two pipelines at least", 6, 7200.0, 1392, (("min_pipelines", 2),)
    ),
}


def trace_of(case: Case, seed: int) -> Iterator[TraceEvent]:
    """Yield arrivals and deaths of one fleet after the other."""
    draw = random.Random(seed)
    at = 0.0
    life = 0
    while at < HOURS * 3600:
        names = [f"l40s-{life}-{index}" for index in range(case.nodes)]
        for name in names:
            yield TraceEvent(at, "arrival", name, "l40s")
        at += max(300.0, draw.expovariate(1 / case.life_s))
        for index, name in enumerate(names):
            later = STAGGER_S * index / len(names)
            yield TraceEvent(at + later, "death", name, "l40s")
        at += STAGGER_S + AWAY_S
        life += 1


def cluster_of(case: Case) -> dict[str, Any]:
    labels = {
        "gpu-type": "L40S",
        "gpu-memory-gib": "48",
        "intra-node-gbps": "256",
        "inter-node-gbps": "20",
        "usd-per-hour": "0.80",
        "spot": "true",
    }
    head = {"resources": {"CPU": 4, "GPU": 0}, "node_config": {}, "max_workers": 0}
    l40s = {
        "resources": {"CPU": 8, "GPU": 1},
        "labels": {f"autohet.io/{name}": value for name, value in labels.items()},
        "node_config": {},
        "min_workers": 0,
        "max_workers": case.nodes,
    }
    return {
        "cluster_name": "restarts",
        "max_workers": case.nodes,
        "provider": {"type": "aws", "region": "none"},
        "available_node_types": {"head": head, "l40s": l40s},
        "head_node_type": "head",
    }


def job_of(case: Case) -> Job:
    document = Job.from_yaml(JOB).to_document()
    document["training"]["global_batch_sequences"] = case.global_batch_sequences
    document["checkpoint"].pop("every_steps", None)
    document["elastic"]["min_workers"] = 1
    document["parallelism"]["min_pipelines"] = 1
    document["parallelism"] |= dict(case.parallelism)
    document["parallelism"].pop("horizon_s", None)
    return Job.from_document(document)


def simulated(case: Case) -> dict[str, Any]:
    """Return the figures of one case: steps of both trainers, by seed."""
    cluster = cluster_from_document(cluster_of(case))
    begun = time.process_time()
    runs = []
    for seed in SEEDS:
        trace = list(trace_of(case, seed))
        simulation = TraceSimulation(Scenario(job_of(case), cluster, trace, HOURS * 3600))
        ours = simulation.run("local_first")
        plain = simulation.run("checkpoint_restart")
        paced = [each for each in ours["decisions"] if "make a checkpoint every" in each]
        runs.append(
            {
                "seed": seed,
                "deaths": sum(event.kind == "death" for event in trace),
                "step_s": round(ours["stretches"][0]["step_s"], 2),
                "ratio": ours["steps"] / plain["steps"],
                "intervals": paced[-1:],
                "policies": [brief(ours), brief(plain)],
            }
        )
    return {
        "what": case.what,
        "simulated": True,
        "ratio": sum(run["ratio"] for run in runs) / len(runs),
        "least_ratio": min(run["ratio"] for run in runs),
        "cpu_s": round(time.process_time() - begun, 1),
        "runs": runs,
    }


def main(names: list[str]) -> None:
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    for name in names or CASES:
        found = provenance() | simulated(CASES[name])
        recorded["cases"][name] = found
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n")
        print(name, round(found["ratio"], 4), round(found["least_ratio"], 4), flush=True)
        for run in found["runs"]:
            steps = [(each["steps"], each["steps_lost"]) for each in run["policies"]]
            print(" ", run["step_s"], run["deaths"], steps, run["intervals"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
