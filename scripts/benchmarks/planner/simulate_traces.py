"""Records `autohet simulate` along public spot traces: results/simulate_traces.json, with commit,
machine and CPU seconds.

    python -m scripts.benchmarks.planner.simulate_traces [NAME ...]       default: all; the traces are read from AUTOHET_MEASUREMENTS/data/traces

A trace of one GPU type says what happened; a mixed fleet is composed of two, and says so. Counts
may be scaled: each node of the simulation then stands for a stated number of the instances that
were measured.
"""  # noqa: E501

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autohet.runtime.job import Job
from autohet.simulate.comparison import compare
from autohet.simulate.simulation import BASELINES, Scenario, TraceSimulation
from autohet.simulate.spot_trace import read_trace
from planner.inputs.cluster import cluster_from_document
from scripts.benchmarks.planner.measurements import measurements_folder
from scripts.benchmarks.provenance import provenance

DAY_S = 86400.0
RESULTS = Path(__file__).parents[1] / "results" / "simulate_traces.json"
ROOT = Path(__file__).parents[3]
JOBS = ROOT / "cluster_configs" / "jobs"
NOTICE_S = {"AWS": 120.0, "GCP": 30.0}
SPOT_USD_PER_GPU_HOUR = {"A100-40": 1.10, "V100-16": 0.74}
"""As in cluster_configs/traces/gcp-a100-v100.yaml."""
NETWORK_GBPS = {("A100-40", 1): 24, ("V100-16", 1): 16, ("A100-40", 8): 100, ("V100-16", 8): 100}
"""A node's network by GPU type and GPUs: Google Cloud's a2 and n1 machine types."""
Counts = Iterator[tuple[float, int]]


@dataclass(frozen=True)
class Part:
    """One node type: nodes of `num_gpus` GPUs, at most `most`, as many as `counts` times
    `scale`.
    """

    name: str
    gpu_type: str
    num_gpus: int
    most: int
    counts: Callable[[Path], Counts]
    scale: float


@dataclass(frozen=True)
class Case:
    what: str
    cloud: str
    hours: float
    parts: tuple[Part, ...]
    job: Path = JOBS / "llama-1b-bf16.yaml"
    global_batch_sequences: int | None = None


def gcp_counts(name: str) -> Callable[[Path], Counts]:
    """Bamboo's counts on Google Cloud, from the file's own first moment on; of several rows at one
    moment the largest.
    """

    def read(folder: Path) -> Counts:
        rows = []
        for line in (
            (folder / "data" / "traces" / "bamboo" / "traces" / "gcloud" / name)
            .read_text()
            .splitlines()
        ):
            day, hour, count = (part.strip() for part in line.split(","))
            rows.append((datetime.fromisoformat(f"{day} {hour}").timestamp(), int(count)))
        by_time: dict[float, int] = {}
        for at, count in sorted(rows):
            by_time[at] = max(count, by_time.get(at, 0))
        begin = min(by_time)
        yield from ((at - begin, count) for at, count in by_time.items())

    return read


def parcae_counts(name: str) -> Callable[[Path], Counts]:
    """Parcae's trace of 32 p3 nodes in steps of 60 s."""

    def read(folder: Path) -> Counts:
        count = 0
        for line in (folder / "data" / "traces" / "parcae" / name).read_text().splitlines():
            at_ms, event, facts = json.loads(line)
            count += {"add": 1, "remove": -1}.get(event, 0) * len(facts["nodes"])
            yield at_ms / 1000, count

    return read


def bamboo_counts(name: str) -> Callable[[Path], Counts]:
    """Bamboo's additions and removals of p3 nodes on AWS."""

    def read(folder: Path) -> Counts:
        count = 0
        for line in (
            (folder / "data" / "traces" / "bamboo" / "traces" / name).read_text().splitlines()
        ):
            at_ms, event, _ = line.split(",")
            count += 1 if event == "add" else -1
            yield int(at_ms) / 1000, count

    return read


def skypilot_counts(zone: str) -> Callable[[Path], Counts]:
    """How many of 16 nodes a zone of AWS would have given, every 300 s."""

    def read(folder: Path) -> Counts:
        path = (
            folder
            / "data"
            / "traces"
            / "skypilot"
            / "availability"
            / "16-node"
            / "aws-08-27-2023"
            / f"{zone}_v100_1.json"
        )
        document = json.loads(path.read_text())
        for index, count in enumerate(document["data"]):
            yield index * float(document["metadata"]["gap_seconds"]), int(count)

    return read


A100, V100 = gcp_counts("a100x1-east1b.txt"), gcp_counts("v100x1-east1c.txt")
CASES = {
    "gcp-18": Case(
        "a day of 18 GPUs: Bamboo's A100 and V100 counts on Google Cloud divided by eight, laid"
        " over each other",
        "GCP",
        24,
        (Part("a100", "A100-40", 1, 8, A100, 1 / 8), Part("v100", "V100-16", 1, 10, V100, 1 / 8)),
    ),
    "gcp-64": Case(
        "a day of 64 GPUs: the same counts by 1/2 and 2/5",
        "GCP",
        24,
        (Part("a100", "A100-40", 1, 32, A100, 1 / 2), Part("v100", "V100-16", 1, 32, V100, 2 / 5)),
    ),
    "gcp-1024": Case(
        "a day of 1,024 GPUs: each instance of the same measurement (of V100 four of five) stands"
        " for a node of eight GPUs",
        "GCP",
        24,
        (Part("a100", "A100-40", 8, 64, A100, 1.0), Part("v100", "V100-16", 8, 64, V100, 4 / 5)),
        JOBS / "llama-8b-plan.yaml",
        2048,
    ),
    "parcae-p3": Case(
        "an hour of 32 V100 nodes on AWS (Parcae, high availability, high preemption): one GPU"
        " type",
        "AWS",
        1,
        (Part("p3", "V100-16", 1, 32, parcae_counts("trace_hh_55_65.txt"), 1.0),),
    ),
    "bamboo-p3": Case(
        "eleven hours of p3 nodes on AWS (Bamboo): one GPU type",
        "AWS",
        11,
        (Part("p3", "V100-16", 1, 64, bamboo_counts("p3-trace.csv"), 1.0),),
    ),
    "skypilot-16": Case(
        "a day of 16 V100 nodes in one AWS zone (SkyPilot, us-west-2a): one GPU type",
        "AWS",
        24,
        (Part("p3", "V100-16", 1, 16, skypilot_counts("us-west-2a"), 1.0),),
    ),
}


def cluster_of(case: Case) -> dict[str, Any]:
    """As a cluster file would have it."""
    types = {}
    for part in case.parts:
        labels = {
            "gpu-type": part.gpu_type,
            "gpu-memory-gib": re.sub(r".*-", "", part.gpu_type),
            "intra-node-gbps": "256" if part.num_gpus == 1 else "1200",
            "inter-node-gbps": str(NETWORK_GBPS[part.gpu_type, part.num_gpus]),
            "usd-per-hour": f"{SPOT_USD_PER_GPU_HOUR[part.gpu_type] * part.num_gpus:.2f}",
            "spot": "true",
        }
        types[part.name] = {
            "resources": {"CPU": 8, "GPU": part.num_gpus},
            "labels": {f"autohet.io/{k}": v for k, v in labels.items()},
            "node_config": {},
            "min_workers": 0,
            "max_workers": part.most,
        }
    head = {
        "resources": {"CPU": 4, "GPU": 0},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 0,
    }
    return {
        "cluster_name": "traces",
        "max_workers": sum(part.most for part in case.parts),
        "provider": {"type": "aws", "region": "none"},
        "available_node_types": {"head": head, **types},
        "head_node_type": "head",
    }


def rows_of(case: Case, folder: Path) -> list[str]:
    """The trace as CSV lines: where a count changes."""
    rows = []
    for part in case.parts:
        before = None
        for at, count in part.counts(folder):
            nodes = min(part.most, round(count * part.scale))
            if nodes != before and at < case.hours * 3600:
                rows.append((at, part.name, nodes))
                before = nodes
    return [
        "time_s,node_type,num_nodes",
        *(f"{at:g},{name},{nodes}" for at, name, nodes in sorted(rows)),
    ]


def job_of(case: Case) -> Job:
    job = Job.from_yaml(case.job).to_document()
    if case.global_batch_sequences:
        job["training"]["global_batch_sequences"] = case.global_batch_sequences
    job["parallelism"]["horizon_s"] = 1800.0
    job["training"]["precision"] = "fp32"  # a V100 computes no bf16
    return Job.from_document(job)


def simulated(case: Case, folder: Path) -> dict[str, Any]:
    """The figures of one case:

    AutoHet's run, its baselines, the comparison, and what the simulation took.
    """
    cluster = cluster_from_document(cluster_of(case))
    with TemporaryDirectory() as temporary:
        path = Path(temporary, "trace.csv")
        path.write_text("\n".join(rows_of(case, folder)) + "\n")
        trace = read_trace(path, cluster, NOTICE_S[case.cloud])
    begun, wall = time.process_time(), time.perf_counter()
    simulation = TraceSimulation(
        Scenario(job_of(case), cluster, trace, min(case.hours * 3600, DAY_S))
    )
    ours = simulation.run("local_first")
    ours_cpu_s = time.process_time() - begun
    others = [simulation.run(name) for name in ("s3_only", *BASELINES)]
    spent = {
        "cpu_s": time.process_time() - begun,
        "local_first_cpu_s": ours_cpu_s,
        "wall_s": time.perf_counter() - wall,
    }
    memory = simulation.memory
    spent |= {
        "planner_cpu_s": memory.search_cpu_s,
        "searches": memory.num_searches,
        "fleets": len(memory.plans),
    }
    return {
        "what": case.what,
        "simulated": True,
        "notice_s": NOTICE_S[case.cloud],
        "events": len(trace),
        "simulator": {name: round(value, 2) for name, value in spent.items()},
        "comparison": compare(ours, others),
        "policies": [brief(result) for result in (ours, *others)],
    }


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the lists of changes, stretches and machines."""
    left_out = ("reconfigurations", "stretches", "decisions", "stated", "machines")
    return {name: value for name, value in result.items() if name not in left_out}


def main(names: list[str]) -> None:
    folder = measurements_folder()
    if folder is None:
        raise SystemExit("no folder of published measurements: set AUTOHET_MEASUREMENTS")
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    for name in names or CASES:
        recorded["cases"][name] = provenance() | simulated(CASES[name], folder)
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n")
        found = recorded["cases"][name]
        ratio = found["comparison"] and {
            k: found["comparison"][k] for k in ("best_baseline", "tokens_ratio", "parts")
        }
        print(name, found["simulator"], ratio, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
