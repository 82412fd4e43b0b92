"""Records `autohet sky` by simulation along public traces of several regions, beside each region
alone: results/simulate_regions.json, with commit and machine.

    python -m scripts.benchmarks.planner.simulate_regions [NAME ...]      default: all; the traces are read from AUTOHET_MEASUREMENTS/data/traces
"""  # noqa: E501

import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autohet.runtime.job import Job
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent, read_trace
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.zones import ZONE_LINKS, region_of
from scripts.benchmarks.planner.measurements import measurements_folder
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "simulate_regions.json"
JOB = Path(__file__).parents[3] / "cluster_configs" / "jobs" / "llama-1b-bf16.yaml"
PUBLISHED = {
    "what": "SkyNomad's cost savings in real cloud deployments",
    "ratio": [1.25, 3.96],
    "source": "SkyNomad, arXiv:2601.06520, abstract",
}
PROVES = (
    "The supervisor's own decisions and the real controller along measured capacity: how much more"
    " one job trains, and at which price, if it may change its region. It proves nothing about"
    " SkyNomad: other traces, other jobs, no probing of other regions, constant spot prices; and a"
    " zone's nodes are had as the trace counts them, not as SkyPilot would launch them."
)
ON_DEMAND_USD = 3.06
"""p3.2xlarge, us-east-1 (EC2 On-Demand Pricing)."""
SPOT_SHARE = 0.3
"""Assumed spot price over the on-demand price; the same in each zone, all the time."""
LINKS = [
    {"between": [one, other], "gbps": 5, "latency-ms": 60, "usd-per-gb": usd}
    for one, other, usd in (
        ("us-east-1", "us-west-2", 0.02),
        ("us-east-2", "us-west-2", 0.02),
        ("us-east-1", "us-east-2", 0.01),
    )
]
"""Prices: EC2 On-Demand Pricing, "Data transfer out from EC2 to other AWS regions"."""


@dataclass(frozen=True)
class Case:
    """Zones' files of one SkyPilot trace, with at most `most` nodes a zone."""

    what: str
    folder: str
    most: int
    min_workers: int
    days: float


CASES = {
    "four-nodes": Case(
        "five days of four V100 nodes in each of three regions (SkyPilot, preemptions, August"
        " 2023)",
        "preemption/4-node/aws-08-03-2023",
        4,
        2,
        5,
    ),
    "sixteen-nodes": Case(
        "three days of sixteen V100 nodes in each zone of two regions (SkyPilot, availability,"
        " August 2023)",
        "availability/16-node/aws-08-27-2023",
        16,
        4,
        3,
    ),
}


def counts_by_zone(case: Case, folder: Path) -> dict[str, list[tuple[float, int]]]:
    """Return (second, nodes) of each zone; all files are laid on one first moment."""
    found = {}
    for path in sorted((folder / "data/traces/skypilot" / case.folder).glob("*.json")):
        document = json.loads(path.read_text())
        gap_s = float(document["metadata"]["gap_seconds"])
        zone = path.name.removesuffix("_v100_1.json")
        found[zone] = [(index * gap_s, int(count)) for index, count in enumerate(document["data"])]
    return found


def cluster_of(zones: list[str], most: int) -> Cluster:
    types = {
        f"p3-{zone}": {
            "node_config": {"InstanceType": "p3.2xlarge"},
            "labels": {
                "autohet.io/usd-per-hour": f"{ON_DEMAND_USD * SPOT_SHARE:.3f}",
                "autohet.io/spot": "true",
                "autohet.io/zone": zone,
            },
            "max_workers": most,
        }
        for zone in zones
    }
    head = {"node_config": {"InstanceType": "m6i.large"}, "max_workers": 0}
    document = {
        "cluster_name": "regions",
        "max_workers": most * len(zones),
        "provider": {"type": "aws", "region": "us-east-1"},
        "available_node_types": {"head": head, **types},
        "head_node_type": "head",
        "metadata": {ZONE_LINKS: LINKS},
    }
    return cluster_from_document(document)


def trace_of(
    counts: dict[str, list[tuple[float, int]]], cluster: Cluster, most: int
) -> tuple[TraceEvent, ...]:
    rows = []
    for zone, found in counts.items():
        before = None
        for at_s, count in found:
            if count != before:
                rows.append((at_s, f"p3-{zone}", min(most, count)))
                before = count
    lines = [f"{at_s:g},{name},{count}" for at_s, name, count in sorted(rows)]
    with TemporaryDirectory() as temporary:
        path = Path(temporary, "trace.csv")
        path.write_text("\n".join(["time_s,node_type,num_nodes", *lines]) + "\n")
        return read_trace(path, cluster, 120.0)


def job_of(case: Case) -> Job:
    document = Job.from_yaml(JOB).to_document()
    document["training"]["precision"] = "fp32"  # a V100 computes no bf16
    document["elastic"]["min_workers"] = case.min_workers
    document["parallelism"] |= {"horizon_s": 1800.0, "min_pipelines": 1, "max_zones": 1}
    return Job.from_document(document)


def simulated(case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of one case: regions in turn, each region alone, and the ratios."""
    counts = counts_by_zone(case, folder)
    cluster, job = cluster_of(list(counts), case.most), job_of(case)
    end_s = min(case.days * 86400, *(found[-1][0] for found in counts.values()))
    trace = [event for event in trace_of(counts, cluster, case.most) if event.time_s < end_s]
    begun = time.process_time()
    simulation = TraceSimulation(Scenario(job, cluster, trace, end_s))
    sky, alone = simulation.run("sky"), simulation.run("one_region")
    first = next(iter(counts))
    always = [
        TraceEvent(0.0, "arrival", f"p3-{first}-{index}", f"p3-{first}")
        for index in range(case.most)
    ]
    steady = TraceSimulation(Scenario(job, cluster, always, 86400.0)).run("local_first")
    rate = steady["tokens_per_s"]
    wanted = rate * end_s / 2
    policies = {"sky": sky, **{each["region"]: each for each in alone["regions"]}}
    usd = {
        name: deadline_usd(each, wanted, case.most * ON_DEMAND_USD / 3600 / rate)
        for name, each in policies.items()
    }
    best = alone["region"]
    return {
        "what": case.what,
        "simulated": True,
        "proves": PROVES,
        "published": PUBLISHED,
        "days": end_s / 86400,
        "regions": {zone: region_of(zone) for zone in counts},
        "min_workers": case.min_workers,
        "region_patience_s": job.elastic.region_patience_s,
        "moves": len(sky["moves"]),
        "gb_between_regions": sum(move["num_bytes"] for move in sky["moves"]) / 1e9,
        "seconds_by_region": sky["seconds_by_region"],
        "sky": {name: sky[name] for name in ("tokens", "usd_by_use", "usd_in_all", "useful_share")},
        "one_region": alone["regions"],
        "tokens_ratio": {
            each["region"]: ratio(sky["tokens"], each["tokens"]) for each in alone["regions"]
        },
        "best_region_in_hindsight": best,
        "deadline": {
            "what": (
                "dollars of half the tokens that on-demand nodes would train in the whole time:"
                " what spot nodes do not train by then is bought on demand"
            ),
            "usd": usd,
            "savings_ratio": {name: ratio(usd[name], usd["sky"]) for name in usd if name != "sky"},
        },
        "cpu_s": round(time.process_time() - begun, 1),
    }


def deadline_usd(result: dict[str, Any], wanted: float, on_demand_usd_per_token: float) -> float:
    tokens = float(result["tokens"])
    spot = result["usd_in_all"] * min(1.0, wanted / tokens if tokens else 1.0)
    return float(spot + max(0.0, wanted - tokens) * on_demand_usd_per_token)


def ratio(one: float, other: float) -> float | None:
    return round(one / other, 3) if other else None


def main(names: list[str]) -> None:
    logging.disable(logging.WARNING)
    folder = measurements_folder()
    if folder is None:
        raise SystemExit("no folder of published measurements: set AUTOHET_MEASUREMENTS")
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    for name in names or CASES:
        recorded["cases"][name] = provenance() | simulated(CASES[name], folder)
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n")
        found = recorded["cases"][name]
        print(name, found["moves"], found["tokens_ratio"], found["deadline"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
