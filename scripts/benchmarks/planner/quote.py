"""Records quotes against replays that they did not see: results/quote.json.

    python -m scripts.benchmarks.planner.quote [DRAWS] [REPLAYS]     default: 50 and 100 for each trace; the traces are read from AUTOHET_MEASUREMENTS/data/traces

Traces of SkyPilot's availability and preemption studies (V100 on AWS, Wu et al., NSDI 24). None of
them tuned the policy: that was done on us-east-1f (preemption), us-west-2a (one node) and us-west-2c
(sixteen nodes). The
replays are other stretches of each trace than the quote's. Their prices are DRAWN, since no public
history covers these weeks: a spot price that reverts to its mean, with jumps to three times.

`halves`: the same figures where a quote is made of draws that begin in the first half of a trace
alone, and judged by those that begin in the second: a forecast, for a market that may have changed.

Hindsight knows all prices and nodes of the history: for each moment it has the fleet of the front,
or none, by which the steps are made until the deadline for the least dollars, by the predicted step
times, with no cost of a move, a start, a notice or a checkpoint. That is a bound, not a policy.
"""  # noqa: E501

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autohet.control.planning.fleet_choice import Terms
from autohet.control.planning.goal import GoalTerms
from autohet.runtime.job import Job
from autohet.simulate.dollars.price_file import RecordedPrices
from autohet.simulate.quote import (
    HOUR_S,
    Draw,
    QuoteMarket,
    likelihood,
    median_and_bounds,
    run_draw,
)
from autohet.simulate.remembered_planning import RememberedPlanning
from autohet.simulate.simulation import Scenario, TraceSimulation
from planner.inputs.cluster import cluster_from_document
from planner.strategies.speeds import FleetSpeeds
from scripts.benchmarks.planner.measurements import measurements_folder
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "quote.json"
JOB = Path(__file__).parents[3] / "cluster_configs" / "jobs" / "gpt2.yaml"
NODES = 4
"""Most nodes of each market that the job may have."""
SPOT_USD = 0.918
ON_DEMAND_USD = 3.06
"""USD an hour of a p3.2xlarge (one V100): on demand, and at the 70% discount of spot in 2023."""
NOTICE_S = 120.0
PRICE_DAYS = 14
FIRST_REPLAY = 10_000


@dataclass(frozen=True)
class Case:
    """A trace, and the deadline and budget of a job of `steps` on it."""

    trace: str
    steps: int
    hours: float
    usd: float | None = None


CASES = (
    Case("preemption/4-node/aws-08-03-2023/us-east-2a_v100_1.json", 3000, 8.0, 9.0),
    Case("availability/1-node/aws-02-15-2023/us-east-2a_v100_1.json", 3000, 9.0, 12.0),
    Case("preemption/4-node/aws-08-03-2023/us-west-2c_v100_1.json", 3000, 10.0),
    Case("availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json", 3000, 6.0),
    Case("availability/16-node/aws-08-27-2023/us-west-2a_v100_1.json", 3000, 10.0),
)


def market_of(case: Case, kinds: Mapping[str, Any], seed: int) -> QuoteMarket:
    """Return the history of a case: the trace's nodes, and drawn prices."""
    folder = measurements_folder()
    if folder is None:
        sys.exit("no measurements: set AUTOHET_MEASUREMENTS")
    path = folder / "data" / "traces" / "skypilot" / case.trace
    document = json.loads(path.read_text())
    gap_s = document["metadata"]["gap_seconds"]
    counts: dict[tuple[float, str], int] = {}
    before = None
    for index, count in enumerate(document["data"]):
        if count != before:
            counts[index * gap_s, "spot"] = min(NODES, count)
        before = count
    rows = [(at, "spot", usd) for at, usd in drawn_prices(seed)]
    prices = RecordedPrices(rows, {"spot": f"drawn, seed {seed}"})
    return QuoteMarket(kinds, [(counts, len(document["data"]) * gap_s)], NOTICE_S, prices)


def drawn_prices(seed: int) -> Iterator[tuple[float, float]]:
    """Yield (second, USD an hour): a price that reverts to its mean, with a jump in two days."""
    chance = random.Random(seed)
    at = deviation = 0.0
    jump_until_s = -1.0
    while at < PRICE_DAYS * 24 * HOUR_S:
        deviation = 0.8 * deviation + chance.gauss(0.0, 0.06)
        if chance.random() < 1 / 16:
            jump_until_s = at + 3 * HOUR_S
        factor = (3.0 if at < jump_until_s else 1.0) * (1.0 + deviation)
        yield at, round(SPOT_USD * max(0.3, factor), 4)
        at += chance.uniform(1.0, 5.0) * HOUR_S


def simulation_of(case: Case) -> TraceSimulation:
    labels = {
        "gpu-type": "V100-16",
        "gpu-memory-gib": "16",
        "intra-node-gbps": "100",
        "inter-node-gbps": "10",
    }
    types: dict[str, Any] = {"head": {"resources": {"CPU": 4, "GPU": 0}, "max_workers": 0}}
    types["head"]["node_config"] = {}
    for name, usd in (("spot", SPOT_USD), ("od", ON_DEMAND_USD)):
        mine = labels | {"usd-per-hour": str(usd), "spot": str(name == "spot").lower()}
        types[name] = {
            "resources": {"CPU": 8, "GPU": 1},
            "labels": {f"autohet.io/{key}": value for key, value in mine.items()},
            "node_config": {},
            "max_workers": NODES,
        }
    document = {
        "cluster_name": "quote",
        "max_workers": 2 * NODES,
        "provider": {"type": "aws", "region": "none"},
        "available_node_types": types,
        "head_node_type": "head",
    }
    job = Job.from_yaml(JOB).to_document()
    job["training"] |= {"steps": case.steps, "precision": "fp32"}
    job["elastic"] |= {"min_workers": 1, "deadline": f"{case.hours}h", "budget_usd": case.usd}
    job["parallelism"] |= {"min_pipelines": 1, "redundancy": 1, "objective": "time"}
    scenario = Scenario(
        Job.from_document(job), cluster_from_document(document), (), 1.5 * case.hours * HOUR_S
    )
    return TraceSimulation(scenario, goal=GoalTerms(case.hours * HOUR_S, case.usd))


def hindsight_usd(simulation: TraceSimulation, speeds: FleetSpeeds, case: Case) -> float | None:
    """Return the dollars of the best schedule in hindsight; None if there is none."""
    periods = list(_periods(simulation, speeds, case.hours * HOUR_S))
    low, high = 0.0, 1.0
    while _schedule(periods, high)[0] < case.steps and high < 1e6:
        high *= 2
    if _schedule(periods, high)[0] < case.steps:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        if _schedule(periods, middle)[0] < case.steps:
            low = middle
        else:
            high = middle
    # Between both, a part of the time has the dearer fleet.
    (few, less_usd), (many, more_usd) = _schedule(periods, low), _schedule(periods, high)
    part = (case.steps - few) / (many - few) if many > few else 1.0
    return less_usd + part * (more_usd - less_usd)


Periods = Sequence[tuple[float, Sequence[tuple[float, float]]]]
"""Hours, and the fleets that may be had in them: (steps an hour, USD an hour)."""


def _schedule(periods: Periods, usd_a_step: float) -> tuple[float, float]:
    """Return the steps and dollars of the fleets that are best where a step is worth this."""
    steps = usd = 0.0
    for hours, fleets in periods:
        rate, price = max([(0.0, 0.0), *fleets], key=lambda fleet: usd_a_step * fleet[0] - fleet[1])
        steps += hours * rate
        usd += hours * price
    return steps, usd


def _periods(simulation: TraceSimulation, speeds: FleetSpeeds, end_s: float) -> Iterator[Any]:
    market = simulation.market(())
    terms = Terms.of(simulation.job, market)
    kinds = {kind.name: kind for kind in market.cluster.node_types}
    alive = Counter(dict.fromkeys(kinds, 0))
    events = [event for event in simulation.scenario.trace if event.kind != "notice"]
    moments = {0.0, end_s, *simulation.prices.changes(end_s)}
    moments |= {event.time_s for event in events if event.time_s < end_s}
    for begin, end in pairwise(sorted(moments)):
        while events and events[0].time_s <= begin:
            event = events.pop(0)
            alive[event.node_type] += 1 if event.kind == "arrival" else -1
        node_types = tuple(simulation.prices.at(kinds, begin).values())
        priced = replace(market, cluster=replace(market.cluster, node_types=node_types))
        now = replace(terms, market=priced, most=dict(alive))
        fleets = [(HOUR_S / each.step_s, each.usd_per_hour) for each in now.offers(speeds)]
        yield (end - begin) / HOUR_S, fleets


@dataclass(frozen=True)
class Replay:
    """A run beside its hindsight. begin: part of the trace at which it begins."""

    draw: Draw
    best_usd: float | None
    begin: float


def record_case(case: Case, draws: int, replays: int) -> dict[str, Any]:
    simulation = simulation_of(case)
    market = market_of(case, simulation.scenario.kinds, seed=len(case.trace))
    simulation.require_plan()
    asked = simulation.market(())
    planning = RememberedPlanning(simulation.inputs, simulation.memory, simulation.scenario.costs)
    speeds = planning.fleet_speeds(asked.cluster, [asked.counts])
    begun = time.process_time()
    runs = []
    for number in [*range(draws), *range(FIRST_REPLAY, FIRST_REPLAY + replays)]:
        events, prices = market.draw(number, simulation.scenario.end_s)
        along = simulation.along(events, prices)
        best = hindsight_usd(along, speeds, case)
        runs.append(Replay(run_draw(along), best, random.Random(number).random()))
    seconds = time.process_time() - begun
    first = [run for run in runs if run.begin < 0.5]
    second = [run for run in runs if run.begin >= 0.5]
    return {
        "trace": case.trace,
        "steps": case.steps,
        "hours": case.hours,
        "budget_usd": case.usd,
        "cpu_s_a_replay_with_hindsight": seconds / len(runs),
        "searches": simulation.memory.num_searches,
        **judge(case, runs[:draws], runs[draws:]),
        "halves": judge(case, first, second),
    }


def judge(case: Case, quoted: Sequence[Replay], runs: Sequence[Replay]) -> dict[str, Any]:
    """Compare a quote that is made of some runs with others."""
    kept = sum(is_in_time(case, run.draw) for run in quoted)
    prices = median_and_bounds([run.draw.usd for run in quoted])
    hours = median_and_bounds([run.draw.hours for run in quoted if run.draw.is_trained])
    judged = [run for run in runs if is_in_time(case, run.draw) and run.best_usd]
    over = [run.draw.usd / case.usd for run in runs] if case.usd else [0.0]
    best_usd = sum(run.best_usd or 0.0 for run in judged)
    assert prices is not None
    return {
        "quoted_probability": likelihood(kept, len(quoted)),
        "quoted_usd": prices,
        "quoted_hours": hours,
        "replays": len(runs),
        "in_time": sum(is_in_time(case, run.draw) for run in runs),
        "usd_within_interval": within(prices, [run.draw.usd for run in runs]),
        "hours_within_interval": within(
            hours, [run.draw.hours for run in runs if run.draw.is_trained]
        ),
        "most_of_budget": max(over),
        "usd": sum(run.draw.usd for run in judged),
        "hindsight_usd": best_usd,
        "usd_over_hindsight": sum(run.draw.usd for run in judged) / best_usd if judged else None,
    }


def is_in_time(case: Case, draw: Draw) -> bool:
    return draw.is_trained and draw.hours <= case.hours


def within(bounds: Mapping[str, float] | None, values: Sequence[float]) -> float | None:
    """Return the share of values within the bounds of a quote."""
    if bounds is None or not values:
        return None
    inside = [bounds["low"] - 1e-9 <= value <= bounds["high"] + 1e-9 for value in values]
    return sum(inside) / len(values)


def total(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all cases together."""
    sure = [case for case in cases if case["quoted_probability"] >= 0.99]
    known = [case for case in cases if case["usd_within_interval"] is not None]
    timed = [case for case in cases if case["hours_within_interval"] is not None]
    replays = sum(case["replays"] for case in sure)
    best_usd = sum(case["hindsight_usd"] for case in cases)
    return {
        "replays_quoted_at_99_percent": replays,
        "of_these_in_time": sum(case["in_time"] for case in sure) / replays if replays else None,
        "most_of_budget": max(case["most_of_budget"] for case in cases),
        "usd_over_hindsight": sum(case["usd"] for case in cases) / best_usd,
        "usd_within_interval": sum(case["usd_within_interval"] for case in known) / len(known),
        "hours_within_interval": sum(case["hours_within_interval"] for case in timed) / len(timed),
    }


def main(arguments: Sequence[str]) -> None:
    draws, replays = [int(each) for each in arguments] or (50, 100)
    cases = []
    for case in CASES:
        cases.append(record_case(case, draws, replays))
        document = {
            "simulated": True,
            "what": __doc__,
            **provenance(),
            "draws": draws,
            "all": total(cases),
            "halves": total([each["halves"] for each in cases]),
            "cases": cases,
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document["all"]), json.dumps(document["halves"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
