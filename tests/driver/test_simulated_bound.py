"""SIMULATED jobs along price histories with jumps: the bound on the price is held."""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autohet.control.planning.outlook import PATIENCE_S
from autohet.driver.sources.spot_prices import POLL_S
from autohet.runtime.job import Job
from autohet.simulate.dollars.price_file import RecordedPrices, read_prices
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import read_trace
from planner.inputs.cluster import cluster_from_document
from tests.driver.test_simulated_prices import ec2_cluster, entry, simulation_of
from tests.driver.test_simulation import job_document

START_S = 150.0
"""Seconds in which a simulated node that is given back is released, and searches are made."""
REACTION_S = POLL_S + PATIENCE_S + START_S
"""Longest time for which a bound may be exceeded: a price interval, `gather_s` and a move."""


HOUR = 3600.0
ZONE = "us-east-1a"
QUICK = {"search_time_limit_s": 0.3}
Rows = list[tuple[float, str, float]]
TRACE = "time_s,node_type,num_nodes\n0,small,2\n0,pair,2\n"
CSV_HISTORIES: dict[str, Rows] = {
    "a jump to ten times": [(0, "pair", 0.8), (0, "small", 0.5), (1, "pair", 8.0)],
    "both beyond the bound": [(0, "pair", 0.8), (0, "small", 0.5), (1, "pair", 9), (1, "small", 4)],
    "a slow rise": [(0, "small", 0.5), *[(h / 2, "pair", 0.4 + 0.2 * h) for h in range(8)]],
    "a fall to nothing": [(0, "pair", 1.2), (0, "small", 1.0), (2, "small", 0.0)],
    "one interval long": [(0, "pair", 0.8), (0, "small", 0.5), (1, "pair", 8), (1.05, "pair", 0.8)],
    "in turns": [(h, ("pair", "small")[h % 2], (0.3, 1.4)[h // 2 % 2]) for h in range(5)],
}
EC2_HISTORIES = {
    "one zone jumps": [
        ("g5.2xlarge", 0, "0.45"),
        ("g6.2xlarge", 0, "0.40"),
        ("g5.2xlarge", 1, "6"),
    ],
    "both jump in turn": [
        ("g5.2xlarge", 0, "0.45"),
        ("g6.2xlarge", 0, "0.40"),
        ("g6.2xlarge", 1, "5.0"),
        ("g5.2xlarge", 2, "5.0"),
        ("g6.2xlarge", 2, "0.5"),
    ],
    "many small steps": [
        ("g6.2xlarge", 0, "0.9"),
        *[("g5.2xlarge", h, f"{0.5 + 0.4 * h:.2f}") for h in range(4)],
    ],
}


def longest_excess_s(found: Mapping[str, Any], bound: float, rows: Rows) -> float:
    """Return the longest time for which the machines that were paid for cost more than the bound.

    Computed from the machines' lives and the prices of the test alone.
    """
    lives = [(life["node_type"], life["begin_s"], life["end_s"]) for life in found["machines"]]
    moments = {at for _, begin, end in lives for at in (begin, end)} | {at for at, _, _ in rows}
    longest = beyond_s = 0.0
    ordered = sorted({*moments, found["seconds"]})
    for begin, end in pairwise(ordered):
        usd = sum(
            price_at(rows, kind, begin) for kind, since, until in lives if since <= begin < until
        )
        beyond_s = beyond_s + end - begin if usd > bound + 1e-9 else 0.0
        longest = max(longest, beyond_s)
    return longest


def price_at(rows: Rows, kind: str, moment: float) -> float:
    return max((at, usd) for at, name, usd in rows if name == kind and at <= moment)[1]


def csv_runs(tmp_path: Path) -> Iterator[tuple[str, Rows, TraceSimulation]]:
    """Yield the name, prices and simulation of each CSV history; they share their searches."""
    rows = {
        name: [(hour * HOUR, kind, float(usd)) for hour, kind, usd in history]
        for name, history in CSV_HISTORIES.items()
    }
    simulation = simulation_of(tmp_path, [], TRACE, hours=5.0, max_usd_per_hour=3.0, **QUICK)
    for name, each in rows.items():
        yield name, each, simulation.along(simulation.scenario.trace, RecordedPrices(each))


def ec2_runs(tmp_path: Path) -> Iterator[tuple[str, Rows, TraceSimulation]]:
    """Yield the same of each history that EC2 tells of."""
    document = ec2_cluster(g5=ZONE, g6=ZONE, floor=ZONE)
    cluster = cluster_from_document(document)
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,node_type,num_nodes\n0,g5,2\n0,g6,2\n")
    events = read_trace(trace, cluster, 120.0)
    job = job_document(max_usd_per_hour=1.5, **QUICK)
    job["emulation"]["relative_speed_by_gpu_type"]["L4"] = 0.9
    simulation = TraceSimulation(Scenario(Job.from_document(job), cluster, events, 4 * HOUR))
    for name, history in EC2_HISTORIES.items():
        entries = [entry(kind, ZONE, f"{5 + hour:02d}:00:00", usd) for kind, hour, usd in history]
        path = tmp_path / "prices.json"
        path.write_text(json.dumps({"SpotPriceHistory": entries}))
        rows = [(hour * HOUR, kind[:2], float(usd)) for kind, hour, usd in history]
        yield name, rows, simulation.along(events, read_prices(path, cluster, document))


@pytest.mark.thorough
@pytest.mark.parametrize(("runs", "bound"), [(csv_runs, 3.0), (ec2_runs, 1.5)])
def test_the_bound_is_held_whatever_prices_do(tmp_path: Path, runs: Any, bound: float) -> None:
    """Wrong: a job that keeps, or pays for, what has become too dear."""
    for name, rows, simulation in runs(tmp_path):
        found = simulation.run("local_first")
        assert found["steps"] > 0, name
        longest_s = longest_excess_s(found, bound, rows)
        assert longest_s <= REACTION_S, name
        assert longest_s == pytest.approx(found["longest_beyond_bound_s"]), name
        assert found["usd_per_token_over_hindsight"] > 0.5, name


@pytest.mark.thorough
def test_a_jump_to_ten_times_costs_no_more_than_the_bound_allows(tmp_path: Path) -> None:
    """L40S from 0.80 to 8.00 $/h for three hours, while two A10G cost 1.00 $/h together."""
    rows = [(0.0, "pair", 0.8), (0.0, "small", 0.5), (HOUR, "pair", 8.0), (4 * HOUR, "pair", 0.8)]
    found = simulation_of(tmp_path, rows, TRACE, hours=5.0, max_usd_per_hour=3.0, **QUICK).run(
        "local_first"
    )
    assert found["usd"] <= 5 * 3.0
    dear = [span for span in found["stretches"] if HOUR < span["begin_s"] < 4 * HOUR]
    assert [span["num_gpus"] for span in dear] == [2]
    assert dear[0]["begin_s"] < HOUR + REACTION_S
